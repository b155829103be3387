"""What `watchdog stop` and `watchdog checkpoint` share: one request to the daemon that decides for the job, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import click

from torch_watchdog.cli.options import json_option, look_options, settings
from torch_watchdog.cli.output import print_json
from torch_watchdog.cli.source import JobLook, find_job, has_own_daemon, live_client
from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.errors import DaemonUnreachableError, OrderLostError, OrderRefusedError, WatchdogError
from torch_watchdog.job.incident import GIVEN_UP, is_order
from torch_watchdog.job.ranks import way_out
from torch_watchdog.launch.going_on import to_go_on
from torch_watchdog.launch.places import here
from torch_watchdog.phrases import as_typed, checkpoint_state, is_good, one_line
from torch_watchdog.store.run_directory import RunDirectory
from torch_watchdog.user import caller
from torch_watchdog_agent.asked import TAKEN
from torch_watchdog_proto.envelopes import OrderAnswer, OrderKind, RankStatus
from torch_watchdog_proto.sentences import and_then
from torch_watchdog_proto.stop.events import IS_GONE

__all__ = ["ask", "order_options"]

LOOK_EVERY_S = 0.2
_LATE = "late "  # before the ranks, of what was said
WORTH_A_LINE_S = 2.0  # of a rank that has not answered: others' answers take milliseconds
Incident = Mapping[str, Any]


def order_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that both commands take."""
    wait = click.option("--wait/--no-wait", default=True, help="Wait until it is done, and tell what was saved where (default).")
    reason = click.option("--reason", default="", metavar="TEXT", help="Kept in the job's events.")
    return click.argument("job")(reason(wait(look_options(json_option(command)))))


def ask(context: click.Context, job: str, kind: OrderKind, *, reason: str, wait: bool, as_json: bool) -> None:
    """Raises OrderRefusedError where the job did not take it, OrderLostError where no checkpoint that can be used came of it."""
    config = settings(context)
    look = find_job(job, directory=config.directory, daemon=config.daemon)
    say, deadline_s = (lambda _: None) if as_json else _told_on_the_side, time.monotonic() + config.grace_s
    with ExitStack() as stack:
        try:
            client = stack.enter_context(live_client(look))
            before = _orders(client.incidents(look.name), kind)
        except DaemonUnreachableError as error:
            if not has_own_daemon(look):
                raise
            raise OrderRefusedError(look.name, _why_nobody_takes_it(look)) from error
        answer = _answer(client, look.name, kind, reason=reason, deadline_s=deadline_s, say=say)
        if not answer.accepted:
            raise OrderRefusedError(look.name, answer.text)
        if not as_json:
            click.echo(f"asked: {answer.text}, and what comes of it is awaited" if wait else f"asked: {answer.text}")
        waiting = _Awaited(client, look, kind, known=len(before), say=say)
        came_of_it = waiting.end(within_s=deadline_s - time.monotonic()) if wait else None
        if came_of_it is not None and _gave_way(came_of_it):
            came_of_it = waiting.rescue(came_of_it, within_s=deadline_s - time.monotonic())
    checkpoint = _checkpoint_of(came_of_it)
    if as_json:
        print_json({"job": look.name, "accepted": True, "text": answer.text, "checkpoint": checkpoint or None})
    elif is_good(checkpoint):
        click.echo("\n".join([_told(checkpoint), *_to_go_on(look, checkpoint)]))
    if came_of_it is not None and not is_good(checkpoint):
        raise OrderLostError(look.name, str(came_of_it.get("summary")))


def _why_nobody_takes_it(look: JobLook) -> str:
    """A launch's own daemon ends with it. Where the launch alone was killed its ranks have not, and whoever asked still wants them to."""
    return f"it {getattr(look.status(), 'problem', 'is not running: its launch has ended')}"


def _answer(
    client: DaemonClient, name: str, kind: OrderKind, *, reason: str, deadline_s: float, say: Callable[[str], None]
) -> OrderAnswer:  # fmt: skip
    """To a stop that comes while a checkpoint is written: once that is done. Whoever asks would have to ask again."""

    def is_written() -> bool:
        return kind == "order.stop" and any(
            found.get("status") != "resolved" for found in _orders(client.incidents(name), "order.checkpoint")
        )

    said = False
    while True:
        was_written = is_written()
        answer = client.request(name, kind, by=caller(), reason=reason)
        if answer.accepted or not (was_written or is_written()) or time.monotonic() >= deadline_s:
            return answer
        if not said:
            say("a checkpoint is under way: the stop is asked for again once that is done")
            said = True
        while is_written() and time.monotonic() < deadline_s:
            time.sleep(LOOK_EVERY_S)


def _orders(incidents: Iterable[Incident], kind: OrderKind) -> Sequence[Incident]:
    return [found for found in incidents if found.get("kind") == kind]


