"""Tokens with roles and jobs, over real gRPC and HTTP: who may do what, who did what, and how a token is taken away."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from click.testing import CliRunner
from fleet_harness import Fleet, SimulatedNode, until
from http_receiver import HttpReceiver

from torch_watchdog.cli.token import command
from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.daemon.config import AlertsConfig
from torch_watchdog.daemon.grants import Grant, Grants, new_entry, write_tokens
from torch_watchdog.errors import ConfigError, DaemonRefusedError, UnknownJobError
from torch_watchdog_proto.envelopes import TOKEN_KEY, JoinRequest

OWN = "o" * 43


class Tokens:
    """The file, kept by the command as an operator does."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "tokens.json"

    def __call__(self, *words: str) -> str:
        done = CliRunner().invoke(command, [*words, "--tokens", str(self.file)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output.strip()


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path)


@pytest.fixture
def fleet(tmp_path: Path, tokens: Tokens) -> Iterator[Fleet]:
    tokens("add", "seed", "--role", "viewer")
    (tmp_path / "f").mkdir()
    more = {"token": OWN, "web_token": "", "tokens_file": tokens.file, "audit_file": tmp_path / "audit.jsonl", "listen": ("127.0.0.1:0",)}
    with Fleet(tmp_path / "f", **more) as made:
        made.http.headers["authorization"] = f"Bearer {OWN}"
        yield made


def node(fleet: Fleet, token: str, job: str) -> SimulatedNode:
    made = SimulatedNode(fleet.daemon.addresses[0], job, metadata=((TOKEN_KEY, token),))
    fleet.nodes.append(made)
    return made


def refused(call: Callable[[], object]) -> str:
    with pytest.raises((grpc.RpcError, DaemonRefusedError)) as raised:
        call()
    return raised.value.details() if isinstance(raised.value, grpc.RpcError) else str(raised.value)


def seen_silences(client: DaemonClient) -> list[tuple[str, ...]]:
    return [tuple(silence["match"]["jobs"]) for silence in client.alerts_and_silences()[1]]


def test_an_agents_token_reports_for_its_jobs_sees_these_and_orders_nothing(fleet: Fleet, tokens: Tokens) -> None:
    token = tokens("add", "team-a", "--role", "agent", "--job", "a-*")
    node(fleet, token, "a-1").steps(0, 0)
    node(fleet, OWN, "b-1")
    assert "is not for job 'b-1'" in refused(lambda: node(fleet, token, "b-1"))
    with DaemonClient(fleet.daemon.addresses[0], token=token) as client:
        assert [status.job for status in client.jobs()] == ["a-1"] and client.incidents("a-1") == ()
        assert "is not for job 'b-1'" in refused(lambda: client.job("b-1"))
        assert "may not order" in refused(lambda: client.request("a-1", "order.stop", by="me"))


def test_an_agents_token_for_all_jobs_reports_and_sees_nothing(fleet: Fleet, tokens: Tokens) -> None:
    token = tokens("add", "cluster", "--role", "agent")
    node(fleet, token, "a-1").steps(0, 0)
    with DaemonClient(fleet.daemon.addresses[0], token=token) as client:
        assert "may not look" in refused(client.jobs)
        assert "may not look" in refused(lambda: client.incidents("a-1"))


def test_a_token_for_one_job_is_for_its_requeues_and_for_no_other(fleet: Fleet, tokens: Tokens) -> None:
    token = tokens("add", "nightly", "--role", "agent", "--job", "nightly")
    for job in ("nightly", "nightly.2", "nightly.31"):
        node(fleet, token, job).steps(0, 0)
    for other in ("nightly-2", "nightly.0", "nightly.x", "nightly.2.big", "big.nightly", "nightl"):
        assert "is not for job" in refused(lambda other=other: node(fleet, token, other))


def test_a_job_that_is_not_there_is_said_without_the_names_of_others(fleet: Fleet, tokens: Tokens) -> None:
    node(fleet, OWN, "b-secret").steps(0, 0)
    with DaemonClient(fleet.daemon.addresses[0], token=tokens("add", "team-a", "--role", "agent", "--job", "a-*")) as client:
        with pytest.raises(UnknownJobError, match="no job 'a-1' here: see") as raised:
            client.job("a-1")
        assert "secret" not in str(raised.value)
        with pytest.raises(UnknownJobError) as raised:
            client.join(JoinRequest(rendezvous="x", host="h", version="0.1.0"))
        assert "secret" not in str(raised.value)


def test_a_viewer_sees_its_jobs_only_and_orders_nothing(fleet: Fleet, tokens: Tokens) -> None:
    for job in ("a-1", "b-1"):
        node(fleet, OWN, job).steps(0, 0)
    with DaemonClient(fleet.daemon.addresses[0], token=tokens("add", "watcher", "--role", "viewer", "--job", "a-*")) as client:
        assert [status.job for status in client.jobs()] == ["a-1"]
        assert "is not for job" in refused(lambda: client.job("b-1"))
        assert "may not order" in refused(lambda: client.request("a-1", "order.stop", by="me"))
    assert "may not report" in refused(lambda: node(fleet, tokens("add", "looker", "--role", "viewer"), "a-2"))


def test_who_gave_which_order_is_kept_by_the_name_of_the_token(fleet: Fleet, tokens: Tokens, tmp_path: Path) -> None:
    one = node(fleet, OWN, "a-1")
    one.rank(0, 1)
    one.steps(0, 0)
    with DaemonClient(fleet.daemon.addresses[0], token=tokens("add", "anna", "--role", "operator")) as client:
        client.request("a-1", "order.stop", by="somebody else", reason="the data is bad")
    headers = {"authorization": f"Bearer {tokens('add', 'ben', '--role', 'operator')}"}
    with httpx.Client(base_url=fleet.url, headers=headers) as web:
        web.post("api/v1/jobs/a-1/orders", json={"kind": "order.checkpoint", "by": "x"})
    with DaemonClient(fleet.daemon.addresses[0], token=tokens("add", "carla", "--role", "operator")) as client:
        client.request("a-1", "order.cancel", by="carla's terminal")  # no rank has answered the stop
        assert not client.request("a-1", "order.cancel", by="once more").accepted
    log = tmp_path / "audit.jsonl"
    lines = until(lambda: log.exists() and len(found := log.read_text().splitlines()) == 4 and found)
    first, second, third, fourth = map(json.loads, lines)
    assert (first["what"], first["of"], first["who"], first["says"], first["reason"]) == (
        "order.stop",
        "a-1",
        "anna",
        "somebody else",
        "the data is bad",
    )
    assert second["who"] == "ben"
    cancelled = [(line["what"], line["of"], line["who"], line["says"], line["accepted"]) for line in (third, fourth)]
    assert cancelled == [
        ("order.cancel", "a-1", "carla", "carla's terminal", True),
        ("order.cancel", "a-1", "carla", "once more", False),
    ]
    assert stat.S_IMODE((tmp_path / "audit.jsonl").stat().st_mode) == 0o600
    assert any("order.stop of a-1 by anna" in line for line in fleet.said)


def test_who_has_acknowledged_silenced_or_stopped_is_told_by_the_name_of_the_token(tmp_path: Path, tokens: Tokens) -> None:
    anna = tokens("add", "anna", "--role", "operator")
    with HttpReceiver() as pager:
        alerts = AlertsConfig.to_all((f"pagerduty://KEY@127.0.0.1:{pager.port}",))
        more = {
            "token": OWN,
            "tokens_file": tokens.file,
            "audit_file": tmp_path / "audit.jsonl",
            "listen": ("127.0.0.1:0",),
            "alerts": alerts,
        }
        with Fleet(tmp_path, **more) as fleet:
            one = node(fleet, OWN, "job")
            one.rank(0, 1)
            one.steps(0, 0)
            with DaemonClient(fleet.daemon.addresses[0], token=anna) as client:
                client.request("job", "order.stop", by="root@host")
                one.exited(0, signal=9)
                one.goodbye(1)
                until(client.alerts)
                assert client.acknowledge("job/2", by="root@host").accepted
                assert client.alerts()[0]["acknowledged_by"] == "anna"
                client.silence(jobs=["prod-*"], kinds=["rank.*"], severities=[], seconds=60, by="root@host", comment="move")
            with DaemonClient(fleet.daemon.addresses[0], token=OWN) as client:
                assert client.acknowledge("job/2", by="ben@host").accepted and client.alerts()[0]["acknowledged_by"] == "ben@host"
            few = tokens("add", "few", "--role", "operator", "--job", "run-?")
            with DaemonClient(fleet.daemon.addresses[0], token=few) as client:
                more_of_it = {"kinds": [], "severities": [], "seconds": 60, "by": "me", "comment": ""}
                for jobs in (["run-*"], ["run-1", "*"], []):
                    assert "is not for job" in refused(lambda jobs=jobs: client.silence(jobs=jobs, **more_of_it))
                assert client.silence(jobs=["run-?", "run-1"], **more_of_it).accepted
                assert seen_silences(client) == [("run-?", "run-1")], "not that of prod-*"
            agent = tokens("add", "team", "--role", "agent", "--job", "job")
            with DaemonClient(fleet.daemon.addresses[0], token=OWN) as client:
                client.silence(jobs=["jo*"], **more_of_it)
                client.silence(jobs=[], **more_of_it)
                assert seen_silences(client) == [("prod-*",), ("run-?", "run-1"), ("jo*",), ()]
            with DaemonClient(fleet.daemon.addresses[0], token=agent) as client:
                assert seen_silences(client) == [("jo*",), ()], "what keeps its own alerts quiet"
            assert fleet.get("api/v1/alerts").json()["silences"][0]["by"] == "anna"
            told = [incident["summary"] for incident in fleet.incidents() if incident["kind"] == "order.stop"]
            assert "anna" in told[0] and "root@host" not in told[0]
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert ("silence", "jobs prod-*, kinds rank.* for 60 s", "anna", "root@host") in [
        (one["what"], one["of"], one["who"], one["says"]) for one in lines
    ]


@pytest.mark.parametrize(
    ("granted", "asked", "fits"),
    [
        (("run-?",), "run-*", False),
        (("[!x]*",), "*", False),
        (("run-*",), "run-[12]", False),
        (("run-*",), "?un-1", False),
        (("run-*", "x"), "run-*", True),
        (("run-*",), "run-*.2", False),
        (("run-?", "*"), "run-*", True),
        (("run-?",), "run-1", True),
    ],
)
def test_a_pattern_is_granted_where_that_very_one_is_or_all_jobs_are(granted: tuple[str, ...], asked: str, fits: bool) -> None:
    assert Grant(name="anna", powers=frozenset({"order"}), jobs=granted).fits(asked) is fits


def test_the_name_of_the_daemons_own_token_is_no_other_tokens(tokens: Tokens) -> None:
    done = CliRunner().invoke(command, ["add", "owner", "--role", "operator", "--tokens", str(tokens.file)])
    assert isinstance(done.exception, ConfigError) and "audit log" in str(done.exception)


def test_the_page_takes_tokens_by_their_role_and_none_that_is_for_some_jobs(fleet: Fleet, tokens: Tokens) -> None:
    def status(token: str) -> int:
        return httpx.get(f"{fleet.url}api/v1/jobs", headers={"authorization": f"Bearer {token}"}).status_code

    assert status(tokens("add", "all", "--role", "viewer")) == 200
    assert status(tokens("add", "some", "--role", "viewer", "--job", "a-*")) == 401
    assert status(tokens("add", "reports", "--role", "agent")) == 401
    assert status(tokens("add", "team", "--role", "agent", "--job", "a-*")) == 401
    viewer = tokens("add", "viewer", "--role", "viewer")
    node(fleet, OWN, "a-1").steps(0, 0)
    order = httpx.post(f"{fleet.url}api/v1/jobs/a-1/orders", headers={"authorization": f"Bearer {viewer}"}, json={"kind": "order.stop"})
    assert order.status_code == 403


def test_a_token_is_rotated_and_taken_away_without_a_restart(fleet: Fleet, tokens: Tokens) -> None:
    old = tokens("add", "anna", "--role", "operator")
    new = tokens("rotate", "anna", "--keep", "1")

    def is_let_in(token: str) -> bool:
        return httpx.get(f"{fleet.url}api/v1/jobs", headers={"authorization": f"Bearer {token}"}).status_code == 200

    assert is_let_in(old) and is_let_in(new)
    newest = tokens("rotate", "anna", "--keep", "0")
    assert not is_let_in(old) and not is_let_in(new) and is_let_in(newest)
    assert "3 tokens of anna are gone" in tokens("remove", "anna")
    assert not is_let_in(newest)


def test_the_file_holds_no_token_and_is_for_its_owner_only(tokens: Tokens) -> None:
    token = tokens("add", "anna", "--role", "operator", "--days", "30")
    assert token not in tokens.file.read_text() and len(token) >= 43
    assert stat.S_IMODE(tokens.file.stat().st_mode) == 0o600
    listed = tokens("list")
    assert "anna" in listed and "operator" in listed and token not in listed and "no end" not in listed
    tokens("add", "team-a", "--role", "agent")
    assert [line.split()[0] for line in tokens("list").splitlines() if line.endswith("no end")] == ["team-a"]


def test_a_token_ends_at_its_time_and_a_broken_file_lets_nobody_in(tmp_path: Path) -> None:
    now, file = [100.0], tmp_path / "tokens.json"
    token, entry = new_entry("anna", "viewer", (), 150.0)
    write_tokens(file, [entry])
    grants = Grants(OWN, file, now=lambda: now[0])
    assert grants.of(token) is not None and grants.of("") is None and grants.of(OWN) is not None
    now[0] = 150.0
    assert grants.of(token) is None
    now[0] = 100.0
    file.write_text("{ half a file")
    assert grants.of(token) is None and grants.of(OWN) is not None


def test_a_refused_call_is_said_once_however_many_there_are(fleet: Fleet) -> None:
    for _ in range(20):
        refused(lambda: node(fleet, "wrong", "a-1"))
    lines = [line for line in fleet.said if "refused a call" in line]
    assert len(lines) == 1 and "another token" in lines[0] and "wrong" not in lines[0]
    assert 'torch_watchdog_refused_calls_total{reason="grpc_token"} 20' in fleet.get("metrics").text
