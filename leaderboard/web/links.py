"""Where things are: the same page has one address on the server and another one in a static copy.

On the server addresses start at its root (or below the prefix that a proxy puts it under). In a static copy they are
relative, with the name of the file, so that they work in any folder of a web host and without a host at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode


@dataclass(frozen=True, slots=True)
class Links:
    """The addresses that one page needs; `root` leads to the site's own root and ends with a slash."""

    root: str = "/"
    is_static: bool = False

    @property
    def home(self) -> str:
        return f"{self.root}index.html" if self.is_static else self.root

    def page(self, name: str, query: Mapping[str, str] | None = None, number: int = 1) -> str:
        """A page of a list, such as `versions`. A static copy has no questions, only the list in its usual order."""
        if self.is_static:
            return f"{self.root}{name}{f'-{number}' if number > 1 else ''}.html"
        asked = {**(query or {}), **({"page": str(number)} if number > 1 else {})}
        return f"{self.root}{name}{'?' if asked else ''}{urlencode(asked)}"

    def one(self, name: str, key: object, number: int = 1) -> str:
        """One thing of a list: its page, or a further page of it."""
        return self.page(f"{name}/{quote(str(key))}", number=number)

    def api(self, name: str, form: str = "json") -> str:
        """A table of the API, or its schema."""
        return f"{self.root}api/v1/{name}.{form}"

    def static(self, name: str) -> str:
        """A file that every copy has."""
        return f"{self.root}static/{name}"


def file_of(address: str) -> str:
    """The file of a static copy that stands for a page of the server, such as `/versions/L1.M0/35`."""
    name = address.strip("/")
    return f"{name}.html" if name else "index.html"


def static_links(file: str) -> Links:
    """For the page in `file` of a static copy."""
    return Links("../" * file.count("/"), is_static=True)
