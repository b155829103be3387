"""The run directory: what was kept is read again, whatever happened to the file's tail, the disk or the index."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from torch_watchdog.errors import RunDirectoryError
from torch_watchdog.store.background import BackgroundWriter
from torch_watchdog.store.index import BlockIndex
from torch_watchdog.store.job_files import JobFiles
from torch_watchdog.store.read import read_blocks, read_events, read_incidents, read_job, read_reports
from torch_watchdog.store.run_directory import RunDirectory, write_json
from torch_watchdog.store.segments import SegmentWriter, read_frames, segment_files
from torch_watchdog_proto.messages import NodeReport, StepBlock, StepTable


def block(rank: int, *steps: int) -> StepBlock:
    return StepBlock(rank=rank, attempt=0, pid=7, first_record=1, step=steps, step_ns=(1,) * len(steps))


def report(seq: int, *blocks: StepBlock) -> NodeReport:
    return NodeReport(seq=seq, time_ns=seq, steps=StepTable.of(blocks))


def keep(root: Path, *reports: NodeReport) -> None:
    files = JobFiles(root)
    for one in reports:
        files.append_report("node", "session", one)
    files.close()


def payloads(folder: Path) -> list[bytes]:
    return [frame.payload for path in segment_files(folder) for frame in read_frames(path)]


def test_what_was_appended_is_read_in_order(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    for number in range(5):
        writer.append(b"payload %d" % number)
    assert payloads(tmp_path) == [b"payload %d" % number for number in range(5)]


def test_a_full_segment_is_followed_by_another(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, max_bytes=200)
    kept = [os.urandom(60) for _ in range(8)]
    for payload in kept:
        writer.append(payload)
    assert len(segment_files(tmp_path)) > 1
    assert payloads(tmp_path) == kept


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_a_torn_tail_costs_only_the_torn_frame(tmp_path: Path, cut: int) -> None:
    writer = SegmentWriter(tmp_path)
    writer.append(b"whole")
    size = segment_files(tmp_path)[0].stat().st_size
    writer.append(os.urandom(40))
    os.truncate(segment_files(tmp_path)[0], size + cut)
    assert payloads(tmp_path) == [b"whole"]


def test_after_a_torn_tail_a_new_writer_loses_nothing(tmp_path: Path) -> None:
    SegmentWriter(tmp_path).append(b"before")
    with segment_files(tmp_path)[0].open("ab") as file:
        file.write(b"\x40\x00\x00\x00torn")
    SegmentWriter(tmp_path).append(b"after")
    assert payloads(tmp_path) == [b"before", b"after"]


@pytest.mark.parametrize("garbage", [b"", b"x", bytes(range(256)) * 16, b"TWSEG\x01\r\n" + b"\xff" * 64])
def test_a_garbage_segment_is_no_error(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "000001.seg").write_bytes(garbage)
    (tmp_path / "notes.seg").write_bytes(garbage)
    SegmentWriter(tmp_path).append(b"good")
    assert payloads(tmp_path) == [b"good"]


def test_a_failed_write_is_followed_by_a_new_segment(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    writer.append(b"before")
    os.close(writer._file.fileno())  # type: ignore[union-attr]
    with pytest.raises(OSError):
        writer.append(b"lost")
    writer.append(b"after")
    assert payloads(tmp_path) == [b"before", b"after"]


def test_blocks_are_found_by_rank_and_step(tmp_path: Path) -> None:
    keep(tmp_path, report(1, block(0, 0, 1), block(1, 0, 1)), report(2, block(0, 2, 3), block(1, 2, 3)))
    assert [b.step for b in read_blocks(tmp_path, rank=1)] == [(0, 1), (2, 3)]
    assert [b.rank for b in read_blocks(tmp_path, first_step=3)] == [0, 1]
    assert [b.step for b in read_blocks(tmp_path, rank=0, first_step=1, last_step=1)] == [(0, 1)]
    assert list(read_blocks(tmp_path / "nothing here")) == []


def test_a_kept_report_names_its_node_and_session(tmp_path: Path) -> None:
    keep(tmp_path, report(9))
    assert [(node, session, kept.seq) for node, session, kept in read_reports(tmp_path)] == [("node", "session", 9)]


def test_the_index_finds_what_a_scan_finds(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keep(run_dir, *(report(n, block(0, 2 * n, 2 * n + 1), block(1, 2 * n)) for n in range(20)))
    index = BlockIndex.open(tmp_path / "cache" / "index.sqlite")
    assert index is not None
    for query in ({}, {"rank": 1}, {"first_step": 7, "last_step": 12}, {"rank": 0, "last_step": 3}):
        assert list(index.blocks(run_dir, **query)) == list(read_blocks(run_dir, **query))
    index.close()


def test_the_index_sees_what_came_since_and_is_made_again_when_it_is_gone(tmp_path: Path) -> None:
    database = tmp_path / "index.sqlite"
    files = JobFiles(tmp_path / "run")
    for seq in (1, 2, 3):
        files.append_report("node", "session", report(seq, block(0, seq)))
        index = BlockIndex.open(database)
        assert index is not None
        assert [b.step for b in index.blocks(tmp_path / "run")] == [(n,) for n in range(1, seq + 1)]
        index.close()
        if seq == 2:
            database.unlink()


def test_an_index_that_cannot_be_opened_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "garbage.sqlite").write_bytes(os.urandom(8192))
    assert BlockIndex.open(tmp_path / "file" / "index.sqlite") is None
    assert BlockIndex.open(tmp_path / "garbage.sqlite") is None


def test_an_event_is_not_glued_to_a_line_that_was_cut_short(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "first"}\n{"kind": "cut sho')
    files = JobFiles(tmp_path)
    files.append_event({"kind": "second"})
    files.close()
    assert [event["kind"] for event in read_events(tmp_path)] == ["first", "second"]


def test_incidents_are_read_by_number_and_garbage_is_left_out(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    for number in (10, 2):
        files.write_incident({"id": str(number)}, None)
    RunDirectory(tmp_path).incident("3").mkdir()
    (RunDirectory(tmp_path).incident("3") / "incident.json").write_text("{")
    assert [incident["id"] for incident in read_incidents(tmp_path)] == ["2", "10"]


def test_the_contract_is_copied_once_beside_its_incident(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    write_json(directory.contract_file(1), {"learned": "first"})
    files = JobFiles(tmp_path)
    files.write_incident({"id": "1"}, 1)
    write_json(directory.contract_file(1), {"learned": "later"})
    files.write_incident({"id": "1"}, 1)
    assert json.loads((directory.incident("1") / "contract.json").read_text()) == {"learned": "first"}


def test_a_replaced_file_leaves_no_part_behind(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "job.json", {"job": "one"})
    with pytest.raises(ValueError):
        write_json(tmp_path / "a" / "job.json", {"job": float("nan")})
    assert read_job(tmp_path / "a") == {"job": "one"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["job.json"]


def test_a_folder_without_a_job_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="--dir"):
        read_job(tmp_path)


def raises(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_a_failing_write_is_counted_said_once_and_the_next_is_tried() -> None:
    said: list[str] = []
    done: list[str] = []
    writer = BackgroundWriter(max_pending=10, say=said.append)
    writer.submit(raises(OSError(28, "No space left on device")), lambda: done.append("first"))
    writer.submit(raises(RuntimeError("a bug")), lambda: done.append("second"))
    writer.submit(lambda: done.append("work"), lambda: done.append("third"))
    assert writer.close(10)
    assert (writer.num_dropped, len(said), done) == (2, 1, ["first", "second", "work", "third"])
    assert "No space left" in said[0]


def test_a_hung_disk_fills_a_bounded_queue_and_does_not_hold_up_the_end() -> None:
    hung, done, started = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        hung.wait()

    writer = BackgroundWriter(max_pending=2, say=lambda line: None)
    writer.submit(hang)
    assert started.wait(10)
    for _ in range(2):
        writer.submit(lambda: None)
    writer.submit(lambda: None, done.set)
    assert done.is_set() and writer.num_dropped == 1
    assert not writer.close(0.05)
    hung.set()


def test_a_disk_that_has_room_again_is_written_to_and_said_to_be_well() -> None:
    said: list[str] = []
    now_s = [0.0]
    writer = BackgroundWriter(max_pending=10, say=said.append, clock=lambda: now_s[0])
    failing, right = (True, True), (False, False)
    too_early = (False, True)  # one write is no sign yet: others may fail still
    for now_s[0], (fails, dropping) in zip(
        (0, 1, 2, 12, 13, 23, 90, 91, 101), (failing, failing, too_early, right, failing, right, failing, too_early, right), strict=True
    ):
        tried = threading.Event()
        writer.submit(raises(OSError(28, "No space left on device")) if fails else lambda: None, tried.set)
        assert tried.wait(10)
        assert writer.is_dropping is dropping
    assert writer.close(10) and writer.num_dropped == 4
    assert [line.partition(" (")[0].partition(":")[0] for line in said] == [
        "the run directory cannot be written", "the run directory can be written again",
    ] * 2  # fmt: skip
