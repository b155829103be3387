"""The last words of a launch, for the person at the terminal: at most ten lines.

Pure: incidents (as in incident.json) and the end of the job in, lines out. It must not know files, terminals or processes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from torch_watchdog.job.incident import has_diverged, is_order, was_left_out
from torch_watchdog.launch.going_on import again, resume_lines, resumed_before, to_go_on
from torch_watchdog.launch.job_end import JobEnd
from torch_watchdog.phrases import (
    as_typed,
    checkpoint_state,
    count,
    ended_by,
    is_good,
    one_line,
    shortened,
    steps_told,
    unjudged,
    what_happened,
    what_offends,
    where_needed,
    who,
    without_good,
)
from torch_watchdog.rules.death import AFTER_ITS_END
from torch_watchdog_proto.stop.events import TRAINING_ENDED

__all__ = [
    "goes_on_from",
    "LAST_LINES",
    "has_failed_of_its_batch",
    "left_behind",
    "left_by_ranks",
    "left_unfinished",
    "summarise",
    "was_survived",
]

Incident = Mapping[str, Any]

LAST_LINES = 12  # of a launch, about its job
_GRAVITY = {"critical": 0, "warning": 1, "info": 2}  # a word that is not known here is taken for the gravest


def left_by_ranks(
    checkpoint: Mapping[str, Any], lines: Sequence[str], record: Mapping[str, Any], run_dir: PurePath, *, here: str, quarantine: str | None,
    restores: bool,
) -> list[str]:  # fmt: skip
    """The last words of a launch with a checkpoint that nobody was left to write into its record: in the place of what they say of an older one, or of none."""
    kept = [line for line in lines if not line.startswith(("  saved ", "  resume", "  again ", "  call "))]
    saved = f"  saved  {one_line(as_typed(checkpoint['path'], here))} ({checkpoint_state(checkpoint)}), by the ranks when nobody watched them any more"
    at = next((number for number, line in enumerate(kept) if line.startswith(("  more ", "  note "))), len(kept))
    resume = to_go_on(checkpoint, record, run_dir, here=here, quarantine=quarantine, restores=restores)
    return [*kept[:at], saved, *resume, *kept[at:]]


def summarise(incidents: Sequence[Incident], end: JobEnd) -> list[str]:
    """Without the prefix that a terminal line carries."""
    if end.ranks_reported == 0:
        return _nobody_reported(end)
    found = [found for found in incidents if found.get("kind") != "order.checkpoint"]
    first = first_to_tell(found, ended_in=end.attempt if end.exit_code else None)
    earlier = _newest_saved(incidents, before=first if first is not None and has_diverged(first) else None)
    if first is None or _is_only_asked_for(first, end):
        lines = [
            _nothing_found(end),
            *_replayed_well(end),
            *unjudged(end.unjudged),
            *_stood_still(end),
            *(_sealed_by_ranks(end) or _saved_earlier(earlier, end)),
        ]
    elif _is_of_earlier(first, end):
        lines = _after_earlier(first, end, earlier)
    elif end.recorded_by:
        lines = [_headline(first, end, found)]
    else:
        lines = [
            _headline(first, end, found),
            *_facts(first, end),
            *([] if first.get("kind") in ("rank.hang", "rank.desync") else _stood_still(end)),
            *_failed_besides(first, found),
            *_afterwards(first, end, earlier, others=sum(not is_order(found) for found in incidents if found is not first)),
        ]
    if end.recorded_by:
        lines.append(f"  more   the whole story is on node {end.recorded_by}, in {end.run_dir}")
    notes = [left_behind(end.left_behind)] if end.left_behind else []
    if end.unused_resume:
        notes.append(
            f"--resume {as_typed(end.unused_resume, end.here)} was taken by nobody: the script began from nothing (README: restore())"
        )
    notes += [left_unfinished(end.unfinished, end.here)] if end.unfinished else []
    return [*lines[: LAST_LINES - len(notes)], *(f"  note   {note}" for note in notes)]


def _is_of_earlier(first: Incident, end: JobEnd) -> bool:
    """All that is known is of attempts before the one that the job ended in, which failed before its ranks were heard of, or was ended from outside."""
    return bool(end.exit_code) and not end.stopped_by_us and first.get("attempt", end.attempt) < end.attempt


def _after_earlier(first: Incident, end: JobEnd, earlier: Incident) -> list[str]:
    run_dir, name = shlex.quote(as_typed(end.run_dir, end.here)), f"attempt {end.attempt}"
    before = f"attempt {first.get('attempt')} had failed: {first.get('kind')}, {who(first)}: {what_happened(first)}"
    how = f"was {ended_by(end.signalled)} in {name}" if end.signalled else f"failed in {name}, of which no rank's failure is known"
    why = (
        []
        if end.signalled
        else [f"  why    read the end of {as_typed(end.run_dir, end.here)}/logs/rank-*.log: it is what that attempt has printed"]
    )
    return [
        f"job {end.job} {how} (exit code {end.exit_code})",
        *why,
        f"  before {one_line(before)}",
        *_saved_earlier(earlier, end),
        f"  more   watchdog timeline {run_dir}; watchdog incidents {run_dir}",
    ]


def left_unfinished(paths: Sequence[str], here: str) -> str:
    """Only a save of the same launch takes them away: the next launch has a folder of its own."""
    one, more = len(paths) == 1, f" and {len(paths) - 1} beside it" if len(paths) > 1 else ""
    return (
        f"{one_line(as_typed(paths[-1], here))}{more}: {'a checkpoint' if one else 'checkpoints'} whose writer was killed, not finished and never to be used; "
        f"nothing needs or removes {'it' if one else 'them'} any more: delete {'it' if one else 'them'}"
    )


def left_behind(pids: Sequence[int]) -> str:
    return f"{count(len(pids), 'rank')} left behind, unwatched: pids {', '.join(map(str, pids[:8]))}{', ...' if len(pids) > 8 else ''}"


def _nothing_found(end: JobEnd) -> str:
    was_interrupted = end.signalled and end.exit_code and not end.stopped_by_us
    how = f" was {ended_by(end.signalled)}" if was_interrupted else ", its command killed" if end.left_behind else ""
    steps = "" if end.steps is None else f"{steps_told(end.steps, began=end.began_at_update, updates=end.updates)}, "
    found = f"{steps}{'at a standstill' if _stood_still(end) else 'nothing found'}" if end.told else "what was found is not known"
    if end.replays and end.told and not end.exit_code:
        return f"job {end.job}: the batch of {end.replays} raised nothing here (exit code 0)"
    return f"job {end.job}{how}: {count(end.ranks_reported, 'rank')}, {found} (exit code {end.exit_code})"


def _replayed_well(end: JobEnd) -> list[str]:
    """What to think of next, of a batch that raised nothing."""
    if not end.replays or not end.told or end.exit_code:
        return []
    return [
        "  why    it is not the batch alone: this was one process, in its first step, with the weights that the script begins with; what failed may "
        "need the weights of that step, its state, or another rank"
    ]


def _stood_still(end: JobEnd) -> list[str]:
    return [f"  note   it stood still by then: {end.standstill}"] if end.standstill and end.exit_code else []


def _newest_saved(incidents: Sequence[Incident], *, before: Incident | None) -> Incident:
    """Of whose checkpoint the job could go on: asked for while it ran, or of an earlier attempt. The newest good one, where one is from `before` that."""
    step = None if before is None else before.get("step") if before.get("framework_step") is None else before["framework_step"]
    good = [found for found in incidents if is_good(made := _checkpoint_of(found)) and (step is None or _updates_of(made) <= step)]
    return max(good, key=lambda found: _updates_of(_checkpoint_of(found)), default={})


def goes_on_from(incident: Incident, incidents: Sequence[Incident], *, ended: bool) -> Mapping[str, Any]:
    """The checkpoint that a person would go on from after it, or nothing, as where its training was over: its own; once the job has `ended` the newest of
    any, of a loss that is no number the newest from before."""
    own = _checkpoint_of(incident)
    if is_good(own):
        return own
    if _was_over(incident) or (not ended and not has_diverged(incident)):
        return {}
    return _checkpoint_of(_newest_saved(incidents, before=incident if has_diverged(incident) else None))


def _updates_of(checkpoint: Mapping[str, Any]) -> int:
    return int(checkpoint.get("updates_applied", 0))


def _checkpoint_of(incident: Incident) -> Mapping[str, Any]:
    return (incident.get("action") or {}).get("checkpoint") or {}


def _sealed_by_ranks(end: JobEnd) -> list[str]:
    """Of a stop whose daemon was gone before it could say what came of it."""
    if not end.stopped_by_us or not end.sealed:
        return []
    saved = f"  saved  {one_line(as_typed(end.sealed['path'], end.here))} ({checkpoint_state(end.sealed)})"
    return [saved, *resume_lines(end.sealed, end)]


def _saved_earlier(found: Incident, end: JobEnd, *, diverged: bool = False, over: bool = False) -> list[str]:
    """And how to go on from it, where the job did not come to its own end, nor its training: `over`."""
    checkpoint = _checkpoint_of(found)
    if not checkpoint:
        return []
    when = "on request" if found.get("kind") == "order.checkpoint" else f"in attempt {found.get('attempt', 0)}"
    saved = f"  saved  {one_line(as_typed(checkpoint['path'], end.here))} ({checkpoint_state(checkpoint)}), {when}"
    return [saved, *(resume_lines(checkpoint, end) if (end.exit_code or diverged) and not over else ())]


def _is_only_asked_for(first: Incident, end: JobEnd) -> bool:
    """A stop that was taken back is no finding of a job that went on to its own end."""
    return is_order(first) and not end.stopped_by_us and end.exit_code == 0


def first_to_tell(incidents: Sequence[Incident], *, ended_in: int | None = None) -> Incident | None:
    """What ended the job where we did; of several the first of the gravest: what began it, not what followed.

    `ended_in`: the attempt that ended badly, which an earlier one's failure does not explain; None where the last one ended well.
    """
    return min(incidents, key=lambda incident: _telling_order(incident, ended_in), default=None)


def _telling_order(incident: Incident, ended_in: int | None) -> tuple[bool, bool, int, bool, str]:
    is_over = ended_in is not None and incident.get("attempt", ended_in) != ended_in
    action = incident.get("action") or {}
    ended_the_job, went_on = action.get("exit_code") is not None, ended_in is not None and action.get("policy") == "skip"
    return is_over, not ended_the_job, _GRAVITY.get(incident.get("severity", "info"), 0), went_on, incident.get("time", "")


def was_survived(incident: Incident, *, attempt: int, exit_code: int | None) -> bool:
    """A later attempt of the launcher's has come to a good end after it."""
    return exit_code == 0 and incident.get("attempt", attempt) < attempt


