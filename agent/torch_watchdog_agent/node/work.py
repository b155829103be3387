"""Everything that a node process does on its event loop: wires rings, processes, GPUs, the relay and the daemon's line together.

Owns the order of opening and closing, and the order in which this node saw things happen.
"""

from __future__ import annotations

import asyncio
import os
import signal as signals
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch_watchdog_agent.node.config import JobOutcome, NodeConfig
from torch_watchdog_agent.node.keepers import Keepers
from torch_watchdog_agent.node.lastwords import LastWords
from torch_watchdog_agent.node.loaders import look_at_loader
from torch_watchdog_agent.node.logs import RankLogs
from torch_watchdog_agent.node.memory import OomKills
from torch_watchdog_agent.node.nvml import Gpus
from torch_watchdog_agent.node.outside import stack_of
from torch_watchdog_agent.node.processes import Ended, ProcessWatch, is_alive, state_of
from torch_watchdog_agent.node.relay import Relay
from torch_watchdog_agent.node.rings import RingFolder, RingNews
from torch_watchdog_agent.node.stopped import Stopped
from torch_watchdog_agent.node.stream import DaemonLink
from torch_watchdog_proto.envelopes import ControlUp, RankSaid, TellRank
from torch_watchdog_proto.fault_points import reach
from torch_watchdog_proto.messages import Abandon, GpuSample, NodeGoodbye, NodeReport, RankEvent, RankHello, Signalled, StepBlock, StepTable
from torch_watchdog_proto.record import Note
from torch_watchdog_proto.rescue_words import Failed, Free, Look, Looked, Release

__all__ = ["NodeWork"]

_IDLE_POLLS = 5  # after so many polls that gave nothing the pauses grow
_LONGEST_PAUSE_S = 1.0
_SILENT_S = 0.7  # for a rank's own answer, before it is looked at from outside
_SETTLE_S = 0.3  # for the news of the last ranks' ends, once the command has ended
_ROWS_PER_REPORT = 16_384
_LEVELS = ("info", "warning", "error")


