"""START HERE for alerts: what is open, who has been told what of it, and who must be told next.

Owns every open alert and, for each of its receivers, what was delivered. An alert ends where its fault ended: resolved while the job went on, or the job
finished; a job that died of it leaves it standing until its training goes on (a restart, a requeue), or for `keep_s`. Pure: incidents and `now` in,
deliveries out. What is told twice by a daemon that died in between carries the same key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch_watchdog.alerts.alert import Alert, Delivery, key_of
from torch_watchdog.alerts.open import Open, Rules
from torch_watchdog.alerts.routes import Route, Silence, route_of
from torch_watchdog.alerts.text import lines_of, says_the_same, title_of

__all__ = ["AlertDesk", "JobFacts"]

_MAX_OPEN_OF_JOB = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What an alert must know of the job whose incident it tells. `page` and `runbook` make links of (job, incident) and of a kind;
    `asked` is the option of commands that says whom or where; `exit_codes`: ours, as the launch's `[exit_codes]` has them; `outlived`: by this daemon,
    which takes an acknowledgement when the job has ended, too; `resume` gives the lines that go on after an incident.
    """

    job: str
    training_job: str
    attempt: int
    world_size: int
    ended: bool
    exit_code: int | None
    page: Callable[[str, str], str | None] = lambda _job, _incident: None
    runbook: Callable[[str], str | None] = lambda _kind: None
    asked: Sequence[str] = ()
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    outlived: bool = True
    resume: Callable[[Mapping[str, Any]], Sequence[str]] = lambda _incident: ()


