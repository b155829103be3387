"""What one traced step did to the batch: the operators that ran on pure values, and the consumers that they reached.

Owns the record and the rules of purity: a value is pure while it can be computed again from the batch, constants and factories; what touched a
parameter or a generator is impure. Knows nothing of modes (mode.py), of bounds over several steps (learn.py) or of words (explain.py).
Tensors are tagged in a weak side table, never by attributes: a tagged copy in a checkpoint would drag the tape along.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_watchdog_agent.contract.bounds import LiveTable
from torch_watchdog_agent.contract.consumers import Use
from torch_watchdog_agent.contract.conversions import Conversions
from torch_watchdog_agent.contract.frames import ModuleNames, Place
from torch_watchdog_agent.contract.nodes import Int, LeafRef, Node, Ref, Schema, Storage, Value, schema_of

__all__ = ["HostRead", "Site", "Tape", "sampled"]

MAX_KEPT_ELEMENTS = 1 << 16  # of constants and of index tensors; larger ones are compared by a sample
_FACTORY_LIKE = {
    "zeros_like": 0,
    "ones_like": 1,
    "empty_like": 0,
    "full_like": None,
    "new_zeros": 0,
    "new_ones": 1,
    "new_empty": 0,
    "new_full": None,
}
_HANDLES_NAN = {"isnan", "isinf", "isfinite", "nan_to_num", "nan_to_num_", "nansum", "nanmean", "nanmedian"}
MODEL, RANDOM = "it comes from the model", "it is drawn at random"


@dataclass(slots=True)
class Site:
    """One use that one consumer made. `sample` is what the index held, for the self-check; `batch` the one in whose step it ran;
    `settled`: the limit is no number that was read off the data."""

    use: Use
    name: str
    place: Place
    numbers: tuple[int, ...]
    storages: tuple[Storage, ...]
    position: int
    batch: int | None
    live: LiveTable | None
    settled: bool
    sample: torch.Tensor | None = None

    @property
    def impure(self) -> str | None:
        return next((storage.impure for storage in self.storages if storage.impure), None)


@dataclass(slots=True)
class HostRead:
    """A value of the batch that Python looked at: the program may have branched on it. The rest is as in a Site, for its recipe."""

    leaves: frozenset[LeafRef]
    value: int | None
    call: tuple[str, int]
    position: int
    numbers: tuple[int, ...]
    storages: tuple[Storage, ...]
    batch: int | None


@dataclass(slots=True)
class Tape:
    """The record of one traced step; several batches may be in flight on it."""

    names: ModuleNames
    nodes: list[Node] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    outside: set[int] = field(default_factory=set)  # tensors that were there before the step
    constants: dict[int, torch.Tensor] = field(default_factory=dict)  # and what the small ones of them held
    leaves: dict[int, LeafRef] = field(default_factory=dict)
    shapes: dict[int, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    storages: dict[int, Storage] = field(default_factory=dict)
    reads: list[HostRead] = field(default_factory=list)
    dynamic_sizes: set[int] = field(default_factory=set)
    flowed: set[LeafRef] = field(default_factory=set)  # reached the model or a loss
    handled: set[LeafRef] = field(default_factory=set)  # looked at for NaN by the program
    used: set[int] = field(default_factory=set)  # batches that reached the model, a loss or a consumer
    touched: set[int] = field(default_factory=set)  # batches that any operator has read
    latest: int | None = None  # the batch touched last
    conversions: Conversions = field(default_factory=Conversions)
    _values: dict[int, tuple[Any, Value]] = field(default_factory=dict)
    _kept: list[torch.Tensor] = field(default_factory=list)
    _count: int = 0

    # Values

    def tag(self, batch: int, key: str, tensor: torch.Tensor) -> None:
        """This tensor is the leaf `key` of that batch. A tensor that has two names keeps the first."""
        if self.value_of(tensor) is None:
            leaf = (batch, key)
            number = self._new(tensor, Storage(leaves=frozenset([leaf])))
            self.leaves[number] = leaf
            self._kept.append(tensor)

    def leaf_that_lists(self, numbers: Sequence[int]) -> torch.Tensor | None:
        """The tensor of the batch that holds exactly these whole numbers."""
        wanted = [int(number) for number in numbers]
        for leaf in self._kept:
            if leaf.dim() == 1 and len(leaf) == len(wanted) and leaf.dtype in (torch.int64, torch.int32) and leaf.tolist() == wanted:
                return leaf
        return None

    def is_from_outside(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is, or is a view of, one that was there before the step and is not trained: a buffer, a cached mask."""
        storage = self.seen(tensor).storage
        return storage.impure is None and not storage.leaves and any(self.storages[number] is storage for number in self.outside)

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        known = self._values.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def seen(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor; an unknown one is impure where it is trained, else a constant from outside (buffer, cached mask, host data)."""
        known = self.value_of(tensor)
        if known is not None:
            return known
        if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
            return self._remember(tensor, Value(-1, Storage(impure=MODEL)))
        made = self.conversions.over_memory(tensor)
        if made is not None:
            return self._made_of(*made, tensor)
        number = self._new(tensor, Storage())
        self.outside.add(number)
        if tensor.device.type != "meta" and tensor.numel() <= MAX_KEPT_ELEMENTS and type(tensor) is torch.Tensor:
            self.constants[number] = tensor.detach().clone()
        return self._values[id(tensor)][1]

    def _made_of(self, leaf: torch.Tensor, steps: Sequence[tuple[Any, tuple[Any, ...]]], tensor: torch.Tensor) -> Value:
        """The program has made this tensor of a leaf, without an operator that could be seen: as if by these."""
        for place, (func, args) in enumerate(steps):
            out = tensor if place == len(steps) - 1 else func(leaf, *args)
            self.record(func, schema_of(func), (leaf, *args), {}, out, None)
            leaf = out
        return self._remember(tensor, self.seen(leaf))

    def _note_new(self, tensor: torch.Tensor) -> None:
        """A tensor that was made of data of the program's own just now: maybe of an array or a list of the batch."""
        if self.value_of(tensor) is not None or tensor.requires_grad or self.conversions.over_memory(tensor) is not None:
            return
        made = self.conversions.of_numbers(tensor)
        if made is None:
            return
        leaf, is_certain = made
        cast = torch.ops.aten._to_copy.default
        self.record(cast, schema_of(cast), (leaf,), {"dtype": tensor.dtype}, tensor, None)
        if not is_certain:  # the program may have looked at the numbers, and mended them
            leaves = self.seen(leaf).storage.leaves
            self.reads.append(HostRead(leaves, None, ("", -1), len(self.nodes), (), (), self.latest))

    def _remember(self, tensor: torch.Tensor, value: Value) -> Value:
        self._values[id(tensor)] = (weakref.ref(tensor), value)
        return value

    def _new(self, tensor: torch.Tensor, storage: Storage) -> int:
        number, self._count = self._count, self._count + 1
        self._remember(tensor, Value(number, storage))
        self.shapes[number] = (tuple(tensor.shape), tensor.dtype)
        self.storages[number] = storage
        return number

    # Operators

    def record(
        self, func: Any, schema: Schema, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, read: tuple[str, int] | None
    ) -> None:
        """Enter one operator that has run. `read`: the call, where it moved a number to Python."""
        if schema.name == "lift_fresh":
            self._note_new(args[0])
        inputs = list(_tensors((args, list(kwargs.values()))))
        values = [self.seen(tensor) for tensor in inputs]
        self._note_use(values)
        outs = [out] if isinstance(out, torch.Tensor) else list(out) if isinstance(out, (list, tuple)) else []
        impure = RANDOM if schema.random else next((value.storage.impure for value in values if value.storage.impure), None)
        leaves = frozenset().union(*(value.storage.leaves for value in values)) if values else frozenset()
        if schema.name in _HANDLES_NAN:
            self.handled |= leaves
        if read is not None and impure is None and leaves:
            self.reads.append(self._read(values, leaves, out, read))
        if schema.dynamic or schema.name in ("masked_select", "nonzero"):
            self.dynamic_sizes.update(size for tensor in outs for size in tensor.shape)
        if impure is not None:
            self._record_impure(schema, args, inputs, values, outs, impure)
        else:
            self._record_pure(func, schema, args, kwargs, values, outs, leaves)

    def _read(self, values: Sequence[Value], leaves: frozenset[LeafRef], out: Any, call: tuple[str, int]) -> HostRead:
        return HostRead(
            leaves=leaves, value=out if type(out) is int else None, call=call, position=len(self.nodes),
            numbers=tuple(value.number for value in values), storages=tuple(value.storage for value in values), batch=self.latest,
        )  # fmt: skip

    def _note_use(self, values: Sequence[Value]) -> None:
        for value in values:
            for batch, _ in value.storage.leaves:
                self.latest = batch
                self.touched.add(batch)

    def _record_impure(
        self, schema: Schema, args: tuple[Any, ...], inputs: Sequence[torch.Tensor], values: Sequence[Value], outs: Sequence[Any], why: str
    ) -> None:
        for value in values:
            if value.storage.impure is None:
                self._flow(value.storage.leaves)
        if schema.name in _FACTORY_LIKE and inputs and len(outs) == 1 and not outs[0].requires_grad:
            self._record_factory(schema.name, args, outs[0])
            return
        for place, writes in enumerate(schema.writes):
            if writes and place < len(args) and isinstance(args[place], torch.Tensor):
                self.seen(args[place]).storage.impure = why
        for tensor in outs:
            if isinstance(tensor, torch.Tensor):
                known = self.value_of(tensor)
                if known is None or known.storage.impure is None:
                    self._remember(tensor, Value(-1, Storage(impure=why)))

    def _flow(self, leaves: frozenset[LeafRef]) -> None:
        self.flowed |= leaves
        self.used.update(batch for batch, _ in leaves)

    def _record_factory(self, name: str, args: tuple[Any, ...], out: torch.Tensor) -> None:
        """`new_zeros` of an impure tensor depends on its shape only: enter it as a factory."""
        filled = _FACTORY_LIKE[name]
        if filled is None:
            filled = args[1] if name == "full_like" else args[2]
        arguments = ([Int(int(size)) for size in out.shape], filled)
        node = Node(torch.ops.aten.full.default, "full", arguments, {"dtype": out.dtype}, ())
        node.outputs = (self._new(out, Storage()),)
        self.nodes.append(node)

    def _record_pure(
        self,
        func: Any,
        schema: Schema,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        values: Sequence[Value],
        outs: Sequence[Any],
        leaves: frozenset[LeafRef],
    ) -> None:
        written = [
            self.seen(args[i]) for i, writes in enumerate(schema.writes) if writes and i < len(args) and isinstance(args[i], torch.Tensor)
        ]
        written += [self.seen(kwargs["out"])] if isinstance(kwargs.get("out"), torch.Tensor) else []
        for value in written:
            value.storage.leaves |= leaves
        node = Node(
            func,
            schema.name,
            tuple(self._argument(argument, schema.may_be_size[place]) for place, argument in enumerate(args)),
            {
                name: self._argument(argument, schema.may_be_size[schema.position[name]])
                for name, argument in kwargs.items()
                if name not in ("device", "pin_memory", "non_blocking", "layout")
            },
            tuple(value.number for value in values),
            writes=tuple(value.number for value in written),
        )
        node.outputs = tuple(self._output(tensor, place, schema, args, node, leaves) for place, tensor in enumerate(outs))
        self.nodes.append(node)

    def _argument(self, argument: Any, may_be_size: bool) -> Any:
        if isinstance(argument, torch.Tensor):
            return Ref(self.seen(argument).number)
        if isinstance(argument, (list, tuple)):
            return [self._argument(item, may_be_size) for item in argument]
        return Int(argument) if may_be_size and type(argument) is int else argument

    def _output(self, tensor: Any, place: int, schema: Schema, args: tuple[Any, ...], node: Node, leaves: frozenset[LeafRef]) -> int | None:
        if not isinstance(tensor, torch.Tensor):
            return None
        known = self.value_of(tensor)
        if known is not None and known.number in node.writes:
            return known.number
        return self._new(tensor, self._viewed(place, schema, args) or Storage(leaves=leaves))

    def _viewed(self, place: int, schema: Schema, args: tuple[Any, ...]) -> Storage | None:
        """The storage that an output shares with an argument, as the schema says."""
        shared = schema.returns[0 if len(schema.returns) == 1 else place] if schema.returns else None
        if shared:
            for argument, alias in zip(args, schema.aliases, strict=False):
                if alias and (alias & shared or "*" in shared) and isinstance(argument, torch.Tensor):
                    return self.seen(argument).storage
        return None

    # Consumers

    def consume(self, use: Use, name: str, place: Place, batch: int | None) -> Site:
        """Enter one use, before its consumer is launched. The use's tensors are let go: only a small copy of the index is kept."""
        values = [self.seen(tensor) for tensor in use.tensors]
        self._note_use(values)
        self.used.update(batch for value in values for batch, _ in value.storage.leaves)
        table = None if use.table is None else self.seen(use.table)
        site = Site(
            use=use,
            name=name,
            place=place,
            numbers=tuple(value.number for value in values),
            storages=tuple(value.storage for value in values),
            position=len(self.nodes),
            batch=batch,
            live=self._live_table(use, table, place),
            settled=not self._depends_on_data(use.rows),
        )
        if values and site.impure is None and use.tensors[0].device.type != "meta":
            site.sample = sampled(use.tensors[0])
        self.sites.append(site)
        return site

    def _live_table(self, use: Use, value: Value | None, place: Place) -> LiveTable | None:
        """The table, where it is a parameter or a tensor from outside the step (a buffer): its length can be read at any time."""
        if use.table is None or use.dim is None or value is None:
            return None
        if isinstance(use.table, torch.nn.Parameter) or value.number in self.outside:
            return LiveTable(use.table, use.dim, place.holder() if place.holder is not None else None)
        return None

    def _depends_on_data(self, rows: int) -> bool:
        """Whether the limit looks like a number that was read off the data (one_hot without a class count, a table as long as the largest id)."""
        near = (rows - 1, rows, rows + 1)
        return any(read.value in near for read in self.reads) or rows in self.dynamic_sizes


def _tensors(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, (list, tuple)):
        for child in item:
            yield from _tensors(child)


def sampled(index: torch.Tensor) -> torch.Tensor:
    """A CPU copy of an index tensor: all of a small one, evenly spaced elements of a large one."""
    index = index.detach()
    if index.numel() > MAX_KEPT_ELEMENTS:
        places = torch.arange(0, index.numel(), index.numel() // MAX_KEPT_ELEMENTS, device="cpu")
        shape = [len(places)]
        coordinates = torch.unravel_index(places, index.shape)
        return index[tuple(c.to(index.device) for c in coordinates)].to("cpu", copy=True).reshape(shape)
    return index.to("cpu", copy=True)