@dataclass(frozen=True, slots=True)
class _Awaited:
    """An order that was taken, until it has ended. The daemon is asked; what it wrote is read where it has ended with the job."""

    client: DaemonClient
    look: JobLook
    kind: OrderKind
    known: int
    say: Callable[[str], None]

    def end(self, *, within_s: float) -> Incident:
        """The order's own record. Raises OrderLostError where there is none to come, or nothing came in time."""
        begun_s, said = time.monotonic(), frozenset[str]()
        while (waited_s := time.monotonic() - begun_s) < within_s:
            try:
                found, ended = self._live()
                said = self._say_who_is_silent(said, waited_s)
            except DaemonUnreachableError as error:
                return self._left_behind(error)
            if found is not None and found.get("status") == "resolved":
                return found
            if ended:
                raise OrderLostError(self.look.name, "its training ended first, or something else stopped it")
            time.sleep(LOOK_EVERY_S)
        raise OrderLostError(self.look.name, f"nothing came of it in {within_s:g} s")

    def rescue(self, order: Incident, *, within_s: float) -> Incident:
        """Of the failure that the order gave way to: its record, with what the other ranks have saved. Raises OrderLostError."""
        self.say(f"{_why_given_up(order)}: the order gave way to that failure, and what the other ranks save is awaited")
        begun_s, found, ended = time.monotonic(), None, False
        while found is None and not ended and time.monotonic() - begun_s < within_s:
            try:
                ended = self.client.job(self.look.name).state == "ended"
                found = _rescue_of(order, self.client.incidents(self.look.name))
            except DaemonUnreachableError:
                ended, found = True, _rescue_of(order, self.look.incidents())
            if found is None and not ended:
                time.sleep(LOOK_EVERY_S)
        if found is None:
            came = "the failure saved nothing" if ended else f"nothing was saved in {within_s:g} s"
            raise OrderLostError(self.look.name, f"it gave way to a failure ({_why_given_up(order)}), and {came}")
        if not is_good(_checkpoint_of(found)):
            raise OrderLostError(self.look.name, f"it gave way to a failure: {found.get('summary')}; {found.get('cause')}")
        self.say(f"the failure: {one_line(str(found.get('summary')))}")
        return found

    def _live(self) -> tuple[Incident | None, bool]:
        found = self._own(self.client.incidents(self.look.name))
        return found, found is None and self.client.job(self.look.name).state == "ended"

    def _say_who_is_silent(self, said: frozenset[str], waited_s: float) -> frozenset[str]:
        """Each once, as soon as it is known: who asks could do something about it. Who is late is told again once that is another."""
        job = self.client.job(self.look.name)
        told = {words: words for rank in job.ranks if (words := _why_silent(rank, waited_s, job.job))}
        late = [str(rank.rank) for rank in job.ranks if rank.phase == "late"]
        if late and not told:
            told[f"{_LATE}{' '.join(late)}"] = and_then(job.standstill, way_out(job.ranks, job.policy))
        for words in (words for key, words in told.items() if key not in said):
            self.say(words)
        return frozenset(key for key in said if not key.startswith(_LATE)) | told.keys()

    def _own(self, incidents: Iterable[Incident]) -> Incident | None:
        return next(iter(_orders(incidents, self.kind)[self.known :]), None)

    def _left_behind(self, error: DaemonUnreachableError) -> Incident:
        """A launch's own daemon ends with it: what came of the order is on disk then. One that was killed has left it unfinished."""
        found = self._own(self.look.incidents())
        if found is None or found.get("status") != "resolved":
            raise OrderLostError(self.look.name, "its daemon is gone, and the ranks end by themselves what they had begun") from error
        return found


def _gave_way(order: Incident) -> bool:
    return not is_good(_checkpoint_of(order)) and IS_GONE in _why_given_up(order)


def _why_given_up(order: Incident) -> str:
    return str(order.get("summary")).rpartition(GIVEN_UP)[2] if GIVEN_UP in str(order.get("summary")) else ""


def _rescue_of(order: Incident, incidents: Iterable[Incident]) -> Incident | None:
    """Once it is over. An attempt has one, and takes no order behind it; a bad batch that came before may tell of it, too."""
    same = [found for found in incidents if found.get("attempt") == order.get("attempt") and found.get("id") != order.get("id")]
    rescued = (found for found in same if (found.get("action") or {}).get("policy") == "rescue")
    return next(rescued, None) or next((found for found in same if not is_order(found) and is_good(_checkpoint_of(found))), None)


def _checkpoint_of(incident: Incident | None) -> Mapping[str, Any]:
    return ((incident or {}).get("action") or {}).get("checkpoint") or {}


def _told_on_the_side(line: str) -> None:
    click.echo(line, err=True)


def _why_silent(rank: RankStatus, waited_s: float, job: str) -> str:
    if rank.phase == "stopped":
        return f"rank {rank.rank} does not answer: its process is stopped; `kill -CONT {rank.pid}` on {rank.node} lets it go on"
    if rank.phase == "asked" and waited_s >= WORTH_A_LINE_S:
        why = f"pid {rank.pid} on {rank.node} runs, and native code may hold the interpreter's lock"
        return f"rank {rank.rank} does not answer yet: {why}; until it does, `watchdog stop {job} --cancel` takes back what was asked"
    return ""


def _to_go_on(look: JobLook, checkpoint: Mapping[str, Any]) -> Sequence[str]:
    """As far as the launch's own record can be seen from here."""
    with suppress(WatchdogError):
        folder = look.folder()
        if folder is not None:
            left_out, restores = RunDirectory(folder).quarantine_file, (folder / TAKEN).exists()
            quarantine = str(left_out) if left_out.exists() else None
            return to_go_on(checkpoint, look.record(), folder, here=here(), quarantine=quarantine, restores=restores)
    return ()


def _told(checkpoint: Mapping[str, Any]) -> str:
    return f"{as_typed(checkpoint['path'], here())} ({checkpoint_state(checkpoint)})"
