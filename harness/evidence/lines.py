"""Reads long JSON Lines files of records: as strict as `Record.from_json`, several times as fast.

The harness writes canonical JSON, so nearly every line of a file has the same shape. A pattern made
from the record's own types recognises such a line; what it matches needs no further check. Any
other line goes the long way, which takes it or says what is wrong with it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from harness.records import Record, parse_json

_Kind = TypeVar("_Kind", bound=Record)

# At most 18 digits: surely within the 64 bits that `Record.from_json` allows.
_INT = rb"-?+(?:0|[1-9][0-9]{0,17}+)"
# As Python spells a float of ordinary size. No exponent: 1e999 would be infinite.
_FLOAT = rb"-?+(?:0|[1-9][0-9]{0,17}+)\.[0-9]{1,20}+"
# Without escapes, which only the long way can read.
_TEXT = rb'"[ !#-\[\]-~]*+"'


class LineReader(Generic[_Kind]):
    """Reads lines of one kind of record.

    ``without``: fields that are checked and then left at their default, to save memory; each must
    have one.
    """

    def __init__(self, kind: type[_Kind], *, without: frozenset[str] = frozenset()) -> None:
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)  # type: ignore[arg-type]
        self._kind = kind
        self._without = without
        self._fullmatch = _pattern(kind).fullmatch
        self._kept = [f.name for f in fields if f.name not in without]
        self._hints = hints
        self._defaults = {f.name: _default(f) for f in fields if f.name in without}

    @functools.cached_property
    def _converters(self) -> list[Callable[[bytes], Any]]:
        return [_converter(self._hints[name]) for name in self._kept]

    def match(self, line: bytes) -> re.Match[bytes] | None:
        """The parts of a canonical line by field, as JSON; None where the long way must tell."""
        return self._fullmatch(line)

    def strict(self, line: bytes) -> _Kind:
        """The record of any line, with all its fields. Raises ValueError on a malformed one."""
        return self._kind.from_json(parse_json(line.decode("utf-8")))

    def __call__(self, line: bytes) -> _Kind:
        """The record of a line. Raises ValueError, RecordError among them, on a malformed one."""
        found = self._fullmatch(line)
        if found is None:
            record = self.strict(line)
            if not self._without:
                return record
            return dataclasses.replace(record, **self._defaults)  # type: ignore[type-var]
        return self.build(found)

    def build(self, found: re.Match[bytes]) -> _Kind:
        """The record of a line that matched."""
        parts = found.group(*self._kept)
        values = [convert(part) for convert, part in zip(self._converters, parts, strict=True)]
        return self._kind(**dict(zip(self._kept, values, strict=True)))


def integers(part: bytes) -> list[int]:
    """The integers of a matched list."""
    found: list[int] = _DECODE(part.decode("ascii"))[0]
    return found


_DECODE = json.JSONDecoder().raw_decode
_PATTERNS: dict[type[Record], re.Pattern[bytes]] = {}


def _pattern(kind: type[Record]) -> re.Pattern[bytes]:
    if kind not in _PATTERNS:
        _PATTERNS[kind] = _compiled(kind)
    return _PATTERNS[kind]


def _compiled(kind: type[Record]) -> re.Pattern[bytes]:
    return re.compile(_object(kind, named=True) + rb"\n?")


def _object(kind: type[Record], *, named: bool) -> bytes:
    hints = typing.get_type_hints(kind)
    names = sorted(f.name for f in dataclasses.fields(kind))  # type: ignore[arg-type]
    part = b'"%(n)s":(?P<%(n)s>%(v)s)' if named else b'"%(n)s":%(v)s'
    values = [part % {b"n": name.encode(), b"v": _value(hints[name])} for name in names]
    return rb"\{" + b",".join(values) + rb"\}"


def _value(hint: Any) -> bytes:
    """Pattern of the canonical JSON of a type. Raises TypeError for a type it cannot describe."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = [b"null" if o is type(None) else _value(o) for o in typing.get_args(hint)]
        return b"(?:" + b"|".join(options) + b")"
    if origin is tuple:
        item = _value(typing.get_args(hint)[0])
        return rb"\[(?:%s(?:,%s)*+)?+\]" % (item, item)
    if origin is dict:
        # One entry at most: a pattern cannot see a key that appears twice.
        key, item = map(_value, typing.get_args(hint))
        return rb"\{(?:%s:%s)?\}" % (key, item)
    if isinstance(hint, type) and issubclass(hint, Record):
        return _object(hint, named=False)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return b"(?:" + b"|".join(b'"%s"' % str(m.value).encode() for m in hint) + b")"
    plain = {int: _INT, float: _FLOAT, str: _TEXT, bool: b"(?:true|false)"}
    if hint not in plain:
        raise TypeError(f"no pattern for {hint}")
    return plain[hint]


def _converter(hint: Any) -> Callable[[bytes], Any]:
    """From a matched part to the value; called on nothing that did not match."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (_converter(o) for o in typing.get_args(hint) if o is not type(None))
        if inner is int:
            return lambda part: None if part == b"null" else int(part)
        return lambda part: None if part == b"null" else inner(part)
    if origin is tuple:
        item = typing.get_args(hint)[0]
        if item is int:
            return lambda part: tuple(integers(part))
        convert = _converter(item)
        return lambda part: tuple(map(convert, part[1:-1].split(b","))) if part != b"[]" else ()
    if origin is dict:
        return lambda part: parse_json(part.decode("ascii"))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        members = {b'"%s"' % str(member.value).encode(): member for member in hint}
        return members.__getitem__
    if hint is str:
        return functools.lru_cache(maxsize=256)(lambda part: part[1:-1].decode("ascii"))
    plain: dict[type, Callable[[bytes], Any]] = {int: int, float: float, bool: b"true".__eq__}
    return plain[hint]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise TypeError(f"{field.name} has no default and cannot be left out")
