"""What a rank does that is in no step: compiles, writes a checkpoint, evaluates, waits for data. Read from the Python stack that it answers with.

Owns the table of what is known by its files and functions. These take long now and then, and are no hang; whoever is told of a late rank is told which it is.
"""

from __future__ import annotations

import re

__all__ = ["phase_in"]

_PHASES = (  # the first that fits counts: an evaluation may compile, and a checkpoint may be written in an evaluation
    ("compiles", re.compile(r"/torch/_(inductor|dynamo|functorch)/|/triton/")),
    ("writes a checkpoint", re.compile(r"/torch/serialization\.py|/torch/distributed/checkpoint/|/safetensors/|, in _?save(_\w+)?$", re.MULTILINE)),
    ("waits for data", re.compile(r"/torch/utils/data/dataloader\.py")),
    ("evaluates", re.compile(r", in _?(eval(uate)?|evaluation|valid(ate)?|validation|test)(_\w+)?$", re.MULTILINE)),
)  # fmt: skip


def phase_in(stack: str) -> str | None:
    """The phase that the stack shows, or None. `stack`: as Python prints it."""
    return next((phase for phase, known in _PHASES if known.search(stack)), None)
