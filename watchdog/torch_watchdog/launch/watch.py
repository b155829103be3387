"""Everything of ours that is open while the command runs: folders, node agent, job.json, and (`seat.py`) the daemon.

Owns their order of opening and closing. It must not know signals or the terminal's words at the end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import Any

from torch_watchdog.config import LaunchConfig
from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.errors import WatchdogError
from torch_watchdog.launch.job_end import JobEnd
from torch_watchdog.launch.places import here, open_ring_dir, open_runtime_dir
from torch_watchdog.launch.plan import LaunchPlan, is_by_accelerate, is_launcher, is_solo, options_to_resume, plan_launch, without_secrets
from torch_watchdog.launch.record import JobStart, at_end, at_start
from torch_watchdog.launch.say import PREFIX, say
from torch_watchdog.launch.seat import Seat, take_seat
from torch_watchdog.launch.unsaid import PATIENCE_S, hand_in, leave_note
from torch_watchdog.phrases import as_typed
from torch_watchdog.rules.limits import SizeLimits, limits_of
from torch_watchdog.store.run_directory import RunDirectory, reserve, write_json, write_last
from torch_watchdog.user import user_name
from torch_watchdog_agent.asked import TAKEN
from torch_watchdog_agent.config import AgentConfig
from torch_watchdog_agent.node.agent import NodeAgent
from torch_watchdog_agent.node.config import JobOutcome, NodeConfig
from torch_watchdog_agent.node.keepers import newest_attempt
from torch_watchdog_proto import __version__
from torch_watchdog_proto.envelopes import JobStatus, JoinAnswer
from torch_watchdog_proto.messages import NodeGoodbye, NodeHello

__all__ = ["Watch", "open_watch", "shim_dir"]

QUESTION_TIMEOUT_S = 2.0
ROOM_FOR_THE_END = 16_384
ENDS_A_LAUNCH = frozenset({SIGINT, SIGTERM, SIGHUP, SIGQUIT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A launch that is ready to run `plan.command`."""

    plan: LaunchPlan
    seat: Seat
    ring_dir: Path
    runtime_dir: Path
    node: NodeAgent
    record: Mapping[str, Any]

    @property
    def directory(self) -> RunDirectory:
        return self.seat.directory

    @property
    def joined(self) -> JoinAnswer | None:
        """The job of another node that this launch is a part of."""
        return self.seat.joined

    @property
    def job(self) -> str:
        return self.directory.root.name

    def heard_from_a_rank(self) -> bool:
        """A rank's first act is to make its ring."""
        return next(self.ring_dir.glob("*.ring"), None) is not None

    def resumed(self) -> str | None:
        """The checkpoint of --resume, where a rank said that it took it."""
        return self._resume() if self.restores() else None

    def unused_resume(self) -> str | None:
        """And where none did."""
        return None if self.restores() else self._resume()

    def _resume(self) -> str | None:
        return str(self.record.get("resume") or "") or None

    def restores(self) -> bool:
        """Whether the script, or its framework, has asked what there is to go on from."""
        return (self.directory.root / TAKEN).exists()

    def stopped_s(self) -> float | None:
        """For how long all ranks of this node have been gone on an order to all of the job, where a launcher of several nodes has started them; else None."""
        meets = self.seat.rendezvous
        return self.node.stopped_s() if meets is not None and meets.nodes > 1 and is_launcher(self.plan.command) else None

    def ranks_at_work(self) -> int:
        """How many ranks of this node live and have an order to carry out: to save, most of all."""
        return self.node.ranks_at_work()

    def ranks_to_go_on(self) -> tuple[int, ...]:
        """The pids of this node's ranks that live, and do not end by themselves."""
        return self.node.ranks_to_go_on()

    def ranks_heard(self) -> int:
        """How many ranks of this launch have left a trace here: a log, or what they learned. For where no daemon can tell."""
        traces = [*self.directory.logs.glob("rank-*.log"), *self.directory.contract_file(0).parent.glob("rank-*.json")]
        return len({path.stem for path in traces})

    def newest_attempt(self) -> int:
        """Of the launcher's starts, as this node has seen it: the last may have failed before any of its ranks was heard of."""
        return newest_attempt(self.runtime_dir)

    def has_lost_its_record(self) -> bool:
        """Somebody has removed the folder, or what it held."""
        return self.joined is None and not self.directory.job_file.exists()

    @property
    def saves_on_signal(self) -> bool:
        return self.seat.config.saves_on_signal

    def signal_ranks(self, number: int) -> None:
        self.node.signal_ranks(number)

    def is_ended_by(self, number: int) -> bool:
        """Whether this signal asks for the end of the launch, and is not made an order of the job's."""
        return number in ENDS_A_LAUNCH and not (number == SIGTERM and self.saves_on_signal)

    def signalled(self, number: int) -> None:
        """The launch got a signal. What asks for its end ends the ranks by itself: nothing failed."""
        if self.is_ended_by(number):
            self.node.asked_to_end(number)

    def finish(self, exit_code: int, signal: int | None) -> JobOutcome:
        return self.node.finish(exit_code, signal)

    def last_status(self) -> JobStatus | None:
        """The job as the daemon has it after the goodbye; None where it does not answer, or does not show it to this token."""
        try:
            with _client(self.seat) as client:
                return client.job(self.job)
        except WatchdogError:
            return None

    def leave_note(self, exit_code: int, signal: int | None) -> None:
        """For a daemon of others, which goes on after this launch and did not hear its end; one note for all nodes."""
        seat, meets = self.seat, self.seat.rendezvous
        if self.joined is None and seat.config.daemon != "auto":
            hello = NodeHello(
                job=self.job, node=seat.node, version=__version__, policy=seat.config.policy, command=(), run_dir=str(self.directory.root),
                session=seat.session, nodes=meets.nodes if meets else 1, rendezvous=meets.key if meets else "",
            )  # fmt: skip
            leave_note(self.directory.root.parent, seat.daemon, hello, NodeGoodbye(exit_code=exit_code, signal=signal))

    def write_end(self, end: JobEnd, exit_reason: str, *, world_size: int) -> None:
        """The record is the host's where there are several nodes."""
        if self.joined is not None:
            return
        ended = at_end(self.record, end, ended=datetime.now(UTC), exit_reason=exit_reason, world_size=world_size)
        write_last(self.directory.job_file, ended, reserved=self.directory.reserved_file)


