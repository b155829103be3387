"""rank.died, rank.exception, rank.assert, rank.hang, rank.desync, memory.oom, loader.worker_died: what the first failure is called, and the sentences about it.

Pure: the judgement of `job/first_failure.py` in, kind and words out.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch_watchdog.job.first_failure import ASKED_TO_END, FirstFailure, RankEnd
from torch_watchdog.job.standstill import STOPPED
from torch_watchdog.rules.assertions import Assertion, Catalogue
from torch_watchdog.rules.ddp import ddp_error
from torch_watchdog.rules.loader_died import LoaderDeath, loader_death
from torch_watchdog.rules.named import named
from torch_watchdog_proto.sentences import and_then, count

__all__ = ["AFTER_ITS_END", "LETS_GO_ON", "THEIRS_FOLLOW", "Files", "Verdict", "judge", "not_after_all", "of_the_others", "raised_besides"]

NOTHING_KNOWN = Catalogue()
PATIENCE_S = 3.0  # from the first failure on, for those whose cause is nearer to the root

LETS_GO_ON = "; until it is ended, `kill -CONT` lets such a process go on"
AFTER_ITS_END = ", after its training was over"  # what a SIGTERM ended had trained all that it was to train
THEIRS_FOLLOW = "; what any other rank raises follows from this one"
_HAD_ENDED = "; the training had come to its own end by then"
_WHO_STOPPED_THE_RANK = "find who stopped it: a debugger, a scheduler that suspends jobs, a shell's Ctrl-Z"
_WHO_STOPPED_IT = "look at who stopped the job, and why"
_MODEL_IS_SAVED = (
    "look whether what the script does behind its training was done (its model saved, say): its loop has nothing left to train, and there is no need to "
    "launch it again"
)
_THREADS_END_FIRST = (
    "end the script with torch.distributed.destroy_process_group() and `time.sleep(0.5)` behind it, until torch's own threads have ended (gloo's abort an exit "
    "in between now and then, without a watchdog, too); where that is not enough find the library whose threads outlive the script"
)
_PEERS_TOO = "; and look at the other ranks: one may have gone without a word, or have become another program (os.exec)"
_MOST_BESIDES, _LONG_ERROR = 2, 200
_HIGHEST_STATUS = 255
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate|MemoryError|oom-kill", re.IGNORECASE)
_WHAT = re.compile(r"what\(\): *(.+)")
_TELLS_LITTLE = re.compile(
    r"SystemExit|.*(CUDA|CUBLAS|CUDNN|cuDNN|NCCL|DataLoader worker \(pid)"
)  # of why: the rest of its words was printed
_OUT_OF_HOST_MEMORY = re.compile(r"DefaultCPUAllocator|(?<!OutOf)MemoryError", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the first failure is called, and the sentences about it. `assertion`: the device-side assertion behind it."""

    kind: Literal[
        "rank.died", "rank.exception", "rank.assert", "rank.hang", "rank.desync", "memory.oom", "config.ddp", "loader.worker_died"
    ]
    severity: Literal["warning", "critical"]
    summary: str
    cause: str
    fix: str
    assertion: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What a person is sent to: the folder of the ranks' logs, and the stacks beside the incident."""

    logs: str = "logs"
    stacks: str = "stacks.txt"

    def log(self, end: RankEnd) -> str:
        return f"{self.logs}/rank-{end.rank}.log"


def judge(first: FirstFailure, known: Catalogue = NOTHING_KNOWN, files: Files = Files(), *, alone: bool = False) -> Verdict:
    """The kind and the words for the first failure. `known`: the catalogue of device-side assertions; `alone`: no other rank is known."""
    verdict = _judge(first, known, files, alone=alone)
    more = raised_besides(first.besides, first.culprits[0].text)
    return replace(verdict, cause=and_then(verdict.cause, more)) if more else verdict


def raised_besides(ends: Sequence[RankEnd], first: str) -> str:
    """Of ranks that failed by themselves after the first, which raised `first`: `rank 1 raised an error of its own after it: ...`; empty where none did."""
    same, others = [end.rank for end in ends if end.text == first], [end for end in ends if end.text != first]
    parts = [f"{named(same)} raised the same by {'itself' if len(same) == 1 else 'themselves'}"] if same else []
    parts += [f"rank {end.rank} raised an error of its own after it: {_short(end.text)}{_at(end)}" for end in others[:_MOST_BESIDES]]
    more = len(others) - _MOST_BESIDES
    return "; ".join([*parts, f"{count(more, 'more rank')} raised errors of their own"] if more > 0 else parts)


def of_the_others(besides: Sequence[RankEnd], first: str) -> str:
    """Of what other ranks raise than the first, in a fix."""
    if not besides:
        return THEIRS_FOLLOW
    own = any(end.text != first for end in besides)
    return "; what the cause names of other ranks is their own, and does not follow from this one" if own else ""


