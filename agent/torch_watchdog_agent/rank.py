"""One rank of a watched job: what the hooks call, and how its parts hang together. START HERE for the rank side.

The life of a batch: `before_fetch` (a boundary: act on an order) -> the user's loader -> `fetched` (the guard looks) -> `handed` (held, repaired, recorded,
traced) -> the user's forward and backward (`loss_seen`) -> `enter_gate` -> the update -> `leave_gate`. Everything here runs on the training thread unless it
says otherwise.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_watchdog_agent import keeper, recorder
from torch_watchdog_agent.asked import AskedResume
from torch_watchdog_agent.at_gate import AtGate
from torch_watchdog_agent.clearance import Clearance
from torch_watchdog_agent.config import AgentConfig
from torch_watchdog_agent.control import connected
from torch_watchdog_agent.gate import Gate
from torch_watchdog_agent.history import History
from torch_watchdog_agent.holds import Holds
from torch_watchdog_agent.hooks import tracks
from torch_watchdog_agent.identity import Identity
from torch_watchdog_agent.lockstep import Lockstep, Mismatch, violation_of
from torch_watchdog_agent.loop import Loop
from torch_watchdog_agent.loop_end import LoopEnd
from torch_watchdog_agent.neighbours import among_neighbours
from torch_watchdog_agent.not_finite import NotFinite
from torch_watchdog_agent.preemption import Preemption
from torch_watchdog_agent.quarantine import FILE_NAME, Quarantine
from torch_watchdog_agent.register import DecisionRegister
from torch_watchdog_agent.rescue.rescuer import Rescuer
from torch_watchdog_agent.saver import Saver
from torch_watchdog_agent.say import Voice
from torch_watchdog_agent.turned_off import why_unknown
from torch_watchdog_agent.unread import Unread
from torch_watchdog_proto.messages import CannotPromise, Finished, Noticed, Order, Prepare, RankMessage, Signalled, Violation
from torch_watchdog_proto.rescue_words import Look
from torch_watchdog_proto.stop.participant import Act, Skip

if TYPE_CHECKING:
    from torch_watchdog_agent.checkpoint.position import Place
    from torch_watchdog_agent.contract.guard import Checked
    from torch_watchdog_agent.rescue.words import Words

__all__ = ["VETOED", "Rank"]

VETOED = -1  # instead of a window's number


class Rank:
    """The agent of this process. Made at the first sign of a training; torch is imported by then."""

    def __init__(self, config: AgentConfig, identity: Identity, *, leave: Callable[[], None]) -> None:
        from torch_watchdog_agent.checkpoint.subjects import Subjects
        from torch_watchdog_agent.checkpoint.window import WindowState
        from torch_watchdog_agent.contract.declared import take_settings
        from torch_watchdog_agent.contract.file import ContractFile
        from torch_watchdog_agent.contract.guard import Guard
        from torch_watchdog_agent.scan import Scan

        self.config, self.identity = config, identity
        self.say = Voice(f"rank {identity.rank}: ")
        self.loop = Loop()
        register = DecisionRegister(os.environ, attempt=identity.attempt, world_size=identity.world_size, say=self.say)
        self.gate = Gate(identity.rank, register.decide)
        self.subjects = Subjects(optimizer_gone=self.loop.optimizer_gone)
        self.window = WindowState(self.subjects, say=self.say)
        self._has_told_why = False
        self._leaving = self.interrupted = False  # by an order of ours; by a SIGINT that nothing caught

        def announce_leave() -> None:
            self._leaving = True
            leave()

        self.rescuer = Rescuer(self, leave=announce_leave)
        self.line = connected(config, identity, on_order=self._ordered, on_lost=self._lost, say=self.say)
        self.history = History(recorder.opened(Path(config.ring_dir), identity, say=self.say), self.loop)
        self.say.also = self.history.said
        is_gated = self.line is not None and config.policy != "observe"
        rings = Path(config.ring_dir)
        self._clearance = (
            among_neighbours(Clearance, rings, identity, say=self.say, without="on GPUs a bad batch may have to end its rank")
            if is_gated
            else None
        )
        self.lockstep = among_neighbours(
            Lockstep, rings, identity, say=self.say, without="ranks in different collectives are not told apart before they hang"
        )
        self.holds = Holds(self)
        self.guard = Guard(
            say=self.say, on_refused=self.holds.refused, on_noticed=self.notice, patient=bool(config.scan), watch_modules=config.watch_modules,
            outlier_times=config.outlier_times,
        )  # fmt: skip
        self._unread = Unread(self.guard, say=self.say, found=self.holds.hold_late, change=config.policy != "observe")
        self.saver = Saver(self, leave=announce_leave)
        if importlib.util.find_spec("safetensors") is None:
            self.say("safetensors is missing in this Python: a stop will leave no checkpoint of ours (pip install safetensors)")
        self.dataset = "?"  # of the batch at hand, as `quarantine.dataset_name` calls it
        self.quarantine = Quarantine(Path(config.run_dir) / FILE_NAME, say=self.say if identity.rank == 0 else None)
        take_settings(config.bounds)
        self.scan = Scan.of(config, identity) if config.scan else None
        self._contract = ContractFile(Path(config.run_dir), rank=identity.rank, say=self.say)
        self._gates_seen = self._trains_in_eval = False
        self._opened_by: tracks.Stand | None = None  # the pass whose batch has opened the window
        self.at_gate, self._not_finite = AtGate(self), NotFinite(self)
        self._loss_is_under_way = False
        self.loop_end, self.preemption = LoopEnd(), self._preempted()
        self.resume = AskedResume(config.resume, Path(config.run_dir), attempt=identity.attempt, speaks=identity.rank == 0, say=self.say)

    # Start and end

    def _preempted(self) -> Preemption | None:
        grace_s = self.config.signal_grace_s
        if grace_s is None or self.line is None or self.scan is not None:
            return None
        preemption = Preemption(
            lambda number: not why_unknown() and self.tell(Signalled(rank=self.identity.rank, signal=number)),  # no stop can be promised
            grace_s=grace_s, progress=lambda: self.loop.progress, acts=lambda: self.loop_end.is_over() and not why_unknown() and self._tell_end(),
        )  # fmt: skip
        preemption.install()
        return preemption

    def _ordered(self, order: Order) -> tuple[RankMessage, ...]:
        if isinstance(order, Look):
            return (self.rescuer.looked(order),)
        if self.rescuer.takes(order):
            return ()
        if isinstance(order, Prepare) and (why := why_unknown()):
            return (self._cannot_promise(order, why),)
        return self.gate.on_order(order)

    def _cannot_promise(self, order: Prepare, why: str) -> CannotPromise:
        """No rank acts on an order that one has not promised for: the job goes on as it is. Told each time, said once."""
        if not self._has_told_why:
            self._has_told_why = True
            self.say(f"no stop, checkpoint or skipped step of the job can be promised: {why}")
        return CannotPromise(rank=self.identity.rank, generation=order.generation, reason=why)

    def _lost(self) -> None:
        self.gate.on_lost()
        self.rescuer.lost()
        keeper.announce_watched(watched=False)
        if self.gate.has_order:
            self.say("the node process is gone: what was decided with it is carried out, and nothing is watched after that")
        else:
            self.say(f"the node process is gone: {self.rescuer.what_now()}")

    def finish(self) -> None:
        """At interpreter exit: no gate will follow."""
        self.rescuer.await_word()
        self.history.flush(ending=True)
        self.write_contract()
        if self.scan is not None:
            self.scan.ended()
        if not self.interrupted:
            self._tell_end()
        if self.preemption is not None and not self._leaving:
            self.preemption.at_end()

    def _tell_end(self) -> bool:
        return self.tell(Finished(rank=self.identity.rank, passed=self.gate.passed))

    def resumed(self, path: Path, *, updates_applied: int) -> None:
        """The training goes on from the checkpoint at `path`: what was left out before stays out."""
        self.loop.resumed(updates_applied)
        self.resume.taken()
        count = self.quarantine.take_over(path / FILE_NAME)
        if count and self.identity.rank == 0:
            self.say(
                f"bad samples that stay left out: {count}. Once they are mended, remove {path / FILE_NAME} and launch without --quarantine"
            )

    def forget_in_child(self) -> None:
        """After a fork: ring and socket belong to the parent."""
        self.history.forget()
        if self.line is not None:
            self.line.forget()

    def hang_up(self) -> None:
        """This process turned out to be no rank of ours: it trains on as without us."""
        self.history.forget()
        if self.line is not None:
            self.line.hang_up()

    @property
    def guarding(self) -> bool:
        """False where nobody could be told: then a bad batch takes its course as without us."""
        return self.line is not None and self.line.connected

    def tell(self, message: RankMessage) -> bool:
        return self.line is not None and self.line.send(message)

    # The life of a batch

    def before_fetch(self, *, trains: bool, evaluates: bool = False) -> None:
        """The loop asks for its next batch: every rank is at the same point here. `trains`: of the data that it trains on, and nothing is half done;
        `evaluates`: of an evaluation. May raise SystemExit."""
        self.history.flush()
        if self._unread.under_check:
            self._unread.settle(wait=False)
        if self.at_gate.undo:
            self.at_gate.before_fetch()
        # Behind the end of the data batches of an evaluation open no window: what is held is what it was at that end.
        in_window = self.loop.is_begun and (self.loop.trained_on > 0 or not self.window.behind_data)
        self.rescuer.at_boundary(in_window=in_window, trains=trains)
        schedule = self.window.schedule
        if trains and schedule.looks:
            schedule.fetching()
        elif evaluates:
            self.window.evaluating()
        waits = schedule.may_be_late or ((not trains or self.window.behind_data) and self.rescuer.is_half_done(trains=trains))
        if not (waits or (self.loop.is_begun and self.loop.trained_on)) and (act := self.gate.boundary()) is not None:
            self.at_gate.at_boundary(act.commit)

    def fetched(self, batch: object, *, indices: Any, worker: int | None) -> Checked | None:
        """A batch has left a DataLoader; the loop may get it later (a prefetching loader)."""
        line = self.line
        return self.guard.fetched(batch, indices=indices, worker=worker) if line is not None and line.connected else None

    def place(self, *, again: int = 0) -> Place:
        """Where the training's data go on, with what the loop has fetched ahead and not used. `again`: so many of the last that it has are to come again."""
        return tracks.training_place(again=again + self.loop.in_hand(self.guard.ahead) if self.loop.may_be_ahead else again)

    def evaluating(self) -> bool:
        """Whether all models are in evaluation mode, in a loop that does not train in that mode."""
        if self._trains_in_eval or not self._gates_seen:
            return False
        models = self.subjects.models()
        for model in models:  # a plain loop: this runs in every step
            if model.training:
                return False
        return bool(models)

    def handed(self, batch: object, checked: Checked | None, *, loader_ns: int, evaluation: bool) -> object:
        """The loop is about to use the batch. Returns it, or a sanitised copy. Raises BadBatchError where nobody agrees on a veto."""
        if self.config.replay is not None:
            batch, checked = self._recorded(batch)
        opens = self.loop.handed_over(evaluation=evaluation)
        if opens or (not evaluation and tracks.turned_from(self._opened_by)):
            begin = self.window.opened if opens else self.window.begins_anew
            begin(updates=self.loop.updates_applied, place=self.place(again=1))
            self._opened_by = tracks.followed
        if not evaluation:
            self.rescuer.at_hand_over(opens=opens)
        self.gate.phase = "eval" if evaluation else "train"
        stats, legal = (checked.stats, checked.legal) if checked is not None else ((), {})
        self.history.batch(stats, loader_ns=loader_ns, evaluation=evaluation, legal=legal)
        if checked is not None:
            checked = self.guard.fresh(checked)  # a prefetching loader looked at it before the last step had taught its bounds
            if checked.violation is not None or checked.warnings:
                held = batch
                batch = self.holds.met(batch, checked)
                if batch is not held:  # what the model gets is what a traced step must learn from
                    checked = self.guard.fetched(batch, indices=None, worker=None)
            if checked.on_device.looks:
                batch = self._unread.handed_over(batch, checked)
            self.guard.handed_over(checked, batch)
        if self._clearance is not None:
            self._clear()
        self.rescuer.keep(batch)
        return batch

    def _recorded(self, batch: object) -> tuple[object, Checked | None]:
        """What a replay puts in the place of the loop's own batch, as the guard sees it."""
        from torch_watchdog_agent.rescue import bundle

        batch = bundle.read_into(Path(self.config.replay or ""), batch)
        return batch, self.fetched(batch, indices=None, worker=None)

    def _clear(self) -> None:
        """The other ranks may pass the gate of this step, as far as the batches handed over so far go."""
        if self._clearance is not None and not self._unread:
            self._clearance.handed_over(self.loop.step, self.loop.micro_step)

    def _settle(self) -> None:
        """What a device still has to say about the batches at hand is heard before backward, and before the gate where there was none."""
        if self._unread.settle(wait=True):
            self._clear()

    def notice(self, violation: Violation) -> None:
        where = self.loop
        self.tell(Noticed(rank=self.identity.rank, step=where.step, micro_step=where.micro_step, violation=violation))

    def write_contract(self) -> None:
        """What has been learned by now, for whoever looks at the run."""
        self._contract.write(self.guard.contract())

    def failed(self, error: BaseException) -> None:
        """An exception ends the training: tell it, and name the batch behind it, where the guard had doubted that batch."""
        self.rescuer.noticed(error)  # before all that takes its time: another rank may fail a millisecond later
        violation = None if self.holds.stood_in_at == self.loop.step else self.guard.diagnose(error)
        if self.scan is not None:
            self.scan.failed = True
        if violation is not None:
            self.holds.refused(violation)  # first the batch, then what came of it: the daemon judges a failure at once
        self.rescuer.failed(error)

    def exits(self, error: SystemExit, words: Words) -> None:
        """The script ends by an exit of its own, with a bad status; an end by an order of ours is none."""
        if self._leaving:
            return
        self.history.note(words.text, level=2)
        if self.scan is not None:
            self.scan.failed = True
        self.rescuer.failed(error, words)

    def loss_seen(self, loss: Any, *, on_cuda: bool) -> None:
        """Backward is about to start from `loss`. Where its value is at hand and is no number, the batch is too."""
        if self._unread.under_check or on_cuda:
            self._settle()
        if self.loop.feeds_itself and self.rescuer.begins_itself():
            self.at_gate.begins_itself()
        if self.window.schedule.looks:
            self.window.begun()
        if self.window.hands.before:
            self.window.hands.look()
        value = self.history.loss_seen(loss)
        self._loss_is_under_way = value is None
        tracks.used()
        if value is None and self.config.watch_modules and loss.numel() == 1:
            value = float(loss.detach())  # what was asked for waits for the device at every module already
        self._not_finite.look(value)

    def out_of_step(self, mismatch: Mismatch) -> None:
        """Another rank of this node has called another collective than this rank is about to call. Once: what follows, follows from it."""
        from torch_watchdog_agent.contract.frames import user_line

        self.lockstep = None
        self.notice(violation_of(mismatch, self.identity, source=user_line()))

    # The gate

    def enter_gate(self, optimizer: Any) -> int | None:
        """Before a parameter changes. Returns the window's number, VETOED where the update must not be applied, None inside a save of ours."""
        number = self._at_gate(optimizer)
        if number is not None and number != VETOED:
            self.rescuer.at_gate(optimizer)
            self.history.update_since_ns = time.monotonic_ns() if optimizer is not None else 0
        return number

    def gate_without_update(self, optimizer: Any) -> int | None:
        """A GradScaler has found gradients that are not finite and calls no update. The window ends here all the same, and orders find their gate."""
        number = self._at_gate(optimizer)
        if number is not None and number != VETOED:
            self.at_gate.go_on(number, applied=False)
            self.rescuer.after_gate(window_closed=False)
        return number

    def _at_gate(self, optimizer: Any) -> int | None:
        if self.saver.busy:
            return None
        self.history.update_since_ns = 0  # unless one begins now
        stepping = 0 if optimizer is None else self.subjects.optimizer_seen(optimizer)
        self._gates_seen = True
        if self._unread.under_check:
            self._settle()
        if self._loss_is_under_way:
            self._not_finite.look(self.history.newest_loss())
        self._trains_in_eval |= self.evaluating()
        number = self.loop.at_gate(stepping)
        if self.loop.is_new_at_gate or (self.loop.fed_elsewhere and not self.loop.trained_on):
            self.at_gate.opened()
        elif self.loop.feeds_itself and self.loop.is_begun:
            self.at_gate.begins_itself()
        if self._clearance is not None and self.loop.drains and not self.loop.trained_on:
            self._clearance.handed_over(number, -1)
        self.guard.step_ended(drains=self.loop.drained is not None)
        if self._clearance is not None and self.guarding and (self.loop.micro_step >= 0 or self.loop.drains):
            from torch_watchdog_agent.hooks.device import backward_finished

            self._clearance.wait(number, self.loop.micro_step, finished=backward_finished(), timeout_s=3 * self.config.hold_timeout_s)
        if self.window.schedule.looks:
            self.window.begun()
            self.window.schedule.at_gate()
        self.window.hands.look(at_gate=True)
        decision = self.gate.judge(number)
        if isinstance(decision, Act):
            self.at_gate.act(decision.commit, number)
            decision = self.gate.judge(number)  # a checkpoint without a stop: the update follows it
        if isinstance(decision, Skip):
            self.at_gate.skip(decision, number)
            return VETOED
        return number

    def leave_gate(self, number: int) -> None:
        """The update of the window has been applied."""
        if self.config.replay is not None:
            self.say("the recorded batch went through forward, backward and update without an error")
            raise SystemExit(0)
        if self.scan is not None:
            self.scan.updated(self.loop)
        self.window.hands.updated()
        if self.window.schedule.learns or self.window.behind_data:
            self.window.updated()
        self.rescuer.after_gate(window_closed=self.at_gate.go_on(number, applied=True))
