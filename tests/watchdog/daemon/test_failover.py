"""Two daemons over one store: a job goes on at the other one, with its number, its incidents and its alerts."""

from __future__ import annotations

import re
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from daemon_harness import Ring
from fleet_harness import BAD_TOKEN, Fleet, until
from http_receiver import HttpReceiver
from services import PostgresServer, needs

from torch_watchdog.alerts.routes import Match, Route
from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.daemon.config import AlertsConfig
from torch_watchdog.errors import UnknownJobError
from torch_watchdog.store.database import RUNS, Database
from torch_watchdog_agent.node.agent import NodeAgent
from torch_watchdog_agent.node.config import NodeConfig
from torch_watchdog_proto import messages as m


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tw") as path:
        yield Path(path)


def daemon(root: Path, name: str, store_url: str, **more: Any) -> Fleet:
    (root / name).mkdir(exist_ok=True)
    return Fleet(root / name, store_url=store_url, **{"lease_s": 0.5} | more)


def pager(receiver: HttpReceiver, boss: HttpReceiver | None = None) -> AlertsConfig:
    """`boss` is told where nobody has acknowledged it three seconds later."""
    receivers = {"pager": f"pagerduty://KEY@127.0.0.1:{receiver.port}"}
    route = Route(match=Match(), to=("pager",))
    if boss is not None:
        receivers["boss"] = f"pagerduty://KEY@127.0.0.1:{boss.port}"
        route = Route(match=Match(), to=("pager",), escalate_after_s=3.0, escalate_to=("boss",))
    return AlertsConfig(receivers=receivers, routes=(route,), restores_all=True)


def pager_of_nobody() -> AlertsConfig:
    return AlertsConfig(
        receivers={"pager": "pagerduty://KEY@127.0.0.1:9"}, routes=(Route(match=Match(), to=("pager",)),), restores_all=True
    )


def test_a_job_goes_on_at_another_daemon_that_has_none_of_its_files(root: Path) -> None:
    store = f"sqlite:///{root / 'store.sqlite'}"
    with daemon(root, "a", store) as first:
        node = first.node()
        node.rank(0, 2)
        node.steps(0, 0, 1)
        node.say(m.Noticed(rank=0, step=2, micro_step=0, violation=BAD_TOKEN))
        (incident,) = until(first.incidents)
    with daemon(root, "b", store) as second:
        assert second.node().hello.next_seq == 2
        assert [found["id"] for found in second.incidents()] == [incident["id"]]
        assert len(second.get("api/v1/jobs/job/events").json()["events"]) > 1


def test_while_one_daemon_decides_for_a_job_another_sends_its_nodes_there(root: Path) -> None:
    store = f"sqlite:///{root / 'store.sqlite'}"
    with daemon(root, "a", store, lease_s=60) as first, daemon(root, "b", store, lease_s=60) as second:
        first.node().steps(0, 0)
        with pytest.raises(grpc.RpcError) as raised:
            second.node()
        assert raised.value.code() is grpc.StatusCode.ABORTED  # the node asks again, and is not refused for good
        assert "is at the daemon" in raised.value.details()
        second.node("other").steps(0, 0)