def _short(text: str) -> str:
    return text if len(text) <= _LONG_ERROR else f"{text[:_LONG_ERROR]} ..."


def _judge(first: FirstFailure, known: Catalogue, files: Files, *, alone: bool) -> Verdict:
    end = first.culprits[0]
    where = _where(first)
    if first.skipped:
        return _skipped(first, where)
    if first.desync:
        return _desync(first, where)
    if end.desync:
        return _in_another(first, where, files)
    if first.sizes is not None:
        return _of_other_sizes(first, where)
    if end.hung:
        return Verdict(
            kind="rank.hang", severity="critical", summary=f"{where}: {end.hung}",
            cause=f"rank {end.rank} made no progress while the others waited for it in a collective",
            fix=f"{_WHO_STOPPED_THE_RANK}{LETS_GO_ON}"
            if STOPPED in end.hung
            else f"look at its stack in {files.stacks}: its innermost line is where it was stuck",
        )  # fmt: skip
    assertion = known.read(end.log)
    if assertion is not None:
        return _asserted(where, assertion)
    if _OUT_OF_MEMORY.search(_on_memory(end)):
        return _out_of_memory(end, where)
    if end.late and end.signal == signals.SIGKILL and len(first.culprits) == 1 and not _had_raised(end):
        return _killed_late(end, where, files)
    if end.signal is not None and not _had_raised(end):
        return _died(end, where, files, over=first.over)
    by_worker = loader_death(end.text)
    if by_worker is not None:
        return _worker_died(end, where, by_worker)
    return _raised(first, where, files, alone=alone)


def _where(first: FirstFailure) -> str:
    end = first.culprits[0]
    who = named([one.rank for one in first.culprits]) + (" (nothing tells which was first)" if len(first.culprits) > 1 else "")
    return who + ("" if end.step is None else f", in step {end.step}")


def _raised(first: FirstFailure, where: str, files: Files, *, alone: bool) -> Verdict:
    end, several = first.culprits[0], len(first.culprits) > 1
    of_peers = not alone and end.is_victim
    status = "ended" if end.exit_code is None else f"ended with exit code {end.exit_code}"
    status = status if end.signal is None else f"ended after that, by {signal_name(end.signal)}"
    by_ddp = ddp_error(end.text)
    cause = f"the rank{'s' * several} {status}; " + (
        "it showed no exception"
        if not end.text
        else f"these are the words of {'ranks' if several else 'a rank'} that waited for another or lost it, and no other is known to have failed"
        if of_peers
        else "each raised this by itself"
        if several
        else f"it raised this itself{_fetching(end)}{_status_told(end.text)}{'' if alone else ', and no other rank is known to have failed before'}"
    )
    others = "" if alone else _PEERS_TOO if of_peers else of_the_others(first.besides, end.text)
    return Verdict(
        kind="rank.exception" if by_ddp is None else "config.ddp",
        severity="critical",
        summary=f"{where}: {end.text or status}{_at(end)}",
        cause=cause if by_ddp is None else by_ddp.cause,
        fix=_where_to_look(end, files) + others if by_ddp is None else by_ddp.fix,
    )


def _at(end: RankEnd) -> str:
    return f" at {end.where}" if end.where else ""


def _where_to_look(end: RankEnd, files: Files) -> str:
    """An exit that the script asked for leaves nothing in the log, nor does os._exit()."""
    if end.text.startswith("RestoreError"):
        return "do what the error says: nothing has been trained"
    if end.text.startswith("SystemExit") and end.where:
        return f"look at {end.where}, where the script asked for this exit"
    if not end.text:
        without_a_word = "look for what ends the process without a word, as `raise SystemExit`, os._exit() or native code does"
        return f"{without_a_word}; what it printed, if anything, is in {files.log(end)}"
    return f"read the end of {files.log(end)}{_met_again(end)}"


def _met_again(end: RankEnd) -> str:
    """Nothing leaves these samples out: which of them raised is not known, and whether it would again only the user can tell."""
    if "sample" not in end.fetching:  # a batch of which nothing is known may have failed on its way to a device
        return ""
    unless = "unless the error was of the moment (a network, say)"
    return f"; a run that goes on makes the same batch again: {unless}, first mend that sample or let the data set pass over it"


def _fetching(end: RankEnd) -> str:
    """No batch was in hand: what it failed on is what was being made."""
    return f" while its loader made {end.fetching}" if end.fetching else ""


def _status_told(text: str) -> str:
    """The kernel keeps the lowest eight bits of a status: a bad one may look like a good one from outside."""
    asked = re.fullmatch(r"SystemExit: (-?\d+)", text)
    if asked is None or 0 <= int(asked[1]) <= _HIGHEST_STATUS:
        return ""
    told = int(asked[1]) & _HIGHEST_STATUS
    return f" (of this status the launcher sees {told}{', as of a rank that ended well' if not told else ''})"


