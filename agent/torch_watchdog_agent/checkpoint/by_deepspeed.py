"""DeepSpeed: what `engine.load_checkpoint(DIR)` takes, by the engine's own `save_checkpoint`. Our rank files lie beside it.

Every rank writes its part of the optimizer there, so `restore()` and DeepSpeed both need as many ranks as have saved.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch_watchdog_agent.checkpoint.errors import CheckpointError
from torch_watchdog_agent.checkpoint.foreign import Writer, standing_in
from torch_watchdog_agent.living import instances

FORMAT = "deepspeed"
_SHARDED_PARAMETERS = 3  # the stage whose groups are narrowed further while it steps: seen with 0.19, loading raises


def engines() -> list[Any]:
    return instances("deepspeed.runtime.engine", "DeepSpeedEngine")


def writer(path: Path) -> Writer | None:
    """None where no engine trains, or where several do: each would write the others' file names."""
    training = [engine for engine in engines() if engine.optimizer is not None]
    if len(training) != 1:
        return None
    engine = training[0]
    return Writer(
        format=FORMAT, path=path, write=lambda folder: _save(engine, folder), by="DeepSpeedEngine.save_checkpoint", models=(engine.module,)
    )  # fmt: skip


def _save(engine: Any, folder: Path) -> None:
    if engine.zero_optimization_stage() >= _SHARDED_PARAMETERS:
        raise CheckpointError(f"DeepSpeed could not load what is saved here under ZeRO stage {_SHARDED_PARAMETERS}, so nothing is")
    with _all_groups(engine):
        if engine.save_checkpoint(str(folder)) is False:
            raise CheckpointError("DeepSpeed says that it could not write the checkpoint")


def _all_groups(engine: Any) -> AbstractContextManager[None]:
    """ZeRO steps one group after the other, and shows the optimizer only that group meanwhile: at the gate of the first one all are put back."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_optimizer_step":
        frame = frame.f_back
    groups = None if frame is None else frame.f_locals.get("original_param_groups")
    return nullcontext() if groups is None else standing_in(engine.optimizer.optimizer, param_groups=groups)
