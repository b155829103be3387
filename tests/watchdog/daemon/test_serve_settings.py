"""The settings file of `watchdog serve`: what it says happens, and what is wrong in it is said with its place and without its secrets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from fleet_harness import Fleet, until
from http_receiver import HttpReceiver

from torch_watchdog.daemon.settings import load_settings
from torch_watchdog.errors import ConfigError

REPO = Path(__file__).resolve().parents[3]


def written(folder: Path, text: str) -> Path:
    path = folder / "serve.toml"
    path.write_text(text)
    return path


def test_the_example_that_we_ship_is_good_and_the_command_says_so() -> None:
    found = load_settings(REPO / "deploy" / "serve.toml")
    assert found.alerts is not None and found.retention_s == 90 * 86_400 and found.max_jobs == 500
    assert [route.to for route in found.alerts.routes] == [("alertmanager",), ("pager",), ("alertmanager",)]
    command = [sys.executable, "-m", "torch_watchdog.cli", "serve", "--settings", str(REPO / "deploy" / "serve.toml"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "good: 2 receivers, 3 routes, 1 silences, records are kept 90 days" in done.stdout
    assert "0123456789" not in done.stdout + done.stderr


@pytest.mark.parametrize(("mode", "is_said"), [(0o600, False), (0o640, True), (0o604, True)])
def test_settings_that_others_may_read_are_said(tmp_path: Path, mode: int, is_said: bool) -> None:
    file = written(tmp_path, "[receivers]\na = 'pagerduty://secret'\n")
    file.chmod(mode)
    done = subprocess.run(
        [sys.executable, "-m", "torch_watchdog.cli", "serve", "--settings", str(file), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and ("chmod 600" in done.stderr) is is_said


def test_a_kind_that_no_alert_can_have_is_named_and_the_daemon_starts_all_the_same(tmp_path: Path) -> None:
    text = """
[receivers]
a = 'pagerduty://secret'
[[routes]]
kinds = ['batch.*', 'btach.*', 'watchdog.job_silent', 'gpu.xid']
to = ['a']
[[silences]]
kinds = ['rank.hangs']
until = 2999-01-01T00:00:00Z
"""
    command = [sys.executable, "-m", "torch_watchdog.cli", "serve", "--settings", str(written(tmp_path, text)), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "good: 1 receivers" in done.stdout
    said = [line.partition("serve.toml, ")[2].partition(" fits no kind")[0] for line in done.stderr.splitlines() if "fits" in line]
    assert said == ["routes 1, kinds: 'btach.*'", "silences 1, kinds: 'rank.hangs'"]


WRONG = [
    ("keep = 90", "keep: must be a number and s, m, h or d"),
    ("keap = '90d'", "unknown setting 'keap'"),
    ("keep = ", "is not TOML"),
    ("heartbeat = 'example.org'", "heartbeat: must be a URL that begins with https://"),
    ("[receivers]\npager = 'pagerduty:secret'", "receiver pager: must be a URL"),
    ("[receivers]\npager = 3", "receivers: must be lines such as"),
    ("[receivers]\na = 'pagerduty://secret'\n[[routes]]\nto = ['b']", "routes 1, to: there is no receiver 'b'; known are a"),
    ("[receivers]\na = 'pagerduty://secret'\n[[routes]]\nkind = ['x']", "routes 1: unknown setting 'kind'"),
    (
        "[receivers]\na = 'pagerduty://secret'\n[[routes]]\nto = ['a']\nescalate_after = '1m'",
        "escalate_after and escalate_to belong together",
    ),
    ("[receivers]\na = 'pagerduty://secret'\n[[routes]]\nto = ['a']\nseverities = ['bad']", "severities: must be of warning, critical"),
    ("[[silences]]\njobs = ['a']", "silences 1: until when?"),
    ("[[silences]]\nuntil = '3'", "silences 1, until: must be a date and time"),
    ("[quotas]\njobs = 0", "quotas, jobs: must be a whole number"),
    ("quotas = 3", "quotas: must be a table"),
    ("store = 'mysql://u:secret@h/d'", "store: must be postgresql://"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_what_is_wrong_is_said_with_its_place_and_without_secrets(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_settings(written(tmp_path, text))
    assert (words in str(raised.value) and str(tmp_path) in str(raised.value)) or "receiver" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_an_alert_goes_by_its_route_and_on_to_others_when_nobody_has_it(tmp_path: Path) -> None:
    with HttpReceiver() as owner, HttpReceiver() as boss:
        text = f"""
