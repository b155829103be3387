"""Finds a library's living objects among the interpreter's, at the moment of a save or a failure: no hook has to see them come and go.

Owns that no other thread is disturbed. A tuple that one is just building must not be held, or its `tuple(...)` fails; so a list of all objects lives only
within one call of C code, in which no other thread runs.
"""

from __future__ import annotations

import gc
import sys
from itertools import chain, filterfalse, starmap
from typing import Any

__all__ = ["instances", "instances_of"]


def instances(module: str, name: str) -> list[Any]:
    """All objects of class `name` of `module`, or of a subclass; none where the module was never imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return [] if kind is None else instances_of(kind)


def instances_of(kind: type) -> list[Any]:
    """All objects of this class or of a subclass, which must be written in Python: each of these objects refers to its class."""
    # By id: a class whose own class defines __eq__ may have no hash. Types, and no isinstance: lazy proxies answer that by importing what they stand for.
    classes = {id(one): one for one in list(map(type, chain.from_iterable(starmap(gc.get_objects, ((),)))))}
    wanted = tuple(one for one in classes.values() if issubclass(one, kind))
    ids = set(map(id, wanted))
    referring = chain.from_iterable(starmap(gc.get_referrers, (wanted,))) if wanted else ()
    return [item for item in list(filterfalse(tuple.__instancecheck__, referring)) if id(type(item)) in ids]
