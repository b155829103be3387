"""Ranks that share one card: first on PYTHONPATH of a launch with more ranks than cards.

NCCL takes no card twice on one machine, and a framework takes one for each local rank: each rank is a machine of its own to them; to our agent, which begins
before that, it is what the launcher has made it. What is measured so is right in what it does, not in how long it takes: the ranks' kernels take turns.
"""

from __future__ import annotations

import os

if "RANK" in os.environ:
    import torch  # noqa: F401 - the agent waits for it

    from torch_watchdog_agent.hooks import active

    active.rank()
    os.environ.update(NCCL_HOSTID=f"rank{os.environ['RANK']}", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
