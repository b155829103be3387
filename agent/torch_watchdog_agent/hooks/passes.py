"""One pass over a loader, whatever made the loader: a boundary before each batch, a look when it is made, a hand-over when the loop gets it.

The outermost loader counts: what happens inside it is only a fetch, and a loader inside a data set is nobody's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.hooks import elsewhere, order_of_another, own_order, tracks
from torch_watchdog_agent.hooks.active import guarded, is_training_thread, made_rank, rank
from torch_watchdog_agent.hooks.indices import Source, leave_out, source_of
from torch_watchdog_agent.hooks.left import is_left_here, watch_collections
from torch_watchdog_agent.hooks.looked_at import Pass, length_for_scan, without_modes_of
from torch_watchdog_agent.hooks.tracks import Stand, Track, is_current, is_followed, track_of
from torch_watchdog_agent.quarantine import dataset_name

__all__ = [
    "ask",
    "asking",
    "begin",
    "catch_up",
    "deafly",
    "fetch",
    "here_now",
    "outer_iteration",
    "outlives_its_passes",
    "to_its_beginning",
]

_Batch = TypeVar("_Batch")


class _Here(threading.local):
    """What this thread is in the middle of. `receiver`: the outer pass that asks for a batch just now. `deaf`: what loaders do now concerns nobody.

    `skipping`: what is fetched will be dropped, or looked at later.
    """

    receiver: Pass | None = None
    deaf = False
    skipping = False


here_now = _Here()


# Beginning a pass


def begin(loader: Any) -> Pass:
    """A new pass over `loader`: remembers the random state it starts from, or brings back the one of a checkpoint."""
    stand = _begun(loader)
    if stand is None:
        return Pass()
    one = Pass(stand=stand, total=length_for_scan(loader))
    to_its_beginning(loader, one)
    return one


def to_its_beginning(loader: Any, one: Pass) -> None:
    """Of a pass that goes on: what it began with, in the run that was saved."""
    stand, resume = one.stand, _to_resume(one.stand)
    if resume is not None and resume.rng_at_iter is not None:
        stand.rng_at_iter = order_of_another.begin_as(resume, resume.rng_at_iter, loader, stand.track)
        own_order.set_count(loader, resume.count_at_iter)
        stand.count_at_iter = resume.count_at_iter


def outlives_its_passes(loader: Any, one: Pass) -> bool:
    """Whether the loader's iterator was made for an earlier pass than the one that goes on here, and is not there yet: with workers that persist torch draws
    their seed once, as it makes the iterator, and this pass must begin behind that."""
    resume = _to_resume(one.stand)
    is_later = resume is not None and resume.rng_at_iter is not None and resume.epoch > 0
    return is_later and bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", loader) is None


def _to_resume(stand: Stand) -> LoaderPosition | None:
    """Where the pass has to go on; an evaluation begins at the beginning."""
    import torch

    return stand.track.resume if torch.is_grad_enabled() else None


@guarded("loader")
def _begun(loader: Any) -> Stand | None:
    from torch_watchdog_agent.checkpoint.rng import RngState

    here = rank()
    watched = here or made_rank()
    if watched is not None:
        watched.quarantine.reload()
    if here is None and not tracks.is_known(loader):
        return None  # a worker, a thread, or no watched launch: nobody will ask where this loader stands
    track = track_of(loader)
    if here is not None:
        track.dataset = dataset_name(getattr(loader, "dataset", None))
        watch_collections()
    _look_for_tokenizer(here, loader, track)
    track.generators = own_order.generators_of(loader)
    return tracks.begin(track, RngState.capture(track.generators), own_order.count_of(loader), own_order.epoch_of(loader))


def _look_for_tokenizer(here: Any, loader: Any, track: Track) -> None:
    """Once for each loader: a vocabulary may be large."""
    from torch_watchdog_agent.tokenizer import tokens_of

    if here is not None and not track.looked_for_tokenizer:
        track.looked_for_tokenizer = True
        here.history.tokenizer_seen(tokens_of(loader))


def catch_up(one: Pass, iterator: Any) -> None:
    """Takes the batches that were consumed before the checkpoint, unseen, then brings back what else the loop had at this place."""
    stand, resume = one.stand, _to_resume(one.stand)
    if resume is not None and rank() is None:
        stand.track.resume = None  # nothing will say when the training has used it
    if resume is None or resume.rng_at_iter is None:  # no iterator had been made: the random state of the boundary is what it starts from
        return
    stand.is_resumed = True
    here_now.skipping = True
    try:
        with suppress(StopIteration):  # the data set is shorter than it was: the loop ends as an empty epoch
            for _ in range(resume.batches):
                next(iterator)
                if one.fetched:
                    one.fetched.popleft()
    finally:
        here_now.skipping = False
    stand.batches = resume.batches
    if stand.track.again is not None:
        stand.track.again()
    if resume.batches:  # else nothing was made but the iterator: the pass draws its order with its first batch
        resume.rng.restore(stand.track.generators)


# Taking batches


def fetch(one: Pass | None, theirs: Callable[[Any], _Batch], iterator: Any) -> _Batch:
    """torch's own loader makes a batch by `theirs(iterator)`: for the outer loader that asks for it, else for the loop itself."""
    receiver, here = here_now.receiver, rank()
    if receiver is None and here is not None and before_fetch(here, one):
        _scan(one or Pass(), lambda: theirs(iterator), lambda: source_of(iterator))
    if receiver is None and one is not None and one.stand.is_resumed and is_left_here(one.stand):
        _end(one)
    began_ns = time.monotonic_ns()
    try:
        batch = _made(here, theirs, iterator)
    except Exception as error:
        source = source_of(iterator)  # that batch will not come
        if not isinstance(error, StopIteration):
            _not_made(here, error, source)
        elif receiver is None:
            _ended(one)
        raise
    target, source = receiver or one or Pass(), source_of(iterator)
    if here is None:
        return batch if is_training_thread() else _elsewhere(target, batch, source, asked_by_outer=receiver is not None)
    if receiver is not None:
        _fetched(here, target, batch, source)
        return batch
    used = _looked_at_and_used(here, target, batch, source, time.monotonic_ns() - began_ns)
    return batch if used is None else used[0]


