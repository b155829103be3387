"""`watchdog scan` on real launches: every bad sample is found without training, none is missed where a scan goes on, and a clean set ends with 0."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import Ended, launch, script, torchrun, watchdog

pytestmark = pytest.mark.e2e

ROWS = 400


def scan(folder: Path, *arguments: object, ranks: int = 2, options: tuple[str, ...] = ("--json",)) -> Ended:
    command = torchrun(*script("scanned.py", *arguments), ranks=ranks) if ranks > 1 else [sys.executable, *script("scanned.py", *arguments)]
    return launch(folder, [*watchdog("scan", *options), *command])


def found(ended: Ended) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(ended.out)
    return parsed


def test_every_bad_sample_of_every_rank_is_listed_once_and_nothing_was_trained(tmp_path: Path) -> None:
    ended = scan(tmp_path, "--bad-ids", 50, 51, 53, 399, "--bad-labels", 52, 200)
    report = found(ended)
    assert ended.code == 65, ended.err
    assert report["exit_code"] == 65
    assert report["finished"]
    assert (report["ranks"], report["samples"]) == (2, ROWS)
    listed = [(entry["dataset_index"], entry["key"], entry["value"]) for entry in report["bad"]]
    assert listed == [(50, "ids", 150), (51, "ids", 151), (52, "labels", 4), (53, "ids", 153), (200, "labels", 4), (399, "ids", 499)]
    assert {entry["rank"] for entry in report["bad"]} == {0, 1}
    log = next((tmp_path / "watchdog_runs").glob("*.log")).read_text()
    assert log.count("step ") <= 2 * 6


def test_a_clean_data_set_ends_with_0(tmp_path: Path) -> None:
    ended = scan(tmp_path, "--workers", 2, ranks=1)
    assert ended.code == 0, ended.err
    assert found(ended)["samples"] == ROWS
    assert found(ended)["bad"] == []
    assert "no sample would fail" in ended.err


def test_a_loop_that_fetches_ahead_misses_none_of_the_steps_that_teach(tmp_path: Path) -> None:
    """Their batches are made before their bounds are known."""
    ended = scan(tmp_path, "--accelerate", "--bad-ids", 4, 7, 9, 14, 30, ranks=1)
    assert ended.code == 65, ended.err
    assert [entry["dataset_index"] for entry in found(ended)["bad"]] == [4, 7, 9, 14, 30]
    assert found(ended)["samples"] == ROWS


def test_a_loop_without_a_loader_ends_soon_and_is_not_called_clean(tmp_path: Path) -> None:
    ended = scan(tmp_path, "--feed", "itself")
    assert ended.code == 1, ended.err
    assert not found(ended)["finished"]
    assert "nothing was scanned: no batch of a DataLoader" in ended.err and "no sample would fail" not in ended.err
    assert "for batch in torch_watchdog_agent.watch(batches)" in ended.err
    log = next((tmp_path / "watchdog_runs").glob("*.log")).read_text()
    assert 0 < log.count("step ") <= 2 * 20


@pytest.mark.parametrize("feed", ["itself_first", "thread"])
def test_a_loader_that_begins_later_or_in_another_thread_is_scanned(tmp_path: Path, feed: str) -> None:
    ended = scan(tmp_path, "--feed", feed, ranks=1)
    assert ended.code == 0, ended.err
    assert ROWS - 16 <= found(ended)["samples"] <= ROWS  # a thread takes its first ones before there is a training


def test_what_is_bad_in_the_batches_of_another_thread_is_listed(tmp_path: Path) -> None:
    ended = scan(tmp_path, "--feed", "thread", "--bad-ids", 201, 203, ranks=1)
    assert ended.code == 65, ended.err
    assert [(entry["dataset_index"], entry["value"]) for entry in found(ended)["bad"]] == [(201, 301), (203, 303)]


def test_what_a_person_sees_is_a_table_of_samples(tmp_path: Path) -> None:
    ended = scan(tmp_path, "--bad-ids", 200, ranks=1, options=("--job", "looked"))
    assert ended.code == 65
    lines = ended.out.splitlines()
    assert lines[0].split() == ["sample", "rank", "what", "allowed", "where"]
    assert lines[1].split() == ["200", "0", "ids[0,2]", "=", "300", "0..99", "embedding", "in", "0"]
    assert (tmp_path / "watchdog_runs" / "looked" / "scan" / "rank-0.jsonl").exists()
    (listed,) = json.loads(launch(tmp_path, [*watchdog("jobs", "--json")]).out)["jobs"]
    assert (listed["job"], listed["policy"], listed["state"], listed["incidents"], listed["exit_code"]) == (
        "looked",
        "scan",
        "ended",
        1,
        65,
    )


def test_a_sample_that_the_data_set_cannot_make_is_a_finding_too(tmp_path: Path) -> None:
    ended = scan(tmp_path, "--raises", 201, "--bad-ids", 300, "--workers", 2, ranks=1)
    first, second = found(ended)["bad"]
    assert ended.code == 65
    assert (first["kind"], first["indices"]) == ("loader.exception", [200, 201, 202, 203])
    assert "row 201 cannot be read" in first["summary"]
    assert second["dataset_index"] == 300


def test_an_interrupted_scan_goes_on_where_it_ended(tmp_path: Path) -> None:
    cut = scan(tmp_path, "--bad-ids", 50, 350, "--dies", 201, ranks=1, options=("--json", "--job", "cut"))
    assert cut.code == 65
    assert not found(cut)["finished"]
    assert [entry["dataset_index"] for entry in found(cut)["bad"]] == [50]
    assert "scan: not finished: so far 1 of " in cut.err and "no sample would fail" not in cut.err
    line = next(line for line in cut.err.splitlines() if "--after" in line).removeprefix("[torch-watchdog] ")
    typed = shlex.split(line.replace("--dies 201", ""))  # as printed, but for what ended it
    assert typed[:7] == ["watchdog", "scan", "--job", "cut", "--after", "watchdog_runs/cut", "--json"]
    rest = launch(tmp_path, [*watchdog(), *typed[1:]])
    assert "samples would fail; the rest was looked at by the scan before" in rest.err
    assert rest.code == 65
    assert found(rest)["finished"]
    assert [entry["dataset_index"] for entry in found(rest)["bad"]] == [50, 350]


def test_a_bad_sample_in_the_very_first_step_ends_the_scan_with_the_line_that_goes_on_without_it(tmp_path: Path) -> None:
    """No bound is known by then: the step itself has to show it."""
    cut = scan(tmp_path, "--bad-ids", 2, 300, ranks=1, options=("--json", "--job", "first"))
    assert cut.code == 65 and [entry["dataset_index"] for entry in found(cut)["bad"]] == [2]
    assert "met a bad sample in a step that it learns from, which fails of it (exit code 65); go on without that sample with" in cut.err
    line = next(line for line in cut.err.splitlines() if "--after" in line).removeprefix("[torch-watchdog] ")
    rest = launch(tmp_path, [*watchdog(), *shlex.split(line)[1:]])
    assert rest.code == 65 and found(rest)["finished"], rest.err
    assert [entry["dataset_index"] for entry in found(rest)["bad"]] == [2, 300]


def test_a_command_that_fails_before_anything_was_learned_is_shown(tmp_path: Path) -> None:
    ended = launch(tmp_path, [*watchdog("scan"), sys.executable, "-c", "raise ValueError('no such data')"])
    assert ended.code == 1
    assert "before the scan could begin" in ended.err
    assert "no such data" in ended.err


def test_scan_says_what_it_needs(tmp_path: Path) -> None:
    done = subprocess.run([*watchdog("scan")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
