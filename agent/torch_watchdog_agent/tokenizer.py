"""How many ids the tokenizer behind a loader has, where the loader's own parts hold one.

Owns the search; it reads attributes that are there and runs nothing of the user's but `get_vocab`. A table is often padded past its tokenizer
(50,304 rows for 50,257 tokens): an id between the two is looked up without an error, and the row was never trained.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

__all__ = ["tokens_of"]

_NAMES = ("tokenizer", "processing_class", "processor", "data_collator", "collate_fn", "dataset")
_DEEP = 3  # a collator in a wrapper's collator, a data set in a subset


def tokens_of(loader: Any) -> int:
    """The highest id and one; 0 where no tokenizer is found, or several that differ."""
    sizes = {_size(one) for one in _tokenizers(loader, _DEEP)}
    return sizes.pop() if len(sizes) == 1 else 0


def _size(tokenizer: Any) -> int:
    """Ids may have holes: a length is no highest id."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _tokenizers(owner: Any, deep: int) -> Iterator[Any]:
    for part in _parts(owner):
        if callable(getattr(type(part), "get_vocab", None)):
            yield part
        elif deep > 0:
            yield from _tokenizers(part, deep - 1)


def _parts(owner: Any) -> Iterator[Any]:
    """What an object holds under a telling name; what a function was made with or reads from its module under one."""
    if isinstance(owner, functools.partial):
        yield from (owner.func, *owner.args, *owner.keywords.values())
    elif isinstance(owner, MethodType):
        yield owner.__self__
    elif isinstance(owner, FunctionType):
        held = dict(zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=False))
        yield from (cell.cell_contents for name, cell in held.items() if name in _NAMES)
        yield from (owner.__globals__[name] for name in owner.__code__.co_names if name in _NAMES and name in owner.__globals__)
    else:
        values = getattr(owner, "__dict__", {})
        yield from (values[name] for name in _NAMES if values.get(name) is not None)
