"""Incidents: from what was found to the object that file, wire, alert and page share.

Owns the field names of incident.json and its sentences. Pure: facts in, a dict out; knows no file, clock or rank connection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from torch_watchdog.rules.death import LETS_GO_ON
from torch_watchdog.rules.sign import About, Sign
from torch_watchdog_proto.frames import to_json
from torch_watchdog_proto.messages import BatchFact, BoundFact, Violation
from torch_watchdog_proto.names import spoken
from torch_watchdog_proto.sentences import and_then
from torch_watchdog_proto.stop.events import NO_CHECKPOINT, Closed, why_no_more_skips
from torch_watchdog_proto.stop.rescue import Ended

__all__ = [
    "GIVEN_UP",
    "Origin",
    "Place",
    "closed",
    "from_sign",
    "from_violation",
    "has_diverged",
    "incident",
    "is_order",
    "number",
    "rescued",
    "summary_of",
    "was_left_out",
    "with_affected",
    "with_batch_kept",
    "with_cause_inside",
    "with_reason",
]

SCHEMA_VERSION = 1
GIVEN_UP = "; given up: "  # in the summary of an order, before why
_SAMPLES_SHOWN = 8
_BY_US = "the watchdog ended by SIGKILL what made no progress, which is the signal that the launcher reports"
_LONG_FLOAT = 8  # digits and all


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where it began; `rank` None where no single rank is at fault."""

    rank: int | None
    local_rank: int | None = None
    node: str | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which job, where in it, and when. `framework_step`: the updates that the model had when the step began, where that is another number."""

    incident_id: str
    job: str
    attempt: int
    policy: str
    time_s: float
    origin: Origin
    step: int | None = None
    micro_step: int | None = None
    framework_step: int | None = None
    ranks_affected: Sequence[int] = ()


def from_violation(violation: Violation, place: Place, *, prevented: bool) -> dict[str, Any]:
    """A bad batch, or what a rank has seen of another kind."""
    found = incident(
        place, kind=violation.kind, severity=violation.severity, summary=summary_of(violation, place), cause=violation.cause,
        fix=violation.fix, prevented=prevented, fingerprint=_fingerprint_of(violation, place.job),
    )  # fmt: skip
    found["batch"] = _batch(violation.batch) if violation.batch.key else None  # what ranks did, not what a batch held
    found["bound"] = None if violation.bound is None else _numbers_only(to_json(violation.bound), "low", "high")
    if violation.bundle:
        found["evidence"]["bundle"] = violation.bundle
    return found


def from_sign(about: About, sign: Sign, place: Place) -> dict[str, Any]:
    """What a rule has found."""
    found = incident(
        place, kind=about.kind, severity=sign.severity or about.severity, summary=sign.said, cause=sign.cause, fix=sign.fix,
        fingerprint=_hash(place.job, about.kind, about.name, sign.subject),
    )  # fmt: skip
    found["evidence"] = dict(sign.evidence)
    if sign.gpu is not None:
        found["origin"] = found["origin"] | {"gpu": sign.gpu}
    return found


def with_cause_inside(found: Mapping[str, Any], violation: Violation) -> dict[str, Any]:
    """A loss that is not finite, once the rank has found the module that it comes from."""
    bound = None if violation.bound is None else _numbers_only(to_json(violation.bound), "low", "high")
    summary = f"{found['summary']}: {violation.summary}"
    more = {"summary": summary, "cause": violation.cause, "fix": violation.fix, "batch": _batch(violation.batch), "bound": bound}
    evidence = found["evidence"] | ({"bundle": violation.bundle} if violation.bundle else {})
    return dict(found) | more | {"evidence": evidence}


def with_batch_kept(found: Mapping[str, Any], violation: Violation) -> dict[str, Any]:
    """A loss that is not finite, with the batch that its rank had in that step, and the samples in it."""
    samples = next((list(more["samples"]) for more in violation.batch.also if more.get("samples")), [])
    told = dict(found) | {"evidence": found["evidence"] | ({"samples": samples} if samples else {})}
    if samples:
        shown = ", ".join(map(str, samples[:_SAMPLES_SHOWN])) + (", ..." if len(samples) > _SAMPLES_SHOWN else "")
        told["summary"] = f"{found['summary']}, of a batch with {'sample' if len(samples) == 1 else 'samples'} {shown} of the data set"
    if violation.bundle:
        told["evidence"] = told["evidence"] | {"bundle": violation.bundle}
        told = with_reason(told, "that batch is kept for `watchdog replay`")
    return told


def incident(
    place: Place, *, kind: str, severity: str, summary: str, cause: str, fix: str, prevented: bool = False, fingerprint: str | None = None
) -> dict[str, Any]:
    """Any incident, by the schema."""
    origin = {name: value for name, value in to_json(place.origin).items() if name == "rank" or value is not None}
    return {
        "schema_version": SCHEMA_VERSION,
        "status": "firing",
        "fingerprint": fingerprint or _hash(place.job, kind),
        "id": place.incident_id,
        "job": place.job,
        "attempt": place.attempt,
        "kind": kind,
        "severity": severity,
        "time": datetime.fromtimestamp(place.time_s, UTC).isoformat(timespec="milliseconds"),
        "origin": origin,
        "step": place.step,
        "micro_step": place.micro_step,
        "framework_step": place.framework_step,
        "summary": summary,
        "cause": cause,
        "fix": fix,
        "batch": None,
        "bound": None,
        "ranks_affected": sorted(place.ranks_affected),
        "evidence": {},
        "action": {
            "policy": place.policy,
            "prevented": prevented,
            "stopped_at_step": None,
            "ranks_stopped": [],
            "seconds_to_stop": None,
            "checkpoint": None,
            "exit_code": None,
        },
        "links": {},
    }


def closed(found: Mapping[str, Any], order: Closed) -> dict[str, Any]:
    """The incident once the order that it caused has ended."""
    stopped = order.outcome == "done" and order.exit_code is not None
    action = dict(found["action"]) | {
        "stopped_at_step": order.stop_step if stopped else None,
        "ranks_stopped": list(order.ranks) if stopped else [],
        "seconds_to_stop": round(order.seconds, 3) if stopped else None,
        "checkpoint": to_json(order.checkpoint),
        "exit_code": order.exit_code if stopped else None,
    }
    changes: dict[str, Any] = {"action": action}
    if is_order(found) or (order.outcome == "done" and order.exit_code is None):
        changes["status"] = "resolved"
    if is_order(found) and order.outcome != "done":
        changes["summary"] = f"{found['summary']}{GIVEN_UP}{order.reason}"
    elif is_order(found) and NO_CHECKPOINT in order.reason:
        changes["summary"] = f"{found['summary']}{NO_CHECKPOINT}{order.reason.partition(NO_CHECKPOINT)[2]}"
    if stopped and order.updates_applied is not None and order.stop_step == found["step"] is not None:
        # What the ranks have counted is newer than their reports.
        changes["framework_step"] = None if order.updates_applied == order.stop_step else order.updates_applied
    told = dict(found) | changes
    why = why_no_more_skips(order.reason) if stopped else ""
    return with_reason(told, why) if why else told


def was_left_out(found: Mapping[str, Any]) -> bool:
    """A bad batch that no rank uses: one that is killed meanwhile, or ends without a word, does not die of it."""
    action = found.get("action") or {}
    return action.get("policy") == "skip" and bool(action.get("prevented"))


def is_order(incident: Mapping[str, Any]) -> bool:
    """Somebody asked for it: nothing went wrong, so there is neither culprit nor fix."""
    return str(incident.get("kind", "")).startswith("order.")


def has_diverged(incident: Mapping[str, Any]) -> bool:
    """A loss or gradient was no number: what the training holds since is no state to go on from, however it ends."""
    return incident.get("kind") in ("loss.not_finite", "grad.not_finite")


def rescued(found: Mapping[str, Any], rescue: Ended) -> dict[str, Any]:
    """The incident of a failure once the other ranks were freed, and have saved what they held or said why not."""
    action = found["action"]
    if rescue.checkpoint is not None and not (action["checkpoint"] or {}).get("committed"):  # what the ranks began together may be in ruins
        action = dict(action) | {"checkpoint": to_json(rescue.checkpoint)}
    if found["action"]["policy"] == "none":
        action = dict(action) | {
            "policy": "rescue",
            "stopped_at_step": rescue.updates_applied,
            "ranks_stopped": list(rescue.freed),
            "seconds_to_stop": None if rescue.seconds_to_free is None else round(rescue.seconds_to_free, 3),
        }
    newest = f"; the newest good checkpoint is {rescue.newest}" if rescue.checkpoint is None and rescue.newest else ""
    return with_reason(found, rescue.reason + newest) | {"action": action}


def without_way_on(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of a process that is gone: nothing lets it go on any more."""
    return dict(found) | {"fix": found["fix"].replace(LETS_GO_ON, "")}


