"""Open alerts that an earlier daemon left, where several daemons share a store."""

from __future__ import annotations

import json
from pathlib import Path

from torch_watchdog.errors import StoreError
from torch_watchdog.store.alerts import all_saved_alerts
from torch_watchdog.store.fleet import FleetStore
from torch_watchdog.store.record import json_record


def left_alert(runs_dir: Path, job: str, words: str) -> None:
    (runs_dir / job).mkdir(parents=True)
    (runs_dir / job / "alerts.json").write_text(json.dumps({"schema_version": 1, "alerts": [{"words": words}]}))


def test_of_a_run_without_alerts_nobody_is_asked(tmp_path: Path) -> None:
    left_alert(tmp_path, "one", "w")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "alerts.json").write_text('{"alerts": []}')
    asked: list[str] = []
    assert all_saved_alerts(tmp_path, take=lambda run: asked.append(run) is None) == [{"words": "w"}]
    assert asked == ["one"]


def test_a_daemon_that_comes_back_tells_no_alert_that_another_has_taken_over_and_takes_its_own_up_again(tmp_path: Path) -> None:
    """A daemon dies, another adopts its run, the first one starts again over its old files; then both end well, and it is started once more."""
    from torch_watchdog.daemon.alerting import Alerting
    from torch_watchdog.daemon.config import AlertsConfig

    url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    said: list[str] = []
    first, second = (FleetStore(url, tmp_path / name, say=said.append) for name in ("a", "b"))
    left_alert(tmp_path / "a", "job", "old")
    first.open_run("job")
    alerting = Alerting(AlertsConfig(), tmp_path / "a", writer=None, clock=lambda: 0.0, say=said.append, log=said.append, store=first)  # type: ignore[arg-type]
    assert alerting._takes("job")
    assert second._owners.adopt("job", first._owners._me)
    assert not alerting._takes("job")
    second.keep(json_record("job", "alerts", "", {"schema_version": 1, "alerts": [{"words": "acknowledged"}]}))
    assert second.close(5.0)
    assert all_saved_alerts(tmp_path / "a", take=alerting._takes) == [{"words": "acknowledged"}]
    assert first.close(5.0)


def test_while_the_store_is_away_an_alert_is_told_all_the_same(tmp_path: Path) -> None:
    from torch_watchdog.daemon.alerting import Alerting
    from torch_watchdog.daemon.config import AlertsConfig

    class Away:
        def open_run(self, run: str) -> None:
            raise StoreError("sqlite://", "away", "wait")

    alerting = Alerting(AlertsConfig(), tmp_path, writer=None, clock=lambda: 0.0, say=print, log=print, store=Away())  # type: ignore[arg-type]
    assert alerting._takes("job")
