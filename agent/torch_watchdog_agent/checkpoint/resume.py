"""The user's one call to go on from a checkpoint: model, optimizer and the rest in place, then generators and the place in the data.

Owns whether a checkpoint may be resumed from at all. Works in a run that the watchdog does not watch, too.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_watchdog_agent.checkpoint import again, by_accelerate, by_deepspeed, by_lightning, by_trainer, callback, dcp
from torch_watchdog_agent.checkpoint.errors import CheckpointError, RestoreError
from torch_watchdog_agent.checkpoint.manifest import newest_committed, read_manifest, verify_files
from torch_watchdog_agent.checkpoint.rank_file import RankFile, without_random_state
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.checkpoint.subjects import TrainingState, bare_model, inner_optimizer, is_on
from torch_watchdog_agent.config import AgentConfig
from torch_watchdog_agent.errors import of_a_signal
from torch_watchdog_proto.checkpoint_names import MANIFEST

if TYPE_CHECKING:
    from torch_watchdog_agent.checkpoint.peers import Peers

_LOAD_TIMEOUT_S = 1800.0  # reading is as long as the storage takes; a stuck rank is seen by other means


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where the run goes on: `for epoch in range(resumed.epoch, EPOCHS)`. `step` counts the updates applied so far."""

    path: Path
    step: int
    epoch: int
    batches: int


def restore(
    *,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    loader: Any = None,
    path: str | os.PathLike[str] | None = None,
) -> Resumed | None:
    """Load the checkpoint at `path` into the given objects, in place; None, and nothing changed, where there is nothing to resume from.

    Each argument is one object or a sequence of them, `loader` one loader only: that which the training takes its batches from.
    Call it on every rank, after the process group, the (wrapped) model, the optimizer and the loader are made, before the first batch
    is taken. `path` is a checkpoint, or a folder of checkpoints: then the newest good one; without it, in a later attempt of one launch
    (--max-restarts) the newest good one of this run, else the one that the launch was given with --resume. Raises RestoreError where
    the checkpoint is not whole or does not fit.
    """
    target = TrainingState(
        models=tuple(bare_model(item) for item in _several(model)),
        optimizers=tuple(inner_optimizer(item) for item in _several(optimizer)),
        schedulers=tuple(getattr(item, "scheduler", item) for item in _several(scheduler)),
        scalers=tuple(item for item in _several(scaler) if is_on(item)),
    )
    _tell_rank_of_call()
    asked_for = path if path is not None else _of_this_launch(target, loader)
    if asked_for is None:
        return None
    place = _checkpoint_at(Path(asked_for))
    try:
        return _restore(place, target, _the_one(loader, place))
    except RestoreError:
        raise
    except CheckpointError as error:
        raise RestoreError(place, str(error), "No rank has gone on; see the rank that is named") from error


def _of_this_launch(target: TrainingState, loader: Any) -> str | os.PathLike[str] | None:
    config = AgentConfig.from_env(os.environ)
    if config is None:
        return None
    newest = _of_this_run(Path(config.run_dir), target, loader) if again.attempt_of_this_launch() else None
    return newest or config.resume


def _of_this_run(run_dir: Path, target: TrainingState, loader: Any) -> Path | None:
    from torch_watchdog_agent.checkpoint.peers import peers_of

    try:
        rank, world_size = _rank_and_world(run_dir)
    except RestoreError as error:  # the first attempt had nothing to resume from, and did not need one
        _say(f"what earlier attempts of this run have saved is not taken: {error}")
        return None
    with dcp.quietly(), peers_of(rank, world_size, timeout_s=_LOAD_TIMEOUT_S) as peers:
        return again.newest_of_this_run(run_dir, peers, loads=bool(target.models), needs_position=loader is not None, say=_say)


def _restore(path: Path, target: TrainingState, loader: Any) -> Resumed:
    from torch_watchdog_agent.checkpoint.peers import peers_of

    rank, world_size = _rank_and_world(path)
    with dcp.quietly(), peers_of(rank, world_size, timeout_s=_LOAD_TIMEOUT_S) as peers:
        manifest = peers.agree_own(lambda: _accepted(path, peers))
        peers.agree_own(lambda: _refuse_foreign(path, manifest["format"], target))
        mine, is_own = peers.agree_own(lambda: _rank_file(path, manifest, peers, needs_position=loader is not None))
        peers.agree_own(lambda: _load(path, manifest, target, mine, peers))
    _tell_rank(path, mine.updates_applied)
    epoch, batches = mine.position.epoch, mine.position.batches
    if loader is not None:
        epoch, batches = _to_its_place(loader, path, mine, target, rank=rank, is_own=is_own)
    if is_own:
        mine.rng.restore()
    else:
        _say(without_random_state(rank, path))
    return Resumed(path=path, step=mine.updates_applied, epoch=epoch, batches=batches)


