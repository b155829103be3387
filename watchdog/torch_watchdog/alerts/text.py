"""The words of an alert, made for the screen of a phone: job and what first, then where, what was done, and what to type next.

Pure: an incident in, short lines out. Bounded however many ranks there are; positions and values of ids, never text of the data.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

from torch_watchdog.alerts.alert import Delivery
from torch_watchdog_proto.sentences import count

__all__ = ["lines_of", "page_of", "ranks_in_words", "said", "says_the_same", "title_of", "typed"]

_TITLE_CHARS = 120
_LINE_CHARS = 200
_TYPED_CHARS = 400
_DONE = "done: "
_MINE = "mine: "
_RESUME, _CALL = "resume: ", "call: "
_COMMAND_CHARS = 1_000  # of the launch's own line
_WHERE_IT_CAME = "acknowledge it where it reached you: its launch has ended, or ends now, and sends no more alerts"
_DIES_WITH_IT = " (only until its launch ends; what `look` says works then, too)"
_AS_THEY_ARE: Mapping[int, int] = MappingProxyType({})
_WHAT = {
    "batch": "bad batch",
    "probability.out_of_range": "probability out of range",
    "activation.not_finite": "activation is not finite",
    "loss.not_finite": "loss is not finite",
    "loss.spike": "loss spike",
    "grad.not_finite": "gradient is not finite",
    "scaler.collapse": "loss scale collapses",
    "memory.pressure": "memory runs short",
    "memory.oom": "out of memory",
    "gpu.xid": "GPU fault",
    "gpu.ecc": "GPU memory errors",
    "gpu.throttle": "GPU throttled",
    "gpu.lost": "GPU lost",
    "rank.assert": "device assert",
    "rank.exception": "exception in a rank",
    "rank.died": "a rank died",
    "rank.hang": "hang",
    "rank.straggler": "slow rank",
    "rank.desync": "ranks out of step",
    "config.ddp": "DDP set up wrongly",
    "loader.stalled": "data loader stalls",
    "loader.worker_died": "data loader worker died",
}


def title_of(incident: Mapping[str, Any]) -> str:
    """`nightly: bad batch, rank 3, step 120, sample 45`."""
    origin, batch = incident["origin"], incident.get("batch") or {}
    sample = (batch.get("sample") or {}).get("dataset_index")
    words = [what(str(incident["kind"]))]
    words += [f"rank {origin['rank']}"] if origin.get("rank") is not None else []
    words += [f"step {incident['step']}"] if incident.get("step") is not None else []
    words += [f"sample {sample}"] if sample is not None else []
    return _cut(f"{incident['job']}: {', '.join(words)}", _TITLE_CHARS)


def what(kind: str) -> str:
    """A few words for the kind."""
    return _WHAT.get(kind) or _WHAT.get(kind.partition(".")[0]) or kind


def lines_of(
    incident: Mapping[str, Any], *, world_size: int, page: str | None, runbook: str | None, asked: Sequence[str] = (),
    exit_codes: Mapping[int, int] = _AS_THEY_ARE, is_last: bool = False, outlived: bool = True, resume: Sequence[str] = (),
) -> tuple[str, ...]:  # fmt: skip
    """What, where, what was done, what to type, with the option that says who is asked (`asked`); the links last. `exit_codes`: ours, as this site has them.
    `is_last`: nobody is left who would take an acknowledgement. `outlived`: whoever serves the page goes on when the job has ended. `resume`: the lines
    that go on from its checkpoint, as the launch's last words have them.
    """
    reached = ranks_in_words(incident.get("ranks_affected") or (), world_size)
    found = [
        str(incident["summary"]),
        f"on {incident['origin'].get('node')}" + (f", reached {reached}" if reached else "") if incident["origin"].get("node") else "",
        f"{_DONE}{_done(incident, exit_codes)}",
        f"fix: {incident['fix']}",
    ]
    to_type = [
        *_to_go_on(resume, str(incident["job"]), asked),
        f"look: {typed('incidents', str(incident['job']), asked)}",
        _MINE + (_WHERE_IT_CAME if is_last else typed("ack", "/".join((str(incident["job"]), str(incident["id"]))), asked)),
    ]
    links = [f"page: {page}{'' if outlived else _DIES_WITH_IT}"] if page else []
    is_ours = page is not None and runbook is not None and runbook.startswith(page.partition("/jobs/")[0])
    links += [f"help: {runbook}{'' if outlived or not is_ours else _DIES_WITH_IT}"] if runbook else []
    return tuple(
        line for line in (*(_cut(line, _LINE_CHARS) for line in found), *to_type, *(_cut(link, _LINE_CHARS) for link in links)) if line
    )


def _to_go_on(resume: Sequence[str], job: str, asked: Sequence[str]) -> list[str]:
    """Whole or not there: cut in the middle it would be another command."""
    labelled = [line.strip().partition(" ") for line in resume]
    lines = [f"{label}: {' '.join(words.split())}" for label, _, words in labelled]
    if all(len(line) <= _COMMAND_CHARS and line.isprintable() for line in lines):
        return lines
    return [f"{_RESUME}{typed('status', job, asked)} says the line, which is too long for this"]


def says_the_same(lines: Sequence[str], others: Sequence[str]) -> bool:
    """All but who takes an acknowledgement, and how the line that goes on reads, for which alone nobody is called again."""
    return _called_for(lines) == _called_for(others)


def _called_for(lines: Sequence[str]) -> list[str]:
    return [_RESUME if line.startswith(_RESUME) else line for line in lines if not line.startswith(_MINE)]


def said(delivery: Delivery) -> tuple[str, ...]:
    """What a receiver shows below the title. Of an end that is how it came, and nothing that works no more."""
    lines = delivery.alert.lines
    if delivery.alert.resolved:
        lines = tuple(line for line in lines if not line.startswith(_MINE))
    if delivery.action != "resolve":
        return lines
    why = (f"resolved: {delivery.alert.resolved_by}",) if delivery.alert.resolved_by else ()
    done_with = [line for line in lines if not line.endswith(_DIES_WITH_IT) and not line.startswith((_RESUME, _CALL))]
    return (*(_cut(line, _LINE_CHARS) for line in why), *done_with)


def page_of(delivery: Delivery) -> str | None:
    """None for the end of what a launch's own page showed: that is gone, or goes now."""
    is_gone = delivery.action == "resolve" and any(line.endswith(_DIES_WITH_IT) for line in delivery.alert.lines)
    return None if is_gone else delivery.alert.page


