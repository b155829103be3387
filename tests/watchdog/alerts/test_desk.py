"""Who is told what, and when: the desk with a clock that is moved by hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_watchdog.alerts.alert import Delivery, alert_name, key_of, lineage_of
from torch_watchdog.alerts.desk import AlertDesk, JobFacts
from torch_watchdog.alerts.open import Rules
from torch_watchdog.alerts.routes import Match, Route, Silence
from torch_watchdog.job import incident as build

PAGER, CHAT, MANAGER = "pager", "chat", "manager"
RULES = {PAGER: Rules(), CHAT: Rules(tells_past=True), MANAGER: Rules(resend_s=60.0, per_minute=1_000)}
HOLD_S = 8.0


def incident(kind: str = "rank.hang", number: str = "1", severity: str = "critical", job: str = "job", **more: Any) -> dict[str, Any]:
    place = build.Place(incident_id=number, job=job, attempt=0, policy="stop", time_s=0.0, origin=build.Origin(rank=3, node="n1"), step=7)
    return build.incident(place, kind=kind, severity=severity, summary="what happened", cause="c", fix="f") | more


def facts(job: str = "job", **more: Any) -> JobFacts:
    known: dict[str, Any] = {"training_job": job, "attempt": 0, "world_size": 4, "ended": False, "exit_code": None}
    return JobFacts(job=job, **known | more)


class Desk:
    """Every delivery succeeds at once, unless `down` names its receiver."""

    def __init__(self, *to: str, routes: tuple[Route, ...] | None = None) -> None:
        self.now = 1000.0
        self.routes = routes or (Route(match=Match(), to=to or (PAGER,)),)
        self.desk = AlertDesk(self.routes, RULES)
        self.down: set[str] = set()

    def see(self, found: dict[str, Any], **more: Any) -> None:
        self.desk.incident(found, facts(found["job"], **more), self.now)

    def sent(self, after_s: float = 0.0, **more: Any) -> list[tuple[str, str]]:
        """What is told after so much time: (receiver, action)."""
        self.now += after_s
        told = []
        for delivery in self.desk.due(self.now, **more):
            if delivery.receiver in self.down:
                self.desk.failed(delivery, self.now)
            else:
                self.desk.delivered(delivery, self.now)
            told.append((delivery.receiver, delivery.action))
        return told


def mine(desk: Desk) -> str:
    (alert,) = desk.desk.open_alerts
    return next(line for line in alert.lines if line.startswith("mine: "))


@pytest.mark.parametrize(
    ("more", "exit_code", "can_be_acknowledged"),
    [
        ({}, 65, True),
        ({"ended": True, "exit_code": 1}, None, True),
        ({"outlived": False}, None, True),
        ({"outlived": False}, 65, False),
        ({"outlived": False, "ended": True, "exit_code": 1}, None, False),
    ],
)
def test_an_acknowledgement_is_offered_where_the_daemon_that_takes_it_is_still_there(
    more: dict[str, Any], exit_code: int | None, can_be_acknowledged: bool
) -> None:
    desk, found = Desk(PAGER), incident()
    desk.see(found | {"action": found["action"] | {"exit_code": exit_code}}, **more)
    assert mine(desk).startswith("mine: watchdog ack job/1") == can_be_acknowledged


def test_nobody_is_called_again_only_because_the_launch_has_ended() -> None:
    desk, found = Desk(PAGER), incident()
    desk.see(found, outlived=False)
    assert desk.sent(HOLD_S) == [(PAGER, "trigger")]
    desk.see(found | {"status": "resolved"}, outlived=False, ended=True, exit_code=1)
    assert desk.sent(HOLD_S) == []
    desk.see(found | {"status": "resolved", "fix": "another"}, outlived=False, ended=True, exit_code=1)
    assert desk.sent(HOLD_S) == [(PAGER, "trigger")] and "watchdog ack" not in mine(desk)


def test_an_incident_is_told_once_after_what_was_done_about_it_can_be_known() -> None:
    desk = Desk()
    desk.see(incident())
    assert desk.sent() == []
    assert desk.sent(HOLD_S) == [(PAGER, "trigger")]
    assert desk.sent(3600) == []


def test_the_same_words_again_tell_nobody_anything_and_new_ones_do() -> None:
    desk = Desk()
    desk.see(incident())
    desk.sent(HOLD_S)
    desk.see(incident())
    assert desk.sent() == []
    desk.see(incident(action={"policy": "stop", "prevented": True, "exit_code": 65}))
    assert desk.sent() == [(PAGER, "trigger")]


def test_what_is_resolved_while_the_job_goes_on_is_resolved() -> None:
    desk = Desk()
    desk.see(incident())
    desk.sent(HOLD_S)
    desk.see(incident(status="resolved"))
    assert desk.sent() == [(PAGER, "resolve")]
    assert desk.desk.open_alerts == () and desk.desk.saved("job") == []


@pytest.mark.parametrize("closing", [False, True])
def test_what_was_over_before_it_could_be_told_wakes_nobody_but_the_chat_hears_of_it_and_then_of_its_end(closing: bool) -> None:
    """An end alone is the end of nothing, to whoever reads it."""
    desk = Desk(PAGER, CHAT, MANAGER)
    desk.see(incident())
    desk.see(incident(status="resolved"))
    assert desk.sent(closing=closing) == [(CHAT, "trigger")]
    assert desk.sent(closing=closing) == [(CHAT, "resolve")]
    assert desk.sent(HOLD_S) == [] and desk.desk.saved("job") == []


def test_what_was_over_before_the_chat_took_a_word_is_told_from_its_begin_also_by_the_next_daemon() -> None:
    desk = Desk(CHAT)
    desk.down = {CHAT}
    desk.see(incident())
    desk.sent(HOLD_S)
    desk.see(incident(status="resolved"))
    assert desk.sent(10) == [(CHAT, "trigger")]
    later = Desk(CHAT)
    later.now = desk.now
    later.desk.restore(json.loads(json.dumps(desk.desk.saved("job"))))
    assert [later.sent(), later.sent(), later.sent()] == [[(CHAT, "trigger")], [(CHAT, "resolve")], []]


def test_what_the_job_died_of_stands_until_it_trains_again() -> None:
    desk = Desk()
    desk.see(incident())
    desk.see(incident(status="resolved"), ended=True, exit_code=75)
    assert desk.sent() == [(PAGER, "trigger")]  # at once: nothing more will be known
    assert desk.sent(3600) == []
    desk.desk.trains(facts("job.2", training_job="job"), desk.now)
    assert desk.sent() == [(PAGER, "resolve")]


@pytest.mark.parametrize(
    ("kind", "severity", "exit_code", "stands"),
    [
        ("rank.died", "warning", 1, True),  # a SIGTERM from outside
        ("rank.died", "warning", 0, False),
        ("rank.straggler", "warning", 1, False),  # nobody dies of a slow rank
        ("batch.empty", "critical", 65, True),
    ],
)
def test_what_the_job_died_of_stands_whoever_ended_it(kind: str, severity: str, exit_code: int, stands: bool) -> None:
    desk = Desk(PAGER, CHAT)
    desk.see(incident(kind, severity=severity))
    desk.see(incident(kind, severity=severity, status="resolved"), ended=True, exit_code=exit_code)
    assert desk.sent(closing=True) == ([(PAGER, "trigger"), (CHAT, "trigger")] if stands else [(CHAT, "trigger")])
    assert desk.sent(closing=True) == ([] if stands else [(CHAT, "resolve")])
    desk.desk.trains(facts("job.2", training_job="job"), desk.now)
    assert desk.sent() == ([(PAGER, "resolve"), (CHAT, "resolve")] if stands else [])


def ends(desk: Desk) -> list[str]:
    """How what ends now ended, as receivers are told."""
    found = [one for one in desk.desk.due(desk.now) if one.action == "resolve"]
    for one in found:
        (desk.desk.failed if one.receiver in desk.down else desk.desk.delivered)(one, desk.now)
    return [one.alert.resolved_by for one in found]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "the job goes on"),
        ({"ended": True, "exit_code": 0}, "the job has ended well"),
        ({"ended": True, "exit_code": 7, "exit_codes": {7: 107}}, "the job has ended (exit code 107)"),
        ({"ended": True}, "the job has ended"),
    ],
)
def test_an_end_says_how_it_came(more: dict[str, Any], words: str) -> None:
    desk = Desk(PAGER, CHAT)
    desk.see(incident(severity="warning"))
    desk.sent(HOLD_S)
    desk.down = {PAGER}
    desk.see(incident(severity="warning", status="resolved"), **more)
    assert ends(desk) == [words] * 2
    desk.down = set()
    desk.see(incident(severity="warning", status="resolved"), ended=True, exit_code=0)
    desk.now += 10
    assert ends(desk) == [words]  # it ended then: the chat, which has heard of that, hears nothing more as its job ends


@pytest.mark.parametrize(
    ("later", "after_s", "words"),
    [
        (facts("job.2", training_job="job"), 0.0, "the later run job.2 trains"),
        (facts(attempt=1), 0.0, "the launcher's next attempt trains"),
        (None, 86_401.0, "nothing more was heard of it for a day"),
    ],
)
def test_the_end_of_what_a_job_died_of_says_what_ended_it(later: JobFacts | None, after_s: float, words: str) -> None:
    desk = Desk()
    desk.see(incident())
    desk.see(incident(status="resolved"), ended=True, exit_code=75)
    desk.sent()
    saved = json.loads(json.dumps(desk.desk.saved("job")))
    saved[0]["alert"].pop("resolved_by")  # as an older daemon's are
    after = Desk()
    after.now = desk.now + after_s
    after.desk.restore(saved)
    if later is not None:
        after.desk.trains(later, after.now)
    assert ends(after) == [words]


def test_what_nobody_mends_is_forgotten_after_a_day() -> None:
    desk = Desk()
    desk.see(incident())
    desk.see(incident(status="resolved"), ended=True, exit_code=75)
    desk.sent()
    assert desk.sent(86_401) == [(PAGER, "resolve")]


def test_a_job_that_finished_leaves_nothing_standing() -> None:
    desk = Desk()
    desk.see(incident())
    desk.sent(HOLD_S)
    desk.see(incident(status="resolved"), ended=True, exit_code=0)
    assert desk.sent() == [(PAGER, "resolve")]


def test_an_attempt_that_trains_resolves_what_the_one_before_it_died_of() -> None:
    desk = Desk()
    desk.see(incident())
    desk.sent(HOLD_S)
    desk.desk.trains(facts(attempt=0), desk.now)
    assert desk.sent() == []
    desk.desk.trains(facts(attempt=1), desk.now)
    assert desk.sent() == [(PAGER, "resolve")]


def test_a_requeue_with_the_same_fault_keeps_its_alert() -> None:
    desk = Desk()
    desk.see(incident())
    desk.see(incident(status="resolved"), ended=True, exit_code=65)
    (first,) = desk.desk.due(desk.now)
    desk.desk.delivered(first, desk.now)
    desk.see(incident(job="job.2"), training_job="job")
    (again,) = desk.desk.due(desk.now)
    assert (again.action, again.alert.key, again.again) == ("trigger", first.alert.key, True)


@pytest.mark.parametrize(
    "ignored", [incident("order.stop", severity="info"), incident("order.preemption", severity="critical"), incident(severity="info")]
)
def test_what_somebody_asked_for_alerts_nobody(ignored: dict[str, Any]) -> None:
    desk = Desk()
    desk.see(ignored)
    assert desk.sent(HOLD_S) == []


def test_a_receiver_that_forgets_is_told_again_until_the_end() -> None:
    desk = Desk(MANAGER)
    desk.see(incident())
    assert desk.sent(HOLD_S) == [(MANAGER, "trigger")]
    assert desk.sent(59) == [] and desk.sent(2) == [(MANAGER, "trigger")]
    desk.see(incident(status="resolved"))
    assert desk.sent() == [(MANAGER, "resolve")]
    assert desk.sent(3600) == []


def test_a_receiver_that_is_down_is_tried_again_later_each_time_and_the_other_is_not_disturbed() -> None:
    desk = Desk(PAGER, CHAT)
    desk.down = {PAGER}
    desk.see(incident())
    assert desk.sent(HOLD_S) == [(PAGER, "trigger"), (CHAT, "trigger")]
    tries = [desk.now]
    while len(tries) < 12:
        if desk.sent(1.0):
            tries.append(desk.now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert gaps[:4] == [2.0, 4.0, 8.0, 16.0] and gaps[-1] == 300.0
    desk.down = set()
    assert desk.sent(301) == [(PAGER, "trigger")] and desk.desk.waiting() == 0


def test_what_a_receiver_has_not_taken_a_day_after_its_end_is_given_up_and_that_is_known() -> None:
    desk = Desk(PAGER, CHAT)
    desk.see(incident())
    desk.sent(HOLD_S)
    desk.down = {PAGER}
    desk.see(incident(status="resolved"))
    desk.sent()
    assert desk.desk.given_up() == []
    desk.sent(86_401)
    assert desk.desk.given_up() == [("job/1", PAGER)] and desk.desk.given_up() == []
    assert desk.sent(86_401) == [] and desk.desk.saved("job") == []


def test_what_was_resolved_while_a_receiver_was_down_is_told_as_it_is_now() -> None:
    desk = Desk()
    desk.see(incident())
    desk.sent(HOLD_S)
    desk.down = {PAGER}
    desk.see(incident(action={"policy": "stop", "prevented": True, "exit_code": 65}))
    desk.sent()
    desk.see(incident(status="resolved"))
    desk.down = set()
    assert desk.sent(10) == [(PAGER, "resolve")]


def test_who_acknowledges_stops_the_escalation() -> None:
    route = Route(match=Match(), to=(PAGER,), escalate_after_s=900.0, escalate_to=(CHAT,))
    ignored, taken = Desk(routes=(route,)), Desk(routes=(route,))
    for desk in (ignored, taken):
        desk.see(incident())
        desk.sent(HOLD_S)
    assert taken.desk.acknowledge("job/1", "anna", taken.now) is not None
    assert taken.sent() == [(PAGER, "acknowledge")]
    assert taken.sent(901) == []
    assert ignored.sent(901) == [(CHAT, "trigger")]
    assert ignored.sent(9000) == []


def test_a_receiver_that_is_away_does_not_stop_the_escalation() -> None:
    desk = Desk(routes=(Route(match=Match(), to=(PAGER,), escalate_after_s=900.0, escalate_to=(CHAT,)),))
    desk.down = {PAGER}
    desk.see(incident())
    desk.sent(HOLD_S)
    assert (CHAT, "trigger") in desk.sent(901)


def test_a_receiver_that_is_told_again_and_again_does_not_put_the_escalation_off() -> None:
    """As Alertmanager is, which forgets otherwise; a daemon that is started anew meanwhile goes on counting."""
    routes = (Route(match=Match(), to=(MANAGER,), escalate_after_s=900.0, escalate_to=(PAGER,)),)
    desk = Desk(routes=routes)
    desk.see(incident())
    told = [desk.sent(HOLD_S), *(desk.sent(60.0) for _ in range(7))]
    assert told == [[(MANAGER, "trigger")]] * 8
    later = Desk(routes=routes)
    later.now = desk.now
    later.desk.restore(json.loads(json.dumps(desk.desk.saved("job"))))
    told = [later.sent(60.0) for _ in range(8)]
    assert told == [[(MANAGER, "trigger")]] * 7 + [[(MANAGER, "trigger"), (PAGER, "trigger")]]


def test_an_acknowledgement_of_nothing_is_told_to_be_one() -> None:
    desk = Desk()
    assert desk.desk.acknowledge("job/1", "anna", desk.now) is None


def test_routes_choose_by_job_kind_and_severity_and_the_first_that_fits_counts() -> None:
    routes = (
        Route(match=Match(jobs=("scratch-*",)), to=()),
        Route(match=Match(kinds=("rank.*", "gpu.*"), severities=("critical",)), to=(PAGER,)),
        Route(match=Match(), to=(CHAT,)),
    )
    desk = Desk(routes=routes)
    desk.see(incident("rank.hang"))
    desk.see(incident("gpu.ecc", "2", "warning"))
    desk.see(incident("batch.empty", "3"))
    desk.see(incident("rank.hang", "1", job="scratch-7"))
    assert desk.sent(HOLD_S) == [(PAGER, "trigger"), (CHAT, "trigger"), (CHAT, "trigger")]


def test_a_silence_keeps_quiet_and_what_is_still_open_after_it_is_told() -> None:
    desk = Desk(PAGER)
    desk.desk.silence(Silence(match=Match(jobs=("job",)), until_s=desk.now + 600, by="anna"), desk.now)
    desk.see(incident())
    desk.see(incident("gpu.lost", "2", job="other"))
    assert desk.sent(HOLD_S) == [(PAGER, "trigger")]
    assert desk.desk.next_deadline(desk.now) is not None
    assert desk.sent(601) == [(PAGER, "trigger")]


def test_a_flood_of_one_job_is_bounded_and_leaves_the_others_their_alerts() -> None:
    desk = Desk(MANAGER)
    for number in range(500):
        desk.see(incident(f"batch.k{number}", str(number)))
    desk.see(incident(job="other"))
    told = {delivery.alert.job for delivery in desk.desk.due(desk.now + HOLD_S)}
    assert told == {"job", "other"} and len(desk.desk.open_alerts) == 21


def test_more_than_a_receiver_takes_in_a_minute_waits_and_is_not_lost() -> None:
    desk = Desk(PAGER)
    for number in range(3):
        for kind in range(15):
            desk.see(incident(f"rank.k{kind}", str(kind), job=f"job-{number}"))
    assert len(desk.sent(HOLD_S)) == 20 and desk.sent(1) == []
    assert len(desk.sent(60)) == 20 and len(desk.sent(61)) == 5


def test_the_last_words_of_a_daemon_last() -> None:
    desk = Desk(PAGER, MANAGER)
    desk.see(incident())
    deliveries = desk.desk.due(desk.now, closing=True)
    assert {one.receiver: one.ends_s - desk.now for one in deliveries} == {PAGER: 86_400.0, MANAGER: 86_400.0}
    for delivery in deliveries:
        desk.desk.delivered(delivery, desk.now)
    assert desk.desk.due(desk.now, closing=True) == () and not desk.desk.has_last_words(desk.now)


def test_a_daemon_that_is_started_anew_tells_nothing_twice_and_loses_nothing() -> None:
    desk = Desk(PAGER, CHAT)
    desk.down = {CHAT}
    desk.see(incident())
    desk.sent(HOLD_S)
    saved = json.loads(json.dumps(desk.desk.saved("job")))
    after = Desk(PAGER, CHAT)
    after.now = desk.now
    after.desk.restore(saved)
    after.see(incident())
    assert after.sent() == [(CHAT, "trigger")]
    after.see(incident(status="resolved"))
    assert after.sent() == [(PAGER, "resolve"), (CHAT, "resolve")]


@pytest.mark.parametrize("saved", [{}, {"alert": {}}, {"alert": None}, {"alert": {"key": 1}, "lines": []}, {"version": "x"}])
def test_what_is_no_alert_of_ours_is_left_out(saved: dict[str, Any]) -> None:
    desk = Desk()
    desk.desk.restore([saved])
    assert desk.desk.open_alerts == ()


def test_a_key_knows_the_fault_and_neither_rank_nor_step_nor_attempt() -> None:
    first = incident()
    moved = incident() | {"step": 99, "attempt": 4, "origin": {"rank": 1}, "id": "7", "job": "job.3"}
    assert key_of(first, "job") == key_of(moved, "job")
    assert key_of(first, "job") != key_of(first, "other")
    assert key_of(first, "job") != key_of(incident("rank.died"), "job")


@pytest.mark.parametrize(
    ("job", "runs", "training_job"),
    [
        ("nightly", {"nightly"}, "nightly"), ("nightly.2", {"nightly"}, "nightly"), ("nightly.17", {"nightly"}, "nightly"),
        ("exp.2", set(), "exp.2"), ("exp.1", {"exp"}, "exp.1"), ("v1.5.2", {"v1.5"}, "v1.5"),
    ],
)  # fmt: skip
def test_a_requeue_is_known_by_the_run_that_it_repeats(job: str, runs: set[str], training_job: str) -> None:
    assert lineage_of(job, runs.__contains__) == training_job


def test_names_for_alertmanager() -> None:
    assert alert_name("rank.hang") == "TrainingRankHang"
    assert alert_name("batch.index_out_of_range") == "TrainingBatchIndexOutOfRange"


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["fire", "resolve", "die", "train", "ack", "down", "up", "wait", "restart"]), st.integers(0, 2)), max_size=40
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_whatever_happens_every_receiver_ends_up_knowing_how_it_is(steps: list[Step]) -> None:
    """After the receivers are back and time has passed, each one's last word is the alert's state; a resolve never comes without a trigger."""
    desk, told = Desk(PAGER, MANAGER, CHAT), dict[tuple[str, str], str]()

    def tell(after_s: float) -> None:
        desk.now += after_s
        for delivery in desk.desk.due(desk.now):
            if delivery.receiver in desk.down:
                desk.desk.failed(delivery, desk.now)
                continue
            desk.desk.delivered(delivery, desk.now)
            _note(told, delivery)

    acts: dict[str, Callable[[str], object]] = {
        "fire": lambda job: desk.see(incident(job=job)),
        "resolve": lambda job: desk.see(incident(job=job, status="resolved")),
        "die": lambda job: desk.see(incident(job=job, status="resolved"), ended=True, exit_code=75),
        "train": lambda job: desk.desk.trains(facts(job, attempt=1), desk.now),
        "ack": lambda job: desk.desk.acknowledge(f"{job}/1", "anna", desk.now),
        "down": lambda job: desk.down.add(PAGER),
        "up": lambda job: desk.down.clear(),
        "wait": lambda job: tell(30.0),
        "restart": lambda job: restart(),
    }

    def restart() -> None:
        saved = json.loads(json.dumps([entry for job in ("j0", "j1", "j2") for entry in desk.desk.saved(job)]))
        desk.desk = AlertDesk(desk.routes, RULES)
        desk.desk.restore(saved)

    for act, number in steps:
        acts[act](f"j{number}")
        tell(1.0)
    desk.down.clear()
    for _ in range(6):
        tell(301.0)
    open_keys = {alert.key for alert in desk.desk.open_alerts}
    for (receiver, key), action in told.items():
        assert (action != "resolve") == (key in open_keys), (receiver, action)
    assert {key for _, key in told if key in open_keys} == open_keys


def _note(told: dict[tuple[str, str], str], delivery: Delivery) -> None:
    place = (delivery.receiver, delivery.alert.key)
    assert delivery.action != "resolve" or told.get(place, "resolve") != "resolve", "a resolve of what was never told"
    told[place] = delivery.action