def _to_its_place(loader: Any, path: Path, mine: RankFile, target: TrainingState, *, rank: int, is_own: bool) -> tuple[int, int]:
    """Brings the loader there, and returns epoch and batches."""
    from torch_watchdog_agent.hooks.loader import resume_at
    from torch_watchdog_agent.hooks.order_of_another import whose_it_takes
    from torch_watchdog_agent.hooks.own_order import keeps_one_iterator

    at = mine.position
    if keeps_one_iterator(loader):
        epoch = at.epoch + at.batches // max(1, len(loader))
        _say(
            f"rank {rank}: {type(loader).__name__} keeps one iterator for all epochs, made before restore(), so that no place in its data can be gone back "
            f"to: epoch {epoch} begins anew, in an order of its own"
        )
        return epoch, 0

    def missed() -> None:
        _say(
            f"rank {rank}: the training takes its batches from an iterator that was made before restore(), so the place in the data (epoch {at.epoch}, "
            f"{at.batches} batches) is not taken: its data begin anew. Call restore() before iter(loader)"
        )

    def of_another() -> None:
        _say(f"rank {rank}: {whose_it_takes(mine.rank, at.epoch)}")

    # What the loader draws as it begins is the saver's, so that it makes the saver's order; after that a rank without a part draws its own.
    goes_on_at = at if is_own else replace(at, rng=RngState.capture())
    resume_at(
        loader, goes_on_at, again=_in_the_epoch(target, rank), missed=missed, of_another=None if is_own else functools.cache(of_another)
    )
    if at.rng_at_iter is None and mine.updates_applied:
        _say(f"rank {rank}: where its data stood is not known in {path} (no loader was seen on the training thread): the epoch begins anew")
    return at.epoch, at.batches


def _in_the_epoch(target: TrainingState, rank: int) -> Callable[[], None]:
    """What the loop does at the head of an epoch it had done before the checkpoint: a scheduler that it steps there is put back."""
    from torch_watchdog_agent.checkpoint.window import kept_schedules

    put_back = kept_schedules(target)

    def as_it_was() -> None:
        try:
            has_stepped = put_back()
        except Exception as error:  # this is the user's own loader: the training goes on
            if of_a_signal(error):
                raise
            _say(f"rank {rank}: a scheduler could not be put back to where the checkpoint has it ({type(error).__name__}: {error})")
            return
        if has_stepped:
            _say(
                f"rank {rank}: a scheduler has stepped between restore() and the epoch's data: the checkpoint holds that step, so it is taken back"
            )

    return as_it_was


def _checkpoint_at(path: Path) -> Path:
    if (path / MANIFEST).exists() or not path.is_dir():
        return path
    return newest_committed(path) or newest_committed(path / "checkpoints") or path


def _the_one(loader: Any, path: Path) -> Any:
    """A checkpoint knows how far one loader had come, and not which of several that was."""
    if not isinstance(loader, (list, tuple, dict)):
        return loader
    if len(loader) != 1:
        what = (
            f"loader= is a {type(loader).__name__} of {len(loader)}, and the place in the data is that of one: which of them is not known"
        )
        more = "Give the one that the training takes its batches from. Where it takes them from several in turn, leave out loader= and begin the epoch anew"
        raise RestoreError(path, what, more)
    return next(iter(loader.values() if isinstance(loader, dict) else loader))


def _several(item: Any) -> tuple[Any, ...]:
    if item is None:
        return ()
    return tuple(item) if isinstance(item, (list, tuple)) else (item,)


def _rank_and_world(path: Path) -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RestoreError(path, "this rank has no process group yet", "Call restore() after torch.distributed.init_process_group()")
    return 0, 1


def _accepted(path: Path, peers: Peers) -> dict[str, Any]:
    # Every rank reads a share of the files: together they have verified each file once.
    manifest = read_manifest(path)
    verify_files(path, manifest["files"][peers.index :: peers.count])
    return manifest


def _rank_file(path: Path, manifest: Mapping[str, Any], peers: Peers, *, needs_position: bool) -> tuple[RankFile, bool]:
    saved_by = manifest["world_size"]
    if saved_by != peers.count and needs_position:
        what = f"it was written by {saved_by} ranks, this run has {peers.count}: the place in the data does not carry over"
        raise RestoreError(path, what, f"Start {saved_by} ranks, or leave out loader= and begin the epoch anew")
    mine, is_own = RankFile.of(path, manifest, rank=peers.rank, world_size=peers.count)
    if mine.position.in_turn and needs_position:
        what = "its training took batches from several passes over loaders in turn: no single place in the data tells how they go on"
        raise RestoreError(path, what, "Leave out loader=, and begin the epoch anew or bring the loaders to their places yourself")
    return mine, is_own