def _nobody_reported(end: JobEnd) -> list[str]:
    """A command that failed before it trained has said itself why; one that succeeded has perhaps trained where we could not see it."""
    if end.signalled and end.exit_code:
        return [f"job {end.job}: {end.signalled} ended it before any rank had begun to train (exit code {end.exit_code})"]
    of = f"0 of {end.ranks_expected} ranks" if end.ranks_expected else "no rank"
    line = f"job {end.job}: {of} reported, so nothing was watched (exit code {end.exit_code})"
    if end.exit_code:
        return [line]
    return [
        line,
        "  why    nothing was trained (no batch of a DataLoader met a model), or in a Python that keeps us out: -I, -E, -S, or one without torch-watchdog",
        "  next   watchdog doctor",
    ]


def _headline(incident: Incident, end: JobEnd, found: Sequence[Incident]) -> str:
    action = incident.get("action") or {}
    if is_order(incident) and end.stopped_by_us:
        return f"job {end.job} stopped on request{without_good(_checkpoint_of(incident))} (exit code {end.exit_code})"
    if was_survived(incident, attempt=end.attempt, exit_code=end.exit_code):
        before = f"{incident.get('kind')} in attempt {incident.get('attempt')}"
        return f"job {end.job} finished in attempt {end.attempt} after {before} (exit code {end.exit_code})"
    if end.stopped_by_us:
        what = _how_we_stopped(action, end)
    elif _came_too_late(incident, end):
        what = f"was {ended_by(end.signalled)}{AFTER_ITS_END * _was_over(incident)}"
    elif was_left_out(incident):
        steps = len({(one.get("attempt"), one.get("step")) for one in found if was_left_out(one)})
        what = "went on without the bad batch" if steps == 1 else f"went on without the bad batches of {steps} steps, first"
    elif action.get("policy") == "observe":
        what = "failed (it was observed, nothing was changed)" if end.exit_code else "observed, nothing was changed"
    elif incident.get("kind") == "rank.died" and incident.get("severity") == "warning":
        what = f"was ended from outside{AFTER_ITS_END * _was_over(incident)}"
    elif incident.get("severity") == "warning":
        what = "failed, after a warning" if end.exit_code else "ended with a warning"
    elif has_diverged(incident) and not end.exit_code:
        what = "came to its own end before it could be stopped"  # so the code is the command's own: nobody stopped it
    else:
        what = f"failed{AFTER_ITS_END * _was_over(incident)}" if end.exit_code else "ended"
    only = ", a warning" if incident.get("severity") == "warning" and what.endswith("nothing was changed") else ""
    return f"job {end.job} {what}: {incident.get('kind')}{only} (exit code {end.exit_code})"