class NodeWork:
    """Made and used on one running loop."""

    def __init__(self, config: NodeConfig, *, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self.last_words = LastWords()
        self._relay = Relay(config.runtime_dir, on_up=self._on_up)
        self._link = DaemonLink(config, on_order=self._on_order, hellos=self._relay.hellos, say=say)
        self._processes = ProcessWatch(self._on_end)
        self._rings = RingFolder(config.ring_dir, is_alive=is_alive, say=say)
        self._gpus = _GpuPoll(config.gpu_interval_s)
        self._keepers = Keepers(config.runtime_dir)
        self._logs, self._oom_kills = RankLogs(config.run_dir / "logs"), OomKills()
        self._events: list[RankEvent] = []
        self._who: dict[int, tuple[int, int]] = {}  # pid -> (attempt, rank)
        self._stopped, self._stopped_keepers = Stopped(), Stopped()
        self._silent: set[tuple[int, int]] = set()  # (attempt, rank): asked where it is, and no answer yet
        self._looked_at: set[int] = set()  # pids, just now, for their loaders
        self._order = 0
        self._given_up: set[str] = set()  # lines
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Raises OSError where the control socket cannot be made."""
        await self._relay.open()
        self._gpus.start(asyncio.get_running_loop())
        works = ((self._link.run(), "the line to the daemon"), (self._poll_rings(), "the reader of the step records"))
        self._tasks = [asyncio.create_task(self._guarded(work, what)) for work, what in works]

    def signal_ranks(self, number: int) -> None:
        for pid in self._relay.pids():
            with suppress(OSError):
                os.kill(pid, number)

    def asked_to_end(self, number: int, time_ns: int) -> None:
        """The launch got a signal that asks for its end: the daemon is to know before it hears of the first rank's."""
        for pid in list(self._who):
            self._add_event(pid, "asked", time_ns=time_ns, signal=number, text=f"the launch got {signals.Signals(number).name}")
        self._wake.set()

    def stopped_s(self) -> float | None:
        """For how long all ranks of this node have been gone on an order to all; None where that is not so."""
        return self._relay.stopped_s

    def ranks_at_work(self) -> int:
        """How many ranks of this node live and have an order to carry out."""
        return sum(map(is_alive, self._relay.at_work()))

    def ranks_to_go_on(self) -> tuple[int, ...]:
        """The pids of this node's ranks that live, and do not end by themselves."""
        return tuple(pid for pid in self._relay.to_go_on() if is_alive(pid))

    async def end(self, exit_code: int, signal: int | None) -> JobOutcome:
        """Reads and reports what is left, then asks how the job ended."""
        await self._relay.close()
        await self._processes.settle(_SETTLE_S)
        self._tasks.pop().cancel()
        while self._poll():
            pass
        answer = await self._link.say_goodbye(NodeGoodbye(exit_code=exit_code, signal=signal))
        if answer is None:
            return JobOutcome(exit_code=None, lines=("the daemon had refused this launch: nothing was watched",))
        words = self.last_words
        return JobOutcome(
            exit_code=words.exit_code(answer.exit_code), incidents=answer.incidents, lines=answer.lines, told=True, sealed=words.sealed()
        )

    async def close(self) -> None:
        self._gpus.stop()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        with suppress(OSError):
            await self._relay.close()
        self._processes.close()
        self._rings.close()

    async def _guarded(self, work: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - a bug of ours must be told, and must not end the other parts
            self._say(f"{what} has failed ({type(error).__name__}: {error}): the training goes on without it")

    # What happens

    def _on_order(self, tell: TellRank) -> None:
        self.last_words.told(tell.order)
        if isinstance(tell.order, Release):
            reach("node", "before", tell.order)
            self._release(tell.attempt, tell.rank, kill=tell.order.kill)
        if isinstance(tell.order, Abandon):
            self._tell_given_up(f"{tell.order.aim or 'an order to all ranks'} was given up: {tell.order.reason}")
        if isinstance(tell.order, Look):
            self._tell_loader(tell.attempt, tell.rank)
            if not tell.order.generation:
                return
            self._tell_state(tell.attempt, tell.rank)
        if isinstance(tell.order, Free):
            self._keepers.freed(tell.attempt, tell.rank, tell.order.generation)
        self._relay.tell(tell)

    def _tell_given_up(self, line: str) -> None:
        """Once: every rank of the node hears of it."""
        if line not in self._given_up:
            self._given_up.add(line)
            self._say(line)

    def _tell_state(self, attempt: int, rank: int) -> None:
        """A process that is stopped cannot answer: the kernel's word for it goes beside the answers of those that can."""
        for pid in self._pids_of(attempt, rank):
            state = state_of(pid)
            if state is not None:
                self._add_event(pid, "state", text=state)
                self._wake.set()
                self._silent.add((attempt, rank))
                self._tasks.insert(0, asyncio.create_task(self._guarded(self._look_from_outside(pid), "a look at a silent rank")))

    def _tell_loader(self, attempt: int, rank: int) -> None:
        """What the rank and the workers of its loaders do; one look at a time."""
        for pid in [pid for pid in self._pids_of(attempt, rank) if pid not in self._looked_at]:
            self._looked_at.add(pid)
            self._tasks.insert(0, asyncio.create_task(self._guarded(self._look_at_loader(pid), "a look at a data loader")))

    async def _look_at_loader(self, pid: int) -> None:
        try:
            text = await asyncio.to_thread(look_at_loader, pid)
        finally:
            self._looked_at.discard(pid)
        self._add_event(pid, "workers", text=text)
        self._wake.set()

    async def _look_from_outside(self, pid: int) -> None:
        await asyncio.sleep(_SILENT_S)
        stack = await asyncio.to_thread(stack_of, pid) if self._who[pid] in self._silent else ""
        if stack:
            self._add_event(pid, "stack", text=stack)
            self._wake.set()

    def _release(self, attempt: int, rank: int, *, kill: bool) -> None:
        self._keepers.release(attempt, rank)
        for pid in self._pids_of(attempt, rank) if kill else ():
            self._processes.kill(pid)

    def _on_up(self, message: ControlUp) -> None:
        if isinstance(message, RankSaid):
            if isinstance(message.message, Signalled) and self._has_lost_one(message.attempt):
                return  # a launcher that has lost a rank sends it to the others, sooner than that end is told: nobody has preempted the job
            self.last_words.heard(message.message)
            self._on_failed(message)
            if isinstance(message.message, Looked):
                self._silent.discard((message.attempt, message.message.rank))
        if isinstance(message, RankSaid) and isinstance(message.message, RankHello):
            hello = message.message
            self._meet(hello.pid, hello.attempt, hello.rank)
        self._link.tell(message)

    def _has_lost_one(self, attempt: int) -> bool:
        return self._processes.has_lost(pid for pid, (number, _) in self._who.items() if number == attempt)

    def _on_failed(self, said: RankSaid) -> None:
        """What the CUDA runtime printed tells more than the exception: it must reach the daemon with it."""
        pids = self._pids_of(said.attempt, said.message.rank)
        if isinstance(said.message, Failed) and pids:
            self._look_at_log(pids[-1])
            self._wake.set()

    def _on_end(self, ended: Ended) -> None:
        self._look_at_log(ended.pid, killed=ended.signal == signals.SIGKILL)
        self._stopped.ended(ended.pid)
        on_device = self._rings.updates_on_device(ended.pid)
        self.last_words.ended(self._who[ended.pid][1], exit_code=ended.exit_code, signal=ended.signal)
        self._add_event(ended.pid, "exited", exit_code=ended.exit_code, signal=ended.signal, updates_on_device=on_device)
        self._keepers.ended(*self._who[ended.pid])
        keeper = self._processes.keeper_of(ended.pid)
        if keeper is not None:
            self._stopped_keepers.begun(keeper)  # from now on the launcher waits for it
        self._wake.set()

    def _look_at_log(self, pid: int, *, killed: bool = False) -> None:
        """Before the end itself is told: the daemon then knows what led to it."""
        lines = self._logs.look(self._who[pid][1])
        if killed and self._oom_kills.new():
            lines.append("oom-kill: the kernel has killed a process of this container for want of memory")
        for line in lines:
            self._add_event(pid, "log", text=line, level="warning")

    def _meet(self, pid: int, attempt: int, rank: int) -> None:
        if pid not in self._who:
            self._who[pid] = (attempt, rank)
            self._logs.begin(rank)
            self._stopped.begun(pid)
            self._add_event(pid, "started")
            self._processes.watch(pid)

    def _pids_of(self, attempt: int, rank: int) -> list[int]:
        """In the order in which they were met: more than one process may have been that rank."""
        return [pid for pid, who in self._who.items() if who == (attempt, rank)]

    def _add_event(self, pid: int, kind: str, **more: object) -> None:
        attempt, rank = self._who[pid]
        self._order += 1
        known = {"time_ns": time.time_ns()} | more
        event = RankEvent(rank=rank, attempt=attempt, pid=pid, kind=kind, order=self._order, **known)  # type: ignore[arg-type]
        self._events.append(event)

    # Rings

    async def _poll_rings(self) -> None:
        idle = 0
        while True:
            idle = 0 if self._poll() else idle + 1
            self._wake.clear()
            pause_s = min(self._config.poll_interval_s * max(1, idle - _IDLE_POLLS), _LONGEST_PAUSE_S)
            with suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it may lose a cancellation.
                async with asyncio.timeout(max(pause_s, self._link.report_every_s)):
                    await self._wake.wait()

    def _poll(self) -> bool:
        """One look at everything; reports what is new. False where nothing was."""
        for tell in self._keepers.without_a_daemon(self._link.lost_s()):
            self._relay.tell(tell)
        for pid, state in self._stopped.changes():
            self._add_event(pid, "state", text=state)
        for keeper, state in self._stopped_keepers.changes():
            if state == "T":
                lets_go = f"`kill -CONT {keeper}` lets it go on, `kill -9 {keeper}` ends it"
                self._say(f"the launcher waits for a rank that has ended: its keeper, pid {keeper}, is stopped (SIGSTOP); {lets_go}")
        news = self._rings.poll()
        for one in news:
            self._meet(one.header.pid, one.header.attempt, one.header.rank)
            self._note(one)
        blocks = [block for one in news for block in one.blocks]
        events, self._events = self._events, []
        gpus = self._gpus.take()
        for report in _reports(blocks, events, gpus):
            self._link.report(report)
        return bool(news or events)

    def _note(self, news: RingNews) -> None:
        for note in news.notes:
            self._add_event(news.header.pid, "note", text=note.text, level=_level(note))


def _level(note: Note) -> str:
    return _LEVELS[min(note.level, len(_LEVELS) - 1)]


def _reports(blocks: Sequence[StepBlock], events: Sequence[RankEvent], gpus: Sequence[GpuSample]) -> Iterator[NodeReport]:
    """In pieces that stay well below a message's size. The events come last: what led to them is known by then."""
    pieces = list(_pieces(blocks))
    if not pieces and (events or gpus):
        pieces = [()]
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        yield NodeReport(
            seq=0, time_ns=time.time_ns(), steps=StepTable.of(piece), events=tuple(events) if last else (), gpus=tuple(gpus) if last else ()
        )  # fmt: skip


def _pieces(blocks: Iterable[StepBlock]) -> Iterator[tuple[StepBlock, ...]]:
    piece: list[StepBlock] = []
    rows = 0
    for block in blocks:
        size = len(block.micro_step) + len(block.step) + sum(len(tensor.rows) for tensor in block.tensors)
        if piece and rows + size > _ROWS_PER_REPORT:
            yield tuple(piece)
            piece, rows = [], 0
        piece.append(block)
        rows += size
    if piece:
        yield tuple(piece)


class _GpuPoll:
    """A daemon thread: NVML may hang for as long as a broken driver likes, and nobody may wait for it."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._samples: list[GpuSample] = []
        self._stop = threading.Event()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        threading.Thread(target=self._run, args=(loop,), name="torch-watchdog-nvml", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def take(self) -> list[GpuSample]:
        samples, self._samples = self._samples, []
        return samples

    def _add(self, samples: Sequence[GpuSample]) -> None:
        self._samples += samples

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        gpus: Gpus | None = None
        with suppress(RuntimeError):  # the loop has ended
            while not self._stop.wait(self._interval_s):  # first: loading the library must not slow the start of the launch
                gpus = gpus or Gpus.open()
                if gpus is None:
                    return
                loop.call_soon_threadsafe(self._add, gpus.samples())
        if gpus is not None:
            gpus.close()
