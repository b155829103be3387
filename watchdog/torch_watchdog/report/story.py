"""A job's story in at most five sentences, the facts of an incident, and what to do next.

Pure: a history and the launch's last words in, plain text out. Whoever shows it escapes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from torch_watchdog.job.incident import is_order
from torch_watchdog.launch.record import resumed_from
from torch_watchdog.launch.summary import was_survived
from torch_watchdog.phrases import allowed_range, checkpoint_state, count, one_line, what_happened, what_offends, who
from torch_watchdog.report.counting import told
from torch_watchdog.report.history import JobHistory

__all__ = ["NextStep", "card_of", "clock", "facts_of", "next_steps", "story"]

_MAX_NAMED = 8
_STATES = {"firing": "goes on", "resolved": "over"}
_DONE = {
    "stop": "stops the job at a bad batch (policy stop)",
    "skip": "leaves a bad batch out and goes on (policy skip)",
    "observe": "changes nothing, tells what it sees (policy observe)",
    "scan": "lists a bad sample, and leaves the step out (watchdog scan)",
    "rescue": "freed the ranks that had not failed, and asked them for what they held",
    "none": "",
}


class NextStep(NamedTuple):
    """What to do: a sentence, or a line to type."""

    text: str
    is_command: bool


def story(history: JobHistory) -> list[str]:
    """What ran, what happened, why, what was done, and how it ended; what to do is told by `next_steps`."""
    found = history.main_incident
    sentences = [_what_ran(history)]
    if found is None:
        nothing = [] if history.scan else ["Nothing was found."]  # the scan's own words say what was
        return [*sentences, *nothing, _how_it_ended(history)]
    if is_order(found):
        sentences += [_sentence(f"Somebody asked for {found.get('summary', 'a boundary')}"), _what_was_done(found, history)]
        return [sentence for sentence in (*sentences, _how_it_ended(history)) if sentence]
    sentences += [_sentence(f"{_severity(found)}: {found.get('summary', '')}"), _capital(_sentence(str(found.get("cause", ""))))]
    sentences += [_what_was_done(found, history), _how_it_ended(history)]
    return [sentence for sentence in sentences if sentence]


def _sentence(text: str) -> str:
    text = one_line(text)
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."


def _capital(text: str) -> str:
    """Of a sentence that begins with a word, not with a name from the code."""
    return text[:1].upper() + text[1:] if text.partition(" ")[0].isalpha() else text


def _severity(found: Mapping[str, Any]) -> str:
    at = clock(found.get("time"))
    return f"{at}, {found.get('kind')}" if at else str(found.get("kind"))


def clock(text: object) -> str:
    """`2026-01-31 00:00:05 UTC`; nothing where it is no time."""
    try:
        return datetime.fromisoformat(str(text)).strftime("%Y-%m-%d %H:%M:%S UTC")
    except ValueError:
        return ""


def _what_ran(history: JobHistory) -> str:
    record = history.record
    if history.scan:
        return _sentence(f"Job {history.name} looked at its data, and trained only to learn what they must keep to: {history.scan}")
    nodes = len(set(history.node_of.values()))
    where = f" of {count(nodes, 'node')}" if nodes > 1 else ""
    began = clock(record.get("started"))
    return _sentence(
        f"Job {history.name} trained on {count(len(history.ranks), 'rank')}{where} for {told(history.tracks)}"
        + (f", from {began} on" if began else "")
        + (f", resumed from {before}" if (before := resumed_from(record)) else "")
    )


def _how_it_ended(history: JobHistory) -> str:
    code, reason = history.record.get("exit_code"), history.record.get("exit_reason")
    if code is None:
        return f"It {reason}." if reason else "It has not ended."
    told = reason and not history.scan
    return _sentence(f"It ended with exit code {code} ({reason})" if told else f"It ended with exit code {code}")


def _what_was_done(found: Mapping[str, Any], history: JobHistory) -> str:
    action = found.get("action") or {}
    parts = []
    if action.get("ranks_stopped"):
        parts.append(_who_stopped(action, len(history.ranks)))
    if action.get("prevented"):
        parts.append("no update was computed with the bad data")
    checkpoint = action.get("checkpoint") or {}
    if checkpoint.get("path"):
        parts.append(f"a checkpoint was written ({checkpoint_state(checkpoint)}): {checkpoint['path']}")
    if was_survived(found, attempt=history.last_attempt, exit_code=history.record.get("exit_code")):
        parts.append(f"the launcher's attempt {history.last_attempt} then came to a good end")
    return _capital(_sentence(", ".join(parts)))


def _who_stopped(action: Mapping[str, Any], num_ranks: int) -> str:
    """After a failure the others are freed; an order stops all. `freed`: they were taken out of the step that they waited in."""
    stopped, seconds = len(action["ranks_stopped"]), action.get("seconds_to_stop")
    within = f" within {seconds:.2g} s" if isinstance(seconds, int | float) else ""
    if action.get("policy") == "rescue":
        return f"the other rank was freed{within}" if stopped == 1 else f"the {stopped} other ranks were freed{within}"
    every = "both ranks" if num_ranks == 2 else f"all {count(num_ranks, 'rank')}"
    ranks = every if stopped == num_ranks else f"{stopped} of {count(num_ranks, 'rank')}"
    return f"{ranks} stopped at step {action.get('stopped_at_step')}{within}"


def facts_of(found: Mapping[str, Any]) -> dict[str, str]:
    """An incident, line by line; only what is known."""
    bound, batch, action = found.get("bound") or {}, found.get("batch") or {}, found.get("action") or {}
    checkpoint = action.get("checkpoint") or {}
    origin = found.get("origin") or {}
    facts = {
        "kind": found.get("kind"),
        "severity": found.get("severity"),
        "state": _state(found),
        "time": clock(found.get("time")),
        "who": "" if is_order(found) else who(found),
        "where it ran": ", ".join(f"{name} {origin[name]}" for name in ("node", "local_rank", "pid") if origin.get(name) is not None),
        "what": what_offends(found) if batch else what_happened(found),
        "tensor": " ".join(str(batch[name]) for name in ("shape", "dtype", "device") if batch.get(name)),
        "allowed": allowed_range(bound),
        "needed by": " ".join(str(bound[name]) for name in ("op", "module", "source") if bound.get(name)),
        "learned from": bound.get("learned_from"),
        "cause": found.get("cause"),
        "fix": found.get("fix"),
        "also affected": _some(found.get("ranks_affected") or ()),
        "watchdog": _did(found, str(action.get("policy") or "")),
        "checkpoint": f"{checkpoint['path']} ({checkpoint_state(checkpoint)})" if checkpoint.get("path") else "",
    }
    return {name: one_line(str(value)) for name, value in facts.items() if value not in (None, "")}


def _state(found: Mapping[str, Any]) -> str:
    """What a job or its attempt died of is over, too: nothing was mended."""
    action, word = found.get("action") or {}, _STATES.get(str(found.get("status")), str(found.get("status") or ""))
    if word != "over" or is_order(found):
        return word
    if action.get("exit_code") is not None:
        return "over: the job has ended"
    has_died = action.get("policy") == "rescue" or str(found.get("kind")).startswith(("rank.died", "rank.exception", "rank.assert"))
    return "over: its ranks have ended" if has_died and found.get("severity") == "critical" else word


def _did(found: Mapping[str, Any], policy: str) -> str:
    if policy == "stop" and str(found.get("kind")).startswith(("loss.", "grad.")):
        return "stops the job once a loss or gradient is not finite, and saves nothing of it (policy stop)"
    if policy == "stop" and is_order(found):
        return "saves all ranks, and stops them"
    return _DONE.get(policy, policy)


def card_of(found: Mapping[str, Any]) -> dict[str, str]:
    """Of a page that begins with the story and with what to do: without what those have said."""
    return {name: text for name, text in facts_of(found).items() if name not in ("cause", "fix", "allowed")}


def _some(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    named = ", ".join(map(str, ranks[:_MAX_NAMED])) + (f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def next_steps(history: JobHistory, last_words: Sequence[str]) -> list[NextStep]:
    """The fix, then what the launch said to type."""
    found = history.main_incident
    steps = [str(found["fix"])] if found is not None and found.get("fix") and not is_order(found) else []
    labelled = (line.strip().partition(" ") for line in last_words)
    said = [text.strip() for label, _, text in labelled if label in ("resume", "call", "again", "note", "next")]
    return [NextStep(_capital(_sentence(step)), is_command=False) for step in steps] + [
        NextStep(one_line(text), is_command=text.startswith(("watchdog ", "cd "))) for text in said
    ]
