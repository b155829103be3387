"""Ranks that share one card: first on PYTHONPATH of a launch with more ranks than cards.

NCCL takes no card twice on one machine, and a framework takes one for each local rank: each rank is a machine of its own to them. Our agent knows by the
time that torch comes which rank it is in. What is measured so is right in what it does, not in how long it takes: the ranks' kernels take turns.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder


class AsTorchComes(MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch":
            os.environ.update(NCCL_HOSTID=f"rank{os.environ['RANK']}", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")


if "RANK" in os.environ:
    sys.meta_path.insert(0, AsTorchComes())
