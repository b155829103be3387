"""The dashboard that we ship: each of its queries is asked of a real Prometheus that scrapes a real daemon, and has an answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fleet_harness import BAD_TOKEN, TOKEN, Fleet, until
from http_receiver import HttpReceiver
from ports import free_port
from services import needs, program

from torch_watchdog.alerts.routes import Match, Route
from torch_watchdog.daemon.config import AlertsConfig
from torch_watchdog_proto import messages as m

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "torch-watchdog.json").read_text())
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: torch-watchdog
    authorization: {{credentials_file: {token}}}
    static_configs: [{{targets: ["{target}"]}}]
"""


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_dashboard_names_each_panel_once_and_places_none_over_another() -> None:
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(set(titles)) == len(titles) >= 15
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y) for place in places for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[httpx.Client]:
    """A real one that has scraped a daemon with a job, an incident, an alert that was told and a refused call."""
    with HttpReceiver() as pager:
        receivers = {"pager": f"pagerduty://KEY@127.0.0.1:{pager.port}"}
        alerts = AlertsConfig(receivers=receivers, routes=(Route(match=Match(), to=("pager",)),))
        (tmp_path / "f").mkdir()
        with Fleet(tmp_path / "f", alerts=alerts) as fleet:
            node = fleet.node()
            node.rank(0, 1)
            node.steps(0, 0, 1)
            node.say(m.Noticed(rank=0, step=2, micro_step=0, violation=BAD_TOKEN))
            httpx.get(f"{fleet.url}api/v1/jobs")
            until(fleet.incidents)
            with running(tmp_path, fleet.url) as client:
                yield client


class running:  # noqa: N801 - a context manager
    def __init__(self, folder: Path, url: str) -> None:
        self.port = free_port()
        (folder / "token").write_text(TOKEN)
        shutil.copy(DEPLOY / "prometheus" / "torch-watchdog.rules.yml", folder / "rules.yml")
        config = CONFIG.format(rules=folder / "rules.yml", token=folder / "token", target=httpx.URL(url).netloc.decode())
        (folder / "prometheus.yml").write_text(config)
        self.command = [
            program("prometheus") or "", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]  # fmt: skip

    def __enter__(self) -> httpx.Client:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}/api/v1/", timeout=10)
        return self.client

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(20)


def answer(client: httpx.Client, query: str) -> list[object] | None:
    """None while it does not answer."""
    try:
        found = client.get("query", params={"query": query})
    except httpx.HTTPError:
        return None
    assert found.status_code in (200, 503), found.text
    return found.json()["data"]["result"] if found.status_code == 200 else None  # type: ignore[no-any-return]


@needs("prometheus")
def test_every_query_of_the_dashboard_has_an_answer(prometheus: httpx.Client) -> None:
    for query in queries():
        asked = re.sub(r"\$job", ".*", query).replace("[5m]", "[1m]").replace("[1h]", "[1m]")
        until(lambda asked=asked: answer(prometheus, asked), 60)
    rules = prometheus.get("rules").json()["data"]["groups"]
    assert rules and all(rule["health"] == "ok" for group in rules for rule in group["rules"])
