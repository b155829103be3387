"""Writes a checkpoint under a limit on the size of files (RLIMIT_FSIZE), by torch's form and by a user's function; prints what is said and what is left."""

import resource
import sys
from pathlib import Path

import torch
from full_disk import position, subjects

from torch_watchdog_agent.checkpoint import on_checkpoint
from torch_watchdog_agent.checkpoint.alone import save_alone
from torch_watchdog_agent.checkpoint.errors import in_words
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.checkpoint.save import save_at

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
place = Path(sys.argv[1]) / "step-2"
told = {"rank": 0, "updates_applied": 2, "position": position, "say": print}
try:
    save_alone(place, subjects, **told)
except BaseException as error:
    print(in_words(error, alone=True))
on_checkpoint(lambda folder: torch.save(torch.zeros(1 << 16), folder / "model.pt"))  # in C++, whose error names no number
try:
    save_at(place, subjects, **told, rng=RngState.capture(), world_size=1)
except BaseException as error:
    print(in_words(error))
print(sorted(path.name for path in Path(sys.argv[1]).iterdir()))
