// In a static copy: tables that can be sorted by their heads, and narrowed to rows with a word. Without it they stand as
// they are. It works on the rows of the page, and asks for nothing.
"use strict";

(function () {
  const ROWS_FOR_WORDS = 6;
  const UNITS = {
    k: 1e3, M: 1e6, G: 1e9, T: 1e12,
    B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40,
    "%": 1, min: 60, h: 3600, d: 86400,
  };

  // A figure as the pages write it: `1,234`, `12.3 k`, `1.61 MiB`, `−0.0312`, `3 d`, `< 1 min`. NaN for what is none.
  function figureOf(text) {
    const found = /^(<\s*)?([+−-]?[\d.,]+)(?:\s*([A-Za-z%]+))?/.exec(text.trim());
    if (!found) return NaN;
    const figure = Number(found[2].replace(/,/g, "").replace("−", "-"));
    const unit = found[3] === undefined || !(found[3] in UNITS) ? 1 : UNITS[found[3]];
    return found[1] ? figure * unit - 0.5 : figure * unit;
  }

  function keyOf(row, column, isFigure) {
    const cell = row.cells[column];
    if (!cell) return isFigure ? NaN : "";
    return isFigure ? figureOf(cell.textContent) : cell.textContent.trim();
  }

  // What is not known comes last, whichever way.
  function compare(a, b, isFigure, way) {
    if (!isFigure) return way * a.localeCompare(b, "en", { numeric: true });
    if (Number.isNaN(a) || Number.isNaN(b)) return Number(Number.isNaN(a)) - Number(Number.isNaN(b));
    return way * (a - b);
  }

  function sort(table, head) {
    const column = head.cellIndex;
    const isFigure = head.classList.contains("n");
    const wasDown = head.getAttribute("aria-sort") === "descending";
    const wasUp = head.getAttribute("aria-sort") === "ascending";
    const way = wasDown ? 1 : wasUp ? -1 : isFigure ? -1 : 1;
    const body = table.tBodies[0];
    const keyed = [...body.rows].map((row) => [keyOf(row, column, isFigure), row]);
    keyed.sort((one, other) => compare(one[0], other[0], isFigure, way));
    body.append(...keyed.map((pair) => pair[1]));
    for (const each of head.parentElement.cells) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
  }

  function offerSorting(table) {
    for (const head of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(table, head));
      head.append(button);
    }
  }

  function offerWords(table) {
    const rows = [...table.tBodies[0].rows];
    const line = document.createElement("p");
    const label = document.createElement("label");
    const input = document.createElement("input");
    const said = document.createElement("span");
    line.className = "narrow";
    input.type = "search";
    input.autocomplete = "off";
    input.spellcheck = false;
    said.className = "quiet";
    said.setAttribute("role", "status");
    label.append("Only rows with ", input);
    line.append(label, said);
    const place = table.closest(".scroll") || table;
    place.before(line);

    function narrow() {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += row.hidden ? 0 : 1;
      }
      said.textContent = words.length ? ` ${shown} of the ${rows.length} rows of this page` : "";
    }
    input.addEventListener("input", narrow);
    narrow();
  }

  for (const table of document.querySelectorAll("main table")) {
    if (!table.tHead || !table.tBodies.length || table.tBodies[0].rows.length < 2) continue;
    offerSorting(table);
    if (table.tBodies[0].rows.length >= ROWS_FOR_WORDS) offerWords(table);
  }
})();