[receivers]
owner = "pagerduty://KEY@127.0.0.1:{owner.port}"
boss = "pagerduty://KEY@127.0.0.1:{boss.port}"
[[routes]]
kinds = ["rank.*"]
to = ["owner"]
escalate_after = "3s"
escalate_to = ["boss"]
"""
        with Fleet(tmp_path, alerts=load_settings(written(tmp_path, text)).alerts) as fleet:
            for job in ("mine", "nobodys"):
                node = fleet.node(job)
                node.rank(0, 1)
                node.steps(0, 0)
                node.exited(0, signal=9)
                node.goodbye(1)
                until(lambda job=job: [body for body in owner.bodies(event_action="trigger") if job in body["payload"]["summary"]])
                if job == "mine":
                    name = fleet.get("api/v1/alerts").json()["alerts"][0]["name"]
                    assert fleet.http.post("api/v1/alerts/acknowledge", json={"incident": name, "by": "me"}).status_code == 202
            until(lambda: boss.got)
            assert ["nobodys" in body["payload"]["summary"] for body in boss.bodies(event_action="trigger")] == [True]


def test_a_silence_of_the_file_keeps_quiet(tmp_path: Path) -> None:
    with HttpReceiver() as pager:
        text = f"""
[receivers]
pager = "pagerduty://KEY@127.0.0.1:{pager.port}"
[[silences]]
jobs = ["quiet-*"]
until = 2999-01-01T00:00:00Z
"""
        with Fleet(tmp_path, alerts=load_settings(written(tmp_path, text)).alerts) as fleet:
            for job in ("quiet-1", "loud"):
                node = fleet.node(job)
                node.rank(0, 1)
                node.steps(0, 0)
                node.exited(0, signal=9)
                node.goodbye(1)
            until(lambda: pager.got)
            assert ["loud" in body["payload"]["summary"] for body in pager.bodies()] == [True]


def test_the_heartbeat_is_told_and_its_silence_is_said_once(tmp_path: Path) -> None:
    with HttpReceiver() as receiver, Fleet(tmp_path, heartbeat_url=f"http://127.0.0.1:{receiver.port}/beat", heartbeat_s=0.05) as fleet:
        until(lambda: len(receiver.got) >= 2)
        receiver.status = 503
        until(lambda: fleet.said)
        receiver.status = 202
        until(lambda: len(fleet.said) == 2)
        assert "about to page" in fleet.said[0] and "heard again" in fleet.said[1]
        assert str(receiver.port) not in " ".join(fleet.said)


def test_a_job_over_the_quota_waits_until_another_has_ended(tmp_path: Path) -> None:
    with Fleet(tmp_path, max_jobs=1) as fleet:
        node = fleet.node("first")
        with pytest.raises(grpc.RpcError) as raised:
            fleet.node("second")
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "quota" in raised.value.details()
        fleet.node("first")  # a node of a job that runs is let in
        node.goodbye(0)
        until(lambda: fleet.get("api/v1/jobs/first").json()["state"] == "ended")
        fleet.node("second")


def test_a_job_that_reports_more_than_its_share_waits_and_another_does_not(tmp_path: Path) -> None:
    with Fleet(tmp_path, reports_per_s=2.0) as fleet:
        flood, calm = fleet.node("flood"), fleet.node("calm")
        for seq in range(1, 401):  # five seconds' worth are let through at once
            flood._seq += 1
            flood._reports.put(_empty_report(seq))
        calm.steps(0, 0)  # acked while the flood waits
        assert fleet.get("metrics").text.count('training_job="calm"') > 0
        taken = [line for line in fleet.get("metrics").text.splitlines() if line.startswith("torch_watchdog_reports_total")]
        assert taken and float(taken[0].split()[-1]) < 300


def _empty_report(seq: int):  # type: ignore[no-untyped-def]
    from torch_watchdog_proto import codec
    from torch_watchdog_proto import messages as m

    return codec.node_message(m.NodeReport(seq=seq, time_ns=1))
