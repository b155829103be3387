"""Lightning that starts its ranks by itself (`python train.py` with `devices=2`): this process is one of them, and those that it starts now are the others."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

from torch_watchdog_agent.config import PID_MARK, RANKS_MARK
from torch_watchdog_agent.hooks.active import disown, guarded, launch_config

__all__ = ["patch"]


def patch(module: ModuleType) -> None:
    theirs = module._SubprocessScriptLauncher._call_children_scripts

    @functools.wraps(theirs)
    def start_others(self: Any) -> Any:
        with _as_ranks() if _may_be_ranks(self) else nullcontext():
            return theirs(self)

    module._SubprocessScriptLauncher._call_children_scripts = start_others


@guarded("Lightning's launch")
def _may_be_ranks(launcher: Any) -> bool:
    """False where those that are started stay nobody's: then this process must be none either, for alone it would stop without the others."""
    ranks, nodes = launcher.num_processes, launcher.num_nodes
    if launch_config() is None or ranks * nodes == 1:
        return False
    return not disown(
        f"Lightning starts {ranks * nodes} ranks by itself, "
        + (f"on {nodes} nodes" if nodes > 1 else "after this process has begun to read data"),
        "`watchdog torchrun --nproc-per-node N train.py` watches all of them",
        even_unmade=nodes > 1,
    )


@contextmanager
def _as_ranks() -> Iterator[None]:
    """What is started in the body inherits the sign that it is a rank, and not the mark that it is some child of one."""
    own = os.environ.pop(PID_MARK, None)
    os.environ[RANKS_MARK] = "1"
    try:
        yield
    finally:
        del os.environ[RANKS_MARK]
        if own is not None:
            os.environ[PID_MARK] = own
