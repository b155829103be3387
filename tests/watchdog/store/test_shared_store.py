"""The shared store: the same promises over SQLite, and over a real PostgreSQL where the tests of services run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from fleet_harness import until
from services import PostgresServer, program

from torch_watchdog.errors import JobElsewhereError, StoreError
from torch_watchdog.store.database import VERSION, Database, check_store_url
from torch_watchdog.store.job_files import JobFiles
from torch_watchdog.store.mirror import Mirror
from torch_watchdog.store.owners import Owners
from torch_watchdog.store.read import read_events, read_incidents, read_reports
from torch_watchdog.store.record import Record, event_record, json_record, report_record
from torch_watchdog.store.retention import forget_old_files
from torch_watchdog.store.transfer import bring_in, bring_out
from torch_watchdog_proto.codec import stored_report
from torch_watchdog_proto.messages import NodeReport, StepBlock, StepTable

INCIDENT = {"id": "1", "kind": "rank.hang", "status": "firing"}


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tw") as folder, PostgresServer(Path(folder)) as server:
        yield server.url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.services)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.sqlite'}"
    if program("initdb") is None:
        pytest.skip("not installed here: apt-get install postgresql")
    found: str = request.getfixturevalue("postgres")
    with Database.open(found).transaction() as connection:
        for table in ("records", "runs", "daemons"):
            connection.execute(sa.text(f"DELETE FROM torch_watchdog_{table}"))
    return found


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    opened = Database.open(url)
    yield opened
    opened.close()


def run_directory(root: Path, name: str = "job") -> Path:
    files = JobFiles(root / name)
    for seq in (1, 2, 3):
        block = StepBlock(rank=0, attempt=0, pid=7, first_record=1, step=(seq,), step_ns=(1,))
        files.append_report("node", "s", NodeReport(seq=seq, time_ns=seq, steps=StepTable.of((block,))))
    files.append_event({"order": 1, "kind": "job.began", "text": "it begins"})
    files.write_incident(INCIDENT, None)
    files.write_stacks("1", "a stack")
    files.close()
    return root / name


def test_a_run_directory_comes_out_as_it_went_in(database: Database, tmp_path: Path) -> None:
    source = run_directory(tmp_path / "a")
    assert bring_in(database, source, has_newest=True) == 6
    assert bring_out(database, "job", tmp_path / "b" / "job") == 6
    target = tmp_path / "b" / "job"
    assert list(read_reports(target)) == list(read_reports(source))
    assert read_events(target) == read_events(source) and read_incidents(target) == read_incidents(source)
    assert (target / "incidents" / "1" / "stacks.txt").read_text() == "a stack"


def test_bringing_twice_changes_nothing(database: Database, tmp_path: Path) -> None:
    source = run_directory(tmp_path / "a")
    for _ in range(2):
        bring_in(database, source, has_newest=True)
        bring_out(database, "job", source)
    assert len(list(read_reports(source))) == 3 and len(read_events(source)) == 1
    assert len(list(database.records("job"))) == 6


def test_the_newest_words_of_an_incident_count_and_a_report_never_changes(database: Database) -> None:
    stored = stored_report("node", "s", NodeReport(seq=1, time_ns=1))
    other = stored_report("node", "s", NodeReport(seq=1, time_ns=99))
    database.write([report_record("job", "node", 1, stored), json_record("job", "incident", "1", INCIDENT)])
    database.write([report_record("job", "node", 1, other), json_record("job", "incident", "1", INCIDENT | {"status": "resolved"})])
    report, incident = database.records("job")
    assert report.content == stored and b"resolved" in incident.content


def test_opening_it_again_migrates_nothing_and_a_newer_one_is_refused(database: Database, url: str) -> None:
    Database.open(url).close()
    with database.transaction() as connection:
        found = connection.scalar(sa.select(VERSION.c.version))
        connection.execute(VERSION.update().values(version=99))
    try:
        with pytest.raises(StoreError, match="Upgrade"):
            Database.open(url)
    finally:
        with database.transaction() as connection:
            connection.execute(VERSION.update().values(version=found))


def test_a_job_has_one_daemon_and_passes_to_another_only_when_that_one_is_silent(database: Database) -> None:
    time_s = [0.0]
    a, b = (Owners(database, name, clock=lambda: time_s[0], now=lambda: 1.0, lease_s=10) for name in "ab")
    a.beat(())
    a.claim("job")
    with pytest.raises(JobElsewhereError, match="job job is at the daemon a"):
        b.claim("job")
    for time_s[0] in range(0, 60, 5):
        a.beat(("job",))
        assert b.beat(()).orphans == {}
    for time_s[0] in range(56, 65, 2):
        assert b.beat(()).orphans == {}
    time_s[0] = 66
    assert b.beat(()).orphans == {"job": "a"}
    assert b.adopt("job", "a") and not b.adopt("job", "a")
    b.claim("job")
    assert a.beat(("job",)).lost == {"job"}
    with pytest.raises(JobElsewhereError):
        a.claim("job")


def test_after_the_database_was_away_a_daemon_that_lives_keeps_its_jobs_whoever_beats_first(database: Database) -> None:
    time_s = [0.0]
    a, b = (Owners(database, name, clock=lambda: time_s[0], now=lambda: 1.0, lease_s=12) for name in "ab")
    a.beat(())
    a.claim("job")
    b.beat(())
    for time_s[0] in (60, 62, 64):  # a minute in which nobody could beat; b comes first, a only four seconds later
        assert b.beat(()).orphans == {}
        with pytest.raises(JobElsewhereError):
            b.claim("job")
    assert a.beat(("job",)).lost == frozenset()
    for time_s[0] in range(66, 76, 2):
        assert b.beat(()).orphans == {}
    time_s[0] = 78
    assert b.beat(()).orphans == {"job": "a"}, "a daemon that died meanwhile is noticed a lease later"


def test_a_daemon_that_stood_still_itself_takes_nobodys_jobs_when_it_wakes(database: Database) -> None:
    time_s = [0.0]
    a, b = (Owners(database, name, clock=lambda: time_s[0], now=lambda: 1.0, lease_s=12) for name in "ab")
    a.beat(())
    a.claim("job")
    b.beat(())
    time_s[0] = 100
    assert b.beat(()).orphans == {}


def test_what_an_ended_daemon_left_is_nobodys_for_a_lease_before_others_may_have_it(database: Database) -> None:
    time_s = [0.0]
    a, b = (Owners(database, name, clock=lambda: time_s[0], now=lambda: 1.0, lease_s=12) for name in "ab")
    a.claim("back"), a.claim("left")
    a.release()
    for time_s[0] in (0.0, 5.0, 10.0):
        assert b.beat(()).released == set()
    a.claim("back")
    time_s[0] = 13.0
    assert b.beat(()).released == {"left"} and b.adopt("left", "") and not a.adopt("left", "")
    assert b.beat(("left",)).released == set()


def test_a_daemon_that_is_back_under_its_name_finds_its_jobs_at_once(database: Database) -> None:
    Owners(database, "a", clock=lambda: 0.0, now=lambda: 1.0).claim("job")
    Owners(database, "a", clock=lambda: 0.0, now=lambda: 1.0).claim("job")


def test_what_is_old_goes_from_the_store_and_what_is_held_stays(database: Database) -> None:
    for name, seen_s in (("old", 10.0), ("held", 10.0), ("new", 100.0)):
        database.keep_run(name, seen_s)
        database.write([event_record(name, {"order": 1})])
    assert database.forget_older(50.0, ("held",)) == ("old",)
    assert set(database.runs()) == {"held", "new"} and not list(database.records("old"))


def test_pruning_takes_the_daemons_records_and_leaves_checkpoints(tmp_path: Path) -> None:
    kept, empty = run_directory(tmp_path, "with-checkpoint"), run_directory(tmp_path, "without")
    (kept / "checkpoints").mkdir()
    (tmp_path / "foreign").mkdir()
    assert forget_old_files(tmp_path, 2**40, ("without",)) == ("with-checkpoint",)
    assert [path.name for path in kept.iterdir()] == ["checkpoints"]
    assert forget_old_files(tmp_path, 2**40, ()) == ("without",) and not empty.exists()
    assert (tmp_path / "foreign").is_dir()


class AwayDatabase(Database):
    """Does not answer while `is_away`."""

    is_away = True

    def write(self, records) -> None:  # type: ignore[no-untyped-def]
        if self.is_away:
            raise StoreError("here", "stopped by the test", "Start it")
        super().write(records)


def test_while_the_store_is_away_nothing_is_acked_and_nothing_is_lost(tmp_path: Path) -> None:
    AwayDatabase.open(f"sqlite:///{tmp_path / 's'}").close()
    database = AwayDatabase.open(f"sqlite:///{tmp_path / 's'}")
    said, acked = list[str](), list[int]()
    mirror = Mirror(database, max_bytes=100, say=said.append)
    for number in range(4):
        mirror.put(event_record("job", {"order": number, "text": "x" * 20}), _noting(acked, number))
    until(lambda: said)
    assert acked == [] and mirror.is_full and "reports wait" in said[0]
    database.is_away = False
    assert until(lambda: len(acked) == 4)
    assert mirror.close(5) and len(list(database.records("job"))) == 4
    assert len(said) == 2 and "nothing was lost" in said[1]


def test_incidents_and_alerts_reach_the_store_before_the_reports_that_wait(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 's'}"
    AwayDatabase.open(url).close()
    database, said = AwayDatabase.open(url), list[str]()
    mirror = Mirror(database, max_bytes=1 << 20, say=said.append)
    for number in range(500):
        mirror.put(event_record("job", {"order": number}))
    mirror.put(json_record("job", "incident", "1", INCIDENT))
    until(lambda: said)
    database.is_away = False
    assert mirror.close(20)
    kinds = [record.kind for record in database.records("job")]
    assert len(kinds) == 501 and kinds.index("incident") <= 200


def test_a_node_of_any_name_is_kept_and_a_record_that_the_database_never_takes_keeps_back_no_other(database: Database) -> None:
    stored, acked = stored_report("node", "s", NodeReport(seq=1, time_ns=1)), list[int]()
    mirror = Mirror(database, max_bytes=1 << 20, say=lambda _: None)
    for number, node in enumerate(("plain", "nul\x00", "x" * 5000, "\ud800"), 1):
        mirror.put(report_record("job", node, number, stored), _noting(acked, number))
    mirror.put(Record(run="job", kind="event", key=None, body=b""))  # type: ignore[arg-type]
    mirror.put(event_record("job", {"order": 1}), _noting(acked, 5))
    assert mirror.close(20)
    assert acked == [1, 2, 3, 4, 5] and len(list(database.records("job"))) == 5


def test_a_daemon_that_is_asked_again_after_another_had_the_job_does_not_bring_its_old_words(database: Database, tmp_path: Path) -> None:
    a, b = (Owners(database, name, clock=lambda: 0.0, now=lambda: 1.0) for name in "ab")
    assert a.claim("job") and a.claim("job")
    a.release()
    assert not b.claim("job")
    bring_in(database, run_directory(tmp_path), has_newest=False)
    database.write([json_record("job", "incident", "1", INCIDENT | {"status": "resolved"})])
    b.release()
    bring_in(database, tmp_path / "job", has_newest=a.claim("job"))
    bring_out(database, "job", tmp_path / "job")
    assert read_incidents(tmp_path / "job")[0]["status"] == "resolved"


def _noting(into: list[int], number: int) -> Callable[[], None]:
    return lambda: into.append(number)


def test_a_url_that_is_none_is_refused_without_showing_its_password() -> None:
    for wrong in ("mysql://u:secret@h/d", "secret", "postgresql://u:secret@h", "sqlite://"):
        with pytest.raises(ValueError, match="must be postgresql://") as raised:
            check_store_url(wrong)
        assert "secret" not in str(raised.value)


def test_a_store_that_does_not_answer_is_an_error_without_its_password() -> None:
    with pytest.raises(StoreError, match="Is it running") as raised:
        Database.open("postgresql://u:secret@127.0.0.1:1/d")
    assert "secret" not in str(raised.value)
