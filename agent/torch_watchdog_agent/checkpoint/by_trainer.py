"""transformers: `OUTPUT_DIR/checkpoint-N` by the Trainer's own code, as `trainer.train(resume_from_checkpoint=True)` takes it.

On resume Trainer drops `global_step * accumulation` batches and puts the generators back: before it makes the iterator where it begins an epoch, behind the
first fetch otherwise. So the vetoed batch comes again, and the quarantine in the checkpoint leaves its bad sample out (hooks/trainer.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_watchdog_agent.checkpoint.foreign import Writer, standing_in
from torch_watchdog_agent.checkpoint.living import instances
from torch_watchdog_agent.checkpoint.position import LoaderPosition

FORMAT = "transformers"


def writer(position: LoaderPosition) -> Writer | None:
    """None where no Trainer trains, or where several do: whose would it be?"""
    training = [trainer for trainer in instances("transformers.trainer", "Trainer") if trainer.is_in_train]
    if len(training) != 1 or training[0].state.is_hyper_param_search:
        return None
    trainer = training[0]
    name = f"checkpoint-{trainer.state.global_step}"
    path = Path(trainer.args.output_dir).absolute() / name
    return Writer(
        format=FORMAT, path=path, write=lambda folder: _save(trainer, folder, position), inside=name, rank_files=False, by="transformers.Trainer"
    )  # fmt: skip


def _save(trainer: Any, folder: Path, position: LoaderPosition) -> None:
    """The whole of the Trainer's saving, subclasses' too, into our folder: there its rotation finds nothing to remove. Nothing goes to a hub."""
    if position.rng_at_iter is not None and float(trainer.state.epoch or 0).is_integer():
        position.rng_at_iter.restore()  # whoever saves puts back those of this moment
    ours = standing_in(trainer, _get_output_dir=lambda *_, **__: str(folder), _push_from_checkpoint=lambda _: None)
    with ours, standing_in(trainer.args, save_only_model=False):
        trainer._save_checkpoint(trainer.model, None)
