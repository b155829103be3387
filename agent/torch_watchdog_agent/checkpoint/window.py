"""What an update window may change besides the parameters, kept at its start, so that a vetoed window leaves no trace.

Owns one copy: generators, the buffers that change, schedulers with the values that they set in the optimizers, and loss scalers. Runs in the
training loop once per window and does not synchronise with a device. State that the user's own code holds is not known.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_watchdog_agent.checkpoint.buffers import Buffers
from torch_watchdog_agent.checkpoint.evaluations import Evaluations
from torch_watchdog_agent.checkpoint.habit import Habit, Written
from torch_watchdog_agent.checkpoint.hands import Hands
from torch_watchdog_agent.checkpoint.position import START, LoaderPosition, Place
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.checkpoint.schedule import Schedule
from torch_watchdog_agent.checkpoint.subjects import Subjects, TrainingState, inner_schedulers, is_half_done, parameters_of

if TYPE_CHECKING:
    from torch_watchdog_agent.checkpoint.part import Reader

_MAX_BUFFER_BYTES = 64 << 20
_MOMENTS_KEPT = 16  # how far Python may be ahead of a device when another rank fails (rescue/ahead.py)
_AS_IT_IS = frozenset((int, float, bool, str, type(None)))
_LEFT_OUT: Any = object()
_LATE = "its loop fetches its next batch behind its update, and what it does behind that (a schedule's step, say) may be still to come"
_version_of = operator.attrgetter("_version")


class WindowState:
    """`opened()` at the window's first hand-over, `restore()` once the window was vetoed."""

    def __init__(self, subjects: Subjects, *, say: Callable[[str], None], max_buffer_bytes: int = _MAX_BUFFER_BYTES) -> None:
        self._subjects = subjects
        self._say = say
        self._max_buffer_bytes = max_buffer_bytes
        self._generation = -1
        self._owners = _Owners(subjects)
        self._buffers: Buffers | None = None
        self.hands = Hands(subjects)
        self._habit = Habit()
        self.schedule = Schedule(subjects)
        self.evaluations = Evaluations(subjects)
        self._kept: deque[_Moment] = deque(maxlen=_MOMENTS_KEPT)
        self._end: _Moment | None = None  # of a pass over the data, until the next window opens
        self._left: _Moment | None = None  # where the loop has let go of a pass: its end, unless an exception has unwound it
        self._written_at_end: tuple[Any, ...] = ()
        self.behind_data = self.ended_late = False  # a pass has ended, and no window begun since; and by a fetch of a late loop

    def opened(self, *, updates: int = 0, place: Place = START, rng: RngState | None = None) -> None:
        """Keep the state of this moment, after so many updates. Of buffers only the newest copy. `place`: in the data. `rng`: kept before, as the buffers."""
        if self._subjects.generation != self._generation:
            self._follow()
        self._end, self._left, self.behind_data = None, None, False
        is_odd = self._habit.opened(self._owners.written())
        self.hands.opened()
        if self.evaluations.begun:
            self.evaluations.over()
        if self.schedule.looks:
            self.schedule.opened()
        moment = _moment(self._owners, updates=updates, place=place, is_odd=is_odd)
        self._kept.append(moment if rng is None else moment._replace(rng=rng))
        if self._buffers is not None and rng is None:
            self._buffers.keep(updates=updates)

    def keep_buffers(self, *, updates: int) -> None:
        if self._subjects.generation != self._generation:
            self._follow()
        if self._buffers is not None:
            self._buffers.keep(updates=updates)

    def begins_anew(self, *, updates: int, place: Place) -> None:
        """The newest window begins only now: what had opened it was no training."""
        if self._kept:
            self._kept[-1] = _moment(self._owners, updates=updates, place=place, is_odd=self._kept[-1].is_odd)
            self.keep_buffers(updates=updates)

    def begun(self) -> None:
        """A backward begins, or the gate is there, in a window in which the schedule looks: what the loop does behind its fetch has been done."""
        if self._kept and self.schedule.begun():
            self._kept[-1] = self._kept[-1]._replace(settled=_namespaces(self._owners))

    def updated(self) -> None:
        """An update has been applied, in one of the windows in which the schedule learns, or of what a pass that has ended had left."""
        self._end, self._left, self.behind_data = None, None, False
        if self.schedule.learns:
            self.schedule.updated(_moment(self._owners).has_moved)

    def let_go(self) -> bool:
        """The pass that the loop has left early was over by that. Returns whether the end of one is on hand."""
        if self._left is not None:
            self._end, self._left, self.behind_data, self.ended_late = self._left, None, True, self.schedule.is_late
        return self._end is not None

    def evaluating(self) -> None:
        """A batch of an evaluation is asked for."""
        if self._kept and self._end is None and not self.evaluations.begun:
            self.evaluations.asks(_moment(self._owners).has_moved)

    def pass_ended(self, *, updates: int, place: Place) -> None:
        """Keep the state of this moment, too: a run that goes on from `place` does again what the loop does behind the data, a scheduler's step say."""
        self.evaluations.over()
        if self._subjects.generation == self._generation:
            self._end, self._written_at_end = _moment(self._owners, updates=updates, place=place), self._written()
            self.behind_data, self.ended_late = True, self.schedule.is_late

    def pass_left(self, *, updates: int, place: Place) -> None:
        """The same of a pass that the loop leaves early: at once of the moment, for by its evaluation it may have moved on."""
        if self._subjects.generation == self._generation:
            self._left, self._written_at_end = _moment(self._owners, updates=updates, place=place), self._written()

    def _written(self) -> tuple[Any, ...]:
        return self._owners.written(), () if self._buffers is None else self._buffers.versions()

    def why_moved_on(self) -> str:
        """Why parameters and buffers before the next window need not be those of its start, or nothing: of a loop that is asking for a batch, or is behind the
        end of its data, where it may evaluate on other weights."""
        if self.schedule.is_late or (self.behind_data and self.ended_late):
            return _LATE
        if self._end is None or self._written() == self._written_at_end:
            return ""
        return "its parameters or buffers were written to since its pass over the data ended (for an evaluation on other weights, say)"

    def is_behind_the_end(self, updates: int, place: Place) -> bool:
        """Whether the loop is behind the end of a pass, after so many updates, and its next pass has not begun: `windows_back=0` is that end then."""
        end = self._end or self._left
        return end is not None and end.updates == updates and end.place == place

    def why_odd(self, windows_back: int = 1) -> str:
        """Why the parameters in that window need not be those of a step's start, or nothing."""
        if self.schedule.is_late and (len(self._kept) < windows_back or self._kept[-windows_back].settled is None):
            return _LATE
        if len(self._kept) >= windows_back and self._kept[-windows_back].is_odd:
            return "before the step at hand its parameters were written to otherwise than between any two before (for an evaluation on other weights, say)"
        return self.hands.why()

    def why_unusual(self) -> str:
        """Why the parameters behind an update need not be what they are between two steps, or nothing: by what a loss scaler is still to do, by how often they
        were written to since its window began, and by what the loop was seen to do there."""
        if any(map(is_half_done, self._subjects.scalers())):
            return "its loss scaler had not been updated yet"
        if self.hands.behind:
            return f"its loop itself changes {self.hands.behind} behind its update, and whether it had done so cannot be told"
        if self.schedule.by_hand:
            return "its loop sets its optimizer's rates by hand behind its update, and whether it had done so cannot be told"
        if why := self._why_odd_by_now() or self.evaluations.why():
            return why
        is_certain = self._habit.is_certain(self._owners.written())
        return (
            ""
            if is_certain
            else "what its loop writes to its parameters behind an update differs from step to step, and more may be to come"
        )

    def _why_odd_by_now(self) -> str:
        is_odd = self._habit.is_odd(self._owners.written())
        return "its parameters were written to since its last step began, and not as between any two steps before" if is_odd else ""

    def is_on_other_weights(self) -> bool:
        """Whether the model stands on parameters that no step has ended with: of an evaluation that asks for a batch."""
        return bool(self._why_odd_by_now() if self._end is None else self.why_moved_on())

    def changed_in_step(self) -> str:
        """What the script itself has changed since the newest window opened, before any optimizer; or nothing."""
        return "" if self._habit.is_as_opened(self._owners.written()) else "parameters, or an optimizer's groups,"

    def restore(self, *, settled: bool = False) -> None:
        """Put everything back to where it was when the newest window opened. May be called again. `settled`: with what belongs to the update before, where the
        loop does that only behind its fetch; a step that is left out gives that back with its own."""
        if not self._kept:
            return
        if self._buffers is not None:
            self._buffers.put_back()
        self._at(1).put_back(settled=settled)

    def begun_after(self, updates: int) -> int:
        """How many windows were begun since so many updates, counted from the newest that began behind just these; 0 where none is kept. From any thread."""
        return next((back for back, moment in enumerate(reversed(tuple(self._kept)), 1) if moment.updates == updates), 0)

    def rng_at(self, windows_back: int) -> RngState:
        return self._at(windows_back).rng

    def position_at(self, windows_back: int) -> LoaderPosition:
        """From where the batches of that window and of those after it come again."""
        moment = self._at(windows_back)
        return moment.place.with_generators(moment.rng, left=moment is self._left)

    def begins_at(self, place: Place) -> bool:
        """Whether the newest window's first batch is the next one there."""
        newest = self._at(1).place
        return (newest.epoch, newest.batches) == (place.epoch, place.batches)

    def _at(self, windows_back: int) -> _Moment:
        if windows_back:
            return self._kept[-windows_back]
        end = self._end or self._left
        if end is None:
            raise LookupError("no pass over the data has just ended")
        return end

    @contextmanager
    def rewound(self, windows_back: int = 1, *, buffers: bool = True) -> Iterator[Callable[[], bool]]:
        """The body sees the state of the window's start; after it everything is as it was before. For a save in the middle of a window. Gives a question: is
        everything still as it was put back? A training thread that cannot be stopped may have moved on."""
        present = _moment(self._owners)
        moment = self._at(windows_back) if windows_back <= len(self._kept) else present
        put_buffers_back = None
        if self._buffers is not None and buffers and moment is not present:
            put_buffers_back = self._buffers.present()
            self._buffers.put_back()
        moment.put_back()
        try:
            yield moment.is_in_place
        finally:
            if put_buffers_back is not None:
                put_buffers_back()
            present.put_back()

    def why_no_buffers(self, updates: int) -> str:
        """Why the models' buffers as they were after so many updates cannot be had in the middle of a step, or nothing."""
        return "" if self._buffers is None else self._buffers.why_not(updates)

    def with_kept_buffers(self, read: Reader) -> Reader:
        """`read`, with the kept copy in the place of every buffer. On a device a copy holds what the last `opened` that it has come to found."""
        return read if self._buffers is None else self._buffers.reading_copies(read)

    def _follow(self) -> None:
        # Looking for the models may need a search through all objects: once, when an optimizer has stepped for the first time.
        models = self._subjects.models() if self._subjects.optimizers() else ()
        self._buffers = Buffers(models, max_bytes=self._max_buffer_bytes, say=self._say) if models else None
        self._owners = _Owners(self._subjects, models)
        self._habit = Habit()
        self._generation = self._subjects.generation