def _worker_died(end: RankEnd, where: str, death: LoaderDeath) -> Verdict:
    summary = f"{where}: {death.said}{_at(end)}{death.then}"
    return Verdict(kind="loader.worker_died", severity="critical", summary=summary, cause=death.cause, fix=death.fix)


def _skipped(first: FirstFailure, where: str) -> Verdict:
    end = first.culprits[0]
    others = named(first.victims)
    return Verdict(
        kind="rank.desync",
        severity="critical",
        summary=f"{where}: it skipped a batch that the others trained on; {others} then waited for it in vain",
        cause=f"rank {end.rank} got a batch in step {end.step} and ran no backward from it (as loops do whose loss is not finite), the others did: since then "
        f"its steps were behind, gradients of different steps were averaged, and it was done with fewer of them while {others} waited in a collective. "
        "A checkpoint from after that step, whole as it may be, holds updates that were made out of step",
        fix="let every rank skip or none: agree with an all_reduce of a flag before the backward, or run the backward from loss * 0; "
        f"go on from a checkpoint from before step {end.step}, where one is kept",
    )


def _desync(first: FirstFailure, where: str) -> Verdict:
    end = first.culprits[0]
    others = named(first.victims)
    # `raise SystemExit(3)` under DDP is torn down so now and then (by gloo's threads), with us and without: nothing is left of its status then.
    what = f"its script ended, and {signal_name(end.signal)} ended it on its way out" if end.torn_down else "it ended well"
    how = f"by which exit is not known, for {signal_name(end.signal)} ended it on its way out," if end.torn_down else "with exit code 0,"
    return Verdict(
        kind="rank.desync",
        severity="critical",
        summary=f"{where}: {what} while {others} still had steps to do",
        cause=f"rank {end.rank} came to its end, {how} while {others} went on, whose next collective then had no partner",
        fix="give every rank the same number of batches: drop_last, a DistributedSampler, or DDP's join(); or find the exit"
        f"{'' if end.torn_down else ' with status 0'} that only this rank takes: sys.exit(), {'SystemExit' if end.torn_down else 'os._exit(0)'}",
    )


def _in_another(first: FirstFailure, where: str, files: Files) -> Verdict:
    what, _, places = first.culprits[0].hung.partition("; ")
    return Verdict(
        kind="rank.desync",
        severity="critical",
        summary=f"{where}: {what}",
        cause=f"every rank waited, and not in the same collective{places and ': '}{places}",
        fix=f"let every rank call the same collectives in the same order and equally often: look at both places ({files.stacks}) for a branch, a loop of "
        "another length, or an early way out that only some ranks take",
    )


def _of_other_sizes(first: FirstFailure, where: str) -> Verdict:
    met = "gloo met data of another size than the collective takes that it came for, which ends a process (SIGABRT)"
    calls = f": {first.sizes}" if first.sizes else ""
    cause = (
        f"{met}{calls}" if first.stray else f"the ranks were in different collectives, and nothing tells whose call is the wrong one{calls}"
    )
    return Verdict(
        kind="rank.desync",
        severity="critical",
        summary=f"{where}: it is in a collective that it had never called before, and the others are in another"
        if first.stray
        else f"{where}: {met}",
        cause=cause,
        fix="let every rank call the same collectives in the same order, with tensors of one shape and dtype: look for a branch, or a tensor of another "
        "length, that only some ranks have",
    )


def _asserted(where: str, found: Assertion) -> Verdict:
    return Verdict(
        kind="rank.assert",
        severity="critical",
        summary=f"{where}: device-side assertion in {found.kernel}: {found.meaning}{found.element_text}",
        cause=f"{found.op or found.kernel}: {found.meaning} ({found.tensor}; allowed: {found.valid}); usual: {found.cause or 'not known'}",
        fix=found.fix or "rerun the recorded batch on the CPU: watchdog replay",
        assertion=found.facts(),
    )


def _on_memory(end: RankEnd) -> str:
    """Of what the rank said and printed, what may speak of its end: a shortage that the script got over is printed, too."""
    if end.raised_ns and end.text and _TELLS_LITTLE.match(end.text) is None:
        return end.text
    if end.signal not in (None, signals.SIGABRT):
        return "\n".join([end.text, *(line for line in end.log.splitlines() if "oom-kill" in line)])
    return f"{end.text}\n{end.log}"


