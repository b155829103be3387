"""What ranks recorded of their steps, by columns: a block of one rank, and the table of all ranks of a node that its reports carry.

Owns these words, and how blocks become a table and a table blocks. What a report costs a daemon goes by the number of its columns and not by that of its
ranks, so that whoever looks at every report reads the table; `blocks()` is for everybody else. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

__all__ = ["BLOCK_COLUMNS", "MICRO_COLUMNS", "NO_STEPS", "STEP_COLUMNS", "TENSOR_COLUMNS", "StepBlock", "StepTable", "TensorColumns"]

BLOCK_COLUMNS = ("rank", "attempt", "pid", "first_record", "lost_records", "gpu", "tokens", "norms_of_shard")
MICRO_COLUMNS = (
    "micro_step", "micro_of_step", "micro_time_ns", "loader_ns", "loss", "loss_known", "evaluation", "forward_ns", "scale", "reach",
)  # fmt: skip
STEP_COLUMNS = (
    "step", "step_time_ns", "step_ns", "vetoed", "allocated_bytes", "reserved_bytes", "peak_bytes", "updates_applied", "backward_ns", "grad_norm",
    "alloc_retries", "update_ns",
)  # fmt: skip
TENSOR_COLUMNS = ("low", "high", "negatives", "ignored", "finite", "shapes")  # of a TensorColumns, beside its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorColumns:
    """Statistics of one tensor of the batch, one entry per row of `rows` (an index into the block's micro-steps)."""

    key: str
    dtype: str
    rows: tuple[int, ...]
    low: tuple[float, ...]  # integers too: exact up to 2**53, larger ones saturate
    high: tuple[float, ...]
    negatives: tuple[int, ...]
    ignored: tuple[int, ...]
    finite: tuple[bool, ...]
    shapes: tuple[tuple[int, ...], ...]
    bound_low: float | None = None  # what the run is known to take, where it is known
    bound_high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBlock:
    """What one rank recorded over one flush, by columns. Micro-step columns have one entry per batch, step columns one per optimizer step."""

    rank: int
    attempt: int
    pid: int
    first_record: int  # the ring's sequence number of the first record in here
    lost_records: int = 0  # overwritten or torn before they could be read
    # per micro-step
    micro_step: tuple[int, ...] = ()
    micro_of_step: tuple[int, ...] = ()
    micro_time_ns: tuple[int, ...] = ()
    loader_ns: tuple[int, ...] = ()
    loss: tuple[float, ...] = ()  # NaN where there was none: see loss_known
    loss_known: tuple[bool, ...] = ()
    evaluation: tuple[bool, ...] = ()
    forward_ns: tuple[int, ...] = ()  # from the hand-over to backward, 0 where not known
    scale: tuple[float, ...] = ()  # the GradScaler's newest known, 0 where there is none
    reach: tuple[float, ...] = ()  # largest |2p - 1| of the probabilities p given to binary_cross_entropy: 1 is their edge, 0 none
    # per optimizer step
    step: tuple[int, ...] = ()
    step_time_ns: tuple[int, ...] = ()  # wall time of the gate
    step_ns: tuple[int, ...] = ()
    vetoed: tuple[bool, ...] = ()
    allocated_bytes: tuple[int, ...] = ()
    reserved_bytes: tuple[int, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    updates_applied: tuple[int, ...] = ()
    backward_ns: tuple[
        int, ...
    ] = ()  # from each loss to the next fetch or the gate, and where its forward waits for others: not the rank's own
    grad_norm: tuple[float, ...] = ()  # of the loop's own clipping, or on request ours; -1: none
    alloc_retries: tuple[int, ...] = ()  # of the allocator so far
    update_ns: tuple[int, ...] = ()  # the part of backward_ns in which the optimizer changed the parameters, 0 where not known
    tensors: tuple[TensorColumns, ...] = ()
    gpu: str = ""  # UUID of the GPU that this rank computes on
    tokens: int = 0  # ids that the tokenizer of its data has, 0 where none is known
    norms_of_shard: bool = False  # grad_norm is of this rank's shard of the gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """The blocks of all ranks of a node as one: each column is those of the blocks, one after the other. Columns have the meaning that they have in a block."""

    # per block
    rank: tuple[int, ...] = ()
    attempt: tuple[int, ...] = ()
    pid: tuple[int, ...] = ()
    first_record: tuple[int, ...] = ()
    lost_records: tuple[int, ...] = ()
    gpu: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    norms_of_shard: tuple[bool, ...] = ()
    num_micro_steps: tuple[int, ...] = ()  # how many entries of each column are this block's
    num_steps: tuple[int, ...] = ()
    # per micro-step
    micro_step: tuple[int, ...] = ()
    micro_of_step: tuple[int, ...] = ()
    micro_time_ns: tuple[int, ...] = ()
    loader_ns: tuple[int, ...] = ()
    loss: tuple[float, ...] = ()
    loss_known: tuple[bool, ...] = ()
    evaluation: tuple[bool, ...] = ()
    forward_ns: tuple[int, ...] = ()
    scale: tuple[float, ...] = ()
    reach: tuple[float, ...] = ()
    # per optimizer step
    step: tuple[int, ...] = ()
    step_time_ns: tuple[int, ...] = ()
    step_ns: tuple[int, ...] = ()
    vetoed: tuple[bool, ...] = ()
    allocated_bytes: tuple[int, ...] = ()
    reserved_bytes: tuple[int, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    updates_applied: tuple[int, ...] = ()
    backward_ns: tuple[int, ...] = ()
    grad_norm: tuple[float, ...] = ()
    alloc_retries: tuple[int, ...] = ()
    update_ns: tuple[int, ...] = ()
    tensors: tuple[TensorColumns, ...] = ()  # of all ranks that have the same; `rows` are entries of this table's micro-step columns

    @classmethod
    def of(cls, blocks: Sequence[StepBlock]) -> StepTable:
        """The same as a table."""
        micro, steps = [len(block.micro_step) for block in blocks], [len(block.step) for block in blocks]
        columns: dict[str, Any] = {name: tuple(getattr(block, name) for block in blocks) for name in BLOCK_COLUMNS}
        columns |= {name: _joined([getattr(block, name) for block in blocks], micro) for name in MICRO_COLUMNS}
        columns |= {name: _joined([getattr(block, name) for block in blocks], steps) for name in STEP_COLUMNS}
        return cls(num_micro_steps=tuple(micro), num_steps=tuple(steps), tensors=tuple(_tensors_of(blocks, _begins(micro))), **columns)

    def blocks(self, *, tensors: bool = True) -> tuple[StepBlock, ...]:
        """Rank by rank; for whoever looks at none, without their tensors."""
        micro, steps = _begins(self.num_micro_steps), _begins(self.num_steps)
        by_block = [(name, getattr(self, name)) for name in BLOCK_COLUMNS]
        by_micro, by_step = [(name, getattr(self, name)) for name in MICRO_COLUMNS], [(name, getattr(self, name)) for name in STEP_COLUMNS]
        of_block = self._tensors_by_block(micro) if tensors else [()] * len(self.rank)
        return tuple(
            StepBlock(
                **{name: column[number] for name, column in by_block},
                **{name: column[micro[number] : micro[number + 1]] for name, column in by_micro},
                **{name: column[steps[number] : steps[number + 1]] for name, column in by_step},
                tensors=tuple(of_block[number]),
            )
            for number in range(len(self.rank))
        )

    def of_attempt(self, attempt: int) -> StepTable:
        """Without the blocks of other attempts."""
        if all(one == attempt for one in self.attempt):
            return self
        return StepTable.of([block for block in self.blocks() if block.attempt == attempt])

    def _tensors_by_block(self, begins: Sequence[int]) -> list[list[TensorColumns]]:
        found: list[list[TensorColumns]] = [[] for _ in self.rank]
        for tensor in self.tensors:
            entries: dict[int, list[int]] = {}
            for entry, row in enumerate(tensor.rows):
                entries.setdefault(bisect_right(begins, row, hi=len(self.rank)) - 1, []).append(entry)
            for number, mine in entries.items():
                found[number].append(_part(tensor, mine, begins[number]))
        return found


NO_STEPS = StepTable()


def _begins(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))


def _joined(columns: Sequence[tuple[Any, ...]], counts: Sequence[int], missing: Any = 0) -> tuple[Any, ...]:
    """One after the other. Where some have none, which others have, it is all `missing`."""
    if not any(columns):
        return ()
    return tuple(chain.from_iterable(column or (missing,) * count for column, count in zip(columns, counts, strict=True)))


def _tensors_of(blocks: Sequence[StepBlock], begins: Sequence[int]) -> Iterator[TensorColumns]:
    """Those of the same name, kind and bounds as one."""
    same: dict[tuple[Any, ...], list[tuple[int, TensorColumns]]] = {}
    for block, begin in zip(blocks, begins, strict=False):
        for tensor in block.tensors:
            same.setdefault((tensor.key, tensor.dtype, tensor.bound_low, tensor.bound_high), []).append((begin, tensor))
    for (key, dtype, low, high), found in same.items():
        counts = [len(tensor.rows) for _, tensor in found]
        values = {name: [getattr(tensor, name) for _, tensor in found] for name in TENSOR_COLUMNS}
        yield TensorColumns(
            key=key, dtype=dtype, bound_low=low, bound_high=high, rows=tuple(begin + row for begin, tensor in found for row in tensor.rows),
            **{name: _joined(columns, counts, () if name == "shapes" else 0) for name, columns in values.items()},
        )  # fmt: skip


def _part(tensor: TensorColumns, entries: Sequence[int], begin: int) -> TensorColumns:
    values = {name: getattr(tensor, name) for name in TENSOR_COLUMNS}
    return TensorColumns(
        key=tensor.key, dtype=tensor.dtype, bound_low=tensor.bound_low, bound_high=tensor.bound_high,
        rows=tuple(tensor.rows[entry] - begin for entry in entries),
        **{name: tuple(column[entry] for entry in entries) if column else () for name, column in values.items()},
    )  # fmt: skip