def kept_schedules(state: TrainingState) -> Callable[[], bool]:
    """What puts the schedulers of `state` back to where they are now, with the values that they set, and says whether one had stepped since."""
    subjects = Subjects()
    for optimizer in state.optimizers:
        subjects.optimizer_seen(optimizer)
    for scheduler in state.schedulers:
        subjects.scheduler_seen(scheduler)
    moment, before = _moment(_Owners(subjects)), subjects.scheduled()

    def put_back() -> bool:
        has_stepped = subjects.scheduled() != before
        if has_stepped:
            moment.put_back()
        return has_stepped

    return put_back


class _Owners:
    """Whose namespaces a window changes. The objects are the user's to delete: they are held weakly."""

    def __init__(self, subjects: Subjects, models: Sequence[Any] = ()) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in subjects.optimizers()]
        schedulers = _all_schedulers(subjects)
        self._others = [weakref.ref(item) for item in (*schedulers, *subjects.scalers())]
        self.num_scheduled = len(self._optimizers) + len(schedulers)  # the first so many `namespaces` are what a schedule moves
        from torch.nn.parameter import is_lazy

        stepped = parameters_of(subjects.optimizers())
        beside = {id(param): param for model in models for param in model.parameters() if id(param) not in stepped and not is_lazy(param)}
        self._beside = [weakref.ref(param) for param in beside.values() if not param.is_inference()]

    def namespaces(self) -> list[Sequence[dict[str, Any]]]:
        """Of each object: of an optimizer its groups, none where the object is gone."""
        found: list[Sequence[dict[str, Any]]] = []
        for ref in self._optimizers:
            optimizer = ref()
            found.append(() if optimizer is None else optimizer.param_groups)
        for ref in self._others:
            item = ref()
            found.append(() if item is None else (item.__dict__,))
        return found

    def written(self) -> Written:
        """The optimizers' parameters, and those that the models have besides (a momentum encoder's): how many there are, and how often they have been written
        to in place, by torch's own count."""
        trained = [group["params"] for ref in self._optimizers if (optimizer := ref()) is not None for group in optimizer.param_groups]
        besides = [param for ref in self._beside if (param := ref()) is not None] if self._beside else ()
        return sum(map(len, trained)), len(besides), sum(map(_version_of, itertools.chain(*trained, besides)))


