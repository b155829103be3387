"""accelerate: what `accelerator.load_state(DIR)` takes, where the Accelerator knows everything that is trained.

Our own rank files lie beside: `restore(loader=...)` brings the loader to its place, which accelerate leaves to the script (`skip_first_batches`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_watchdog_agent.checkpoint.foreign import Writer, standing_in
from torch_watchdog_agent.checkpoint.living import instances
from torch_watchdog_agent.checkpoint.subjects import Subjects, inner_optimizer, parameters_of

FORMAT = "accelerate"


def writer(path: Path, subjects: Subjects) -> Writer | None:
    """None where something that is trained was not given to `accelerator.prepare`: its save would lack that."""
    accelerators = accelerators_of(subjects)
    if len(accelerators) != 1:
        return None
    return Writer(
        format=FORMAT, path=path, write=lambda folder: _save(accelerators[0], folder), by="accelerator.save_state"
    )  # fmt: skip


def accelerators_of(subjects: Subjects) -> list[Any]:
    return [found for found in instances("accelerate.accelerator", "Accelerator") if _knows_all(found, subjects)]


def _knows_all(accelerator: Any, subjects: Subjects) -> bool:
    optimizers = {id(inner_optimizer(optimizer)) for optimizer in accelerator._optimizers}
    schedulers = {id(getattr(scheduler, "scheduler", scheduler)) for scheduler in accelerator._schedulers}
    parameters = {id(parameter) for model in accelerator._models for parameter in model.parameters()}
    seen = subjects.optimizers()
    return (
        bool(seen)
        and {id(optimizer) for optimizer in seen} <= optimizers
        and {id(scheduler) for scheduler in subjects.schedulers()} <= schedulers
        and parameters_of(seen).keys() <= parameters
    )


def _save(accelerator: Any, folder: Path) -> None:
    """Into our folder: its automatic naming would choose one, and remove older ones for it, before this one is known to be good; nor is it counted."""
    naming = accelerator.project_configuration
    with standing_in(naming, automatic_checkpoint_naming=False, iteration=naming.iteration):
        accelerator.save_state(str(folder))
