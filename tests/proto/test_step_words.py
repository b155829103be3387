"""Blocks of ranks and the table of a node: neither loses what the other has."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch_watchdog_proto.messages import StepBlock, StepTable, TensorColumns
from torch_watchdog_proto.step_words import BLOCK_COLUMNS, MICRO_COLUMNS, STEP_COLUMNS
from torch_watchdog_proto.v1 import telemetry_pb2


def tensor(*rows: int, key: str = "input_ids", high: float = 9.0, bound: float | None = None) -> TensorColumns:
    count = len(rows)
    return TensorColumns(
        key=key, dtype="int64", rows=rows, low=(0.0,) * count, high=tuple(high + row for row in rows), negatives=(0,) * count, ignored=rows,
        finite=(True,) * count, shapes=tuple((row + 1,) * (row + 1) for row in rows), bound_high=bound,
    )  # fmt: skip


def block(rank: int, *steps: int, batches: int = 1, attempt: int = 0, **more: Any) -> StepBlock:
    """Each of `batches` micro-steps."""
    micro = {"micro_step": tuple(range(batches)) * len(steps), "micro_of_step": tuple(step for step in steps for _ in range(batches))}
    columns = {"step": steps, "step_ns": tuple(10 * step for step in steps), "loss": tuple(0.5 * step for step in micro["micro_of_step"])}
    return StepBlock(rank=rank, attempt=attempt, pid=100 + rank, first_record=7, **(micro | columns | more))


def test_a_table_holds_the_blocks_that_it_was_made_of() -> None:
    blocks = (
        block(3, 1, 2, tensors=(tensor(0, 1), tensor(1, key="labels", bound=10.0)), gpu="GPU-3", tokens=50, lost_records=2),
        block(0),
        block(1, 5, batches=3, tensors=(tensor(2, 0), tensor(0, key="labels", bound=11.0)), norms_of_shard=True),
        block(2, 4, batches=0),
        block(9, 8, attempt=1, tensors=(tensor(0),)),
    )
    table = StepTable.of(blocks)
    assert table.blocks() == blocks
    assert [one.key for one in table.tensors] == ["input_ids", "labels", "labels"]  # of the same bounds only
    assert StepTable.of(()).blocks() == ()


def test_a_column_that_one_rank_lacks_is_all_zeros_there_and_one_that_all_lack_is_not_there() -> None:
    first, second = StepTable.of((block(0, 1, forward_ns=(4,)), block(1, 1))).blocks()
    assert (first.forward_ns, second.forward_ns, second.scale) == ((4,), (0,), ())


def test_blocks_without_their_tensors_are_else_the_same() -> None:
    whole, without = block(0, 1, tensors=(tensor(0),)), block(0, 1)
    assert StepTable.of((whole,)).blocks(tensors=False) == (without,)


def test_an_attempt_has_its_own_blocks_and_tensors() -> None:
    blocks = (block(0, 7, attempt=0, tensors=(tensor(0),)), block(0, 0, attempt=1, tensors=(tensor(0, high=5.0),)))
    assert StepTable.of(blocks).of_attempt(1).blocks() == blocks[1:]
    assert StepTable.of(blocks).of_attempt(2).rank == ()


def test_whatever_a_block_has_the_table_has_too_also_on_the_wire() -> None:
    known = {*BLOCK_COLUMNS, *MICRO_COLUMNS, *STEP_COLUMNS, "tensors"}
    on_the_wire = {name.removesuffix("_delta") for name in telemetry_pb2.StepTable.DESCRIPTOR.fields_by_name}
    assert {field.name for field in fields(StepBlock)} == known
    assert {field.name for field in fields(StepTable)} == on_the_wire == known | {"num_micro_steps", "num_steps"}
