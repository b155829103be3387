"""Ranks that share one card: first on PYTHONPATH of a launch with more ranks than cards.

NCCL takes no card twice on one machine, and a framework takes one for each local rank: once torch is there each rank is a machine of its own to them, and to
our agent, which has begun by then, what the launcher has made it. What is measured so is right in what it does, not in how long it takes: the ranks'
kernels take turns.
"""

from __future__ import annotations

import os

if "RANK" in os.environ:
    import torch  # noqa: F401

    os.environ.update(NCCL_HOSTID=f"rank{os.environ['RANK']}", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