def ask(one: Pass, make: Callable[[], _Batch], *, inside: bool = True, skip: int = 0, part: int | None = None) -> _Batch:
    """The loop asks an outer loader for a batch. `inside`: torch's loader in it may be listened to. `skip`: batches that it drops unseen at first.

    `part`: the item of what it returns that is the batch.
    """
    here = rank()
    if here is not None and before_fetch(here, one):
        _scan(one, make, None, inside=inside, part=part)
    if one.stand.is_resumed and is_left_here(one.stand):
        _end(one)
    began_ns = time.monotonic_ns()
    with asking(one, inside=inside):
        try:
            batch = make()
        except StopIteration:
            _ended(one)
            raise
        except Exception as error:
            _not_made(here, error, None)
            raise
    for _ in range(min(skip, len(one.fetched))):
        one.fetched.popleft()
    if here is None:
        return batch if part is not None or is_training_thread() else elsewhere.handed(batch, one.found(batch)[0])
    took_ns = time.monotonic_ns() - began_ns
    if part is None:
        return _hand_over(here, one, batch, took_ns)
    items: Any = batch
    handed = _hand_over(here, one, items[part], took_ns)
    return batch if handed is items[part] else type(items)((*items[:part], handed, *items[part + 1 :]))


def _elsewhere(one: Pass, batch: _Batch, source: Source, *, asked_by_outer: bool) -> _Batch:
    """Another thread takes the batch, ahead of the loop."""
    if not asked_by_outer:
        return elsewhere.handed(batch, source)
    one.fetched.append((batch, source, None))
    return batch


class asking:  # noqa: N801  read as a statement: `with asking(one):`
    """What torch's loaders make in the body is fetched for `one`, or by nobody where `inside` is False."""

    __slots__ = ("_before", "_inside", "_mode", "_one")

    def __init__(self, one: Pass, *, inside: bool = True) -> None:
        self._one, self._inside = one, inside

    def __enter__(self) -> None:
        self._before = here_now.receiver, here_now.deaf
        here_now.receiver, here_now.deaf = self._one, not self._inside
        self._mode = without_modes_of(rank())
        if self._mode is not None:
            self._mode.__enter__()

    def __exit__(self, *raised: Any) -> None:
        here_now.receiver, here_now.deaf = self._before
        if self._mode is not None:
            self._mode.__exit__(*raised)


def outer_iteration(loader: Any, iterate: Callable[[], Iterator[Any]], *, inside: bool = True, skip: int = 0) -> Iterator[Any]:
    """Iterates the loader that the user's loop sees; torch's loader inside only fetches."""
    if here_now.receiver is not None or here_now.deaf:
        yield from iterate()
        return
    one = begin(loader)
    with asking(one, inside=inside):
        inner = iter(iterate())
    with asking(one, inside=inside):
        catch_up(one, inner)
    try:
        while True:
            try:
                batch = ask(one, lambda: next(inner), inside=inside, skip=skip)
            except StopIteration:
                return
            skip = 0
            yield batch
    finally:
        close = getattr(inner, "close", None)
        if close is not None:
            close()


@contextmanager
def deafly() -> Iterator[None]:
    """Nothing that loaders do in the body concerns anybody."""
    before, here_now.deaf = here_now.deaf, True
    try:
        yield
    finally:
        here_now.deaf = before


