"""Are the fields of a record what its class says? For records that come from a file."""

import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from math import isfinite
from typing import Any, Union, get_args, get_origin, get_type_hints

MOST = 2**50
"""More bytes than any machine has, and few enough to be added up."""

Check = Callable[[Any], bool]


def check_types(record: Any) -> None:
    """ValueError for the first field whose value is not of its type, or is a number beyond all measure."""
    kind: type = type(record)
    for name, fits in _checks(kind):
        if not fits(getattr(record, name)):
            raise ValueError(f"{kind.__name__}.{name} is {getattr(record, name)!r:.80}")


@cache
def _checks(kind: type) -> tuple[tuple[str, Check], ...]:
    hints = get_type_hints(kind)
    names = [spec.name for spec in fields(kind)] if is_dataclass(kind) else list(hints)
    return tuple((name, _check_of(hints[name])) for name in names)


def _check_of(hint: Any) -> Check:
    if hint is int:
        return lambda value: type(value) is int and abs(value) <= MOST
    if hint is float:
        return lambda value: type(value) in (int, float) and isfinite(value) and 0 <= value <= MOST
    if hint in (str, bool) or (isinstance(hint, type) and issubclass(hint, Enum)):
        return lambda value: isinstance(value, hint)
    if get_origin(hint) in (Union, types.UnionType):
        options = [_check_of(option) for option in get_args(hint) if option is not types.NoneType]
        return lambda value: value is None or any(fits(value) for fits in options)
    if get_origin(hint) is tuple:
        return _tuple_check(get_args(hint))
    return _record_check(hint)


def _tuple_check(hints: tuple[Any, ...]) -> Check:
    if hints[-1] is Ellipsis:
        fits = _check_of(hints[0])
        return lambda value: isinstance(value, tuple) and all(map(fits, value))
    each = [_check_of(hint) for hint in hints]
    return lambda value: (
        isinstance(value, tuple) and all(fits(item) for fits, item in zip(each, value, strict=True))
    )


def _record_check(kind: type) -> Check:
    """A record inside of another one; it names its own field."""

    def fits(value: Any) -> bool:
        if not isinstance(value, kind):
            return False
        check_types(value)
        return True

    return fits