def has_failed_of_its_batch(action: Mapping[str, Any], end: JobEnd) -> bool:
    """A bad batch that no order of all ranks has answered was found inside its step, or could not be left out: its rank has raised. One that was answered,
    and whose daemon was gone before it could write so, is told by what its ranks have sealed.
    """
    was_answered = action.get("stopped_at_step") is not None or (end.sealed and not action.get("checkpoint"))
    return bool(action.get("prevented")) and not was_answered


def _came_too_late(incident: Incident, end: JobEnd) -> bool:
    """An order that a signal asked for, of a training that the same signal ended before it could be carried out."""
    return is_order(incident) and bool(end.signalled and end.exit_code) and not end.stopped_by_us


def _was_over(incident: Incident) -> bool:
    """A signal ended what had trained all that it was to train: to launch it again would train anew."""
    words = str(incident.get("summary", ""))
    return words.endswith(TRAINING_ENDED) if is_order(incident) else incident.get("kind") == "rank.died" and words.endswith(AFTER_ITS_END)


def _how_we_stopped(action: Mapping[str, Any], end: JobEnd) -> str:
    if has_failed_of_its_batch(action, end):
        return "failed on a bad batch; no update used it"
    return "stopped before the bad batch was used" if action.get("prevented") else "stopped"


def _facts(incident: Incident, end: JobEnd) -> list[str]:
    if is_order(incident):
        return [f"  what   {one_line(incident.get('summary', ''))}"]
    batch, here = incident.get("batch"), end.here
    facts = [("who", who(incident) + (f" of the replay; the batch is of {end.replays}" if end.replays else ""))]
    if batch:
        facts.append(("what", what_offends(incident)))
        facts.append(("where", where_needed(incident.get("bound") or {}, here)))
    else:
        facts.append(("what", what_happened(incident)))
    facts += [("why", shortened(incident.get("cause", ""), here)), ("fix", shortened(incident.get("fix", ""), here))]
    return [f"  {label:<6} {one_line(text)}" for label, text in facts if text]


