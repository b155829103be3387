"""The log of a central daemon, one line for each thing that changed: a job began or ended, an incident was found or is over, who was told of it.

Owns the words. A launch's own daemon has none of this but for `AtTerminal`: that terminal is its user's. What comes from a job is shortened, and brings no
control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_watchdog.job.incident import has_diverged, is_order
from torch_watchdog.job.ranks import way_out
from torch_watchdog.phrases import count, one_line
from torch_watchdog_proto.sentences import and_then

if TYPE_CHECKING:
    from torch_watchdog.daemon.live_job import JobListener, LiveJob

__all__ = ["AtTerminal", "Journal", "Listeners", "printable"]

_MAX_WORDS = 200


class Journal:
    """A JobListener."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._open: set[tuple[str, str]] = set()  # job and id of incidents that were said
        self._ended: set[str] = set()

    def opened(self, live: LiveJob, saved: Sequence[Mapping[str, Any]]) -> None:  # noqa: ARG002 - as JobListener has it
        job, known = live.job, live.job.incidents
        self._ended.discard(job.name)
        self._open |= {(job.name, str(one["id"])) for one in known if one["status"] == "firing"}
        begins = f"goes on here, with {count(len(known), 'incident')} so far" if live.last_seq or known else "begins"
        self._say(f"job {job.name}: {begins}, policy {job.policy}, on {printable(job.host)}")

    def incident(self, live: LiveJob, incident: Mapping[str, Any]) -> None:
        key, words = (live.job.name, str(incident["id"])), printable(str(incident["summary"]))
        what = str(incident["kind"]) if is_order(incident) else f"incident {incident['id']}: {incident['kind']}, {incident['severity']}"
        if incident["status"] == "firing" and key not in self._open:
            self._open.add(key)
            self._say(f"job {live.job.name}: {what}, {words}")
        elif incident["status"] == "resolved" and key in self._open:
            self._open.discard(key)
            self._say(f"job {live.job.name}: over, {what}, {words}")

    def event(self, live: LiveJob, event: Mapping[str, Any]) -> None:
        """Nothing: a job's own story is in its run directory."""

    def reported(self, live: LiveJob, *, trains: bool) -> None:
        """Nothing: that is what jobs do all the time."""

    def left(self, live: LiveJob) -> None:
        status = live.job.status()
        if status.state != "ended" or status.job in self._ended:
            return
        self._ended.add(status.job)
        self._open = {key for key in self._open if key[0] != status.job}
        code = "without an exit code" if status.exit_code is None else f"exit code {status.exit_code}"
        self._say(f"job {status.job}: ended, {code}, {count(status.incidents, 'incident')}")

    def given_up(self, live: LiveJob) -> None:
        """Said for all of them at once, by who noticed."""


class AtTerminal:
    """A JobListener for who watches a launch: a loss that has become NaN and stops nothing has a line, once, and so has a standstill, as soon as it is known
    who is late. An order of ours is told by its ranks."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: set[tuple[str, str]] = set()  # job and id of incidents
        self._late: dict[str, tuple[Any, Any]] = {}  # job -> attempt and step of the newest standstill that was said

    def opened(self, live: LiveJob, saved: Sequence[Mapping[str, Any]]) -> None:  # noqa: ARG002 - as JobListener has it
        self._told |= {(live.job.name, str(one["id"])) for one in live.job.incidents}

    def incident(self, live: LiveJob, incident: Mapping[str, Any]) -> None:
        key = live.job.name, str(incident["id"])
        if has_diverged(incident) and incident["action"]["policy"] == "observe" and key not in self._told:
            self._told.add(key)
            self._say(
                f"{printable(str(incident['summary']))}: policy observe, so the training goes on unchanged; the next ones are recorded, not said"
            )

    def event(self, live: LiveJob, event: Mapping[str, Any]) -> None:
        name, at = live.job.name, (event["attempt"], event["step"])
        if event["kind"] == "rank.late" and self._late.get(name) != at:
            self._late[name] = at
            job = live.job.status()
            self._say(one_line(and_then(job.standstill or event["text"], way_out(job.ranks, job.policy))))

    def reported(self, live: LiveJob, *, trains: bool) -> None:
        """Nothing."""

    def left(self, live: LiveJob) -> None:
        """Nothing: its launch has the last words."""

    def given_up(self, live: LiveJob) -> None:
        """Nothing."""


class Listeners:
    """Several as one."""

    def __init__(self, *listeners: JobListener) -> None:
        self._listeners = listeners

    def opened(self, live: LiveJob, saved: Sequence[Mapping[str, Any]]) -> None:
        for one in self._listeners:
            one.opened(live, saved)

    def incident(self, live: LiveJob, incident: Mapping[str, Any]) -> None:
        for one in self._listeners:
            one.incident(live, incident)

    def event(self, live: LiveJob, event: Mapping[str, Any]) -> None:
        for one in self._listeners:
            one.event(live, event)

    def reported(self, live: LiveJob, *, trains: bool) -> None:
        for one in self._listeners:
            one.reported(live, trains=trains)

    def left(self, live: LiveJob) -> None:
        for one in self._listeners:
            one.left(live)

    def given_up(self, live: LiveJob) -> None:
        for one in self._listeners:
            one.given_up(live)


def printable(text: str, longest: int = _MAX_WORDS) -> str:
    """At most so many characters, with a blank in the place of each control character."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:longest])
