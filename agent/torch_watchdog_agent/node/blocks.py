"""Ring records -> StepBlocks, by columns.

Owns what one ring's records mean together: names of keys, which tensors belong to which micro-step. Pure: records in, blocks and notes out; knows no file
or clock. The tensors of a batch are recorded before its loss is known: they wait here for their micro-step, or for the rank's end.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch_watchdog_proto.messages import StepBlock, TensorColumns
from torch_watchdog_proto.record import (
    DeviceNamed,
    GradientsSharded,
    KeyNamed,
    MicroStep,
    Note,
    Record,
    RingHeader,
    StepDone,
    TensorSeen,
    TokenizerSeen,
)

__all__ = ["BlockBuilder"]

_MAX_WAITING = 4096  # tensors without their micro-step: past this the oldest batches go out as they are
_MAX_KEYS = 4096


class BlockBuilder:
    """Builds the blocks of one ring, in the order of its records."""

    def __init__(self, header: RingHeader) -> None:
        self._header = header
        self._keys: dict[int, KeyNamed] = {}
        self._gpu, self._tokens, self._has_shards = "", 0, False
        self._waiting: list[TensorSeen] = []

    def build(self, records: Sequence[Record], *, first_record: int, lost: int) -> tuple[StepBlock | None, tuple[Note, ...]]:
        """A block for what has been read (None where nothing of it belongs into one), and the notes among it."""
        self._learn_names(records)
        self._waiting += [record for record in records if isinstance(record, TensorSeen)]
        micro = [record for record in records if isinstance(record, MicroStep)]
        micro = self._with_overdue(micro)
        steps = [record for record in records if isinstance(record, StepDone)]
        notes = tuple(record for record in records if isinstance(record, Note))
        if not micro and not steps and not lost:
            return None, notes
        return self._block(micro, steps, first_record, lost), notes

    def rest(self, *, first_record: int) -> StepBlock | None:
        """The rank has ended: the batches whose loss it never learned, the last of which it may have died of."""
        micro = self._unfinished(self._waiting)
        return self._block(micro, [], first_record, 0) if micro else None

    def _learn_names(self, records: Iterable[Record]) -> None:
        for record in records:
            if isinstance(record, KeyNamed) and (record.key_id in self._keys or len(self._keys) < _MAX_KEYS):
                self._keys[record.key_id] = record
            elif isinstance(record, DeviceNamed):
                self._gpu = record.uuid
            elif isinstance(record, TokenizerSeen):
                self._tokens = record.tokens
            elif isinstance(record, GradientsSharded):
                self._has_shards = True

    def _with_overdue(self, micro: list[MicroStep]) -> list[MicroStep]:
        """With the batches whose micro-step was lost: later ones have arrived, or too many wait."""
        come = {(row.step, row.micro_step) for row in micro}
        newest = max(come, default=(-1, -1))
        excess = len(self._waiting) - _MAX_WAITING
        overdue = [
            tensor
            for number, tensor in enumerate(self._waiting)
            if (tensor.step, tensor.micro_step) not in come and ((tensor.step, tensor.micro_step) < newest or number < excess)
        ]
        return sorted([*micro, *self._unfinished(overdue)], key=lambda row: (row.step, row.micro_step)) if overdue else micro

    @staticmethod
    def _unfinished(tensors: Iterable[TensorSeen]) -> list[MicroStep]:
        places = dict.fromkeys((tensor.step, tensor.micro_step) for tensor in tensors)
        return [MicroStep(step=s, micro_step=m, time_ns=0, loader_ns=0, loss=math.nan, loss_known=False) for s, m in places]

    def _block(self, micro: Sequence[MicroStep], steps: Sequence[StepDone], first_record: int, lost: int) -> StepBlock:
        header = self._header
        return StepBlock(
            rank=header.rank, attempt=header.attempt, pid=header.pid, first_record=first_record, lost_records=lost,
            micro_step=tuple(row.micro_step for row in micro), micro_of_step=tuple(row.step for row in micro),
            micro_time_ns=tuple(row.time_ns for row in micro), loader_ns=tuple(row.loader_ns for row in micro),
            loss=tuple(row.loss for row in micro), loss_known=tuple(row.loss_known for row in micro),
            evaluation=tuple(row.evaluation for row in micro),
            forward_ns=tuple(row.forward_ns for row in micro), scale=tuple(row.scale for row in micro), reach=tuple(row.reach for row in micro),
            step=tuple(row.step for row in steps), step_time_ns=tuple(row.time_ns for row in steps),
            step_ns=tuple(row.step_ns for row in steps), vetoed=tuple(row.vetoed for row in steps),
            allocated_bytes=tuple(row.allocated_bytes for row in steps), reserved_bytes=tuple(row.reserved_bytes for row in steps),
            peak_bytes=tuple(row.peak_bytes for row in steps), updates_applied=tuple(row.updates_applied for row in steps),
            backward_ns=tuple(row.backward_ns for row in steps), grad_norm=tuple(row.grad_norm for row in steps),
            alloc_retries=tuple(row.alloc_retries for row in steps), update_ns=tuple(row.update_ns for row in steps),
            tensors=self._tensors(micro), gpu=self._gpu, tokens=self._tokens, norms_of_shard=self._has_shards,
        )  # fmt: skip

    def _tensors(self, micro: Sequence[MicroStep]) -> tuple[TensorColumns, ...]:
        """Takes the waiting tensors that belong to these rows."""
        row_of = {(row.step, row.micro_step): number for number, row in enumerate(micro)}
        mine: dict[tuple[int, str], list[TensorSeen]] = defaultdict(list)
        left = []
        for tensor in self._waiting:
            if (tensor.step, tensor.micro_step) in row_of:
                mine[tensor.key_id, tensor.dtype].append(tensor)
            else:
                left.append(tensor)
        self._waiting = left
        return tuple(self._columns(tensors, row_of) for tensors in mine.values())

    def _columns(self, tensors: Sequence[TensorSeen], row_of: dict[tuple[int, int], int]) -> TensorColumns:
        first = tensors[0]
        key = self._keys.get(first.key_id) or KeyNamed(key_id=first.key_id, name=f"key {first.key_id}")
        return TensorColumns(
            key=key.name, dtype=first.dtype, bound_low=_known(key.low), bound_high=_known(key.high),
            rows=tuple(row_of[tensor.step, tensor.micro_step] for tensor in tensors), low=tuple(tensor.low for tensor in tensors),
            high=tuple(tensor.high for tensor in tensors), negatives=tuple(tensor.negatives for tensor in tensors),
            ignored=tuple(tensor.ignored for tensor in tensors), finite=tuple(tensor.finite for tensor in tensors),
            shapes=tuple(tensor.shape for tensor in tensors),
        )  # fmt: skip


def _known(bound: float) -> float | None:
    return None if math.isnan(bound) else bound
