"""START HERE for a launch: open what watches, run the command, say how it went, end as it did.

Owns the life of the wrapper process. Nothing of ours that fails may keep the command from running as it was given: whatever cannot be opened
is said in one line, and the command runs plain. It must not know torch, nor what the daemon decides or why.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from torch_watchdog.config import LaunchConfig
from torch_watchdog.job.hangs import ITSELF
from torch_watchdog.job.incident import is_order
from torch_watchdog.launch import signals
from torch_watchdog.launch.job_end import JobEnd
from torch_watchdog.launch.places import here
from torch_watchdog.launch.plain import become, become_for, cannot_start, described
from torch_watchdog.launch.plan import AGENT_VARIABLE, is_by_accelerate, is_launcher, ranks_asked_for
from torch_watchdog.launch.say import say
from torch_watchdog.launch.summary import LAST_LINES, has_failed_of_its_batch, left_behind, summarise
from torch_watchdog.launch.watch import ENDS_A_LAUNCH, Watch, open_watch
from torch_watchdog.launch.witness import Witness, open_witness
from torch_watchdog.phrases import count, ended_by
from torch_watchdog.replay.recorded import batch_of
from torch_watchdog.store.checkpoints import unfinished_checkpoints
from torch_watchdog_agent.node.config import JobOutcome
from torch_watchdog_proto.messages import EXIT_FAILED

__all__ = ["launch"]

SWITCH = "TORCH_WATCHDOG"  # "off": the command is executed as if we were not installed
SILENCE_WORTH_A_LINE_S = 300.0
OTHER_NODES_S = 30.0  # for their launchers, once our ranks have left on an order to all
RECORD_LOST = "the run directory was removed while the job ran: what it held of steps, incidents and logs is lost"
_T = TypeVar("_T")


def launch(config: LaunchConfig, command: Sequence[str], *, options: Sequence[str] = ()) -> NoReturn:
    """Runs the command under the watchdog and ends this process as the job ended. `options` are ours, as they were given."""
    is_off = os.environ.get(SWITCH, "").lower() == "off"
    if is_off and config.resume:
        say(f"{SWITCH}=off: --resume {config.resume} is handed to nobody, and restore() finds nothing to go on from")
    if is_off or is_watched_already(os.environ):
        become(command)
    mask, came = signals.block_signals(), list[signal.Signals]()
    with contextlib.ExitStack() as stack:
        witness = stack.enter_context(open_witness(signals.FORWARDED))
        try:
            watch = stack.enter_context(open_watch(config, command, options))
        except Exception as error:  # noqa: BLE001 - whatever it is, the training runs
            stack.close()
            signals.unblock_signals(mask)
            become_for(error, command)
        status = run_command(watch, mask, witness, came=came.append)
        decided = _guarded(lambda: conclude(watch, status, watch.record["options"], came=came))
    if decided is not None:
        sys.exit(decided)
    signals.end_like(status, mask)


def is_watched_already(environment: Mapping[str, str]) -> bool:
    """Whether a live launch above us has its ranks watched: `watchdog` inside `watchdog` adds nothing."""
    try:
        launcher_pid = int(json.loads(environment.get(AGENT_VARIABLE, "null"))["launcher_pid"])
        return launcher_pid in _ancestors(os.getpid())
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return False


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1:
        try:
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        except OSError:
            break
        pid = int(after_name.split()[1])
        found.add(pid)
    return found


def run_command(watch: Watch, mask: set[int], witness: Witness, *, came: Callable[[signal.Signals], object]) -> int:
    """The wait status of the command, or one that says why it was never started. `came`: is told each signal from outside."""
    early = signals.pending_end()
    if early is not None:
        return early  # as a wait status: died by this signal
    instead = _for_the_ranks_alone(watch)
    try:
        pid = signals.spawn(watch.plan.command, {**os.environ, **watch.plan.environment}, mask=mask, ignored=tuple(instead))
    except OSError as error:
        return cannot_start(watch.plan.command, error) << 8
    instead |= _for_a_lone_rank(watch, pid)

    ticks = _silence(watch, started_s=time.monotonic()), _waiting_for_nodes(watch, pid)

    def tick() -> None:
        for each in ticks:
            each()

    def noted(number: signal.Signals) -> None:
        came(number)
        _guarded(lambda: watch.signalled(number))
        if number in ENDS_A_LAUNCH and _guarded(watch.stopped_s) is not None:
            signals.send(pid, signal.SIGKILL)  # nothing of the job is left, and it may hear no other

    status = signals.wait_forwarding(pid, witness, tick=tick, came=noted, instead=instead)
    _guarded(lambda: _wait_for_ranks(watch, status, came))
    return status


def _wait_for_ranks(watch: Watch, status: int, came: Callable[[signal.Signals], object]) -> None:
    """A launcher that was killed leaves its ranks behind: those that save are seen to their end, and no other launch begins beside them."""
    at_work, is_asked = watch.ranks_at_work(), False
    if not at_work:
        return

    def passed_on(number: signal.Signals) -> None:
        nonlocal is_asked
        came(number)
        watch.signal_ranks(number)
        is_asked |= watch.is_ended_by(number)

    code, grace_s = signals.exit_code_of(status), watch.seat.config.grace_s
    say(f"the command has ended ({code}) before {count(at_work, 'rank')} that may be saving: the launch waits for up to {grace_s:g} s")
    signals.wait_while(lambda: not is_asked and watch.ranks_at_work() > 0, within_s=grace_s, came=passed_on)


def _waiting_for_nodes(watch: Watch, pid: int) -> Callable[[], None]:
    """After its ranks torchrun meets the launchers of the other nodes once more. Where one of them was ended by a signal it waits for minutes, and hears no
    signal but SIGKILL."""

    def tick() -> None:
        stopped_s = _guarded(watch.stopped_s)
        if stopped_s is not None and stopped_s >= OTHER_NODES_S:
            say(f"all ranks of this node left as ordered {stopped_s:.0f} s ago, and its launcher still waits for other nodes': it is ended")
            signals.send(pid, signal.SIGKILL)

    return tick


def _for_the_ranks_alone(watch: Watch) -> dict[signal.Signals, Callable[[], None]]:
    """torchrun would end by SIGUSR1, and leave its ranks behind: it gets none, and they get what was meant for them."""
    if not watch.saves_on_signal or not is_launcher(watch.plan.command):
        return {}
    return {signal.SIGUSR1: lambda: watch.signal_ranks(signal.SIGUSR1)}


def _for_a_lone_rank(watch: Watch, pid: int) -> dict[signal.Signals, Callable[[], None]]:
    """`accelerate launch` would end by SIGTERM and leave the one process that it has started behind, training on: that gets it. To several it is passed on."""

    def told() -> None:
        if watch.ranks_heard() == 1:
            watch.signal_ranks(signal.SIGTERM)
        else:
            signals.send(pid, signal.SIGTERM)

    return {signal.SIGTERM: told} if watch.saves_on_signal and is_by_accelerate(watch.plan.command) else {}


def _silence(watch: Watch, *, started_s: float) -> Callable[[], None]:
    """Says once that no rank has spoken for long: a launch that seems to be watched and is not would be worse than none."""
    settled = False

    def tick() -> None:
        nonlocal settled
        if settled:
            return
        settled = bool(_guarded(watch.heard_from_a_rank))  # asked all the time: later its rings may be gone again
        if not settled and time.monotonic() - started_s >= SILENCE_WORTH_A_LINE_S:
            settled = True
            asked = ranks_asked_for(watch.plan.command, os.environ)
            say(
                f"0 of {asked or '?'} ranks reported in {SILENCE_WORTH_A_LINE_S:.0f} s: nothing is watched so far (python -I, -E and -S skip us)"
            )

    return tick


def conclude(watch: Watch, status: int, options: Sequence[str], *, came: Sequence[signal.Signals]) -> int | None:
    """Reads what is left, writes job.json, says how it went. `came`: signals from outside. Returns the exit code where the watchdog decided it,
    whatever else fails."""
    own_code = signals.exit_code_of(status)
    by_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    left = _guarded(watch.ranks_to_go_on) if by_signal else None
    outcome = watch.finish(own_code, by_signal)
    if not outcome.told:
        _guarded(lambda: watch.leave_note(own_code, by_signal))
    decided = None if outcome.exit_code is None else watch.seat.config.exit_codes.get(outcome.exit_code, outcome.exit_code)
    code = own_code if decided is None else decided
    _guarded(lambda: _tell_end(watch, status, options, outcome, code, left=left or (), came=came))
    return decided


def _tell_end(
    watch: Watch,
    status: int,
    options: Sequence[str],
    outcome: JobOutcome,
    exit_code: int,
    *,
    left: Sequence[int],
    came: Sequence[signal.Signals],
) -> None:
    last = watch.last_status()
    reported = len(last.ranks) if last else watch.ranks_heard()
    ranks = last.ranks if last else ()
    end = JobEnd(
        job=watch.job,
        run_dir=str(watch.directory.root) if watch.joined is None else watch.joined.run_dir,
        recorded_by=watch.joined.hosted_by if watch.joined else None,
        exit_code=exit_code,
        stopped_by_us=_was_stopped(outcome),
        signalled=_asks_for_the_end(came, status),
        ranks_reported=reported,
        ranks_expected=(last.world_size if last else 0) or ranks_asked_for(watch.plan.command, os.environ),
        steps=max((rank.last_step + 1 for rank in ranks if rank.last_step is not None), default=0) if last else None,
        began_at_update=next((rank.began_at_update for rank in ranks if rank.began_at_update is not None), None),
        updates=max((rank.updates_applied for rank in ranks if rank.updates_applied is not None), default=None),
        attempt=max(last.attempt if last else 0, _guarded(watch.newest_attempt) or 0),
        standstill=last.standstill.partition(ITSELF)[0] if last else "",
        left_behind=tuple(sorted(left)),
        replays=_guarded(lambda: batch_of(Path(replay))) or Path(replay).name if (replay := watch.seat.config.replay) else "",
        told=last is not None or outcome.told,
        unjudged=outcome.unjudged,
        options=tuple(options),
        command=watch.plan.command,
        here=here(),
        resumed=watch.resumed(),
        unused_resume=watch.unused_resume(),
        restores=watch.restores(),
        quarantine=str(watch.directory.quarantine_file) if watch.directory.quarantine_file.exists() else None,
        sealed=outcome.sealed,
        unfinished=() if left else unfinished_checkpoints(watch.directory.root / "checkpoints"),
    )
    has_lost_its_record = _guarded(watch.has_lost_its_record)
    _guarded(lambda: watch.write_end(end, _reason(outcome, status, end), world_size=last.world_size if last else 0))
    lost = [RECORD_LOST] if has_lost_its_record else []
    for line in [*outcome.lines, *lost, *(_guarded(lambda: summarise(outcome.incidents, end)) or ())][:LAST_LINES]:
        say(line)


def _asks_for_the_end(came: Sequence[signal.Signals], status: int) -> str:
    """The signal from outside that ended the command, by its name, or ""; also where it came before the command was started, or to it alone."""
    own = [os.WTERMSIG(status)] if os.WIFSIGNALED(status) and os.WTERMSIG(status) in signals.FORWARDED else []
    ends = [number for number in (*came, *own) if number not in (signal.SIGUSR1, signal.SIGUSR2)]
    return signal.Signals(ends[0]).name if ends else ""


def _was_stopped(outcome: JobOutcome) -> bool:
    """By an order of ours, also one that has saved nothing; a failure that the launcher took for a good end is none."""
    orders = [(incident.get("action") or {}).get("exit_code") for incident in outcome.incidents if is_order(incident)]
    return outcome.exit_code not in (None, EXIT_FAILED) or (outcome.exit_code is not None and outcome.exit_code in orders)


def _reason(outcome: JobOutcome, status: int, end: JobEnd) -> str:
    if outcome.exit_code == EXIT_FAILED and not _was_stopped(outcome):
        return "failed"
    if outcome.exit_code is not None:
        ours = [one for one in outcome.incidents if (one.get("action") or {}).get("exit_code") is not None]
        has_failed = bool(ours) and has_failed_of_its_batch(ours[0]["action"], end)
        return f"{'failed on a bad batch' if has_failed else 'stopped by the watchdog'}: {ours[0].get('kind') if ours else 'on request'}"
    if end.signalled and status and all(map(is_order, outcome.incidents)):
        return ended_by(end.signalled)
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}" + (f"; {left_behind(end.left_behind)}" if end.left_behind else "")
    return "finished" if os.WEXITSTATUS(status) == 0 else "failed"


def _guarded(action: Callable[[], _T]) -> _T | None:
    """Our own end never changes the command's."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - whatever it is, the command's exit code must come out
        say(f"the end of this launch could not be told: {described(error)}")
        return None