class AlertDesk:
    """`receivers` maps each receiver's name to whether it must be told again while an alert is open, and how much of a hurry it bears."""

    def __init__(self, routes: Sequence[Route], rules: Mapping[str, Rules]) -> None:
        self._routes, self._rules = tuple(routes), dict(rules)
        self._open: dict[str, Open] = {}
        self._silences: list[Silence] = []
        self._changed: set[str] = set()
        self._given_up: list[tuple[str, str]] = []
        self._sent: dict[str, deque[float]] = {name: deque(maxlen=one.per_minute) for name, one in rules.items()}

    # What others look at

    @property
    def open_alerts(self) -> tuple[Alert, ...]:
        return tuple(one.alert for one in self._open.values() if not one.alert.resolved)

    @property
    def silences(self) -> tuple[Silence, ...]:
        return tuple(self._silences)

    def waiting(self) -> int:
        """Deliveries that were tried and must be tried again."""
        return sum(line.tries > 0 for one in self._open.values() for line in one.lines.values())

    def changed_jobs(self) -> set[str]:
        """Jobs whose alerts have changed since this was asked."""
        changed, self._changed = self._changed, set()
        return changed

    def given_up(self) -> list[tuple[str, str]]:
        """Alert and receiver of what was not taken in time, since this was asked."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def saved(self, job: str) -> list[dict[str, Any]]:
        """The job's open alerts, for `restore`."""
        return [one.saved() for one in self._open.values() if one.alert.job == job]

    # What happens

    def restore(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """Alerts as an earlier daemon left them; those that are open here already stay as they are."""
        for entry in saved:
            found = Open.from_saved(entry, self._rules)
            if found is not None:
                self._open.setdefault(found.alert.key, found)

    def forget(self, job: str) -> None:
        """Somebody else tells of this job from now on."""
        for key in [key for key, one in self._open.items() if one.alert.job == job]:
            self._open.pop(key)

    def incident(self, incident: Mapping[str, Any], job: JobFacts, now: float) -> None:
        """An incident is new or has changed."""
        if incident["severity"] not in ("warning", "critical") or str(incident["kind"]).startswith("order."):
            return
        known = self._open.get(key_of(incident, job.training_job))
        over = incident["status"] == "resolved"
        if known is None and (over or self._is_flooded(job.job)):
            return
        alert = _alert(incident, job, known, now)
        # What a SIGTERM ended is a warning only, and the training is gone all the same.
        may_end_it = incident["severity"] == "critical" or incident["kind"] == "rank.died"
        stands = over and job.ended and may_end_it and job.exit_code not in (0, None)
        self._keep(alert, now, over=_end_of(job) if over and not stands else "", stands=stands)

    def raised(self, alert: Alert, now: float, *, stands: bool = False) -> None:
        """An alert of the daemon's own, which no incident stands for. `stands`: nobody will say more of it but a later run."""
        known = self._open.get(alert.key)
        starts_s = known.alert.starts_s if known is not None and not known.alert.resolved else alert.starts_s
        self._keep(replace(alert, starts_s=starts_s), now, stands=stands)

    def settled(self, key: str, now: float, *, why: str) -> None:
        """What `raised` told is over."""
        known = self._open.get(key)
        if known is not None:
            self._keep(known.alert, now, over=why)

    def trains(self, job: JobFacts, now: float) -> None:
        """The job takes steps: what an earlier run or attempt of it died of is over."""
        for one in list(self._open.values()):
            alert = one.alert
            earlier_run = alert.training_job == job.training_job and alert.job != job.job and one.stands_since_s is not None
            earlier_attempt = alert.job == job.job and alert.attempt < job.attempt
            if not alert.resolved and (earlier_run or earlier_attempt):
                self._keep(alert, now, over=f"the later run {job.job} trains" if earlier_run else "the launcher's next attempt trains")

    def acknowledge(self, name: str, by: str, now: float) -> Alert | None:
        """`name` is JOB/ID or the alert's key; None where no such alert is open."""
        for one in self._open.values():
            if name in (one.alert.name, one.alert.key) and not one.alert.resolved:
                one.change(replace(one.alert, acknowledged_by=by), now)
                self._changed.add(one.alert.job)
                return one.alert
        return None

    def silence(self, silence: Silence, now: float) -> None:
        self._silences = [known for known in self._silences if known.until_s > now] + [silence]

    # Who must be told

    def due(self, now: float, *, closing: bool = False) -> tuple[Delivery, ...]:
        """What must be sent now; each is under way until `delivered` or `failed` says what came of it. `closing`: this daemon's last words."""
        found: list[Delivery] = []
        for one in list(self._open.values()):
            one.escalate(route_of(one.alert, self._routes), self._rules, now)
            found += one.due(now, is_quiet=self._is_quiet(one.alert, now), closing=closing, may_send=lambda name: self._may_send(name, now))
            self._forget_if_over(one, now)
        return tuple(found)

    def has_last_words(self, now: float) -> bool:
        """Whether a daemon that ends now owes anybody a word."""
        return any(one.has_last_words(is_quiet=self._is_quiet(one.alert, now)) for one in self._open.values())

    def delivered(self, delivery: Delivery, now: float) -> None:
        if delivery.alert.key in self._open:
            self._open[delivery.alert.key].delivered(delivery, now)
            self._changed.add(delivery.alert.job)
            self._forget_if_over(self._open[delivery.alert.key], now)

    def failed(self, delivery: Delivery, now: float) -> None:
        """It is tried again, later each time."""
        if delivery.alert.key in self._open:
            self._open[delivery.alert.key].failed(delivery, now)

    def next_deadline(self, now: float) -> float | None:
        """When `due` may have something, if nothing happens before."""
        times = [one.next_deadline(route_of(one.alert, self._routes)) for one in self._open.values()]
        times += [silence.until_s for silence in self._silences if silence.until_s > now]
        return min((time for time in times if time is not None), default=None)

    def _keep(self, alert: Alert, now: float, *, over: str = "", stands: bool = False) -> None:
        """`over`: how it ended, where it has."""
        one = self._open.get(alert.key)
        if one is None:
            route = route_of(alert, self._routes)
            if not route.to:
                return
            one = self._open[alert.key] = Open(alert, {name: self._rules[name] for name in route.to}, now)
        one.stands_since_s = (one.stands_since_s or now) if stands else None
        if over and one.alert.resolved:
            over = one.alert.resolved_by or over  # it ended then: whoever has heard of that hears nothing new
        one.change(replace(alert, resolved=bool(over), resolved_by=over, acknowledged_by=one.alert.acknowledged_by), now)
        self._changed.add(alert.job)

    def _forget_if_over(self, one: Open, now: float) -> None:
        if one.is_over(now):
            self._given_up += [(one.alert.name, receiver) for receiver in one.unheard()]
            self._open.pop(one.alert.key)
            self._changed.add(one.alert.job)

    def _is_flooded(self, job: str) -> bool:
        """A job that finds more has told all there is to tell: the rest is in its incidents."""
        return sum(one.alert.job == job for one in self._open.values()) >= _MAX_OPEN_OF_JOB

    def _may_send(self, receiver: str, now: float) -> bool:
        sent = self._sent[receiver]
        if len(sent) == sent.maxlen and now < sent[0] + 60.0:
            return False
        sent.append(now)
        return True

    def _is_quiet(self, alert: Alert, now: float) -> bool:
        return any(silence.until_s > now and silence.match.fits(alert) for silence in self._silences)


def _end_of(job: JobFacts) -> str:
    """How an alert of this job ended that a later run did not end."""
    if not job.ended:
        return "the job goes on"
    if job.exit_code == 0:
        return "the job has ended well"
    code = "" if job.exit_code is None else f" (exit code {job.exit_codes.get(job.exit_code, job.exit_code)})"
    return f"the job has ended{code}"


def _alert(incident: Mapping[str, Any], job: JobFacts, known: Open | None, now: float) -> Alert:
    page, runbook = job.page(job.job, str(incident["id"])), job.runbook(str(incident["kind"]))
    is_last = not job.outlived and (job.ended or incident["action"].get("exit_code") is not None)
    lines = lines_of(
        incident,
        world_size=job.world_size,
        page=page,
        runbook=runbook,
        asked=job.asked,
        exit_codes=job.exit_codes,
        is_last=is_last,
        outlived=job.outlived,
        resume=job.resume(incident),
    )
    if known is not None and known.was_told and says_the_same(lines, known.alert.lines):
        lines = known.alert.lines
    return Alert(
        key=key_of(incident, job.training_job), training_job=job.training_job, job=job.job, attempt=incident["attempt"],
        incident=str(incident["id"]), kind=incident["kind"], severity=incident["severity"], title=title_of(incident),
        lines=lines, starts_s=known.alert.starts_s if known is not None else now, node=incident["origin"].get("node"), rank=incident["origin"].get("rank"),
        page=page, runbook=runbook,
    )  # fmt: skip
