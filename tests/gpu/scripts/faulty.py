"""The suite's small training on GPUs, with the faults that only a GPU has: `faulty.py PLAN`, as tests/faults/train.py. Knows nothing of the watchdog."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "faults"))

import torch
import torch.distributed as dist
from torch import nn
from train import Shape, Training

GIB = 1 << 30
LEAK_MIB = 64  # each step
NEEDED_GIB = 30  # of a step whose memory falls to pieces


class OnGpu(Training):
    def __init__(self, shape: Shape) -> None:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        super().__init__(shape)
        if shape.room_gib:
            free, _ = torch.cuda.mem_get_info()
            self.kept.append(torch.empty(free - int(shape.room_gib * GIB), dtype=torch.uint8, device="cuda"))

    def _before(self, step: int) -> None:
        super()._before(step)
        if self.faulty("leak", step):
            self.kept.append(torch.empty(LEAK_MIB << 20, dtype=torch.uint8, device="cuda"))
        if self.faulty("pieces", step):  # of two sizes, none of which fits where one of the other has been
            self._needs(3.0)
            self._needs(3.75)
        if self.faulty("retries", step):  # of another size each time
            self._needs(3.0 + 0.03 * (step % 32))
        if self.faulty("device_assert", step):
            nn.functional.embedding(
                torch.tensor([self.shape.vocabulary + 7], device="cuda"), torch.zeros(self.shape.vocabulary, 8, device="cuda")
            )

    def _needs(self, block_gib: float) -> None:
        """For a moment, in blocks of this size."""
        blocks = [torch.empty(int(block_gib * GIB), dtype=torch.uint8, device="cuda") for _ in range(int(NEEDED_GIB / block_gib))]
        del blocks


def main() -> None:
    dist.init_process_group("nccl")
    OnGpu(Shape(**json.loads(sys.argv[1]))).run()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
