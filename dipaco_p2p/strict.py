"""From a plain mapping (TOML, JSON) to a frozen dataclass, refusing whatever is not exactly right.

An unknown key is refused with the nearest known name; there are no aliases and no silent conversions, except that
an integer may stand for a float. The field of a key that is a word of Python's, as `from`, has `_` behind it. A
type with a `parse` class method (a module, a path) is written as its text, and one with `load` and `to_dict` (a signed
document) reads and writes itself. A bound is written beside the field: `rounds: int = bounded(16, low=1)`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from .errors import ConfigError

T = TypeVar("T")

_SCALARS = frozenset({type(None), bool, int, float, str})
_EXACT = frozenset({bool, int, str})
"""Types of which every value is fine as it is; a float may be none that JSON can say."""


def bounded(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[Any] = (),
    items: int | None = None,
) -> Any:
    """A dataclass field whose value must lie in [low, high] and, if given, among `choices`; a list of at most `items`,
    which are counted before any is looked at."""
    bounds = {"low": low, "high": high, "choices": tuple(choices), "items": items}
    return dataclasses.field(default=default, metadata=bounds)


def added(default: Any, **bounds: Any) -> Any:
    """A dataclass field that documents were signed without: it is left out of `plain` while it has its default, so that
    these keep their bytes and their ids. Its bounds are as `bounded` takes them."""
    field = bounded(default, **bounds)
    return dataclasses.field(default=default, metadata={**field.metadata, "is_added": True})


def written(name: str) -> str:
    """The key of the field with this name."""
    return name.removesuffix("_")


def load(kind: type[T], mapping: object, *, where: str) -> T:
    """Make a `kind` from `mapping`; `where` names the place for messages. Raises ConfigError."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where} must be a table, not {_describe(mapping)}")
    fields, hints, is_bounded = _shape(typing.cast(Any, kind))
    for key in mapping:
        _check_known(key, fields, where)
    values = {}
    for name, field in fields.items():
        if name in mapping:
            value, hint = mapping[name], hints[name]
            if is_bounded[name]:
                _check_items(value, field, f"`{name}` in {where}")
            is_plain = type(value) is hint and hint in _EXACT
            values[field.name] = value if is_plain else _convert(value, hint, f"`{name}` in {where}")
            if is_bounded[name]:
                _check_bounds(values[field.name], field, f"`{name}` in {where}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"`{name}` is missing in {where}")
    return kind(**values)


def plain(value: Any) -> Any:
    """The inverse of `load`: dataclasses to dicts, tuples to lists; `added` fields only with another value than their
    default."""
    kind: Any = type(value)
    return value if kind in _SCALARS else _plainer(kind)(value)


@functools.cache
def _plainer(kind: type) -> Callable[[Any], Any]:
    """How values of this type become plain ones."""
    if hasattr(kind, "parse"):
        return str
    if hasattr(kind, "to_dict"):
        return lambda value: value.to_dict()
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        added = {field.name: field.default for field in dataclasses.fields(kind) if "is_added" in field.metadata}
        if added:
            return lambda value: {
                written(name): plain(getattr(value, name))
                for name in names
                if name not in added or getattr(value, name) != added[name]
            }
        keys = [(written(name), name) for name in names]
        return lambda value: {key: plain(getattr(value, name)) for key, name in keys}
    if issubclass(kind, (tuple, list)):
        return lambda value: [plain(item) for item in value]
    return lambda value: value


@functools.cache
def _shape(kind: Any) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any], dict[str, bool]]:
    """A dataclass's fields by name, their types, and whether they are bounded: finding these out takes longer than all
    the rest of `load`."""
    fields = {written(field.name): field for field in dataclasses.fields(kind)}
    is_bounded = {
        name: any(field.metadata.get(bound) not in (None, ()) for bound in ("low", "high", "choices", "items"))
        for name, field in fields.items()
    }
    return fields, {written(name): hint for name, hint in typing.get_type_hints(kind).items()}, is_bounded


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


def _check_known(key: object, known: Mapping[str, Any], where: str) -> None:
    if key in known:
        return
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
    hint = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(known)}"
    raise ConfigError(f"unknown key `{key}` in {where}", hint=hint)


def _convert(value: object, kind: Any, where: str) -> Any:
    origin, args = _parts(kind)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(value, args, where)
    if hasattr(kind, "__supertype__"):
        return _convert(value, kind.__supertype__, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where} must be a list, not {_describe(value)}")
        return tuple(_convert(item, args[0], f"{where}, item {i + 1}") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a table, not {_describe(value)}")
        return {key: _convert(item, args[1], f"{where}, {key}") for key, item in value.items()}
    if hasattr(origin, "load"):
        return origin.load(args[0], value)
    if hasattr(kind, "parse"):
        if not isinstance(value, str):
            raise ConfigError(f"{where} must be a text, not {_describe(value)}")
        return kind.parse(value)
    if dataclasses.is_dataclass(kind):
        return load(typing.cast(type, kind), value, where=where.replace("`", "").replace(" in ", " of ", 1))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = _float(value, where)
    if type(value) is not kind:
        raise ConfigError(f"{where} must be {_name(kind)}, not {_describe(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} must be finite, not {value}")
    return value


def _float(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError:  # no subclass of ValueError, so it would pass every caller that expects a bad value
        raise ConfigError(f"{where} must be finite, not a number of {value.bit_length()} bits") from None


def _convert_union(value: object, kinds: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    problems = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return _convert(value, kind, where)
            except ConfigError as error:
                problems.append(error)
    raise problems[0]


def _check_items(value: object, field: dataclasses.Field[Any], where: str) -> None:
    most = field.metadata.get("items")
    if most is not None and isinstance(value, (list, tuple)) and len(value) > most:
        raise ConfigError(f"{where} has {len(value)} items, limit {most}")


def _check_bounds(value: Any, field: dataclasses.Field[Any], where: str) -> None:
    low, high = field.metadata.get("low"), field.metadata.get("high")
    choices = field.metadata.get("choices") or ()
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), map(str, choices), n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"choose one of {', '.join(map(str, choices))}"
        raise ConfigError(f"{where} is `{value}`", hint=hint)
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, (int, float)) and ((low is not None and item < low) or (high is not None and item > high)):
            raise ConfigError(f"{where} is {item}, but must be {_bounds(low, high)}")


def _bounds(low: float | None, high: float | None) -> str:
    if high is None:
        return f"at least {low}"
    return f"at most {high}" if low is None else f"from {low} to {high}"


def _name(kind: Any) -> str:
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}.get(kind, str(kind))


def _describe(value: object) -> str:
    """For people. What is inside a table or a list is not shown: it may be as large and as deep as a stranger likes."""
    known = {dict: "a table", list: "a list", type(None): "nothing"}
    return known[type(value)] if type(value) in known else f"`{value}`"
