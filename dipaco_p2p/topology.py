"""The grid: levels, the modules of a level, and the paths that pick one module per level.

Source: DiPaCo (arXiv 2403.10616) section 2.2, and 2.6.1 for path-specific (here: private) modules. A level with one
module is a trunk that every path shares.
"""

from __future__ import annotations

import functools
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
            raise ConfigError(f"`{text}` is not a module", hint="a module is written like `L1.M3`")
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
            raise ConfigError(f"`{text}` is not a path", hint="a path is written like `P0-1-1`, one index per level")
        return cls(tuple(int(part) for part in text[1:].split("-")))

    def modules(self) -> tuple[ModuleId, ...]:
        """The path's modules, from the first level to the last."""
        return tuple(ModuleId(level, index) for level, index in enumerate(self.indices))


@dataclass(frozen=True, slots=True)
class Topology:
    """`widths[l]` modules in level l; every combination of the shared levels is a path.

    A private level has one module per path, which no other path trains: there a path's index is its own number. If
    all levels are private the paths share nothing (the flat mixture), and their number is that level's width.
    """

    widths: tuple[int, ...]
    private: tuple[bool, ...] = ()
    """Per level, whether it is private; empty when none is."""

    def __post_init__(self) -> None:
        if not self.widths or any(width < 1 for width in self.widths):
            message = f"the grid {self.widths} has an empty level"
            raise ConfigError(message, hint="every level needs at least one module")
        assert not self.private or len(self.private) == len(self.widths), (self.widths, self.private)
        for level, width in enumerate(self.widths):
            if self.is_private(level) and width != self.path_count:
                raise ConfigError(f"the private level {level} has {width} modules, not one for each path")

    def __str__(self) -> str:
        return "x".join(f"{width}{'p' * self.is_private(level)}" for level, width in enumerate(self.widths))

    def is_private(self, level: int) -> bool:
        """Whether each module of `level` belongs to one path alone."""
        return bool(self.private) and self.private[level]

    def modules(self) -> tuple[ModuleId, ...]:
        """All modules, level by level."""
        return tuple(ModuleId(level, index) for level, width in enumerate(self.widths) for index in range(width))

    def paths(self) -> Iterator[PathId]:
        """All paths in the order of their numbers, the last shared level changing fastest."""
        return map(self.path, range(self.path_count))

    @property
    def path_count(self) -> int:
        return _path_count(self)

    def path(self, number: int) -> PathId:
        """The path with this number, 0 <= number < path_count."""
        assert 0 <= number < self.path_count, number
        rest, indices = number, []
        for level in reversed(range(len(self.widths))):
            if self.is_private(level):
                indices.append(number)
            else:
                rest, index = divmod(rest, self.widths[level])
                indices.append(index)
        return PathId(tuple(reversed(indices)))

    def number(self, path: PathId) -> int:
        """The inverse of `path`."""
        assert path in self, path
        return self._number(path)

    def paths_through(self, module: ModuleId) -> tuple[PathId, ...]:
        """The paths that contain `module`."""
        return _paths_through(self, module)

    def parent(self, module: ModuleId, before: Topology) -> ModuleId:
        """The module of the smaller grid `before` that `module` begins as when that grows into this one.

        Of a level that goes from w to v modules, module m comes of module m * w // v, rounded down: so every module of
        before has a child, the children of one stand side by side, and a level that stays as it is keeps its modules.
        """
        old, new = before.widths[module.level], self.widths[module.level]
        assert old <= new and module.index < new, (before, self, module)
        return ModuleId(module.level, module.index * old // new)

    def parent_path(self, path: PathId, before: Topology) -> PathId:
        """The path of `before` whose modules those of `path` begin as."""
        return PathId(tuple(self.parent(module, before).index for module in path.modules()))

    def __contains__(self, item: object) -> bool:
        if isinstance(item, ModuleId):
            return 0 <= item.level < len(self.widths) and 0 <= item.index < self.widths[item.level]
        if isinstance(item, PathId):
            fits = len(item.indices) == len(self.widths) and all(
                0 <= index < width for index, width in zip(item.indices, self.widths, strict=True)
            )
            return fits and self.path(self._number(item)) == item
        return False

    def _number(self, path: PathId) -> int:
        if all(map(self.is_private, range(len(self.widths)))):
            return path.indices[0]
        number = 0
        for level, (width, index) in enumerate(zip(self.widths, path.indices, strict=True)):
            number = number if self.is_private(level) else number * width + index
        return number


# Peers ask for both many times a second, and a grid never changes.


@functools.lru_cache(64)
def _path_count(topology: Topology) -> int:
    shared = [width for level, width in enumerate(topology.widths) if not topology.is_private(level)]
    return math.prod(shared) if shared else topology.widths[0]


@functools.lru_cache(1024)
def _paths_through(topology: Topology, module: ModuleId) -> tuple[PathId, ...]:
    return tuple(path for path in topology.paths() if path.indices[module.level] == module.index)