def typed(command: str, name: str, asked: Sequence[str]) -> str:
    """A command of ours. A path is whole or not there: cut in the middle it would be another one."""
    line = shlex.join(["watchdog", command, name, *asked])
    return line if len(line) <= _TYPED_CHARS else _cut(shlex.join(["watchdog", command, name]), _LINE_CHARS - len("look: "))


def _done(incident: Mapping[str, Any], exit_codes: Mapping[int, int]) -> str:
    """What the watchdog did about it. The exit code comes first, and a path that would not fit is told by its end."""
    action = incident["action"]
    checkpoint = action.get("checkpoint") or {}
    if action.get("policy") in ("observe", "none") and not checkpoint and action.get("exit_code") is None:
        return "nothing, it was only observed" if action.get("policy") == "observe" else "nothing could be prevented"
    code = action.get("exit_code")
    words = [] if code is None else [f"exit code {exit_codes.get(code, code)}"]
    if action.get("stopped_at_step") is not None:
        words.append(f"{count(len(action.get('ranks_stopped') or ()), 'rank')} stopped at step {action['stopped_at_step']}")
    elif action.get("policy") == "skip" and incident["status"] == "resolved":
        words.append("the step was left out, the training goes on")
    if checkpoint:
        good = checkpoint.get("committed") and checkpoint.get("finite", True)
        words.append(f"checkpoint {'verified' if good else 'NOT good'}: ")
        words[-1] += _end_of(str(checkpoint.get("path")), room=_LINE_CHARS - len(_DONE) - len(", ".join(words)))
    return ", ".join(words) or f"policy {action.get('policy')} is under way"


def _end_of(path: str, *, room: int) -> str:
    """`.../checkpoints/step-23`: whoever reads it sees that it is no whole one."""
    return path if len(path) <= room else ".../" + "/".join(PurePosixPath(path).parts[-2:])


def ranks_in_words(ranks: Sequence[int], world_size: int) -> str:
    """`ranks 0-2, 4`, and a number where there are many of them: as short for 16,384 ranks as for two."""
    if len(ranks) > 1 and len(ranks) >= world_size - 1:
        return f"all {len(ranks)} others"
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans[:4])
    more = sum(last - first + 1 for first, last in spans[4:])
    return "" if not ranks else f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (f" and {more} more" if more else "")


def _cut(text: str, limit: int) -> str:
    plain = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return plain if len(plain) <= limit else f"{plain[: limit - 3]}..."