@contextlib.contextmanager
def open_watch(config: LaunchConfig, command: Sequence[str], options: Sequence[str]) -> Iterator[Watch]:
    """Raises whatever keeps a part of ours from starting: the caller runs the command without us."""
    session = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        runtime_dir = stack.enter_context(open_runtime_dir(session, os.environ))
        ring_dir = _ring_dir(stack, session, runtime_dir)
        seat = take_seat(stack, config, command, session=session, runtime_dir=runtime_dir)
        node_config = _node_config(seat, command, runtime_dir, ring_dir)
        plan = plan_launch(command, os.environ, shim_dir=shim_dir(), agent=_agent_config(seat.config, node_config, command).to_env())
        options = options_to_resume(options, node_config.job, pages=bool(seat.config.alerts) or seat.config.daemon != "auto")
        record = at_start(_job_start(seat, node_config, options), list(os.environ))
        if seat.joined is None:
            write_json(seat.directory.job_file, record)
            reserve(seat.directory.reserved_file, seat.directory.job_file.stat().st_size + ROOM_FOR_THE_END)
        node = NodeAgent(node_config, say=_without_prefix)
        node.start()  # the last thing that can fail: its thread would go on, and miss what is closed then
        say(_first_words(seat))
        if seat.config.daemon != "auto":
            hand_in(seat.directory.root.parent, seat.daemon, lambda: _client(seat, timeout_s=PATIENCE_S))
        yield Watch(plan=plan, seat=seat, ring_dir=ring_dir, runtime_dir=runtime_dir, node=node, record=record)


def _client(seat: Seat, *, timeout_s: float = QUESTION_TIMEOUT_S) -> DaemonClient:
    return DaemonClient(seat.daemon, token=seat.token() or "", timeout_s=timeout_s, authority=seat.authority)


