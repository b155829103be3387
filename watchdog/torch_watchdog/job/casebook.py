"""The incidents of one job: which are new, which are the same again, and which order belongs to which.

Owns their numbers and their dedup: a bad batch that is held, then refused, is one incident; a rank that dies of it is its victim. Pure: facts in,
changed incidents out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_watchdog.job import incident as build
from torch_watchdog.job.first_failure import FirstFailure, RankEnd, died_of_the_asking, is_of_device, raised_its_own
from torch_watchdog.job.ranks import RankState
from torch_watchdog.rules.assertions import Catalogue
from torch_watchdog.rules.death import NOTHING_KNOWN, THEIRS_FOLLOW, Files, judge, not_after_all, of_the_others, raised_besides
from torch_watchdog.rules.loss import Divergence
from torch_watchdog_proto.messages import KEPT_BATCH, Violation
from torch_watchdog_proto.sentences import and_then, count
from torch_watchdog_proto.stop.events import Closed, Found, Opened
from torch_watchdog_proto.stop.rescue import Ended

if TYPE_CHECKING:
    from torch_watchdog.rules.engine import Finding

__all__ = ["Casebook"]

Incident = dict[str, Any]
Ranks = Mapping[int, RankState]

_ORDER_WORDS = {
    "order.stop": "a clean stop of all ranks",
    "order.checkpoint": "a checkpoint of all ranks, without a stop",
    "order.preemption": "a checkpoint and a stop before the machine is taken away",
}
_TOLD_ANEW = ("status", "severity", "summary", "step", "framework_step", "ranks_affected")
_NEVER_FATAL = ("loss.", "grad.")
_FAILURES = ("rank.", "memory.oom", "config.ddp", "loader.worker_died")  # kinds of `rules/death.py`: who fails after one is its victim
_STEPS_BEHIND = 64  # Python's steps before a device's: its launch queue takes 1,024, and a step has a dozen of them at the least
_BATCHES_BEHIND = 2  # of a loop that has fetched before it trains: what is found of a batch is told with the step at hand
_MAX_INCIDENTS = 1000  # a job that finds more has told all there is to tell


def _is_of_one_step(held: Incident, other: Incident) -> bool:
    return bool(other["action"]["prevented"]) and other["step"] == held["step"]


def _was_skipped(found: Incident) -> bool:
    """Of one that an earlier daemon left on disk."""
    return found["status"] == "resolved" and build.was_left_out(found) and found["action"]["exit_code"] is None


class Casebook:
    """Incidents by number, oldest first."""

    def __init__(
        self, *, job: str, policy: str, folders: Mapping[str, str], incidents: Iterable[Mapping[str, Any]] = (),
        assertions: Catalogue = NOTHING_KNOWN,
    ) -> None:  # fmt: skip
        """`folders`: the run directory of each node, the job's own first."""
        self._job, self._policy = job, policy
        self._incidents: dict[str, Incident] = {found["id"]: dict(found) for found in incidents}
        self._assertions, self._folders = assertions, folders
        self._failure_id = self._rescue_told = ""  # which incident a failure is, and which one has said what became of the other ranks
        self._over = {found["id"] for found in self._incidents.values() if _was_skipped(found)}  # the training went on after them
        self._attempt = 0
        self._named: dict[str, frozenset[int]] = {}  # failure -> the ranks that it is of
        self._besides: dict[str, str] = {}  # incident -> what it tells of other ranks that failed by themselves
        self._waiting: list[str] = []  # found, and no order opened for them yet
        self._of_order: dict[int, list[str]] = {}  # generation -> incidents
        self._inside: dict[int, Violation] = {}  # rank -> where in its model a loss went wrong
        self._batches: dict[int, Found] = {}  # rank -> the batch of its first loss that went wrong
        self._of_rule: dict[tuple[str, int | None, str], str] = {}  # rule, rank, subject -> incident

    @property
    def incidents(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(self._incidents.values())

    def begin_attempt(self, attempt: int) -> None:
        self._attempt, self._waiting, self._of_order, self._inside, self._batches = attempt, [], {}, {}, {}
        self._failure_id = self._rescue_told = ""
        self._of_rule = {}

    def found(self, found: Found, ranks: Ranks, now: float, *, world_size: int) -> Incident | None:
        """A violation; None where it is known already."""
        violation = found.violation
        if violation.kind == "activation.not_finite":
            return self._traced_back(found)
        if violation.kind == KEPT_BATCH:
            return self._batch_of(found)
        known = self._known(found)
        if known is not None and found.how == "held":
            self._awaits_order(known)  # an earlier daemon was told first, whose order it was
        if known is not None or len(self._incidents) >= _MAX_INCIDENTS:
            return None
        others = [rank for rank in range(world_size) if rank != found.rank] if violation.severity == "critical" else []
        noticed_only = found.how == "noticed" and self._policy != "observe"
        place = self._place(
            now, ranks, found.rank, step=found.step, micro_step=found.micro_step, affected=others,
            policy="none" if noticed_only else self._policy,
        )  # fmt: skip
        made = build.from_violation(violation, place, prevented=found.how != "noticed")
        self._keep(made)
        if found.how == "held":
            self._awaits_order(made)
        return made

    def _awaits_order(self, held: Incident) -> None:
        """A batch that is held: of the next order, or of the one under way that vetoes its step already."""
        told = {owner for owners in (self._waiting, *self._of_order.values()) for owner in owners}
        if held["id"] in told | self._over:
            return
        of_step = (owners for owners in self._of_order.values() if any(_is_of_one_step(held, self._incidents[owner]) for owner in owners))
        next(of_step, self._waiting).append(held["id"])

    def _traced_back(self, found: Found) -> Incident | None:
        """Where in the model a loss that is not finite began: no incident of its own, but the cause of that rank's loss.not_finite."""
        self._inside[found.rank] = found.violation
        origins = (found.rank, None)  # None: every rank's
        of_rank = (known for known in self._of_attempt() if known["kind"] == "loss.not_finite" and known["origin"]["rank"] in origins)
        known = next(of_rank, None)
        return None if known is None else self._keep(self._with_way_back(build.with_cause_inside(known, found.violation)))

    def _batch_of(self, found: Found) -> Incident | None:
        """The batch of a loss that is not finite, as its rank has kept it: no incident of its own either."""
        self._batches[found.rank] = found
        known = next((one for one in self._of_attempt() if one["kind"] == "loss.not_finite" and one["origin"]["rank"] == found.rank), None)
        return None if known is None or known["step"] != found.step else self._keep(build.with_batch_kept(known, found.violation))

    def opened(self, opened: Opened, ranks: Ranks, now: float) -> Sequence[Incident]:
        """An order begins: it belongs to what was found before it, or to a person, who gets an incident of the order's own kind."""
        if opened.kind in _ORDER_WORDS:
            asked_for = self._keep(self._ordered(opened, ranks, now))
            self._of_order[opened.generation] = [asked_for["id"]]
            return [asked_for]
        self._of_order[opened.generation], self._waiting = self._waiting, []
        return []

    def closed(self, closed: Closed) -> Sequence[Incident]:
        """An order has ended: its incidents say how."""
        owners = self._of_order.pop(closed.generation, [])
        if closed.outcome == "done" and closed.exit_code is None:
            self._over.update(owners)
        return [self._keep(build.closed(self._incidents[owner], closed)) for owner in owners]

    def diverged(self, found: Divergence, ranks: Ranks, now: float) -> Incident:
        """The first loss that is no number."""
        others = [rank for rank in ranks if rank != found.origin]
        place = self._place(
            now, ranks, found.origin, step=found.first.step, micro_step=found.first.micro_step, affected=others,
            policy="observe" if self._policy == "observe" else "stop",
        )  # fmt: skip
        made = build.incident(place, kind=found.kind, severity="critical", summary=found.summary, cause=found.cause, fix=found.fix)
        self._waiting.append(made["id"])
        batch = None if found.origin is None or found.first.is_gradient else self._batches.get(found.origin)
        if batch is not None and batch.step == found.first.step:
            made = build.with_batch_kept(made, batch.violation)
        inside = next((self._inside[rank] for rank in found.ranks if rank in self._inside), None)
        return self._keep(self._with_way_back(made if inside is None else build.with_cause_inside(made, inside)))

    def _with_way_back(self, found: Incident) -> Incident:
        """From where to go on: parameters may be NaN by now."""
        before = found.get("framework_step")
        step = found["step"] if before is None else before  # a checkpoint counts the updates of all launches, a step those of this one
        good = [one["action"]["checkpoint"] for one in self._incidents.values() if _is_good(one["action"]["checkpoint"])]
        newest = max((one for one in good if one["updates_applied"] <= step), key=lambda one: one["updates_applied"], default=None)
        way = (
            f"this run has made no checkpoint that is known to be finite: resume from one of your own, from before step {found['step']} "
            "(`watchdog checkpoint` makes one at any time)"
            if newest is None
            else f"resume from {newest['path']}, the newest checkpoint that is finite ({count(newest['updates_applied'], 'update')})"
        )
        return found | {"fix": f"{found['fix'].rstrip('.')}; {way}"}

    def ruled(self, finding: Finding, ranks: Ranks, now: float) -> Incident | None:
        """What a rule says: one incident a subject, however often it comes and goes. None where nothing changes."""
        sign, about = finding.sign, finding.about
        subject = (about.name, sign.rank, sign.subject)
        known = self._incidents.get(self._of_rule.get(subject, ""))
        if finding.change == "resolves":
            return known and self._keep(known | {"status": "resolved"})
        if known is None and len(self._incidents) >= _MAX_INCIDENTS:
            return None
        place = self._place(now, ranks, sign.rank, step=sign.step, affected=sign.affected, policy="none")
        made = build.from_sign(about, sign, place)
        if known is not None:  # again: what is told is of this time, the step as well as the sentence
            return self._keep(known | {name: made[name] for name in _TOLD_ANEW})
        told_before = (one for one in self._of_attempt() if _same_sign(one, made))  # by a daemon that is no more
        known = next(told_before, made)
        self._of_rule[subject] = known["id"]
        return None if known is not made else self._keep(made)

    def looked_into(self, incident_id: str, words: str) -> Incident | None:
        """What was seen of it since; the stacks lie beside it. None where it is not known any more."""
        found = self._incidents.get(incident_id)
        return found and self._keep(build.with_reason(found, words) | {"evidence": dict(found["evidence"]) | {"stacks": "stacks.txt"}})

    def failed(self, first: FirstFailure, ranks: Ranks, now: float) -> tuple[Incident, bool]:
        """Ranks ended badly: the incident that this is, or belongs to, and whether it is new."""
        of_none = (found for found in self._at_hand() if not _may_be_cause(found, first))
        self._over.update([found["id"] for found in of_none if build.was_left_out(found)])
        cause = self._cause_of(first) or self._told_of_the_asking(first)
        cause = cause and (cause if first.over else not_after_all(cause))
        failed = [*(end.rank for end in first.culprits), *first.victims]
        if cause is None:
            found = self._failure(first, failed, ranks, now)
        else:
            found = self._with_besides(_ended_on_its_batch(build.with_affected(cause, failed), first), first)
        self._failure_id = found["id"]
        return self._keep(found), cause is None

    def rescued(self, rescue: Ended, *, exit_code: int | None) -> Sequence[Incident]:
        """What became of the other ranks: said, once, by the incident of the failure, and by that of a bad batch whose order gave way to it. Not by one that
        has a checkpoint to tell of already."""
        if not self._failure_id or self._failure_id == self._rescue_told:
            return []
        self._rescue_told = self._failure_id
        owners = {self._failure_id, *(found["id"] for found in self._prevented())}
        told = [
            build.rescued(found, rescue)
            for found in map(self._incidents.__getitem__, sorted(owners, key=int))
            if not _has_checkpoint(found)
        ]
        return [self._keep(found | {"action": found["action"] | {"exit_code": exit_code}}) for found in told]

    def killed_by_us(self) -> Sequence[Incident]:
        """A rank that the failure is laid to, and which made no progress."""
        return [self._keep(build.killed_by_us(self._incidents[self._failure_id]))] if self._failure_id else []

    def prevented_bad_batch(self) -> bool:
        """Whether this attempt met a bad batch that a rank did not take."""
        return bool(self._prevented())

    def ended(self, exit_code: int | None, ranks: Ranks) -> Sequence[Incident]:
        """The command has ended on all nodes: nothing fires any more; bad batches that had no order of their own name the code of ours, too."""
        prevented = self._prevented() if exit_code is not None else []
        changed = []
        for found in self._incidents.values():
            told = build.without_way_on(found) | {"status": "resolved"}
            if found["attempt"] == self._attempt and found.get("framework_step") is None:  # found before the first steps were reported
                told |= {"framework_step": _framework_step(ranks, found["origin"]["rank"], found["step"])}
            if found in prevented and found["action"]["exit_code"] is None:
                told |= {"action": found["action"] | {"exit_code": exit_code}}
            if told != found:
                changed.append(told)
        return [self._keep(told) for told in changed]

    def _prevented(self) -> list[Incident]:
        return [found for found in self._at_hand() if found["action"]["prevented"]]

    def _at_hand(self) -> list[Incident]:
        """What may have brought the job to where it is: nothing that it went on after."""
        return [found for found in self._of_attempt() if found["severity"] == "critical" and found["id"] not in self._over]

    def _cause_of(self, first: FirstFailure) -> Incident | None:
        """A rank that dies after a bad batch of its own dies of it; after a failure it is that failure's victim."""
        ranks = {end.rank for end in first.culprits}
        causes = [found for found in self._at_hand() if _may_be_cause(found, first)]
        return min(causes, key=lambda found: found["origin"]["rank"] not in ranks, default=None)

    def _told_of_the_asking(self, first: FirstFailure) -> Incident | None:
        """Ranks that one signal to the launch has ended, heard of one after the other, are one incident."""
        told = self._incidents.get(self._failure_id)
        is_same = told is not None and told["attempt"] == self._attempt and told["severity"] == "warning"
        return told if is_same and all(map(died_of_the_asking, first.culprits)) else None

    def _failure(self, first: FirstFailure, failed: Sequence[int], ranks: Ranks, now: float) -> Incident:
        end = first.culprits[0]
        origin = end.rank if len(first.culprits) == 1 else None
        others = {rank for rank in (*ranks, *failed) if rank != origin}
        place = self._place(now, ranks, origin, step=end.step, affected=sorted(others), policy="none")
        own = next(iter(self._folders.values()))
        files = Files(logs=f"{self._folders.get(end.node, own)}/logs", stacks=f"{own}/incidents/{place.incident_id}/stacks.txt")
        verdict = judge(first, self._assertions, files, alone=not others)
        self._named[place.incident_id] = frozenset(end.rank for end in first.culprits)
        self._besides[place.incident_id] = raised_besides(first.besides, end.text)
        made = build.incident(
            place, kind=verdict.kind, severity=verdict.severity, summary=verdict.summary, cause=verdict.cause, fix=verdict.fix
        )
        exception = {"text": end.text} | ({"where": end.where} if end.where else {}) if end.text else None
        made["evidence"] = {"exception": exception, "assertion": verdict.assertion, "log_tail": f"logs/rank-{end.rank}.log"}
        made["evidence"]["bundle"] = end.bundle or None
        made["evidence"]["stacks"] = "stacks.txt" if end.hung or end.late else None
        return made

    def _with_besides(self, found: Incident, first: FirstFailure) -> Incident:
        """With what ranks have raised by themselves that were heard of after it, or whose failure is another than what was found before."""
        named = self._named.get(found["id"], frozenset()) | {one["origin"]["rank"] for one in self._at_hand()}
        own = (end for end in (*first.culprits, *first.besides) if raised_its_own(end) and end.rank not in named)
        others = sorted(own, key=lambda end: end.rank)
        text = (found["evidence"].get("exception") or {}).get("text", "")
        before, words = self._besides.get(found["id"], ""), raised_besides(others, text)
        if not words or words == before:
            return found
        self._besides[found["id"]] = words
        # What was told before may begin with a capital.
        cause = found["cause"].replace(before[1:], words[1:], 1) if before else and_then(found["cause"], words)
        return found | {"cause": cause, "fix": found["fix"].replace(THEIRS_FOLLOW, of_the_others(others, text))}

    def _ordered(self, opened: Opened, ranks: Ranks, now: float) -> Incident:
        what = _ORDER_WORDS[opened.kind]
        place = self._place(now, ranks, None, affected=sorted(ranks), policy="none" if opened.kind == "order.checkpoint" else "stop")
        return build.incident(
            place, kind=opened.kind, severity="info", summary=f"{what}: {opened.reason}", cause=opened.reason, fix="nothing is wrong"
        )

    def _known(self, found: Found) -> Incident | None:
        violation = found.violation
        for known in self._of_attempt():
            batch = known["batch"] or {}
            same = (known["kind"], known["origin"]["rank"], known["step"], batch.get("key"))
            if same == (violation.kind, found.rank, found.step, violation.batch.key):
                return known
        return None

    def _of_attempt(self) -> list[Incident]:
        return [found for found in self._incidents.values() if found["attempt"] == self._attempt]

    def _place(
        self, now: float, ranks: Ranks, rank: int | None, *, policy: str, step: int | None = None, micro_step: int | None = None,
        affected: Sequence[int] = (),
    ) -> build.Place:  # fmt: skip
        state = ranks.get(rank) if rank is not None else None
        origin = build.Origin(rank=rank) if state is None else build.Origin(
            rank=rank, local_rank=state.local_rank, node=state.node, pid=state.pid
        )  # fmt: skip
        return build.Place(
            incident_id=str(max((int(number) for number in self._incidents), default=0) + 1), job=self._job, attempt=self._attempt,
            policy=policy, time_s=now, origin=origin, step=step, micro_step=micro_step, ranks_affected=affected,
            framework_step=_framework_step(ranks, rank, step),
        )  # fmt: skip

    def _keep(self, found: Incident) -> Incident:
        self._incidents[found["id"]] = found
        return found


def _ended_on_its_batch(found: Incident, first: FirstFailure) -> Incident:
    """With the batch that its own rank has failed on since, where that was kept and no other was."""
    bundle = next((end.bundle for end in first.culprits if end.rank == found["origin"]["rank"]), "")
    if not found["batch"] or not bundle or found["evidence"].get("bundle"):
        return found
    return found | {"evidence": found["evidence"] | {"bundle": bundle}}


def _framework_step(ranks: Ranks, rank: int | None, step: int | None) -> int | None:
    """The updates before the step, which a loop and its checkpoints count, where they are not the step's own number: in a launch that resumed one.

    By the rank that it began at; by any where it is no single rank's.
    """
    known = ranks.get(rank) if rank is not None else next(iter(ranks.values()), None)
    before = None if known is None else known.updates_before(step)
    return None if before == step else before


def _has_checkpoint(found: Incident) -> bool:
    return bool((found["action"]["checkpoint"] or {}).get("committed"))


def _is_good(checkpoint: Mapping[str, Any] | None) -> bool:
    return checkpoint is not None and bool(checkpoint.get("committed")) and checkpoint.get("finite") is not False


def _may_be_cause(found: Incident, first: FirstFailure) -> bool:
    """Whether ranks may have failed by what was found before: not where it never ends a rank, nor by a batch that the rank went on after."""
    if found["kind"].startswith(_NEVER_FATAL):
        return False
    return found["kind"].startswith(_FAILURES) or any(_may_be_of(found, end, first) for end in first.culprits)


def _may_be_of(found: Incident, end: RankEnd, first: FirstFailure) -> bool:
    """By what was found on another rank only where it tells of no failure of its own: an exception that blames no peer, or an end without a word while the
    other is well."""
    origin = found["origin"]["rank"]
    behind = _STEPS_BEHIND if is_of_device(end) else _BATCHES_BEHIND
    if end.step is not None and found["step"] is not None and end.step > found["step"] + behind:
        return False
    if build.was_left_out(found) and not (end.raised_ns or (end.text and end.signal is None)):
        return False
    if origin in (None, end.rank):
        return True
    if end.raised_ns:
        return end.is_victim
    failed = {*first.victims, *(culprit.rank for culprit in first.culprits)}
    return origin in failed or died_of_the_asking(end) or end.lost_a_peer


def _same_sign(one: Incident, other: Incident) -> bool:
    return (one["fingerprint"], one["origin"]["rank"]) == (other["fingerprint"], other["origin"]["rank"])
