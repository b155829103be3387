"""Streams for the tests of the rules: blocks as a node process reports them, one step each, and samples of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from torch_watchdog.rules.engine import Engine, Finding
from torch_watchdog.rules.xid import XidCode
from torch_watchdog_proto.messages import GpuSample, StepBlock, StepTable, TensorColumns

GIB = 1 << 30
UUID = "GPU-0"


def labels(high: float, *, ignored: int = 0, of: int = 100, bound: float | None = None, key: str = "labels") -> TensorColumns:
    return TensorColumns(
        key=key, dtype="int64", rows=(0,), low=(0.0,), high=(high,), negatives=(ignored,), ignored=(ignored,), finite=(True,), shapes=((of,),),
        bound_low=None if bound is None else 0.0, bound_high=bound,
    )  # fmt: skip


def block(
    rank: int, step: int, *, loss: float = 1.0, own_ms: float = 10, wait_ms: float = 5, loader_ms: float = 1, **more: Any
) -> StepBlock:
    """One step of one micro-batch. `own_ms` holds `loader_ms`; `wait_ms` is spent in backward."""
    columns: dict[str, Any] = {
        "micro_step": (0,), "micro_of_step": (step,), "micro_time_ns": (0,), "loader_ns": (int(loader_ms * 1e6),), "loss": (loss,), "loss_known": (True,),
        "evaluation": (False,), "forward_ns": (int((own_ms - loader_ms) * 1e6),), "scale": (0.0,), "step": (step,), "step_time_ns": (step * 10**9,),
        "step_ns": (int((own_ms + wait_ms) * 1e6),), "vetoed": (False,), "updates_applied": (step + 1,), "backward_ns": (int(wait_ms * 1e6),),
        "grad_norm": (-1.0,), "tensors": (labels(9),),
    }  # fmt: skip
    return StepBlock(rank=rank, attempt=0, pid=100 + rank, first_record=1, **(columns | more))


def batches(rank: int, losses: Sequence[tuple[int, float]], **more: Any) -> StepBlock:
    """One block of several steps, as it comes where they are short: only their numbers and losses."""
    steps, zeros = tuple(step for step, _ in losses), (0,) * len(losses)
    columns: dict[str, Any] = {
        "micro_step": zeros, "micro_of_step": steps, "micro_time_ns": zeros, "loader_ns": zeros, "loss": tuple(loss for _, loss in losses),
        "loss_known": (True,) * len(losses), "evaluation": (False,) * len(losses), "step": steps, "step_time_ns": zeros, "step_ns": (1_000_000,) * len(losses),
    }  # fmt: skip
    return StepBlock(rank=rank, attempt=0, pid=100 + rank, first_record=1, **(columns | more))


def sample(second: int, **more: Any) -> GpuSample:
    known: dict[str, Any] = {
        "index": 3, "uuid": UUID, "name": "NVIDIA H100", "memory_used_bytes": 40 * GIB, "memory_total_bytes": 80 * GIB, "sm_clock_mhz": 1900,
        "max_sm_clock_mhz": 1980, "throttle_reasons": 0x4, "ecc_uncorrected": 0, "ecc_corrected": 0, "pcie_replays": 0, "nvlink_errors": 0,
        "temperature_c": 60,
    }  # fmt: skip
    return GpuSample(time_ns=second * 10**9, **(known | more))


class Watch:
    """An engine with a hand-moved clock."""

    def __init__(self, *, codes: Mapping[int, XidCode] | None = None, **changes: Mapping[str, Any]) -> None:
        self.engine, self.now = Engine(codes=codes or {}, changes=changes), 1000.0
        self.found: list[Finding] = []

    def second(self, *blocks: StepBlock, gpus: Iterable[GpuSample] = ()) -> None:
        if blocks:
            self.engine.take_steps(StepTable.of(blocks), self.now)
        for one in gpus:
            self.engine.take_gpu("node-1", one, self.now)
        self.now += 1.0
        self.found += self.engine.judge(self.now)

    def seconds(self, count: int, made: Callable[[int], Iterable[StepBlock]], start: int = 0) -> None:
        """One step of every rank a second."""
        for step in range(start, start + count):
            self.second(*made(step))

    @property
    def told(self) -> list[tuple[str, int | None, str]]:
        return [(finding.about.name, finding.sign.rank, finding.change) for finding in self.found]


def everything(watch: Watch) -> Watch:
    """A run in which there is something for every rule to see but for slow loaders: 110 steps, from the 40th on bad."""
    for blocks, gpus in _of_everything():
        watch.second(*blocks, gpus=gpus)
    return watch


@cache
def _of_everything() -> list[tuple[list[StepBlock], list[GpuSample]]]:
    made = []
    for step in range(110):
        bad, blocks = step >= 40, []
        for rank in range(3):
            allocated = int((20 + (step / 2 if rank else 0)) * GIB)
            blocks.append(block(
                rank, step, loss=1.0 + 0.01 * (step % 7) + 20 * (bad and rank == 1), own_ms=60 if bad and rank == 2 else 20,
                scale=(65536.0 / 2 ** max(0, step - 60),), reach=(0.3 + 0.006 * step,), gpu=f"GPU-{rank}",
                tensors=(labels(5.0 * step, ignored=98 if bad else 20, bound=560),), tokens=530, allocated_bytes=(allocated,),
                reserved_bytes=(allocated + 30 * GIB,), peak_bytes=(allocated,), alloc_retries=(step,),
            ))  # fmt: skip
        hurt: dict[str, Any] = {
            "throttle_reasons": 0x40, "sm_clock_mhz": 1000, "ecc_uncorrected": 1, "ecc_corrected": 50 * step, "pcie_replays": 50 * step,
            "nvlink_errors": 50 * step, "xids": (79,), "memory_used_bytes": 78 * GIB,
        }  # fmt: skip
        lost: dict[str, Any] = {"lost": True, "memory_used_bytes": 0, "memory_total_bytes": 0}
        gpus = [sample(step, uuid=f"GPU-{rank}", **(lost if step >= 105 and rank == 2 else hurt if bad else {})) for rank in range(3)]
        made.append((blocks, gpus))
    return made
