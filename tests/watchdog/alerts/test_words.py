"""The words and forms of an alert: fit for a phone, bounded at 16,384 ranks, and what each service's API asks for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torch_watchdog.alerts.alert import Alert, Delivery
from torch_watchdog.alerts.alertmanager import posted
from torch_watchdog.alerts.pagerduty import event
from torch_watchdog.alerts.receivers import check_url, receiver_of
from torch_watchdog.alerts.text import lines_of, page_of, ranks_in_words, said, says_the_same, title_of, what
from torch_watchdog.daemon.alerting import Alerting
from torch_watchdog.daemon.config import AlertsConfig
from torch_watchdog.errors import ConfigError
from torch_watchdog.job import incident as build
from torch_watchdog.store.background import BackgroundWriter
from torch_watchdog_proto import messages as m

WORLD = 16_384
SCHEMA = Path(__file__).resolve().parents[3] / "proto" / "torch_watchdog_proto" / "incident.schema.json"
NAN = {"path": "p", "committed": True, "finite": False}


def bad_batch(**action: Any) -> dict[str, Any]:
    violation = m.Violation(
        kind="batch.index_out_of_range", summary="past the table", cause="c", fix="Resize the embeddings to len(tokenizer).",
        batch=m.BatchFact(key="input_ids", element=(5, 211), value=50257, sample=m.Sample(position_in_batch=5, dataset_index=88211)),
        bound=m.BoundFact(low=0, high=50256, op="embedding", module="transformer.wte"),
    )  # fmt: skip
    place = build.Place(
        incident_id="3", job="nightly-7b", attempt=0, policy="stop", time_s=0.0, origin=build.Origin(rank=3, node="node-17"), step=120,
        ranks_affected=[rank for rank in range(WORLD) if rank != 3],
    )  # fmt: skip
    found = build.from_violation(violation, place, prevented=True)
    return found | {"action": found["action"] | action}


STOPPED = {
    "stopped_at_step": 120, "ranks_stopped": list(range(WORLD)), "exit_code": 65,
    "checkpoint": {"path": "/runs/nightly-7b/checkpoints/step-120", "committed": True, "finite": True},
}  # fmt: skip


def test_the_first_screen_of_a_phone_says_job_what_who_and_what_was_done() -> None:
    found = bad_batch(**STOPPED)
    assert title_of(found) == "nightly-7b: bad batch, rank 3, step 120, sample 88211"
    assert lines_of(found, world_size=WORLD, page="https://w/jobs/nightly-7b/incidents/3", runbook="https://w/runbooks/x") == (
        "rank 3, step 120: input_ids[5,211] is 50257, allowed 0..50256 (embedding, transformer.wte), dataset sample 88211",
        "on node-17, reached all 16383 others",
        "done: exit code 65, 16384 ranks stopped at step 120, checkpoint verified: /runs/nightly-7b/checkpoints/step-120",
        "fix: Resize the embeddings to len(tokenizer).",
        "look: watchdog incidents nightly-7b",
        "mine: watchdog ack nightly-7b/3",
        "page: https://w/jobs/nightly-7b/incidents/3",
        "help: https://w/runbooks/x",
    )


def test_what_to_type_names_the_central_daemon_that_is_asked() -> None:
    lines = lines_of(bad_batch(**STOPPED), world_size=WORLD, page=None, runbook=None, asked=("--daemon", "watchdog.example.org:9470"))
    assert lines[-2:] == (
        "look: watchdog incidents nightly-7b --daemon watchdog.example.org:9470",
        "mine: watchdog ack nightly-7b/3 --daemon watchdog.example.org:9470",
    )


def test_where_the_daemon_ends_with_the_job_the_alert_offers_no_command_that_nobody_would_answer() -> None:
    told = ("--dir", "/runs")
    lines = lines_of(bad_batch(**STOPPED), world_size=WORLD, page=None, runbook=None, asked=told, is_last=True)
    assert lines[-2:] == (
        "look: watchdog incidents nightly-7b --dir /runs",
        "mine: acknowledge it where it reached you: its launch has ended, or ends now, and sends no more alerts",
    )
    assert says_the_same(lines, lines_of(bad_batch(**STOPPED), world_size=WORLD, page=None, runbook=None, asked=told))
    assert not says_the_same(lines, lines_of(bad_batch(), world_size=WORLD, page=None, runbook=None, asked=told))


RESUME = ("  resume cd /work && watchdog --resume runs/step-120 torchrun train.py --token ***", "  call   restore(model=...) in the script")


def test_the_line_that_goes_on_is_in_the_alert_and_whole_or_not_there() -> None:
    def told(*resume: str) -> tuple[str, ...]:
        return lines_of(bad_batch(**STOPPED), world_size=WORLD, page=None, runbook=None, asked=("--dir", "/runs"), resume=resume)

    goes_on = told(*RESUME)[-4:-2]
    assert goes_on == (
        "resume: cd /work && watchdog --resume runs/step-120 torchrun train.py --token ***",
        "call: restore(model=...) in the script",
    )
    long = f"  resume watchdog {'x' * 1_000}"
    assert told(long)[-3] == "resume: watchdog status nightly-7b --dir /runs says the line, which is too long for this"
    assert says_the_same(told(*RESUME), told(long, RESUME[1])) is False  # another call
    assert says_the_same(told(RESUME[0]), told(long)) and not says_the_same(told(RESUME[0]), told())


def test_a_resolved_alert_advises_nobody_to_go_on() -> None:
    found = bad_batch(**STOPPED)
    alert = Alert(
        key="k", training_job="nightly-7b", job="nightly-7b", attempt=0, incident="3", kind=found["kind"], severity="critical", title=title_of(found),
        lines=lines_of(found, world_size=WORLD, page=None, runbook=None, resume=RESUME), starts_s=0.0, resolved=True, resolved_by="the later run trains",
    )  # fmt: skip
    shown = said(Delivery(receiver="chat", action="resolve", alert=alert, version=1, ends_s=0.0))
    assert shown[0] == "resolved: the later run trains" and not [line for line in shown if line.startswith(("resume", "call"))]


@pytest.mark.parametrize("runbook", ["http://10.0.0.7:8123/runbooks/x", "https://wiki/x"])
def test_links_that_end_with_the_launch_say_so_and_what_works_then(runbook: str) -> None:
    page = "http://10.0.0.7:8123/jobs/nightly-7b/incidents/3"
    *_, look, _, shown, helps = lines_of(
        bad_batch(**STOPPED), world_size=WORLD, page=page, runbook=runbook, asked=("--dir", "/runs"), outlived=False
    )
    short_lived = " (only until its launch ends; what `look` says works then, too)"
    assert (look, shown) == ("look: watchdog incidents nightly-7b --dir /runs", f"page: {page}{short_lived}")
    assert helps == f"help: {runbook}{short_lived if 'wiki' not in runbook else ''}"


def test_a_folder_in_what_to_type_is_whole_or_not_there() -> None:
    def told(folder: str) -> tuple[str, ...]:
        return lines_of(bad_batch(**STOPPED), world_size=WORLD, page=None, runbook=None, asked=("--dir", folder))[-2:]

    assert told("/data/my runs") == (
        "look: watchdog incidents nightly-7b --dir '/data/my runs'",
        "mine: watchdog ack nightly-7b/3 --dir '/data/my runs'",
    )
    assert told("/d" * 150)[1].endswith("/d/d/d")
    assert told("/d" * 500) == ("look: watchdog incidents nightly-7b", "mine: watchdog ack nightly-7b/3")


@pytest.mark.parametrize(
    ("is_central", "addresses", "told"),
    [
        (True, ["unix:/run/daemon.sock", "127.0.0.1:9470", "watchdog.example.org:9470"], ["--daemon", "watchdog.example.org:9470"]),
        (True, ["127.0.0.1:9470"], ["--daemon", "127.0.0.1:9470"]),
        (True, ["unix:/run/daemon.sock"], ["--daemon", "unix:/run/daemon.sock"]),
        (True, ["0.0.0.0:9470"], None),
        (True, ["[::]:9470"], None),
        (True, ["[2001:db8::1]:9470"], ["--daemon", "[2001:db8::1]:9470"]),
        (False, ["watchdog.example.org:9470"], None),
    ],
)
def test_a_daemon_tells_where_it_is_asked_else_the_folder_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_central: bool, addresses: list[str], told: list[str] | None
) -> None:
    monkeypatch.chdir(tmp_path)
    writer = BackgroundWriter(max_pending=1, say=print)
    try:
        config = AlertsConfig.to_all(("pagerduty://KEY",), restores_all=is_central)
        alerting = Alerting(config, Path("runs"), writer=writer, clock=float, say=print, log=print)
        alerting.is_at(addresses)
        assert list(alerting.asked) == (told or ["--dir", str(tmp_path / "runs")])
    finally:
        writer.close(1)


def test_words_stay_short_whatever_is_in_the_incident() -> None:
    long = bad_batch(**STOPPED) | {"summary": "x" * 9000, "fix": "y\n\x1b[31m" * 3000, "job": "j" * 100}
    assert len(title_of(long)) <= 120
    lines = lines_of(long, world_size=WORLD, page=None, runbook=None)
    assert max(map(len, lines)) <= 200 and not any("\x1b" in line or "\n" in line for line in lines)


def done_of(found: dict[str, Any], **more: Any) -> str:
    (line,) = [line for line in lines_of(found, world_size=WORLD, page=None, runbook=None, **more) if line.startswith("done")]
    return line


def test_the_exit_code_is_the_one_that_this_site_sees() -> None:
    assert done_of(bad_batch(**STOPPED), exit_codes={65: 165}).startswith("done: exit code 165, ")


def test_a_long_path_hides_no_exit_code_and_is_not_cut_within_a_name() -> None:
    path = f"/{'deep/' * 60}checkpoints/step-23"
    found = bad_batch(**STOPPED | {"checkpoint": {"path": path, "committed": True, "finite": True}})
    assert done_of(found) == "done: exit code 65, 16384 ranks stopped at step 120, checkpoint verified: .../checkpoints/step-23"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], ""), ([4], "rank 4"), ([0, 1, 2, 5], "ranks 0-2, 5"), (list(range(1, WORLD)), "all 16383 others"),
        (list(range(0, WORLD, 2)), "ranks 0, 2, 4, 6 and 8188 more"),
    ],
)  # fmt: skip
def test_ranks_are_said_shortly(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks, WORLD) == words


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ({"policy": "observe"}, "nothing, it was only observed"),
        ({"policy": "none"}, "nothing could be prevented"),
        ({"policy": "stop"}, "policy stop is under way"),
        ({"stopped_at_step": 3, "ranks_stopped": [0, 1], "checkpoint": NAN}, "2 ranks stopped at step 3, checkpoint NOT good: p"),
    ],
)  # fmt: skip
def test_what_was_done_is_never_made_better_than_it_is(action: dict[str, Any], words: str) -> None:
    assert f"done: {words}" in lines_of(bad_batch(**action), world_size=2, page=None, runbook=None)


def delivery(action: Any = "trigger", alert: Alert | None = None, **more: Any) -> Delivery:
    found = bad_batch(**STOPPED)
    alert = alert or Alert(
        key="0123456789abcdef", training_job="nightly-7b", job="nightly-7b.2", attempt=0, incident="3", kind=found["kind"], severity="critical",
        title=title_of(found), lines=lines_of(found, world_size=WORLD, page="https://w/p", runbook="https://w/r"), starts_s=1_700_000_000.0,
        node="node-17", rank=3, page="https://w/p", runbook="https://w/r",
    )  # fmt: skip
    return Delivery(receiver="r", action=action, alert=alert, version=1, ends_s=1_700_000_300.0, **more)


@pytest.mark.parametrize("outlived", [True, False])
def test_an_end_says_how_it_came_and_names_no_page_that_is_gone_and_nothing_to_acknowledge(outlived: bool) -> None:
    page, wiki = "http://10.0.0.7:8123/jobs/nightly-7b/incidents/3", "https://wiki/x"
    lines = lines_of(bad_batch(**STOPPED), world_size=WORLD, page=page, runbook=wiki, outlived=outlived)
    told = delivery(alert=replace(delivery().alert, lines=lines, page=page))
    assert (said(told), page_of(told)) == (lines, page)
    over = replace(told, action="resolve", alert=replace(told.alert, resolved=True, resolved_by="the later run nightly-7b.3 trains"))
    kept = [line for line in lines if not line.startswith("mine: ") and (outlived or not line.startswith("page: "))]
    assert said(over) == ("resolved: the later run nightly-7b.3 trains", *kept) and kept[-1] == f"help: {wiki}"
    (shown,) = posted(over)
    assert (page_of(over), shown.get("generatorURL")) == ((page, page) if outlived else (None, None))
    assert shown["annotations"]["description"].startswith("resolved: the later run")
    first = replace(over, action="trigger")  # of what was over before it could be told
    assert said(first) == tuple(line for line in lines if not line.startswith("mine: "))


def test_pagerduty_gets_its_event() -> None:
    """Fields and limits of Events API v2: summary 1024 characters, the event 512 KB, dedup_key 255."""
    body = event(delivery(), "KEY")
    assert (body["routing_key"], body["event_action"], body["dedup_key"]) == ("KEY", "trigger", "torch-watchdog/0123456789abcdef")
    payload = body["payload"]
    assert (payload["source"], payload["severity"], payload["group"]) == ("node-17", "critical", "nightly-7b")
    assert (payload["class"], payload["component"]) == ("batch.index_out_of_range", "rank 3")
    assert payload["timestamp"] == "2023-11-14T22:13:20.000+00:00" and len(payload["summary"]) <= 1024
    assert body["links"] == [{"href": "https://w/p", "text": "Incident"}, {"href": "https://w/r", "text": "Runbook"}]
    assert len(json.dumps(body)) < 8_192 and len(body["dedup_key"]) <= 255


@pytest.mark.parametrize("action", ["resolve", "acknowledge"])
def test_pagerduty_is_told_of_the_end_by_the_key_alone(action: str) -> None:
    assert event(delivery(action), "KEY") == {"routing_key": "KEY", "event_action": action, "dedup_key": "torch-watchdog/0123456789abcdef"}


def test_alertmanagers_labels_name_the_alert_for_life_and_hold_nothing_that_changes() -> None:
    (found,) = posted(delivery())
    assert found["labels"] == {
        "alertname": "TrainingBatchIndexOutOfRange", "training_job": "nightly-7b", "kind": "batch.index_out_of_range", "severity": "critical",
        "incident_key": "0123456789abcdef",
    }  # fmt: skip
    assert found["annotations"]["runbook_url"] == "https://w/r" and found["generatorURL"] == "https://w/p"
    assert (found["startsAt"], found["endsAt"]) == ("2023-11-14T22:13:20.000Z", "2023-11-14T22:18:20.000Z")
    assert len(json.dumps(found)) < 8_192


@pytest.mark.parametrize("url", ["", "oncall", "pagerduty://", "alertmanager://", "slack:x", "://x"])
def test_what_is_no_receiver_is_said_without_its_secret(url: str) -> None:
    with pytest.raises(ValueError, match=r"must be|needs"):
        check_url(url)
    with pytest.raises(ConfigError):
        receiver_of("r", url)


def test_a_service_that_apprise_does_not_know_is_refused_and_a_known_one_taken() -> None:
    with pytest.raises(ConfigError) as caught:
        receiver_of("chat", "nosuchservice://secret-word/")
    assert "secret-word" not in str(caught.value)
    assert receiver_of("chat", "json://127.0.0.1:9/x").rules.tells_past


@pytest.mark.parametrize("url", ["pagerduty://secret-word", "alertmanager://user:secret-word@host:1"])
def test_a_receiver_does_not_show_its_secret(url: str) -> None:
    assert "secret-word" not in repr(receiver_of("r", url))


@pytest.mark.parametrize(
    "kind", [one for one in json.loads(SCHEMA.read_text())["properties"]["kind"]["enum"] if not one.startswith("order.")]
)
def test_every_kind_has_words_that_say_it_on_a_phone(kind: str) -> None:
    """`config.ddp` came as such."""
    assert "." not in what(kind)