def _made(here: Any, theirs: Callable[[Any], _Batch], iterator: Any) -> _Batch:
    """A loader inside the data set is not listened to, and collation must not land on the tape of a traced step."""
    mode = without_modes_of(here)
    here_now.deaf = True
    try:
        if mode is None:
            return theirs(iterator)
        with mode:
            return theirs(iterator)
    finally:
        here_now.deaf = False


@guarded("boundary")
def before_fetch(here: Any, one: Pass | None) -> bool:
    """True where a scan is to take the rest of this pass."""
    import torch

    trains = one is None or is_followed(one.stand)
    evaluates = not trains and (not torch.is_grad_enabled() or here.evaluating())
    if one is not None and not one.stand.batches and tracks.turns_to(one.stand):
        here.window.let_go()
        if trains and torch.is_grad_enabled() and not here.evaluating():
            tracks.asks_first(one.stand)
    here.before_fetch(trains=trains, evaluates=evaluates and tracks.turns_to_evaluation())
    return here.scan is not None and _scan_is_due(here)


@guarded("loader")
def _fetched(here: Any, one: Pass, batch: Any, source: Source) -> None:
    checked = None if here_now.skipping else here.fetched(batch, indices=source.indices, worker=source.worker)
    one.fetched.append((batch, source, checked))


@guarded("failed fetch", at_end=True)
def _not_made(here: Any, error: Exception, source: Source | None) -> None:
    """`source`: of a batch of torch's own loader; one outside of that has nothing to add."""
    if here is not None:
        here.rescuer.batches.not_made(error, None if source is None else source.indices)


def _end(one: Pass) -> NoReturn:
    _ended(one)
    raise StopIteration


@guarded("loader")
def _ended(one: Pass | None) -> None:
    """The loop has what there is of this pass: one that prefetches goes on with what it has in hand."""
    import torch

    here = rank()
    if here is not None and one is not None:
        tracks.ended(one.stand)
    if here is not None and torch.is_grad_enabled():
        here.loop.pass_ended()
        here.rescuer.batches.pass_ended()
        if one is not None and is_current(one.stand):
            here.window.pass_ended(updates=here.loop.updates_applied, place=here.place())
            here.rescuer.at_pass_end()


# Instead of handing over


def _scan_is_due(here: Any) -> bool:
    import torch

    if not torch.is_grad_enabled() or here.evaluating() or here.loop.is_open(here.loop.step):
        return False
    return bool(here.scan.is_due(here.loop.step + 1, tracing=here.guard.tracing))


def _scan(
    one: Pass, make: Callable[[], Any], source: Callable[[], Source] | None, *, inside: bool = True, part: int | None = None
) -> NoReturn:
    """The rest of this pass goes to the scan, and the rank ends. `source`: of a batch of torch's own loader."""
    here: Any = rank()

    def take() -> tuple[Any, Source, Any]:
        if source is not None:
            batch = _made(here, lambda _: make(), None)
            _fetched(here, one, batch, source())
        else:
            with asking(one, inside=inside):
                batch = make()
            batch = batch if part is None else batch[part]
        return batch, *_checked(here, one, batch)

    leave_out(here.scan.has_seen)
    here.scan.drive(take, here.guard, total=one.total, failed_at=source or Source)
    raise SystemExit(0)


# Handing over


def _hand_over(here: Any, one: Pass, batch: _Batch, loader_ns: int) -> _Batch:
    replaced = _handed(here, one, batch, loader_ns)
    return batch if replaced is None else replaced[0]


@guarded("hand-over")
def _handed(here: Any, one: Pass, batch: Any, loader_ns: int) -> tuple[Any]:
    source, checked = _checked(here, one, batch)
    return _used(here, one, batch, source, checked, loader_ns)


@guarded("hand-over")
def _looked_at_and_used(here: Any, one: Pass, batch: Any, source: Source, loader_ns: int) -> tuple[Any]:
    """The loop gets the batch that was just made."""
    checked = here.fetched(batch, indices=source.indices, worker=source.worker)
    return _used(here, one, batch, source, checked, loader_ns)


def _used(here: Any, one: Pass, batch: Any, source: Source, checked: Any, loader_ns: int) -> tuple[Any]:
    import torch

    stand = one.stand
    stand.batches += 1
    # Trainer fetches the first batch after an evaluation before it puts its model back into training mode.
    evaluation = not torch.is_grad_enabled() or (not is_followed(stand) and here.evaluating())
    if not evaluation:
        tracks.follow(stand)
    here.dataset = source.dataset or stand.track.dataset
    if here.scan is not None and not evaluation:
        here.scan.looked_at(batch, source, checked, here.guard)
    return (here.handed(batch, checked, loader_ns=loader_ns, evaluation=evaluation),)


def _checked(here: Any, one: Pass, batch: Any) -> tuple[Source, Any]:
    """What was found when this batch was made; else it is looked at now, because the loader changed it or made it by itself."""
    source, checked = one.found(batch)
    return source, here.fetched(batch, indices=source.indices, worker=source.worker) if checked is None else checked
