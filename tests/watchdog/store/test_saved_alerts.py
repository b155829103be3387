"""Open alerts that an earlier daemon left, where several daemons share a store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torch_watchdog.errors import StoreError
from torch_watchdog.store import fleet
from torch_watchdog.store.alerts import all_saved_alerts
from torch_watchdog.store.database import Database
from torch_watchdog.store.fleet import FleetStore
from torch_watchdog.store.record import Record, json_record


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


class Takeover:
    """A daemon that is gone had these runs; another one, with a lease of nothing, looks after them."""

    def __init__(self, tmp_path: Path, *runs: str) -> None:
        url = f"sqlite:///{tmp_path / 'store.sqlite'}"
        self.said: list[str] = []
        self.gone, self.alive = (FleetStore(url, tmp_path / name, say=self.said.append, lease_s=0.0) for name in ("gone", "alive"))
        for run in runs:
            left_alert(tmp_path / "gone", run, run)
            self.gone.open_run(run)

    def look(self, *, tells: bool = True) -> frozenset[str]:
        self.alive.beat(())
        return self.alive.adopt(tells=tells)


def test_a_run_whose_folder_cannot_be_written_keeps_back_no_other_and_is_said_once(tmp_path: Path) -> None:
    takeover = Takeover(tmp_path, "a-job", "b-job")
    (tmp_path / "alive").mkdir()
    (tmp_path / "alive" / "a-job").write_text("a file")
    assert takeover.look() == {"b-job"}
    assert takeover.look() == takeover.look() == frozenset()
    (said,) = takeover.said
    assert "a-job cannot be taken over (FileExistsError" in said
    (tmp_path / "alive" / "a-job").unlink()
    assert takeover.look() == {"a-job"}


def test_where_the_store_goes_away_in_the_middle_what_was_taken_is_told_of_and_the_rest_is_taken_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takeover, bring_out, tried, is_away = Takeover(tmp_path, "a-job", "b-job", "c-job"), fleet.bring_out, [], True

    def failing(database: Database, run: str, run_dir: Path) -> int:
        tried.append(run)
        if run == "b-job" and is_away:
            raise StoreError("here", "the server closed the connection", "Start it")
        return bring_out(database, run, run_dir)

    monkeypatch.setattr(fleet, "bring_out", failing)
    assert takeover.look() == {"a-job"} and tried == ["a-job", "b-job"]
    assert takeover.look() == {"c-job"}, "one run for which the store never answers comes after the others"
    is_away = False
    assert takeover.look() == {"b-job"}
    assert sum("b-job" in line for line in takeover.said) == 1


def test_alerts_in_the_store_that_nobody_can_read_keep_back_no_other_run(tmp_path: Path) -> None:
    takeover = Takeover(tmp_path, "a-job", "b-job")
    assert takeover.gone.close(5.0)
    takeover.gone._database.write([Record(run="a-job", kind="alerts", key="", body=b"no zlib")])
    assert takeover.look() == {"b-job"}


class CutAfterCommit:
    """A connection that breaks once, after the database has committed and before it can say so."""

    def __init__(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, transaction = 1, database.transaction

        @contextlib.contextmanager
        def cut() -> Iterator[Any]:
            with transaction() as connection:
                yield connection
            if self.left:
                self.left -= 1
                raise StoreError("here", "server closed the connection unexpectedly", "Start it")

        self._cut, self._database, self._patch = cut, database, monkeypatch

    def now(self) -> None:
        self._patch.setattr(self._database, "transaction", self._cut)


def test_a_run_whose_adoption_was_committed_and_not_answered_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takeover = Takeover(tmp_path, "a-job")
    takeover.alive.beat(())
    adopt, cut = takeover.alive._owners.adopt, CutAfterCommit(takeover.alive._database, monkeypatch)
    monkeypatch.setattr(takeover.alive._owners, "adopt", lambda *run, **how: (cut.now(), adopt(*run, **how))[1])
    assert takeover.alive.adopt(tells=True) == frozenset() and cut.left == 0
    assert takeover.alive._owners.beat(()).orphans == {}, "it is ours, so that no beat tells of it"
    assert takeover.look() == {"a-job"}
    assert takeover.look() == frozenset()


def test_a_claim_that_was_committed_and_not_answered_takes_no_old_words_for_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that had the run long ago asks for it: what it still has of it is older than what the store has."""
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    daemon = FleetStore(url, tmp_path / "a", say=lambda _: None)
    left_alert(tmp_path / "a", "job", "old")
    daemon._database.keep_run("job", 0.0)
    daemon._database.write([json_record("job", "alerts", "", {"schema_version": 1, "alerts": [{"words": "newest"}]})])
    claim, cut = daemon._owners.claim, CutAfterCommit(daemon._database, monkeypatch)
    monkeypatch.setattr(daemon._owners, "claim", lambda run: (cut.now(), claim(run))[1])
    with pytest.raises(StoreError):
        daemon.open_run("job")
    daemon.open_run("job")
    assert all_saved_alerts(tmp_path / "a", take=lambda _: True) == [{"words": "newest"}]
    assert daemon.close(5.0)
