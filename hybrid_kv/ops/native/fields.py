"""The numbers of the engine's descriptors by name, to compare what it is told with what is."""

from __future__ import annotations

import ctypes

_OWN = frozenset({"extents", "whole", "searches", "heads", "head", "beams", "walks"})
"""Addresses of descriptors: each plan has its own, wherever they lie."""


def fields_of(name: str, told: object) -> list[tuple[str, object]]:
    """Fields of a structure, or of each of several, and of those that it points at, by name."""
    found: list[tuple[str, object]] = []
    if isinstance(told, ctypes.Structure):
        for field, kind, *_ in told._fields_:
            if field not in _OWN or not issubclass(kind, (ctypes.c_void_p, ctypes._Pointer)):
                found += fields_of(f"{name}.{field}", getattr(told, field))
    elif isinstance(told, ctypes._Pointer):
        found += fields_of(name, told.contents if told else None)
    elif isinstance(told, (ctypes.Array, list)):
        for place, one in enumerate(told):
            found += fields_of(f"{name}[{place}]", one)
    else:
        found.append((name, told))
    return found
