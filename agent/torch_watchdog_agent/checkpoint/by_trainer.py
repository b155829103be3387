"""transformers: `OUTPUT_DIR/checkpoint-N` by the Trainer's own code, as `trainer.train(resume_from_checkpoint=True)` takes it.

On resume Trainer drops `global_step * accumulation` batches and puts the generators back: before it makes the iterator where it begins an epoch, behind the
first fetch otherwise. So the vetoed batch comes again, and the quarantine in the checkpoint leaves its bad sample out (hooks/trainer.py). A rank whose
generators are not in the checkpoint, because it had failed, keeps its own.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_watchdog_agent.checkpoint.by_accelerate import as_main_process
from torch_watchdog_agent.checkpoint.errors import CheckpointError
from torch_watchdog_agent.checkpoint.foreign import Writer, on_host, own_name, standing_in
from torch_watchdog_agent.checkpoint.part import Alone, Moment
from torch_watchdog_agent.checkpoint.subjects import bare_model
from torch_watchdog_agent.checkpoint.weights import refuse_without_weights
from torch_watchdog_agent.living import instances

FORMAT = "transformers"
STATE_FILE = "trainer_state.json"  # which it writes last
_ARGUMENTS, _GENERATORS = "training_args.bin", "rng_state_{}.pth"
_NO_WEIGHTS = (_ARGUMENTS, "rng_state", "optimizer", "scheduler", "scaler")

_saved: weakref.WeakKeyDictionary[Any, Path] = weakref.WeakKeyDictionary()  # by each Trainer, last


def has_saved(trainer: Any) -> None:
    """The Trainer's own saving has ended, on this rank."""
    _saved[trainer] = Path(trainer._get_output_dir(trial=None)).absolute() / f"checkpoint-{trainer.state.global_step}"


def trainers() -> list[Any]:
    return [trainer for trainer in instances("transformers.trainer", "Trainer") if trainer.is_in_train]


def writer(moment: Moment) -> Writer | None:
    """None where no Trainer trains, or where several do: whose would it be?"""
    training = trainers()
    if len(training) != 1 or training[0].state.is_hyper_param_search:
        return None
    trainer, alone = training[0], moment.alone
    if alone is not None and not _can_be_alone(trainer, alone):
        return None
    name = f"checkpoint-{trainer.state.global_step if alone is None else alone.steps}"
    path = Path(trainer.args.output_dir).absolute() / name

    def write(folder: Path) -> None:
        if alone is None:
            _save(trainer, folder, moment)
        else:
            _save_alone(trainer, folder, moment, alone, rank=trainer.args.process_index)

    is_there = _saved.get(trainer) == path and _can_be_resumed(trainer, path)
    return Writer(format=FORMAT, path=path, write=write, inside=name, rank_files=False, by="transformers.Trainer", is_there=is_there)


def _can_be_resumed(trainer: Any, path: Path) -> bool:
    """Whether the Trainer's own folder is still there, and whole: a rank that has failed may have been the one that wrote it."""
    try:
        state = json.loads((path / STATE_FILE).read_text())
    except (OSError, ValueError):
        return False
    if trainer.args.save_only_model or path.name != f"checkpoint-{state.get('global_step')}":
        return False
    try:
        if _holds_all(trainer):
            _refuse_without_weights(trainer, path)
    except CheckpointError:
        return False
    return True


def _save(trainer: Any, folder: Path, moment: Moment) -> None:
    """The whole of the Trainer's saving, subclasses' too, into our folder: there its rotation finds nothing to remove. Nothing goes to a hub."""
    at_iter = moment.position.rng_at_iter
    if at_iter is not None and float(trainer.state.epoch or 0).is_integer():
        at_iter.restore()  # whoever saves puts back those of this moment
    with _into(trainer, folder), standing_in(trainer.args, save_only_model=False):
        trainer._save_checkpoint(trainer.model, None)
    if trainer.args.should_save and _holds_all(trainer):
        _refuse_without_weights(trainer, folder / f"checkpoint-{trainer.state.global_step}")


def _into(trainer: Any, folder: Path, **more: Any) -> Any:
    """The Trainer saves into `folder` in the body, whatever name it would choose; and has the attributes `more`."""
    return standing_in(trainer, _get_output_dir=lambda *_, **__: str(folder), _push_from_checkpoint=lambda _: None, **more)


def _holds_all(trainer: Any) -> bool:
    """Every rank does, so that the files hold the model as a whole."""
    return not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)


def _can_be_alone(trainer: Any, alone: Alone) -> bool:
    """Where every rank holds everything, and the Trainer's count of its steps is one that we can tell it from: one of those that it may be in by now.

    It counts a step a moment after its update, and before it fetches the next batch.
    """
    if not _holds_all(trainer):
        return False
    counted: int = trainer.state.global_step
    return counted > 0 and (0 if alone.begun else -1) <= counted - alone.steps <= alone.begun


def _save_alone(trainer: Any, folder: Path, moment: Moment, alone: Alone, *, rank: int) -> None:
    """The same by one rank: it speaks as the main process, and leaves out what would be a collective (the count of operations, a barrier)."""
    import torch

    at_iter = moment.position.rng_at_iter
    if at_iter is not None and not moment.position.batches:
        at_iter.restore()
    quiet = standing_in(trainer.args, save_only_model=False, save_strategy="no")  # which asks for the barrier
    held = (trainer.model, trainer.optimizer)
    with as_main_process(), on_host(moment, held), _at(trainer.state, alone.steps), quiet, _into(trainer, folder, store_flos=lambda: None):
        trainer._save_checkpoint(trainer.model, None)
    inside = folder / f"checkpoint-{alone.steps}"
    _refuse_without_weights(trainer, inside)
    if trainer.control.should_evaluate and trainer.args.metric_for_best_model:
        moment.say(
            f"the evaluation behind step {alone.steps} had not ended: it is not done again, and the Trainer's best score will lack it"
        )
    own_name(inside, _GENERATORS, rank)
    if (inside / _ARGUMENTS).exists():
        torch.save(trainer.args, inside / _ARGUMENTS)


def _refuse_without_weights(trainer: Any, folder: Path) -> None:
    """A script may replace how its model is saved. Of a model of transformers' own, or an adapter, some names are others in its files."""
    refuse_without_weights(folder, [trainer.model], but=_NO_WEIGHTS, renamed=hasattr(bare_model(trainer.model), "save_pretrained"))


@contextmanager
def _at(state: Any, steps: int) -> Iterator[None]:
    """What the Trainer says of itself, as it was after so many steps."""
    epoch = state.epoch if steps == state.global_step else state.epoch * steps / state.global_step
    log = [entry for entry in state.log_history if entry.get("step", 0) <= steps]
    with standing_in(state, global_step=steps, epoch=epoch, log_history=log):
        yield