def killed_by_us(found: Mapping[str, Any]) -> dict[str, Any]:
    """The incident of ranks that made no progress, once the watchdog has ended them: launchers show only the signal."""
    told = without_way_on(found)
    return told if _BY_US in found["cause"] else with_reason(told, _BY_US)


def with_reason(found: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """The incident with more to its cause."""
    return dict(found) | {"cause": and_then(found["cause"], reason)}


def with_affected(found: Mapping[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
    """The incident with more ranks that it reached."""
    reached = set(found["ranks_affected"]) | set(ranks)
    return dict(found) | {"ranks_affected": sorted(reached - {found["origin"]["rank"]})}


def summary_of(violation: Violation, place: Place) -> str:
    """`rank 1, step 5: input_ids[2,7] is 70, allowed 0..63 (embedding, transformer.wte), dataset sample 45`."""
    where = f"rank {place.origin.rank}" + ("" if place.step is None else f", step {place.step}")
    batch, bound = violation.batch, violation.bound
    if batch.element is None or batch.value is None or bound is None:
        return f"{where}: {violation.summary}"
    return f"{where}: {_offender(batch)}{_allowed(bound)}{_sample(batch)}"


def _offender(batch: BatchFact) -> str:
    element = ",".join(map(str, batch.element or ()))
    text = f"{spoken(batch.key)}[{element}] is {number(batch.value)}"
    if batch.derived is not None:
        text += f", so {batch.derived.expression} is {number(batch.derived.value)}"
    return text


def number(value: object) -> str:
    """Ids as they are; of a float as many digits as anybody reads."""
    return f"{value:.6g}" if isinstance(value, float) and len(repr(value)) > _LONG_FLOAT else str(value)


def _allowed(bound: BoundFact) -> str:
    by = ", ".join(word for word in (bound.op, bound.module) if word)
    if bound.low is None and bound.high is None:
        allowed = ""
    else:
        allowed = f", allowed {'' if bound.low is None else number(bound.low)}..{'' if bound.high is None else number(bound.high)}"
    if bound.ignored:
        allowed += " or " + ", ".join(map(str, bound.ignored))
    return f"{allowed} ({by})" if by else allowed


def _sample(batch: BatchFact) -> str:
    index = batch.sample.dataset_index if batch.sample is not None else None
    return "" if index is None else f", dataset sample {index}"


def _batch(fact: BatchFact) -> dict[str, Any]:
    """The schema has no null for a position, and no word for a derived value."""
    batch: dict[str, Any] = to_json(fact)
    sample = batch["sample"]
    if sample is not None and sample["position_in_batch"] is None:
        del sample["position_in_batch"]
    if batch["derived"] is not None:
        _numbers_only(batch["derived"], "value")
    return batch


def _numbers_only(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    for name in names:
        fields[name] = None if isinstance(fields[name], str) else fields[name]
    return fields


def _fingerprint_of(violation: Violation, job: str) -> str:
    """The same fault of the same job, over attempts and requeues: neither rank nor step, which change with the world size."""
    bound, sample = violation.bound, violation.batch.sample
    where = (bound.module, bound.op) if bound is not None else (None, None)
    return _hash(job, violation.kind, violation.batch.key, *where, sample.dataset_index if sample is not None else None)


def _hash(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]
