"""Writes a checkpoint into a folder that has no room for it, and prints what is said and what is left."""

import sys
from pathlib import Path

import torch

from torch_watchdog_agent.checkpoint.alone import save_alone
from torch_watchdog_agent.checkpoint.errors import CheckpointError
from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.checkpoint.subjects import Subjects

subjects = Subjects()
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
subjects.optimizer_seen(optimizer)
position = LoaderPosition(epoch=0, batches=1, rng_at_iter=None, rng=RngState.capture())

if __name__ == "__main__":
    try:
        save_alone(Path(sys.argv[1]) / "step-1", subjects, rank=0, updates_applied=1, position=position, say=print)
    except CheckpointError as error:
        print(error)
    print(sorted(path.name for path in Path(sys.argv[1]).iterdir()))
