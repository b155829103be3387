"""The rules and the configuration that we ship, by Prometheus's own tools, and against the metrics that the daemon really has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from fleet_harness import BAD_TOKEN, Fleet, until
from services import needs, program

from torch_watchdog.alerts.routes import Match, Route
from torch_watchdog.daemon.config import AlertsConfig
from torch_watchdog_proto import messages as m

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"


def promtool(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([program("promtool") or "", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@needs("promtool")
def test_the_rules_are_rules_and_do_what_their_tests_say() -> None:
    assert promtool("check", "rules", "torch-watchdog.rules.yml")[0] == 0
    code, text = promtool("test", "rules", "torch-watchdog.rules.test.yml")
    assert code == 0, text


def test_every_alert_has_its_unit_test() -> None:
    rules = (FOLDER / "torch-watchdog.rules.yml").read_text()
    tests = (FOLDER / "torch-watchdog.rules.test.yml").read_text()
    assert set(re.findall(r"alert: (\w+)", rules)) == set(re.findall(r"alertname: (\w+)", tests))


def test_the_rules_ask_only_for_metrics_that_the_daemon_has(tmp_path: Path) -> None:
    alerts = AlertsConfig(receivers={"pager": "pagerduty://KEY@127.0.0.1:9"}, routes=(Route(match=Match(), to=("pager",)),))
    with Fleet(tmp_path, alerts=alerts) as fleet:
        node = fleet.node()
        node.rank(0, 1)
        node.steps(0, 0, 1)
        node.say(m.Noticed(rank=0, step=2, micro_step=0, violation=BAD_TOKEN))
        until(fleet.incidents)
        there = set(re.findall(r"^(torch_watchdog\w+)", fleet.get("metrics").text, re.MULTILINE))
    exprs = re.findall(
        r"expr: (.*?)(?=\n +(?:for|labels|- record|- alert)|\n\n)", (FOLDER / "torch-watchdog.rules.yml").read_text(), re.DOTALL
    )
    asked = set(re.findall(r"(?<![:\w])torch_watchdog_\w+(?![:\w])", " ".join(exprs)))
    assert asked and asked - {"torch_watchdog_refused_calls_total"} <= there | {"torch_watchdog_job_state"}
