"""accelerate: what `accelerator.load_state(DIR)` takes, where the Accelerator knows everything that is trained.

Our own rank files lie beside: `restore(loader=...)` brings the loader to its place, which accelerate leaves to the script (`skip_first_batches`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_watchdog_agent.checkpoint.foreign import Writer, on_host, own_name, standing_in
from torch_watchdog_agent.checkpoint.part import Moment
from torch_watchdog_agent.checkpoint.subjects import Subjects, inner_optimizer, parameters_of
from torch_watchdog_agent.checkpoint.weights import refuse_without_weights
from torch_watchdog_agent.living import instances

FORMAT = "accelerate"
_GENERATORS = "random_states_{}.pkl"
_NO_WEIGHTS = ("optimizer", "scheduler", "sampler", "dl_state_dict", "scaler", "random_states", "custom_checkpoint")
_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU")  # in which every rank holds everything


def accelerators() -> list[Any]:
    return instances("accelerate.accelerator", "Accelerator")


def writer(path: Path, subjects: Subjects, moment: Moment) -> Writer | None:
    """None where something that is trained was not given to `accelerator.prepare`: its save would lack that."""
    knowing = accelerators_of(subjects)
    if len(knowing) != 1:
        return None
    accelerator = knowing[0]
    if moment.alone is None:
        return Writer(format=FORMAT, path=path, write=lambda folder: _save(accelerator, folder), by="accelerator.save_state")
    if accelerator.distributed_type not in _PLAIN:
        return None
    rank = accelerator.process_index
    return Writer(
        format=FORMAT, path=path, write=lambda folder: _save_alone(accelerator, folder, moment, rank=rank), by="accelerator.save_state"
    )  # fmt: skip


def accelerators_of(subjects: Subjects) -> list[Any]:
    return [found for found in accelerators() if _knows_all(found, subjects)]


@contextmanager
def as_main_process() -> Iterator[None]:
    """Only the main process writes what all hold alike. It may be the one that has failed."""
    from accelerate.state import PartialState

    with standing_in(PartialState(), process_index=0, local_process_index=0), _models_write():
        yield


@contextmanager
def _models_write() -> Iterator[None]:
    """A model of transformers' own (5.24) asks torch for its rank besides, whoever has it saved, and only the first writes."""
    kind, name = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None), "should_save_on_this_rank"
    if not hasattr(kind, name):
        yield
        return
    own = vars(kind).get(name)
    setattr(kind, name, lambda _, is_main_process: is_main_process)
    try:
        yield
    finally:
        delattr(kind, name) if own is None else setattr(kind, name, own)


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
    if accelerator.is_main_process and accelerator.distributed_type in _PLAIN:
        hooked = bool(accelerator._save_model_state_pre_hook)  # the script's own way to save its models, under names of its own
        refuse_without_weights(folder, accelerator._models, but=_NO_WEIGHTS, renamed=hooked)


def _save_alone(accelerator: Any, folder: Path, moment: Moment, *, rank: int) -> None:
    begun = (
        accelerator.step % accelerator.gradient_accumulation_steps
    )  # batches of the step at hand, which the state does not hold: it begins anew
    held = (*accelerator._models, *accelerator._optimizers)
    with as_main_process(), on_host(moment, held), standing_in(accelerator, step=accelerator.step - begun):
        _save(accelerator, folder)
    own_name(folder, _GENERATORS, rank)
