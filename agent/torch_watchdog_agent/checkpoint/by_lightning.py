"""Lightning: a folder with `lightning.ckpt`, as `trainer.fit(..., ckpt_path=...)` takes it. Our rank files lie beside it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch_watchdog_agent.checkpoint.errors import CheckpointError
from torch_watchdog_agent.checkpoint.foreign import Writer, standing_in
from torch_watchdog_agent.checkpoint.part import Alone, Moment
from torch_watchdog_agent.living import instances

FORMAT = "lightning"
FILE = "lightning.ckpt"

_fitting: weakref.ref[Any] | None = None  # the Trainer that has begun to fit last
# Of the newest steps at whose ends it asked for a batch: how many had ended, and its own count then.
_counts: deque[tuple[int, int]] = deque(maxlen=3)
_uncounted = 0  # batches that were done and that it had not counted as steps when it asked last: one more in the evaluation that comes behind a batch
_is_told = False  # its callbacks, of the end of an evaluation since then


def fits(trainer: Any) -> None:
    """It begins, from the start or from a checkpoint."""
    global _fitting
    _fitting = weakref.ref(trainer)
    _counts.clear()


def asks_for_batch(steps: int, fetcher: Any) -> bool:
    """So many steps have ended, and nothing of another is half done. `fetcher`: an evaluation has one of its own; True where it is the training's."""
    global _uncounted, _is_told
    trainer = None if _fitting is None else _fitting()
    if trainer is None:
        return False
    trains = fetcher is trainer.fit_loop._data_fetcher
    if trains:
        _uncounted, _is_told = _not_counted(trainer), False
    if _counts and _counts[-1][0] == steps:
        _counts.pop()
    _counts.append((steps, trainer.global_step))
    return trains


def tells_of_evaluation() -> None:
    """To its callbacks, each of which may keep what was found."""
    global _is_told
    _is_told = True


def _not_counted(trainer: Any) -> int:
    loop = trainer.fit_loop.epoch_loop
    return int(loop.batch_progress.total.completed - loop._batches_that_stepped)


def count_after(steps: int, counts: Iterable[tuple[int, int]]) -> int:
    """What Lightning counts after so many steps: one for each optimizer that steps by hand, so that there may be several a step.

    Where it has not asked for a batch since, the step is taken to be as the one before.
    """
    known = [pair for pair in counts if pair[0] <= steps]
    if not known:
        return steps
    at, count = known[-1]
    before = known[-2] if len(known) > 1 else (at - 1, count - 1)
    return count + (steps - at) * (count - before[1]) // (at - before[0])


def trainers() -> list[Any]:
    """Those that fit, or did so until an exception came: that takes the word of it away while it unwinds."""
    homes = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
    living = (trainer for home in homes for trainer in instances(home, "Trainer"))
    return [trainer for trainer in living if trainer.state.fn == "fit" and trainer.state.status in ("running", "interrupted")]


def writer(path: Path, moment: Moment) -> Writer | None:
    """None where no Lightning Trainer trains, or where several do: whose would it be?"""
    alone = moment.alone
    training = [trainer for trainer in trainers() if alone is not None or trainer.training]
    if len(training) != 1 or (alone is not None and not _can_be_alone(training[0], alone)):
        return None
    trainer = training[0]

    def write(folder: Path) -> None:
        with _counts_right(trainer.fit_loop.epoch_loop):
            if alone is None:
                trainer.save_checkpoint(folder / FILE, weights_only=False)
            else:
                _save_alone(trainer, folder, moment)

    return Writer(format=FORMAT, path=path, write=write, by="Trainer.save_checkpoint")


def _can_be_alone(trainer: Any, alone: Alone) -> bool:
    """Where every rank holds everything, and the loops' many counts are of this moment: nobody but Lightning could set them back. In the middle of a step of
    several batches they are not."""
    holds_all = any(kind.__name__ in ("DDPStrategy", "SingleDeviceStrategy") for kind in type(trainer.strategy).__mro__)
    return holds_all and trainer.accumulate_grad_batches == 1 and trainer.global_step == count_after(alone.steps, _counts)


def _counts_right(loop: Any) -> AbstractContextManager[None]:
    """What loggers number their lines by: on resume Lightning counts the step, for its own saves come behind that. One in the middle of it is not done."""
    progress = loop.batch_progress.total
    if progress.processed == progress.ready or loop._should_accumulate():
        return nullcontext()
    return standing_in(loop, _batches_that_stepped=loop._batches_that_stepped - 1)


def _save_alone(trainer: Any, folder: Path, moment: Moment) -> None:
    """As `save_checkpoint` does it, which only writes on rank 0 and waits for the others."""
    import torch

    evaluates = _not_counted(trainer) > _uncounted
    if evaluates and _is_told:
        raise CheckpointError("its callbacks were being told what an evaluation has found, and which of them know it cannot be told")
    dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    _begin_evaluations_anew(dumped.get("loops") or {}, evaluates=evaluates)
    torch.save(moment.on_host(dumped), folder / FILE)


def _begin_evaluations_anew(loops: dict[str, Any], *, evaluates: bool) -> None:
    """Of one that was under way Lightning would run the rest, and take that for the whole: what its metrics had seen by then is not in a checkpoint. And none
    where all its batches were done, so that it is written as one that is in the middle."""
    for progress in (value for of_one in loops.values() for name, value in of_one.items() if name.endswith("val_loop.batch_progress")):
        progress["current"] = dict.fromkeys(progress["current"], 0)
        if evaluates:
            begun = max(1, progress["total"]["ready"])
            progress["total"] |= {"ready": begun, "started": begun, "processed": begun - 1, "completed": begun - 1}
