"""A training whose save waits, on each rank, until a test has opened that rank's fifo. With --fail rank 1 raises at step 5.

Knows nothing of the watchdog. It never reads its own state, so that whoever asks the model for it saves.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from train import Net, Rows, begin


def main() -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    begin("gloo")
    rank = dist.get_rank()
    Path(f"pid-{rank}").write_text(str(os.getpid()))

    def wait_for_the_test(*_: object) -> None:
        Path(f"saving-{rank}").touch()
        Path(f"fifo-{rank}").open("rb").close()

    plain = Net()
    plain.register_state_dict_pre_hook(wait_for_the_test)
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = Rows(48, None)
    loader = DataLoader(rows, batch_size=3, sampler=DistributedSampler(rows))
    step = 0
    while True:
        for batch in loader:
            if "--fail" in sys.argv and step == 5 and rank == 1:
                raise ValueError("a fault of the script's own")
            nn.functional.cross_entropy(model(batch["ids"]), batch["labels"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            Path(f"step-{rank}").write_text(str(step))
            time.sleep(0.01)


if __name__ == "__main__":
    main()
