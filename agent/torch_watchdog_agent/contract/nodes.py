"""The words of a tape: values, nodes and what an operator's schema says. Owns the data; decides nothing about batches or bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

__all__ = ["Impurity", "Int", "LeafRef", "Node", "Ref", "Schema", "Storage", "Value", "schema_of"]

LeafRef: TypeAlias = tuple[int, str]  # (number of the batch, path of the tensor in it)
Impurity: TypeAlias = str


@dataclass(slots=True)
class Storage:
    """What views of one memory share: why it is not a function of batch and constants (None while it is), and the leaves behind it."""

    impure: Impurity | None = None
    leaves: frozenset[LeafRef] = frozenset()


@dataclass(slots=True)
class Value:
    """One tensor seen by the tape; `number` is -1 where nothing can be computed from it."""

    number: int
    storage: Storage


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor among a node's arguments."""

    number: int


@dataclass(frozen=True, slots=True)
class Int:
    """Stands for an integer among a node's arguments that may be a size of the batch."""

    value: int


@dataclass(slots=True)
class Node:
    """One operator that ran on pure values."""

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...] = ()
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Schema:
    """What we need of an operator's schema, looked up once."""

    name: str
    may_be_size: tuple[bool, ...]
    writes: tuple[bool, ...]
    aliases: tuple[frozenset[str] | None, ...]
    returns: tuple[frozenset[str] | None, ...]
    position: dict[str, int] = field(default_factory=dict)
    random: bool = False
    fused: bool = False
    dynamic: bool = False


def _kind(argument: Any) -> str:
    kind = argument.real_type
    while kind.kind() in ("ListType", "OptionalType"):
        kind = kind.getElementType()
    return str(kind.kind())


def _alias(info: Any) -> frozenset[str] | None:
    return None if info is None else frozenset(info.before_set) | frozenset(info.after_set)


_schemas: dict[Any, Schema] = {}


def schema_of(func: Any) -> Schema:
    """The schema's facts of an OpOverload."""
    known = _schemas.get(func)
    if known is None:
        known = _schemas[func] = _read_schema(func)
    return known


def _read_schema(func: Any) -> Schema:
    arguments, name = func._schema.arguments, func.overloadpacket.__name__
    return Schema(
        name=name,
        may_be_size=tuple(_kind(a) in ("SymIntType", "NumberType") for a in arguments),
        writes=tuple(a.alias_info is not None and a.alias_info.is_write for a in arguments),
        aliases=tuple(_alias(a.alias_info) for a in arguments),
        returns=tuple(_alias(r.alias_info) for r in func._schema.returns),
        position={a.name: i for i, a in enumerate(arguments)},
        random=torch.Tag.nondeterministic_seeded in func.tags,
        fused=name.startswith(("_foreach", "_fused")),
        dynamic=torch.Tag.dynamic_output_shape in func.tags,
    )