def _out_of_memory(end: RankEnd, where: str) -> Verdict:
    what = (end.text or "out of memory") + _at(end)
    if "oom-kill" in end.log:
        what = "the kernel killed it for want of memory (cgroup oom_kill)"
        cause = "the container's memory limit was reached: loader workers and pinned memory count too"
        fix = "raise the limit, or take fewer loader workers and smaller batches"
    elif _OUT_OF_HOST_MEMORY.search(end.text or end.log):
        place = end.where or "the last line of its traceback"
        cause = f"the host's memory, not a GPU's, could not give what was asked for{_at(end)}"
        fix = f"look at {place}: how much it asks for, and what is kept from step to step; loader workers and pinned memory take host memory, too"
    else:
        cause, fix = "an allocation failed on this rank", "smaller batches, or shorter sequences"
    return Verdict(kind="memory.oom", severity="critical", summary=f"{where}: {what}", cause=cause, fix=fix)


def _had_raised(end: RankEnd) -> bool:
    """Whether the rank had failed by itself before a signal ended it: while the others saved it was asked to end, or killed (with its keeper, say), or native
    code ended it on its way out."""
    return bool(end.raised_ns and end.text) and not end.text.startswith("KeyboardInterrupt")


def _died(end: RankEnd, where: str, files: Files, *, over: bool) -> Verdict:
    name = signal_name(end.signal)
    if end.signal in ASKED_TO_END:
        is_over = end.said_end and not end.text
        return Verdict(
            kind="rank.died",
            severity="warning",
            summary=f"{where}: ended by {name} from outside{AFTER_ITS_END * is_over}",
            cause=f"somebody sent {name}: the launcher, a scheduler or a person; no rank failed before it{_HAD_ENDED * is_over}",
            fix=_MODEL_IS_SAVED if is_over else _WHO_STOPPED_IT,
        )
    if end.torn_down:
        return Verdict(
            kind="rank.died",
            severity="critical",
            summary=f"{where}: ended by {name} on its way out{AFTER_ITS_END if over else ', after its script was over'}",
            cause=f"native code ended the process by {name} while it took its threads down{_HAD_ENDED * over}",
            fix=_THREADS_END_FIRST + f"; {_MODEL_IS_SAVED}" * over,
        )
    return Verdict(
        kind="rank.died",
        severity="critical",
        summary=f"{where}: killed by {name}" + (f", after {end.text}" if end.text else ""),
        cause=f"the process was ended by {name}" + (_thrown(end) or _SIGNAL_MEANINGS.get(end.signal or 0, "")),
        fix=_where_a_signal_came_from(end, files),
    )


def _killed_late(end: RankEnd, where: str, files: Files) -> Verdict:
    """Whoever did that, as `watchdog stop` says how, did so because it stood still."""
    return Verdict(
        kind="rank.died",
        severity="critical",
        summary=f"{where}: {end.late}; then it was killed by SIGKILL",
        cause=f"rank {end.rank} made no progress while the others waited for it in a collective; the SIGKILL came once that was known, from a person, the "
        "launcher or a scheduler",
        fix=_WHO_STOPPED_THE_RANK
        if STOPPED in end.late
        else f"look at its stack in {files.stacks}: its innermost line is where it was stuck",
    )


def not_after_all(found: Mapping[str, Any]) -> dict[str, Any]:
    """The incident of ranks that a signal ended, of which one was not at its end yet."""
    summary, cause = found["summary"].replace(AFTER_ITS_END, ""), found["cause"].replace(_HAD_ENDED, "")
    return dict(found) | {
        "summary": summary,
        "cause": cause,
        "fix": found["fix"].replace(f"; {_MODEL_IS_SAVED}", "").replace(_MODEL_IS_SAVED, _WHO_STOPPED_IT),
    }


def _thrown(end: RankEnd) -> str:
    """The words of the exception of C++ that nothing caught, where that ended the process."""
    thrown = _WHAT.search(end.log) if end.signal == signals.SIGABRT else None
    return "" if thrown is None else f": native code gave up: {_short(thrown[1])}"


def _where_a_signal_came_from(end: RankEnd, files: Files) -> str:
    """A process that is killed prints nothing about it, and native code may not either."""
    by_kernel = f"`dmesg` on {end.node} for the kernel's reason"
    if end.text or end.log:
        return f"read the end of {files.log(end)}, and {by_kernel}"
    if end.signal == signals.SIGKILL:
        return f"look for what killed it: {by_kernel}, then the scheduler; what it printed before, if anything, is in {files.log(end)}"
    return f"read the end of {files.log(end)}, if it printed anything, and {by_kernel}"


_SIGNAL_MEANINGS: dict[int, str] = {
    signals.SIGKILL: ": often the kernel or the container for want of memory, else a person or a scheduler",
    signals.SIGSEGV: ": a fault in native code",
    signals.SIGBUS: ": a file in shared memory or a mapped file was cut short or could not grow",
    signals.SIGABRT: ": native code gave up, as after a device-side assertion or by the NCCL watchdog",
}


def signal_name(number: int | None) -> str:
    try:
        return signals.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"