def _first_words(seat: Seat) -> str:
    place = as_typed(str(seat.directory.root), str(Path.cwd()))
    words = f"job {seat.directory.root.name}: policy {seat.config.policy}, files in {place}{_left_out(seat.config.quarantine)}"
    if seat.joined is not None:
        return f"{words}; this is its node {seat.node}, node {seat.joined.hosted_by} decides"
    return words if seat.rendezvous is None else f"{words}; {seat.rendezvous.nodes} nodes, this one ({seat.node}) decides"


def _ring_dir(stack: contextlib.ExitStack, session: str, runtime_dir: Path) -> Path:
    try:
        return stack.enter_context(open_ring_dir(session))
    except OSError as error:
        say(f"no shared memory for the rings ({error}): they are kept in {runtime_dir}")
        return runtime_dir


def _left_out(quarantine: Path | None) -> str:
    if quarantine is None:
        return ""
    return f"; samples left out from the start: {len(quarantine.read_bytes().splitlines())} (--quarantine)"


def _node_config(seat: Seat, command: Sequence[str], runtime_dir: Path, ring_dir: Path) -> NodeConfig:
    meets = seat.rendezvous
    return NodeConfig(
        job=seat.directory.root.name,
        node=seat.node,
        session=seat.session,
        policy=seat.config.policy,
        command=without_secrets(command),
        rules=seat.config.rules,
        max_skips=seat.config.max_skips,
        run_dir=seat.directory.root,
        runtime_dir=runtime_dir,
        ring_dir=ring_dir,
        daemon=seat.daemon,
        nodes=meets.nodes if meets else 1,
        node_rank=(meets.node_rank or 0) if meets else 0,
        rendezvous=meets.key if meets else "",
        token=seat.token,
        authority=seat.authority,
    )


def _agent_config(config: LaunchConfig, node: NodeConfig, command: Sequence[str]) -> AgentConfig:
    return AgentConfig(
        job=node.job,
        session=node.session,
        policy=node.policy,
        run_dir=str(node.run_dir),
        runtime_dir=str(node.runtime_dir),
        ring_dir=str(node.ring_dir),
        version=__version__,
        launcher_pid=os.getpid(),
        grace_s=config.grace_s,
        keeper=config.keeper,
        signal_grace_s=config.signal_grace_s if config.saves_on_signal else None,
        solo=is_solo(command, os.environ),
        by_accelerate=is_by_accelerate(command),
        resume=config.resume,
        bounds=config.bounds,
        scan=config.scan,
        scan_after=config.scan_after,
        replay=config.replay,
        device_gate=config.device_gate,
        bundles=config.bundles,
        watch_modules=config.watch_modules,
        watch_gradients=config.watch_gradients,
        outlier_times=limits_of(SizeLimits, config.rules).times,
    )


def _job_start(seat: Seat, node: NodeConfig, options: Sequence[str]) -> JobStart:
    return JobStart(
        job=node.job,
        session=node.session,
        command=node.command,
        folder=here(),
        options=tuple(options),
        policy=node.policy,
        daemon=node.daemon,
        network=seat.network,
        host=node.node,
        user=user_name(),
        pid=os.getpid(),
        versions={"torch_watchdog": __version__, "python": platform.python_version(), "platform": _platform()},
        resume=seat.config.resume,
        started=datetime.now(UTC),
        slurm_job_id=os.environ.get("SLURM_JOB_ID"),
    )


def _platform() -> str:
    """Without `platform.platform()`, which reads the whole interpreter to tell the version of its C library."""
    system = os.uname()
    return f"{system.sysname}-{system.release}-{system.machine}"


def shim_dir() -> str:
    """Found by path: the rank's package is never imported here to find it."""
    found = importlib.util.find_spec("torch_watchdog_agent")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError("torch_watchdog_agent is not installed beside torch_watchdog")
    return str(Path(found.submodule_search_locations[0]) / "_shim")


def _without_prefix(line: str) -> None:
    say(line.removeprefix(PREFIX).lstrip())