def test_what_another_daemon_has_is_shown_once_it_has_ended_and_named_before(root: Path) -> None:
    store = f"sqlite:///{root / 'store.sqlite'}"
    with daemon(root, "a", store, lease_s=60) as first, daemon(root, "b", store, lease_s=60, alerts=pager_of_nobody()) as second:
        node = first.training("ended", session="e", run_dir="/of/its/launch")
        node.steps(0, 1, 2)
        node.exited(0, signal=9)
        node.goodbye(1)
        first.training("runs", session="r")
        second.training("own", session="o").goodbye(0)
        listed = until(lambda: len(found := second.get("api/v1/jobs").json()["jobs"]) == 2 and {job["job"]: job for job in found})
        theirs = listed["ended"]
        assert (theirs["state"], theirs["exit_code"], theirs["incidents"], theirs["run_dir"]) == ("ended", 1, 1, "/of/its/launch")
        assert second.get("jobs/ended").status_code == 200 and "rank.died" in second.get("jobs/ended/incidents/1").text
        with DaemonClient(second.socket) as client:
            assert {job.job for job in client.jobs()} == {"own", "ended"}
            assert [rank.last_step for rank in client.job("ended").ranks] == [2]
            assert [incident["kind"] for incident in client.incidents("ended")] == ["rank.died"]
            assert [step for block in client.steps("ended") for step in block.step] == [0, 1, 2]
            assert not client.request("ended", "order.stop", by="me").accepted
            assert re.search("the daemon .*/a/runs tells of that job", client.acknowledge("runs/1", by="anna").text)
            assert client.acknowledge("nobodys/1", by="anna").text.endswith("see `watchdog alert list`")
            for question in (client.job, client.incidents, client.steps):
                with pytest.raises(UnknownJobError, match=r"'runs' here: it is at the daemon .*/a/runs: ask that one"):
                    question("runs")
        assert "it is at the daemon" in second.get("api/v1/jobs/runs").json()["error"]
        assert [line for line in second.said if "took over" in line or "ended" in line] == []
    with daemon(root, "b", store, alerts=pager_of_nobody()) as again:
        assert {job["job"] for job in again.get("api/v1/jobs").json()["jobs"]} == {"own", "ended"}, (
            "what was brought to look at is nobody's run"
        )
        copies = root / "b" / "runs" / ".elsewhere"
        assert not copies.exists() and again.get("api/v1/jobs/ended").status_code == 200
        assert [folder.name for folder in copies.iterdir()] == ["ended"]
        Database.open(store).forget_older(1e12, ("own",))
        assert until(lambda: [job["job"] for job in again.get("api/v1/jobs").json()["jobs"]] == ["own"])
        assert list(copies.iterdir()) == [], "what was pruned is not kept by those who had looked at it"


def test_an_alert_of_a_daemon_that_ended_is_resolved_by_the_other_under_its_key(root: Path) -> None:
    store = f"sqlite:///{root / 'store.sqlite'}"
    with HttpReceiver() as receiver:
        with daemon(root, "a", store, alerts=pager(receiver)) as first:
            node = first.training("job")
            node.exited(0, signal=9)
            node.goodbye(1)
            until(lambda: receiver.bodies(event_action="trigger"))
        with daemon(root, "b", store, alerts=pager(receiver)) as second:
            assert second.node("job").hello.next_seq == 3
            second.training("job.2", session="t")
            until(lambda: receiver.bodies(event_action="resolve"))
        told = Counter((body["event_action"], body["dedup_key"]) for body in receiver.bodies())
        assert set(told.values()) == {1} and len({key for _, key in told}) == 1


def test_an_alert_of_a_daemon_that_ended_in_order_is_told_on_by_one_that_lives_beside_it(root: Path) -> None:
    """Nobody starts: the one that was there all the time takes it up, escalates it, and resolves it when the requeue trains there."""
    store = f"sqlite:///{root / 'store.sqlite'}"
    with HttpReceiver() as receiver, HttpReceiver() as boss, daemon(root, "b", store, alerts=pager(receiver, boss)) as second:
        with daemon(root, "a", store, alerts=pager(receiver, boss)) as first:
            node = first.training("job")
            node.exited(0, signal=9)
            node.goodbye(1)
            until(lambda: receiver.bodies(event_action="trigger"))
            first.node("quiet", session="q").goodbye(0)
        (alert,) = until(lambda: second.get("api/v1/alerts").json()["alerts"])
        assert alert["name"] == "job/1"
        assert [line for line in second.said if "took over" in line] == ["took over 1 jobs of a daemon that is gone or has ended: job"]
        (escalated,) = until(lambda: boss.bodies(event_action="trigger"))
        second.training("job.2", session="t")
        until(lambda: receiver.bodies(event_action="resolve") and boss.bodies(event_action="resolve"))
        assert [body["event_action"] for body in receiver.bodies()] == ["trigger", "resolve"]
        assert {body["dedup_key"] for body in (*receiver.bodies(), *boss.bodies())} == {escalated["dedup_key"]}