class _Moment(NamedTuple):
    """Everything but the buffers."""

    owners: _Owners
    kept: list[list[dict[str, Any]]]
    rng: RngState
    updates: int
    place: Place
    is_odd: bool  # what came before it is not known
    settled: list[list[dict[str, Any]]] | None = None  # in the place of `kept`, where a loop moves its schedule only behind its fetch

    def put_back(self, *, settled: bool = True) -> None:
        for living, kept in self._pairs(settled=settled):
            for key, value in kept.items():
                living[key] = _as_it_was(value)
        self.rng.restore()

    def is_in_place(self) -> bool:
        """Of plain values: a schedule moves its count and the learning rates."""
        return not any(_differ([living], [kept]) for living, kept in self._pairs(settled=True))

    def has_moved(self) -> bool:
        """Whether an optimizer's groups are others than they were, or a scheduler: by their plain values."""
        both = zip(self.owners.namespaces(), self.kept, strict=True)
        return any(_differ(living, kept) for living, kept in itertools.islice(both, self.owners.num_scheduled))

    def _pairs(self, *, settled: bool) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        both = zip(self.owners.namespaces(), (settled and self.settled) or self.kept, strict=True)
        return [pair for living, kept in both for pair in zip(living, kept, strict=False)]  # groups may have been added since