def _load(path: Path, manifest: Mapping[str, Any], target: TrainingState, mine: RankFile, peers: Peers) -> None:
    if manifest["format"] == by_accelerate.FORMAT and target.models:
        _accelerator(path, target).load_state(str(path))
    if manifest["format"] == by_deepspeed.FORMAT and target.models:
        _engine(path, target).load_checkpoint(str(path))
    if manifest["format"] != dcp.FORMAT:
        return
    from torch_watchdog_agent.checkpoint.load import Stored, load_state

    stored = Stored(path, group=peers.group, own=mine.own, values=mine.values)
    if manifest["world_size"] != peers.count:
        _refuse_hand_made_shards(path, manifest["ranks"], stored.small)
    load_state(stored, target)


_FORMATS = {form.FORMAT for form in (by_accelerate, by_deepspeed, by_lightning, by_trainer, callback, dcp)}
_TAKEN_BY = {
    callback.FORMAT: "its files were written by the function that was given to on_checkpoint()",
    by_lightning.FORMAT: f"Lightning wrote it: trainer.fit(..., ckpt_path={by_lightning.FILE!r} in it) takes it",
}


def _refuse_foreign(path: Path, form: str, target: TrainingState) -> None:
    """What another's code wrote only that code can read; generators and the place in the data are ours, but not in a Trainer's folder."""
    if form not in _FORMATS:
        raise RestoreError(
            path, f"this version does not know its format {form!r}", "Resume with the version of torch-watchdog that wrote it"
        )
    if form == by_trainer.FORMAT:
        raise RestoreError(path, "transformers wrote it", "Give it to trainer.train(resume_from_checkpoint=...)")
    if form in _TAKEN_BY and (target.models or target.optimizers or target.schedulers or target.scalers):
        more = "Load them with that, and call restore(model=None, loader=...) for generators and data order"
        raise RestoreError(path, _TAKEN_BY[form], more)


def _accelerator(path: Path, target: TrainingState) -> Any:
    """The Accelerator that the given objects were prepared by: it loads all that it has prepared."""
    wanted = _parameters(target)
    for accelerator in by_accelerate.accelerators():
        if wanted <= {id(parameter) for model in accelerator._models for parameter in model.parameters()}:
            return accelerator
    more = "Call restore() after accelerator.prepare(), or accelerator.load_state() yourself and then restore(model=None, loader=...)"
    raise RestoreError(path, "accelerate wrote it, and no Accelerator has prepared the model", more)


def _engine(path: Path, target: TrainingState) -> Any:
    """The DeepSpeed engine around the given model: it loads its optimizer and scheduler, too."""
    wanted = _parameters(target)
    for engine in by_deepspeed.engines():
        if wanted <= {id(parameter) for parameter in engine.module.parameters()}:
            return engine
    raise RestoreError(path, "DeepSpeed wrote it, and no engine holds the model", "Call restore() after deepspeed.initialize()")


def _parameters(target: TrainingState) -> set[int]:
    return {id(parameter) for model in target.models for parameter in model.parameters()}


def _tell_rank_of_call() -> None:
    """Where this launch is watched: its script asks what there is to go on from."""
    from torch_watchdog_agent.hooks.active import rank

    here = rank()
    if here is not None:
        here.resume.taken()


def _tell_rank(path: Path, updates_applied: int) -> None:
    """Where this launch is watched: what was left out stays out, and updates are counted on."""
    from torch_watchdog_agent.hooks.active import rank

    here = rank()
    if here is not None:
        here.resumed(path, updates_applied=updates_applied)


def _refuse_hand_made_shards(path: Path, savers: Iterable[int], small: Mapping[str, Any]) -> None:
    # BatchNorm statistics of the lowest rank can stand in for all; parameters that differ between ranks are shards that only their maker can cut anew.
    parameters = {f"model.{name}" for key, names in small.items() if key.endswith(".params") and "param_groups" in key for name in names}
    own = {name for rank in savers for name in RankFile.read(path, rank).own}
    shards = sorted(name for name in own if name in parameters or name.startswith("optimizer"))
    if shards:
        what = f"it was written by another number of ranks, and {shards[0]} is not the same on all of them"
        raise RestoreError(path, what, "Start as many ranks as the run that saved it")


def _say(line: str) -> None:
    sys.stderr.write(f"[torch-watchdog] {line}\n")