def _failed_besides(first: Incident, found: Sequence[Incident]) -> list[str]:
    """What went wrong on another rank while a bad batch was being answered: to mend the batch would not mend that."""
    if not first.get("batch"):
        return []
    others = [
        one for one in found if one.get("attempt") == first.get("attempt") and not one.get("batch") and one.get("severity") == "critical"
    ]
    other = first_to_tell(others)
    return [] if other is None else [f"  also   {one_line(f'{who(other)}: {what_happened(other)}')}"]


def _afterwards(incident: Incident, end: JobEnd, earlier: Incident, *, others: int) -> list[str]:
    """What was saved, and what a person can type next."""
    checkpoint = _checkpoint_of(incident) or (end.stopped_by_us and end.sealed) or {}
    path = as_typed(checkpoint.get("path") or "", end.here)
    survived = was_survived(incident, attempt=end.attempt, exit_code=end.exit_code)
    before = (
        []
        if is_good(checkpoint)
        else _saved_earlier(earlier, end, diverged=has_diverged(incident) and not survived, over=_was_over(incident))
    )
    failed = bool(end.exit_code) and (incident.get("action") or {}).get("policy") == "rescue"
    lines = []
    if path:
        lines.append(f"  saved  {one_line(path)} ({checkpoint_state(checkpoint)})")
    elif not before and (end.stopped_by_us or failed or _came_too_late(incident, end)):
        lines.append("  saved  no checkpoint was written")
        if not end.resumed and not _was_over(incident) and (end.quarantine or (failed and not end.unused_resume)):
            lines.append(again(end))
    if is_good(checkpoint):
        lines += [] if survived else resume_lines(checkpoint, end)
    else:
        lines += before or ([] if has_diverged(incident) or _was_over(incident) else resumed_before(end))
    run_dir = shlex.quote(as_typed(end.run_dir, end.here))
    also = f"; {count(others, 'incident')} more: watchdog incidents {run_dir}" if others else ""
    lines.append(f"  more   watchdog timeline {run_dir}{_to_replay(incident, end)}{also}")
    return lines


def _to_replay(incident: Incident, end: JobEnd) -> str:
    """Of a batch that was kept: a bad one, one that a rank failed on, or that of a loss that is no number."""
    bundle = (incident.get("evidence") or {}).get("bundle")
    path = shlex.quote(one_line(as_typed(f"{end.run_dir}/{bundle}", end.here)))
    return "" if not bundle or end.replays else f"; its batch once more: watchdog replay {path}"
