"""What is told of real runs afterwards, with no server: two of them side by side, and the files for other tools. And one while it runs, on a terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import environment, launch, script, torchrun, until, watchdog

sys.path.insert(0, str(Path(__file__).parents[1] / "watchdog" / "cli"))

from terminal import Screen

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training twice, and once more with a bad sample."""
    root = tmp_path_factory.mktemp("runs")
    for job, arguments, code in (("one", (), 0), ("two", (), 0), ("bad", ("--bad", 45), 65)):
        done = launch(root, [*watchdog("--job", job), *torchrun(*script("train.py", *arguments))])
        assert done.code == code, done.err
    return root


def told(folder: Path, *words: str) -> str:
    done = launch(folder, [*watchdog(), *words])
    assert done.code == 0, done.err
    return done.out


def test_the_same_training_twice_has_the_same_losses(folder: Path) -> None:
    found = json.loads(told(folder, "timeline", "one", "two", "--json"))
    assert found["loss"]["first_difference_at_step"] is None and found["loss"]["common_steps"] >= 7
    assert "the losses are the same in all" in told(folder, "timeline", "one", "two").splitlines()[-1]


def test_a_run_that_was_stopped_differs_by_its_end_and_not_before(folder: Path) -> None:
    found = json.loads(told(folder, "timeline", "one", "bad", "--json"))
    differing = {name: pair for name, pair in found["figures"].items() if name in ("exit code", "incidents", "skipped updates", "ranks")}
    assert differing == {"exit code": [0, 65], "incidents": [0, 1], "skipped updates": [0, 1], "ranks": [2, 2]}
    (incident,) = json.loads(told(folder, "timeline", "bad", "--json"))["incidents"]
    assert found["loss"]["first_difference_at_step"] in (None, incident["step"])


def test_other_tools_read_the_steps_of_a_real_run(folder: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    told(folder, "timeline", "one", "--parquet", "t.parquet", "--perfetto", "t.json")
    steps = {rank["rank"]: rank["step"] for rank in json.loads(told(folder, "timeline", "one", "--json"))["ranks"]}
    table = duckdb.read_parquet(str(folder / "t.parquet"))
    rows = table.aggregate("rank, count(*), max(step), count(loss), min(step_s) > 0", "rank").order("rank").fetchall()
    assert rows == [(rank, len(steps[rank]), steps[rank][-1], len(steps[rank]), True) for rank in (0, 1)]
    slices = [
        event for event in json.loads((folder / "t.json").read_text())["traceEvents"] if event["ph"] == "X" and event["cat"] == "step"
    ]
    assert len(slices) == sum(map(len, steps.values()))


def test_a_real_run_is_followed_on_a_terminal_until_it_ends(tmp_path: Path) -> None:
    tiny = str(Path(__file__).parent / "tiny_train.py")
    run = Screen(
        [*watchdog("--job", "job"), *torchrun(tiny, "--steps", "4000", "--step-time-s", "0.05")], cwd=tmp_path, variables=environment()
    )
    until(lambda: b"step 10 " in run.text, "ten steps")
    screen = Screen([*watchdog("status", "job", "--watch")], cwd=tmp_path, variables=environment())
    until(lambda: b"job job, running" in screen.text and b"slowest rank" in screen.text, "the job on the terminal")
    told(tmp_path, "stop", "job")
    assert "ended, exit code 0" in screen.finished(120)
    assert run.process.wait(60) == 0