def test_a_job_that_dies_with_its_daemon_is_told_of_by_the_one_that_takes_over_and_one_that_moved_is_not(root: Path) -> None:
    store = f"sqlite:///{root / 'store.sqlite'}"
    with HttpReceiver() as receiver:
        config = replace(pager(receiver), silent_s=1.5)
        with daemon(root, "a", store) as first:
            for job in ("dies", "moves"):
                first.training(job, session=job)
        with daemon(root, "b", store, alerts=config) as second, daemon(root, "a", store, alerts=config) as again:
            second.node("moves", session="moves")
            until(lambda: receiver.bodies(event_action="trigger"))
            silent = [alert for fleet in (second, again) for alert in fleet.get("api/v1/alerts").json()["alerts"]]
            assert [(alert["job"], alert["kind"]) for alert in silent] == [("dies", "watchdog.job_silent")]
        assert [body["payload"]["group"] for body in receiver.bodies()] == ["dies"]


def test_a_daemon_that_was_taken_for_dead_gives_its_job_up_and_writes_no_more_of_it(root: Path) -> None:
    store = f"sqlite:///{root / 'store.sqlite'}"
    with daemon(root, "a", store) as first:
        node = first.node()
        node.steps(0, 0)
        database = Database.open(store)
        with database.transaction() as connection:
            connection.execute(RUNS.update().values(owner="another"))
        until(lambda: any("at another daemon now" in line for line in first.said))
        known = {record.key for record in database.records("job", "event")}
        with pytest.raises(grpc.RpcError) as raised:
            node.steps(0, 1)
        assert raised.value.code() is grpc.StatusCode.ABORTED
        assert first.get("api/v1/jobs/job").status_code == 404
    assert {record.key for record in database.records("job", "event")} == known
    database.close()


@needs("initdb", "postgres")
def test_postgresql_stops_for_a_while_and_no_report_is_acked_before_it_is_back(root: Path) -> None:
    with PostgresServer(root) as postgres, daemon(root, "a", postgres.url) as fleet:
        node = fleet.training()
        postgres.stop()
        acked = threading.Event()
        waiting = threading.Thread(target=lambda: (node.steps(0, 1), acked.set()), daemon=True)
        waiting.start()
        until(lambda: any("reports wait" in line for line in fleet.said))
        node.say(m.Noticed(rank=0, step=2, micro_step=0, violation=BAD_TOKEN))
        until(fleet.incidents)  # the job is judged meanwhile
        assert not acked.is_set()
        away = [line for line in fleet.get("metrics").text.splitlines() if line.startswith("torch_watchdog_store_away_seconds")]
        assert float(away[0].split()[1]) > 0
        postgres.start()
        until(acked.is_set, 30)
        waiting.join(10)
        until(lambda: any("the store is back" in line and "nothing was lost" in line for line in fleet.said))


@needs("initdb", "postgres")
def test_a_job_that_is_new_while_postgresql_is_away_is_told_why_it_waits_and_is_taken_in_afterwards(root: Path) -> None:
    """By a real node process: one line that says what happened, what is kept and what to do, and nothing is lost."""
    node_says = list[str]()
    with PostgresServer(root) as postgres, daemon(root, "a", postgres.url) as fleet:
        fleet.node("known", session="k").steps(0, 0)
        postgres.stop()
        folders = {name: root / name for name in ("launch", "runtime", "rings")}
        for folder in folders.values():
            folder.mkdir(mode=0o700)
        config = NodeConfig(
            job="new", node="node", session="n", policy="stop", command=("train",), run_dir=folders["launch"], runtime_dir=folders["runtime"],
            ring_dir=folders["rings"], daemon=fleet.socket, poll_interval_s=0.02, max_backoff_s=0.3,
        )  # fmt: skip
        node = NodeAgent(config, say=node_says.append)
        node.start()
        Ring(folders["rings"], 0, 4096).steps(0, 1)
        until(lambda: node_says)
        assert (
            "does not watch this job yet (job new is new there, and the store that says whose jobs are whose does not answer"
            in node_says[0]
        )
        for words in (
            "start that, or launch without --daemon",
            "a bad batch stops only its own rank",
            "the training goes on",
            "records are kept for it",
        ):
            assert words in node_says[0]
        with pytest.raises(grpc.RpcError) as raised:
            fleet.node("newer", session="m")
        assert raised.value.code() is grpc.StatusCode.ABORTED
        postgres.start()
        until(lambda: len(node_says) > 1, 30)
        assert "the daemon watches this job after" in node_says[1] and "nothing was lost" in node_says[1]
        until(lambda: [rank["last_step"] for rank in fleet.get("api/v1/jobs/new").json().get("ranks", ())] == [1])
        node.finish(0, timeout_s=5)
