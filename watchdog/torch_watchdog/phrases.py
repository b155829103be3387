"""Ranks, steps, values, checkpoints and paths in the words that terminal, report and pages share.

Pure, and one phrase each: whole lines are made where they are shown.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from torch_watchdog.job.incident import number
from torch_watchdog.rules.named import named as ranks_named
from torch_watchdog_proto.names import spoken
from torch_watchdog_proto.sentences import count

__all__ = [
    "ENDED_WITHOUT_A_WORD",
    "LIVES_AND_IS_SILENT",
    "allowed_range",
    "as_our_fault",
    "as_typed",
    "checkpoint_state",
    "count",
    "ended_by",
    "goes_on_elsewhere",
    "goes_on_unwatched",
    "is_good",
    "one_line",
    "shortened",
    "steps_told",
    "unjudged",
    "what_happened",
    "what_offends",
    "where_needed",
    "who",
    "without_good",
    "without_others",
]

Incident = Mapping[str, Any]
ENDED_WITHOUT_A_WORD = "ended without a word: the launch was killed, or could not write how it ended"
LIVES_AND_IS_SILENT = "has not ended: the launch lives, and does not answer"


def unjudged(words: Sequence[str]) -> list[str]:
    """Of a launch whose daemon was gone before it could say who failed first: what is known is what ranks had said or come to."""
    note = "  note   by the ranks' own words: nobody was left to say which of them failed first, or why"
    return [*(f"  said   {one_line(word)}" for word in words), note] if words else []


def who(incident: Incident) -> str:
    """Rank, step, a later attempt of the launcher's and dataset sample, as far as they are known."""
    rank = (incident.get("origin") or {}).get("rank")
    parts = ["no single rank" if rank is None else f"rank {rank}"]
    attempt = f"attempt {incident['attempt']}" if incident.get("attempt") else ""
    if incident.get("step") is not None:
        parts.append(f"step {incident['step']}{attempt and f' of {attempt}'}{_after(incident)}")
    elif attempt:
        parts.append(attempt)
    sample = (incident.get("batch") or {}).get("sample") or {}
    if sample.get("dataset_index") is not None:
        parts.append(f"dataset sample {sample['dataset_index']}")
    if sample.get("position_in_batch") is not None:
        parts.append(f"position {sample['position_in_batch']} in the batch")
    return ", ".join(parts)


def _after(incident: Incident) -> str:
    """The step counts from 0 in this launch: where the model has had another number of updates, that is told."""
    before = incident.get("framework_step")
    return "" if before is None else f" (after {count(before, 'update')})"


def what_happened(incident: Incident) -> str:
    """The summary, for a reader who has been told who and when."""
    summary = str(incident.get("summary", ""))
    place = re.match(r"rank (\d+)(?:, (?:in )?step \d+)?: ", summary)
    return summary[place.end() :] if place and int(place[1]) == (incident.get("origin") or {}).get("rank") else summary


def what_offends(incident: Incident) -> str:
    """`input_ids[5,211] = 50257, allowed 0..50256`."""
    batch, bound = incident.get("batch") or {}, incident.get("bound") or {}
    element = batch.get("element")
    where = "" if element is None else "[" + ",".join(str(index) for index in element) + "]"
    text = named = f"{spoken(batch.get('key') or '')}{where}"
    if batch.get("value") is not None:
        text += f" = {number(batch['value'])}"
    derived = batch.get("derived") or {}
    if derived.get("expression"):
        text += f", from which {derived['expression']} = {number(derived.get('value'))}"
    allowed = allowed_range(bound)
    if allowed:
        text += f", allowed {allowed}"
    if text == named and not where:  # a tensor as a whole: what is wrong with it is in the sentence behind `rank 1, step 5: `
        return what_happened(incident) or text
    more = (batch.get("count") or 1) - 1
    return f"{text}, and {count(more, 'element')} more" if more else text


def where_needed(bound: Mapping[str, Any], here: str) -> str:
    """`embedding in wte (./model.py:31)`."""
    module = f"in {bound['module']}" if bound.get("module") else ""
    source = f"({as_typed(bound['source'], here)})" if bound.get("source") else ""
    return " ".join(part for part in (bound.get("op") or "", module, source) if part)