def _differ(living: Sequence[dict[str, Any]], kept: Sequence[dict[str, Any]]) -> bool:
    """By plain values. Groups may have been added since."""
    pairs = zip(living, kept, strict=False)
    return any(now.get(key) != value for now, before in pairs for key, value in before.items() if type(value) in _AS_IT_IS)


def _moment(owners: _Owners, *, updates: int = 0, place: Place = START, is_odd: bool = False) -> _Moment:
    return _Moment(owners, _namespaces(owners), RngState.capture(), updates, place, is_odd)


def _namespaces(owners: _Owners) -> list[list[dict[str, Any]]]:
    return [list(map(_kept_namespace, of_one)) for of_one in owners.namespaces()]


def _kept_namespace(living: dict[str, Any]) -> dict[str, Any]:
    """The values that a window changes: numbers, words, plain containers of them, tensors.

    Nothing else: a scaler's notes on the step that it is in the middle of must not come back, nor a function that was wrapped since. And what holds
    objects of the user's would keep them alive.
    """
    kept = {}
    for key, value in living.items():
        if type(value) in _AS_IT_IS:
            kept[key] = value
        elif key != "params":
            copy = _kept(value)
            if copy is not _LEFT_OUT:
                kept[key] = copy
    return kept


def _all_schedulers(subjects: Subjects) -> list[Any]:
    return [found for scheduler in subjects.schedulers() for found in (scheduler, *inner_schedulers(scheduler))]


def _kept(value: Any) -> Any:
    """A copy; _LEFT_OUT where it holds anything else than is kept."""
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is list or kind is tuple:
        copies = []
        for item in value:
            copy = item if type(item) in _AS_IT_IS else _kept(item)
            if copy is _LEFT_OUT:
                return _LEFT_OUT
            copies.append(copy)
        return kind(copies)
    if kind is dict:
        copied = {key: _kept(item) for key, item in value.items()}
        return copied if all(copy is not _LEFT_OUT for copy in copied.values()) else _LEFT_OUT
    from torch import Tensor

    if isinstance(value, Tensor):
        return _Tensor(value)
    return value if isinstance(value, int | float) else _LEFT_OUT


class _Tensor:
    """A tensor and what was in it: both are put back, because others may hold the same tensor."""

    __slots__ = ("copy", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.copy = tensor, tensor.detach().clone()


def _as_it_was(value: Any) -> Any:
    if isinstance(value, _Tensor):
        value.tensor.detach().copy_(value.copy)
        return value.tensor
    if type(value) in (list, tuple):
        return type(value)(_as_it_was(item) for item in value)
    if type(value) is dict:
        return {key: _as_it_was(item) for key, item in value.items()}
    return value
