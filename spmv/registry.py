"""Tables of named things: formats, kernels, preconditioners, solvers. One class, so that all of them behave alike."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

from penstock.spmv.errors import InputError

Key = TypeVar("Key", bound=Hashable)
Thing = TypeVar("Thing")


class Registry(Generic[Key, Thing]):
    """A table that refuses to replace an entry, and looks up what installed packages offer.

    Modules named by the entry points of ``group``, such as ``"penstock.formats"``, are loaded when an unknown key is looked up
    or all keys are listed; they register their entries when imported. One that fails is a warning.

    Examples
    --------
    >>> colours = Registry("colour")
    >>> colours.add("red", "#ff0000")
    >>> colours.add("red", "#ee0000")
    Traceback (most recent call last):
        ...
    penstock.spmv.errors.InputError: a colour 'red' exists already: '#ff0000'; choose another name
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        self._kind = kind
        self._group = group
        self._entries: dict[Key, Thing] = {}

    def add(self, key: Key, thing: Thing) -> None:
        """Add an entry, unless the key is taken; a module that is loaded again, as in a notebook, may add its entries again."""
        if key in self._entries and not _same_definition(self._entries[key], thing):
            raise InputError(f"a {self._kind} {key!r} exists already: {self._entries[key]!r}; choose another name")
        self._entries[key] = thing

    def remove(self, key: Key) -> None:
        """Take an entry out again, as tests do."""
        del self._entries[key]

    def __getitem__(self, key: Key) -> Thing:
        if key not in self._entries:
            self._load_entry_points()
        try:
            return self._entries[key]
        except KeyError:
            raise InputError(f"unknown {self._kind} {key!r}; known: {', '.join(map(str, self.keys()))}") from None

    def __contains__(self, key: object) -> bool:
        if key not in self._entries:
            self._load_entry_points()
        return key in self._entries

    def keys(self) -> list[Key]:
        """Return all keys, sorted."""
        self._load_entry_points()
        return sorted(self._entries)  # type: ignore[type-var]

    def _load_entry_points(self) -> None:
        group, self._group = self._group, None  # once: importing a module may look something up
        for entry in entry_points(group=group) if group else ():
            try:
                entry.load()
            except Exception as error:  # of another package, whatever it is: what needs nothing of it goes on
                warnings.warn(
                    f"the {self._kind} that {entry.value} offers in the entry point group {group} cannot be loaded: "
                    f"{type(error).__name__}: {error}; mend or uninstall its package",
                    RuntimeWarning,
                    stacklevel=2,
                )


@functools.cache
def _installed() -> Any:  # SelectableGroups before Python 3.12, then EntryPoints
    """Return what all installed packages offer: one scan of them, which takes long where there are hundreds."""
    return importlib.metadata.entry_points()


def entry_points(group: str) -> importlib.metadata.EntryPoints:
    """Return what installed packages offer in a group."""
    offered: importlib.metadata.EntryPoints = _installed().select(group=group)
    return offered


def _same_definition(one: Any, other: Any) -> bool:
    """Return whether functions or classes come from the same place in the same module, or things consist of equal parts."""
    if is_dataclass(one) and not isinstance(one, type) and type(one) is type(other):
        return all(_same_definition(getattr(one, of.name), getattr(other, of.name)) for of in fields(one))
    if callable(one):
        return _place(one) == _place(other) != (None, None)
    return type(one) is type(other) and bool(one == other)


def _place(thing: Any) -> tuple[Any, Any]:
    return getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
