"""The grid: levels, the modules of a level, and the paths that pick one module per level.

Source: DiPaCo (arXiv 2403.10616) section 2.2. A level with one module is a trunk that every path shares.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import ConfigError

_INDEX = "(?:0|[1-9][0-9]{0,5})"
"""One spelling for each number: no leading zeros, and no digits of other scripts, which `int` would read too."""


@dataclass(frozen=True, order=True, slots=True)
class ModuleId:
    """One module of one level; prints as `L1.M3`."""

    level: int
    index: int

    def __str__(self) -> str:
        return f"L{self.level}.M{self.index}"

    @classmethod
    def parse(cls, text: str) -> ModuleId:
        """The inverse of `str`; raises ConfigError."""
        match = re.fullmatch(rf"L({_INDEX})\.M({_INDEX})", text)
        if match is None:
            raise ConfigError(f"`{text}` is no module", hint="a module is written like `L1.M3`")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, order=True, slots=True)
class PathId:
    """One choice of a module per level, from the first level on; prints as `P0-1-1`."""

    indices: tuple[int, ...]

    def __str__(self) -> str:
        return "P" + "-".join(map(str, self.indices))

    @classmethod
    def parse(cls, text: str) -> PathId:
        """The inverse of `str`; raises ConfigError."""
        if re.fullmatch(rf"P{_INDEX}(-{_INDEX}){{0,31}}", text) is None:
            raise ConfigError(f"`{text}` is no path", hint="a path is written like `P0-1-1`, one index per level")
        return cls(tuple(int(part) for part in text[1:].split("-")))

    def modules(self) -> tuple[ModuleId, ...]:
        """The path's modules, from the first level to the last."""
        return tuple(ModuleId(level, index) for level, index in enumerate(self.indices))


@dataclass(frozen=True, slots=True)
class Topology:
    """`widths[l]` modules in level l; every combination is a path."""

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.widths or any(width < 1 for width in self.widths):
            message = f"the grid {self.widths} has an empty level"
            raise ConfigError(message, hint="every level needs at least one module")

    def __str__(self) -> str:
        return "x".join(map(str, self.widths))

    def modules(self) -> tuple[ModuleId, ...]:
        """All modules, level by level."""
        return tuple(ModuleId(level, index) for level, width in enumerate(self.widths) for index in range(width))

    def paths(self) -> Iterator[PathId]:
        """All paths, the last level changing fastest; a path's place here is its number."""
        return (PathId(indices) for indices in itertools.product(*map(range, self.widths)))

    @property
    def path_count(self) -> int:
        return math.prod(self.widths)

    def path(self, number: int) -> PathId:
        """The path with this number, 0 <= number < path_count."""
        assert 0 <= number < self.path_count, number
        indices = []
        for width in reversed(self.widths):
            number, index = divmod(number, width)
            indices.append(index)
        return PathId(tuple(reversed(indices)))

    def number(self, path: PathId) -> int:
        """The inverse of `path`."""
        assert path in self, path
        number = 0
        for width, index in zip(self.widths, path.indices, strict=True):
            number = number * width + index
        return number

    def paths_through(self, module: ModuleId) -> tuple[PathId, ...]:
        """The paths that contain `module`."""
        return tuple(path for path in self.paths() if path.indices[module.level] == module.index)

    def __contains__(self, item: object) -> bool:
        if isinstance(item, ModuleId):
            return 0 <= item.level < len(self.widths) and 0 <= item.index < self.widths[item.level]
        if isinstance(item, PathId):
            return len(item.indices) == len(self.widths) and all(
                0 <= index < width for index, width in zip(item.indices, self.widths, strict=True)
            )
        return False
