"""One spelling for a configuration's values, the same in every process. Standard library only.

Two values get equal spellings only when they are equal. What has no name that another process would
give it too (functions, locks, tensors, objects with state outside their attributes) is refused
instead of spelt by its repr, which may hold an address or leave out what matters.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from types import BuiltinFunctionType, MappingProxyType, ModuleType
from typing import Any

_MAPPINGS = (dict, OrderedDict, Counter, defaultdict, MappingProxyType)
_HEAP_TYPE = 1 << 9  # set for classes made by a class statement, and for some others
# transformers imports a model's own code under a name made of the directory's and a hash; the code
# itself is digested elsewhere, so that a model may move.
_REMOTE_CODE = "transformers_modules."
_PROBLEMS_SHOWN = 5
_MISSING = object()

Ignores = Callable[[type, str], bool]


class UnnamedError(ValueError):
    """A value has no stable spelling; the message lists where each one is and what it is."""


def canonical(value: object, *, name: str, ignores: Ignores = lambda owner, field: False) -> Any:
    """Spells a value in JSON's types, the same in every process. Pure.

    Objects are spelt by their type's name and their attributes; mappings and sets have no order;
    what JSON has no type for carries its kind under a key that begins with "!". Values that a
    ``cached_property`` left behind are passed over: they follow from the others.

    Args:
        name: what the value is called in messages.
        ignores: whether to leave out an attribute, by the type of its owner and its name.

    Raises:
        UnnamedError: something in it has no stable spelling.
    """
    walk = _Walk(ignores)
    spelt = walk.spell(value, name)
    if walk.problems:
        shown = "; ".join(walk.problems[:_PROBLEMS_SHOWN])
        more = len(walk.problems) - _PROBLEMS_SHOWN
        raise UnnamedError(shown + (f"; and {more} more" if more > 0 else ""))
    return spelt


def type_name(kind: type) -> str:
    """A class's name with its module; of a model's own code without the module's place. Pure."""
    module = kind.__module__
    if module.startswith(_REMOTE_CODE):
        module = _REMOTE_CODE + module.rpartition(".")[2]
    return f"{module}.{kind.__qualname__}"


class _Walk:
    def __init__(self, ignores: Ignores) -> None:
        self.problems: list[str] = []
        self._ignores = ignores
        self._above: set[int] = set()  # containers on the way here, by id

    def spell(self, value: object, path: str) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, enum.Enum):
            return {"!enum": [type_name(type(value)), value.name or repr(value.value)]}
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            number = float.__float__(value)
            return number if math.isfinite(number) else {"!float": float.__repr__(number)}
        if isinstance(value, (bytes, bytearray)):
            return {"!bytes": bytes(value).hex()}
        if isinstance(value, PurePath):
            return {"!path": str(value)}
        if type_name(type(value)) in ("torch.dtype", "torch.device"):
            return {f"!{type_name(type(value))}": str(value)}
        if isinstance(value, type):
            return {"!type": type_name(value)} if _is_importable(value) else self._refuse(
                path, value, "a class that cannot be imported"
            )  # fmt: skip
        if id(value) in self._above:
            return self._refuse(path, value, "an object that contains itself")
        self._above.add(id(value))
        try:
            return self._spell_container(value, path)
        finally:
            self._above.discard(id(value))

    def _spell_container(self, value: object, path: str) -> Any:
        if type(value) is list or isinstance(value, tuple):
            return [self.spell(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return {"!set": _ordered(self.spell(item, f"{path}{{}}") for item in value)}
        if type(value) in _MAPPINGS:
            assert isinstance(value, Mapping)
            if all(isinstance(k, str) and not k.startswith("!") for k in value):
                return {k: self.spell(item, f"{path}[{k!r}]") for k, item in value.items()}
            pairs = (
                [self.spell(k, f"{path} key"), self.spell(item, f"{path}[{k!r}]")]
                for k, item in value.items()
            )
            return {"!pairs": _ordered(pairs)}
        if (attributes := _attributes(value)) is None:
            return self._refuse(path, value, "")
        kind = type(value)
        spelt = {
            name: self.spell(item, f"{path}.{name}")
            for name, item in attributes.items()
            if not self._ignores(kind, name)
        }
        return {"!object": type_name(kind), **spelt}

    def _refuse(self, path: str, value: object, what: str) -> None:
        kind = value if isinstance(value, type) else type(value)
        self.problems.append(f"{path} is {what or 'a ' + type_name(kind)}")


def _attributes(value: object) -> dict[str, Any] | None:
    """All of an object's state by name, or None when attributes are not all of it."""
    kind = type(value)
    if callable(value) or isinstance(value, ModuleType) or not _is_importable(kind):
        return None
    if not hasattr(value, "__dict__") and not dataclasses.is_dataclass(value):
        return None
    if not all(base is object or _is_written_in_python(base) for base in kind.__mro__):
        return None
    names = (
        {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    )
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names.update([slots] if isinstance(slots, str) else slots)
    names -= {"__dict__", "__weakref__"}
    names.update(getattr(value, "__dict__", {}))
    cached = {
        name
        for base in kind.__mro__
        for name, item in base.__dict__.items()
        if isinstance(item, functools.cached_property)
    }
    # The instance's own dictionary first: a property of the same name may do anything.
    own: dict[str, Any] = getattr(value, "__dict__", {})
    found = {name: own.get(name, _MISSING) for name in names - cached}
    for name in found:
        if found[name] is _MISSING:
            found[name] = getattr(value, name, _MISSING)  # a slot, or a field's default
    return {name: item for name, item in found.items() if item is not _MISSING}


def _is_written_in_python(kind: type) -> bool:
    """False for classes that can keep state in C, out of reach of vars()."""
    made = kind.__dict__.get("__new__")
    return bool(kind.__flags__ & _HEAP_TYPE) and not isinstance(made, BuiltinFunctionType)


def _is_importable(kind: type) -> bool:
    return "<locals>" not in kind.__qualname__ and kind.__module__ not in (
        "__main__", "__mp_main__",
    )  # fmt: skip


def _ordered(items: Iterable[Any]) -> list[Any]:
    return sorted(items, key=functools.partial(json.dumps, sort_keys=True))