def allowed_range(bound: Mapping[str, Any]) -> str:
    """`0..50256 or -100 (ignored)`; empty where neither end is known."""
    low, high = bound.get("low"), bound.get("high")
    if low is None and high is None:
        return ""
    text = f"{'' if low is None else number(low)}..{'' if high is None else number(high)}"
    ignored = bound.get("ignored") or ()
    return f"{text} or {', '.join(number(value) for value in ignored)} (ignored)" if ignored else text


def as_typed(path: str, here: str) -> str:
    """As a person in the folder `here` would type it; with a slash in it, so that no command takes it for a mere name."""
    if not path or here == "/" or not PurePath(path).is_relative_to(here):
        return path
    below = str(PurePath(path).relative_to(here))
    return below if "/" in below else f"./{below}"


def shortened(text: str, here: str) -> str:
    """A sentence whose paths a person in the folder `here` can type as they stand."""
    return re.sub(rf"(?<![^\s(`'\"]){re.escape(here.rstrip('/'))}/(?=[^\s/]+/)", "", str(text)) if here.strip("/") else str(text)


def checkpoint_state(checkpoint: Mapping[str, Any]) -> str:
    """`23 updates, verified`, or why it is not to be used."""
    applied = count(checkpoint.get("updates_applied", 0), "update")
    if checkpoint.get("finite") is False:
        return f"{applied}, holds NaN, infinity or a part of a step: do not use it"
    if not checkpoint.get("committed"):
        return f"{applied}, not complete: do not use it"
    return f"{applied}, as your on_checkpoint function wrote it" if checkpoint.get("format") == "callback" else f"{applied}, verified"


def is_good(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a job may go on from it."""
    return bool(checkpoint.get("committed")) and checkpoint.get("finite") is not False


def without_good(checkpoint: Mapping[str, Any]) -> str:
    """Behind `stopped on request`: what is wrong with what was saved, of a stop that left nothing to go on from."""
    if is_good(checkpoint):
        return ""
    if checkpoint.get("path") and checkpoint.get("finite") is False:
        return ", and what was saved holds NaN, infinity or a part of a step"
    return ", and saved nothing that is complete" if checkpoint.get("path") else ", and saved nothing"


def steps_told(steps: int, *, began: int | None, updates: int | None) -> str:
    """`24 steps (23 updates)`; of a resumed launch, whose steps count from 0 again, `36 steps (updates 24 to 59)`."""
    words = count(steps, "step")
    if began is None or updates is None:
        return words
    if began and updates == began:
        return f"{words} (no update after the {began} that it began with)"
    return f"{words} (updates {began + 1} to {updates})" if began else f"{words} ({count(updates, 'update')})"


def as_our_fault(error: Exception) -> str:
    """Of one that nobody has foreseen: what and where it was, for whoever gets the report."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    what = one_line(f"{type(error).__name__}: {error}")[:300]
    return f"this is a fault of torch-watchdog itself, please report it: {what} ({Path(where.filename).name}:{where.lineno})"


def ended_by(signalled: str) -> str:
    """How a launch ended that somebody ended from outside."""
    return "interrupted (SIGINT, as by Ctrl-C)" if signalled == "SIGINT" else f"ended by {signalled} from outside"


def goes_on_unwatched(pids: Sequence[int], *, are_ranks: bool, failed: Sequence[int] = ()) -> str:
    """Of a launch that was killed alone: a second one must not be started beside what it has left. `failed`: ranks that had, so that none trains on."""
    what = count(len(pids), "rank") if are_ranks else "1 process" if len(pids) == 1 else f"{len(pids)} processes"
    named = f"pid{'' if len(pids) == 1 else 's'} {', '.join(map(str, pids[:8]))}{', ...' if len(pids) > 8 else ''}"
    how = (
        f"is ending unwatched: the launch was killed after {ranks_named(failed)} had failed"
        if failed
        else "goes on unwatched: the launch was killed"
    )
    return f"{how}, {what} of it {'lives' if len(pids) == 1 else 'live'} on ({named})"


def goes_on_elsewhere(host: str, user: str) -> str:
    """Of a launch that only another machine, or another user, can see."""
    return f"has written no end, and does not answer here: {user or 'its user'} on {host} can see whether it goes on"


def without_others(last_words: str) -> str:
    """A line of a launch's last words, for who is shown all incidents beside it."""
    return re.sub(r"; \d+ incidents? more: watchdog incidents .*", "", last_words) if last_words.startswith("  more ") else last_words


def one_line(text: str) -> str:
    """Names come from the user's data: no control character of theirs may reach the terminal."""
    return "".join(character if character.isprintable() else " " for character in " ".join(str(text).split()))
