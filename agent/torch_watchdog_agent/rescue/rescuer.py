"""The rank's half of a rescue: no update any more, come free, say what is held, save it where asked to, and only then end.

The control thread brings orders; a thread of its own, which exists only once a rank has failed, does the work; the training thread tells how far it is
(`at_boundary`, `at_hand_over`, `at_gate`, `after_gate`) and stands still when it comes to the next of these places, or to its own end. The rule over
all: a state that a half step may have touched is never called whole.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch_watchdog_agent.rescue.ahead import Ahead, on_device
from torch_watchdog_agent.rescue.gpu import PROBE_S, OnGpu
from torch_watchdog_agent.rescue.half_step import Phase, Place
from torch_watchdog_agent.rescue.lingering import Lingering
from torch_watchdog_agent.rescue.lost_peer import LostPeer
from torch_watchdog_agent.rescue.own_failure import OwnFailure
from torch_watchdog_agent.rescue.recent import RecentBatches
from torch_watchdog_agent.rescue.saving import freed, reason_here, save, seal
from torch_watchdog_agent.rescue.whole import WholeWindow
from torch_watchdog_agent.rescue.words import Words, words_of
from torch_watchdog_proto.messages import Leave, Left, Order, Saved, WriteCommitted
from torch_watchdog_proto.rescue_words import Free, Holds, Look, Looked, Release, Rescue

if TYPE_CHECKING:
    from torch_watchdog_agent.rank import Rank

__all__ = ["Rescuer"]

WORD_TIMEOUT_S = 5.0  # for the daemon's word to a rank that raises: where none comes it ends as it would have without us
AFTER_NOTHING_S = 5.0  # a rank's end reaches the daemon through its node: a few 10 ms after the others have noticed their connection to it, on a quiet machine
_NO_ANSWER = "the device answers to no other thread: its launch queue is full, or the loop waits in a copy such as tensor.cpu()"
LEAVE_S = 3.0  # for a training thread that waits on its device, once nothing more is asked of it; the failed rank's keeper speaks first
LAUNCH_S = 1.0  # for an update that is being launched on a device; a full queue keeps it from ever ending
SETTLE_S = 5.0  # for a training thread that is between its update and the next fetch


class Rescuer:
    """One rank's part. `leave` tells the keeper that this end is ours."""

    def __init__(self, rank: Rank, *, leave: Callable[[], None]) -> None:
        self._rank, self._announce_leave = rank, leave
        self._lock = threading.RLock()  # taken by itself where a step passes: less code than the condition's
        self._changed = threading.Condition(self._lock)
        self._phase: Phase = "start"
        self.steps = WholeWindow(rank.subjects.scheduled)
        self._free: Free | None = None
        self._part = (0, 0)  # which part of the state this rank holds, of how many; (0, 0) where none that others could complete
        self._words: deque[Order] = deque()
        self._asked = self._standing = self._over = False
        self._gpu = OnGpu(rank)
        self.batches = RecentBatches(rank)
        self._own, self.lost_peer = OwnFailure(rank, self._gpu, self.batches), LostPeer(rank)
        self.lingering = Lingering(rank, is_over=self._is_over_here)

    # The training thread

    def at_boundary(self, *, in_window: bool, trains: bool = True) -> None:
        """Before a fetch. `trains`: from the loader that the training follows; an evaluation may come between an update and what belongs to it.

        May raise SystemExit, as every place where a rank stands still.
        """
        self._come_to(("window" if in_window else "boundary") if trains else self._phase)

    def is_half_done(self, *, trains: bool) -> bool:
        """Whether what belongs to the newest update may be still to come, although the loop asks for a batch: where it does not train on that one, the loop's
        own part of the update, or of what an evaluation is for. And it may stand on other weights, or have changed them behind the end of its data."""
        window = self._rank.window
        if trains:  # of several ranks one alone may evaluate: what they do not do alike must not make one of them go on
            alone = self._rank.identity.world_size == 1
            return window.behind_data and (window.ended_late or (alone and bool(window.why_moved_on())))
        missing = self._phase == "after" and self.steps.missing(self._rank.subjects.optimizers())
        if self._rank.loop.feeds_itself:  # each of its gates is a place to stop at, for all ranks alike
            return True
        return bool(missing) or window.is_on_other_weights() or not window.evaluations.may_be_left()

    def begins_itself(self) -> bool:
        """Whether what a loop does that feeds itself belongs to its next step: all optimizers have stepped since the last one began."""
        return self._phase == "after" and self.steps.has_all_steps(self._rank.subjects.optimizers())

    def at_pass_end(self) -> None:
        """The loop has had all batches. What it does now, a scheduler's step say, it does once for all of them, and no mere update has to wait for it."""
        if self._phase == "boundary":
            self.steps.over()

    def at_hand_over(self, *, opens: bool) -> None:
        """A batch is about to be trained on. `opens`: it is the first of its window."""
        if opens:
            self.steps.over()
        self._come_to("window")
        if opens:
            self._gpu.opened()

    def at_gate(self, optimizer: Any) -> None:
        """The update may follow: from here on the state is in flux."""
        self._come_to("update")
        self.steps.stepped(optimizer)
        self._gpu.before_update(optimizer, first=self.steps.num_steps == 1)

    def after_gate(self, *, window_closed: bool) -> None:
        """The update has been applied, or left out. `window_closed`: it was the first of its window."""
        if window_closed:
            self._gpu.after_update()
        if self.lost_peer.is_known:  # asked here, not there: a call less in every step
            self.lost_peer.went_on()
        with self._lock:
            self._phase = "after"
            if self._free is not None:
                self._changed.notify_all()

    def what_now(self) -> str:
        """What becomes of the training once nobody will say anything any more. From any thread."""
        if self._asked or self._free is not None:
            return "the training cannot go on, and nothing more of it is saved or told"
        return "training goes on without the watchdog (no guard, no clean stop, no timeline from here)"

    def why_alone(self) -> str:
        """Why no other rank need be waited for any more, or nothing. From any thread."""
        free = self._free
        return "" if free is None else f"the training cannot go on: {reason_here(self._rank, free)}"

    def at_nothing(self) -> None:
        """A save of all ranks, or a hold, has come to nothing: where another has failed, this one is to be asked for its state, and not gone by then."""
        if self._rank.identity.world_size == 1:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._free is not None or self._over, AFTER_NOTHING_S)
        if self._free is not None:
            self._stand()
            self._leave()

    def _come_to(self, phase: Phase) -> None:
        with self._lock:
            if self._free is None:
                self._phase = phase
                return
        self._stand()
        self._leave()

    def _stand(self) -> None:
        """Until the rescue is over for this rank."""
        with self._changed:
            self._standing = True
            self._changed.notify_all()
            while self._free is not None and not self._over:
                self._changed.wait(1.0)

    def _leave(self) -> None:
        rank, free = self._rank, self._free
        if free is None:
            return
        rank.history.flush(ending=True)
        rank.tell(Left(rank=rank.identity.rank, generation=free.generation, updates_applied=rank.loop.updates_applied))
        self._announce_leave()
        raise SystemExit(free.exit_code)

    # The end of this rank's own program

    def noticed(self, error: BaseException) -> None:
        """An exception is in flight, and a process group is about to be torn down because of it: remember when that was."""
        self._own.noticed(error)

    def keep(self, batch: Any) -> None:
        """The batch that is about to be used."""
        self.batches.keep(batch, several=self._gpu.is_gated)

    def failed(self, error: BaseException, words: Words | None = None) -> None:
        """An exception leaves the training: tell it. `words`: what was said of it while it was raised."""
        from torch_watchdog_agent.rescue.looking import recorded

        rank, message = self._rank, self._own.told(error, words or words_of(error))
        with self._changed:
            self._asked = rank.config.policy != "observe" and (rank.identity.world_size > 1 or not isinstance(error, SystemExit))
        if not rank.tell(message):
            self._asked = False
        self.lingering.failed()
        recorded(rank, device_answers=lambda: True)  # the others are being freed meanwhile

    def await_word(self) -> None:
        """After the rank's last exception was shown, or as its process is about to end: a healthy state must not go before it is saved."""
        deadline = time.monotonic() + WORD_TIMEOUT_S
        with self._changed:
            while (self._asked or self.lost_peer.is_known) and self._free is None and not self._over and time.monotonic() < deadline:
                self._changed.wait(0.5)
        self._stand()
        self.lost_peer.went_on()

    def _is_over_here(self) -> bool:
        """Whether a failure, this rank's or another's, ends the training, and nothing more is asked of this one. From any thread."""
        return self._over and (self._asked or self._free is not None)

    def lost(self) -> None:
        """Nobody will say anything any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    # The control thread

    def takes(self, order: Order) -> bool:
        """True where the order was a rescue's."""
        with self._changed:
            if isinstance(order, Free):
                self._begin(order)
            elif isinstance(order, Release):
                pass  # the keeper's
            elif self._free is not None and order.generation == self._free.generation:
                self._words.append(order)
            elif isinstance(order, Leave) and self._asked and self._free is None:
                self._over = True
            else:
                return False
            self._changed.notify_all()
            return True

    def looked(self, order: Look) -> Looked:
        """Where the training thread is: asked once the job has come to a standstill."""
        from torch_watchdog_agent.rescue.looking import answer

        return answer(order, self._rank, self._gpu, at=self._own.step_at_hand())

    def _begin(self, free: Free) -> None:
        if self._free is not None or self._over:
            return
        self._free = free
        try:
            threading.Thread(target=self._run, args=(free,), name="torch-watchdog-rescue", daemon=True).start()
        except RuntimeError as error:  # the machine gives no thread any more
            self._give_up_without_a_thread(free, str(error))

    def _give_up_without_a_thread(self, free: Free, why: str) -> None:
        """This is the control thread, which must not wait for its own words: the rank comes free, and saves nothing."""
        from torch_watchdog_agent.rescue import sockets

        self._rank.say(f"the training cannot go on ({reason_here(self._rank, free)}); nothing can be saved here: {why}")
        why = f"no thread for a rescue could be started ({why})"
        self._rank.tell(freed(self._rank, free, "nothing", why, self._rank.loop.updates_applied))
        self._over = True
        if not on_device(self._rank.subjects.now()):
            sockets.shut_down_all()

    # The rescue's own thread

    def _run(self, free: Free) -> None:
        try:
            self._rescue(free)
        except BaseException as error:  # noqa: BLE001  whatever it is: the training thread must not stand for ever
            self._rank.say(f"this rank's part of the rescue has failed ({type(error).__name__}: {error})")
        finally:
            self.lost()
            self.lingering.watch()

    def _rescue(self, free: Free) -> None:
        from torch_watchdog_agent.rescue import sockets

        rank = self._rank
        if rank.identity.world_size > 1:
            rank.say(f"the training cannot go on ({reason_here(rank, free)}): this rank applies no further update")
        kept = rank.subjects.now()  # held here: an exception that unwinds the training must not take the state with it
        if on_device(kept):
            if rank.config.device_gate:
                self._rescue_from_device(free, kept)
            else:
                self._give_up_on_device(free)
            return
        self._let_the_update_end()
        sockets.shut_down_all()
        self._settle()
        holds, why = self._holdings(kept)
        rank.tell(freed(rank, free, holds, why, rank.loop.updates_applied, part=self._part))
        self._obey(free)

    def _give_up_on_device(self, free: Free) -> None:
        """No CUDA call, no abort: what is queued on the device is unknown, and a wait there may never end. Nothing is said to be whole."""
        why = "a state on GPUs is not saved after another rank's failure"
        self._rank.tell(freed(self._rank, free, "nothing", why, self._rank.loop.updates_applied))
        self._obey(free)
        self._end_where_stuck()

    def _end_where_stuck(self) -> None:
        if self._rank.identity.world_size == 1:
            return  # it waits for nobody, and ends by its own exception
        with self._changed:
            self._changed.wait_for(lambda: self._standing, LEAVE_S)
        if not self._standing:
            self._rank.say("it waits on its device for a rank that is gone: it is ended")
            os.kill(os.getpid(), signal.SIGKILL)  # no handler of Python's runs while the training thread is in the driver

    def _rescue_from_device(self, free: Free, kept: Any) -> None:
        """No collective is broken before the state is on disk: what is queued behind it would run with garbage."""
        from torch_watchdog_agent.rescue import sockets

        self._gpu.close()
        self._let_the_update_end(within_s=LAUNCH_S)
        ahead = self._gpu.look(fetches=self._phase == "boundary", within_s=SETTLE_S)
        if not ahead.windows_back:
            self._settle()  # nothing is on the device: it comes there by itself
        try:
            holds, why = self._holdings_on_device(kept, ahead)
            self._rank.tell(freed(self._rank, free, holds, why, ahead.updates, part=self._part))
            self._obey(free)
        finally:
            self._gpu.free()
            sockets.shut_down_all()
        self._end_where_stuck()

    def _holdings_on_device(self, state: Any, ahead: Ahead) -> tuple[Holds, str]:
        with self._changed:
            why = self._place().why_not_on_device(state, ahead)
        if why:
            return "nothing", why
        holds, why = self._shares(state)
        if (holds == "all" or self._part[1]) and not self._gpu.answers(state, within_s=PROBE_S):
            return "nothing", _NO_ANSWER
        return holds, why

    def _let_the_update_end(self, *, within_s: float = SETTLE_S) -> None:
        """Nothing is broken from outside in the middle of an update: some need a collective (ZeRO), and all end by themselves."""
        with self._changed:
            self._until(lambda: self._phase != "update" or self._standing, within_s=within_s)

    def _settle(self) -> None:
        """Between an update and the next fetch a loop steps its scheduler and more: let it come to a place where all that is done. A save that an order
        had begun writes under the same name: it ends first, or fails by what it waited for, and takes its own half files away.
        """
        with self._changed:
            self._until(lambda: (self._phase not in ("update", "after") and not self._rank.saver.busy) or self._standing)

    def _until(self, true: Callable[[], bool], *, within_s: float = SETTLE_S) -> None:
        deadline = time.monotonic() + within_s
        while not true() and time.monotonic() < deadline:
            self._changed.wait(0.2)

    def _holdings(self, state: Any) -> tuple[Holds, str]:
        with self._changed:
            why = self._place().why_not(state)
        return ("nothing", why) if why else self._shares(state)

    def _place(self) -> Place:
        return Place(rank=self._rank, steps=self.steps, phase=self._phase, standing=self._standing)

    def _shares(self, state: Any) -> tuple[Holds, str]:
        from torch_watchdog_agent.rescue.replica import holdings, part_of

        holds, why = holdings(state, world_size=self._rank.identity.world_size, updates=self._rank.loop.updates_applied)
        if holds == "part":
            self._part = part_of(state, world_size=self._rank.identity.world_size)
        return holds, why

    def _obey(self, free: Free) -> None:
        """What the daemon says, until it says Leave."""
        from torch_watchdog_agent.checkpoint.save import owners

        deadline = time.monotonic() + 3 * free.grace_s
        held = owners()
        written: tuple[Rescue, Saved] | None = None
        while (order := self._next_word(deadline)) is not None:
            match order:
                case Rescue():
                    written = order, self._save(order, within_s=free.grace_s)
                    self._rank.tell(written[1])
                case WriteCommitted() if written is not None:
                    asked, saved = written
                    self._rank.tell(seal(self._rank, asked, order, saved, parts=self._part[1]))
                case _:
                    return
        del held
        if not self._over:
            self._rank.say(f"no word on the rescue within {free.grace_s:g} s: this rank ends")

    def _next_word(self, deadline: float) -> Order | None:
        with self._changed:
            while not self._words and not self._over and time.monotonic() < deadline:
                self._changed.wait(1.0)
            return self._words.popleft() if self._words else None

    def _save(self, order: Rescue, *, within_s: float) -> Saved:
        part = self._part[0] if self._part[1] else None
        if self._gpu.closed is not None:
            return self._gpu.save(order, has_begun=self._has_begun, part=part, within_s=within_s)
        updates = self._rank.loop.updates_applied
        return save(self._rank, order, updates=updates, windows_back=lambda: int(self._has_begun()), part=part)

    def _has_begun(self) -> bool:
        """Whether the training thread has taken a batch to train on: a slow loader may hand over once the rescue has begun. What its step begins with is kept
        by the time that it stands. An evaluation before the next step's first batch changes nothing.
        """
        begun = self._rank.loop.is_training
        if not begun and self._rank.loop.feeds_itself and self.begins_itself():
            return self._rank.at_gate.has_begun_itself()
        if begun and self._phase == "boundary":
            with self._changed:
                self._until(lambda: self._standing)
        return begun
