// Keeps the parts of a page fresh, and offers to copy what is long. Everything works without it.
"use strict";

(function () {
  const TRIES_BEFORE_NOTICE = 2;
  const pollMs = Number(document.body.dataset.pollS || 0) * 1000;
  let failures = 0;
  let timer = 0;

  function offerCopies(root) {
    if (!navigator.clipboard) return;
    for (const element of root.querySelectorAll("[data-copy]:not([data-offered])")) {
      const text = element.textContent;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "copy";
      button.textContent = "Copy";
      button.addEventListener("click", async function () {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      });
      element.dataset.offered = "";
      if (element.tagName === "PRE") element.prepend(button);
      else element.after(button);
    }
  }

  // The page as it is now, and as the server last sent it: what differs is replaced, and nothing else moves.
  const sent = new Map();
  function partsOf(page) {
    return new Map([...page.querySelectorAll("[data-live][id]")].map((part) => [part.id, part.innerHTML]));
  }

  function keyOfFocus(part) {
    const focused = document.activeElement;
    return part.contains(focused) && focused.getAttribute("href");
  }

  function replace(part, html) {
    const href = keyOfFocus(part);
    part.innerHTML = html;
    part.classList.remove("fresh");
    void part.offsetWidth;
    part.classList.add("fresh");
    if (href) {
      const again = [...part.querySelectorAll("a")].find((link) => link.getAttribute("href") === href);
      if (again) again.focus({ preventScroll: true });
    }
    offerCopies(part);
  }

  function take(html) {
    const page = new DOMParser().parseFromString(html, "text/html");
    if (document.querySelector("[data-reload]") && !page.querySelector("[data-reload]")) {
      location.reload();
      return;
    }
    for (const [id, fresh] of partsOf(page)) {
      const part = document.getElementById(id);
      if (part && sent.get(id) !== fresh) {
        sent.set(id, fresh);
        replace(part, fresh);
      }
    }
  }

  function noticed(isOffline) {
    document.getElementById("offline").hidden = !isOffline;
  }

  async function poll() {
    try {
      // With the ETag that the browser keeps: an unchanged page comes as an answer without a body.
      const answer = await fetch(location.href, { cache: "no-cache", credentials: "omit" });
      if (!answer.ok) throw new Error(String(answer.status));
      take(await answer.text());
      failures = 0;
    } catch (error) {
      failures += 1;
    }
    noticed(failures >= TRIES_BEFORE_NOTICE);
    schedule();
  }

  function schedule() {
    clearTimeout(timer);
    // After failures more rarely, up to sixteen times as long; never while nobody looks.
    if (!document.hidden) timer = setTimeout(poll, pollMs * 2 ** Math.min(failures, 4));
  }

  offerCopies(document);
  if (pollMs > 0) {
    for (const [id, html] of partsOf(document)) sent.set(id, html);
    document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
    schedule();
  }
})();
