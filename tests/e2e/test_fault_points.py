"""kill -9 of a part between two words of a stop: no hang, nothing half called good, never different updates on two ranks.

A few of all the points, for each change; `tests/faults/fault_points.py` tries every one.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from launching import Ended, ended, launch, script, start, torchrun, until, watchdog
from ports import free_port

from torch_watchdog_agent.checkpoint import manifest
from torch_watchdog_proto.checkpoint_names import COMMITTED
from torch_watchdog_proto.fault_points import VARIABLE

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from fault_points import ranks_of, served

pytestmark = pytest.mark.e2e

BAD = 38  # meets rank 1 at step 4
LONGEST_S = (
    150.0  # start, ten steps, the timeouts of one order (10 s each), torchrun's own end of a failed launch (30 s); for two busy cores
)

HELD = ("rank-0 before Ack", "rank-1 before Saving", "rank-1 before Saved")  # the rank that is left holds everything
OFTEN = ("rank-1 before Saving", "rank-1 before Hold", "rank-0 before Committed", "node before Commit")
FEW = (*HELD, "rank-1 before Hold", "rank-0 got Commit", "rank-0 before Committed", "node before Commit", "node got Saved")


@pytest.mark.parametrize("point", [point if point in OFTEN else pytest.param(point, marks=pytest.mark.slow) for point in FEW])
def test_a_part_that_dies_between_two_words_of_a_stop_harms_nothing(tmp_path: Path, point: str) -> None:
    began = time.monotonic()
    command = [*watchdog("--job", "dying"), *torchrun(*script("train.py", "--epochs", 1, "--bad", BAD))]
    if point.startswith("node"):  # its launch is over with it; the training ends by itself, as its output says
        run = outlived(tmp_path, command, point)
    else:
        run = launch(tmp_path, command, **{VARIABLE: point})
    assert time.monotonic() - began < LONGEST_S, point
    assert run.code != 0, point
    judge(run)
    if point in HELD:
        assert "(4 updates, verified)" in run.err, point
    if point == "node got Saved":  # the ranks know that all is whole
        assert [path.parent.name for path in run.folder.rglob(COMMITTED)] == ["step-4"], point
        assert "every rank's part is whole, so it was sealed without it" in run.err, point


def at_daemon(address: str) -> list[str]:
    options = ("--job", "dying", "--daemon", address, "--grace", "20")
    return [*watchdog(*options), *torchrun(*script("train.py", "--epochs", 1, "--bad", BAD))]


@pytest.mark.slow
def test_a_central_daemon_that_dies_between_two_words_of_a_stop_harms_nothing(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    daemon = served(tmp_path / "daemon", address, **{VARIABLE: "daemon before Commit"})
    began = time.monotonic()
    run = launch(tmp_path, at_daemon(address))
    assert daemon.wait(30) == -9
    assert time.monotonic() - began < LONGEST_S
    judge(run)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["daemon before Commit", "daemon before WriteCommitted"])
def test_a_daemon_that_is_started_again_in_the_middle_of_a_stop_ends_it(tmp_path: Path, point: str) -> None:
    """Before the decision the hold is said again, and the stop is as ever; behind it the ranks end it by themselves when the grace time is over."""
    address = f"127.0.0.1:{free_port()}"
    first = served(tmp_path / "daemon", address, **{VARIABLE: point})
    began = time.monotonic()
    process = start(tmp_path, at_daemon(address))
    assert first.wait(120) == -9
    second = served(tmp_path / "daemon", address)
    run = ended(process, tmp_path)
    took_s = time.monotonic() - began
    second.terminate()
    assert second.wait(30) == 0
    judge(run)
    assert (run.code, took_s < LONGEST_S) == (65, True), run.err
    assert list(run.folder.rglob(COMMITTED)), run.err


@pytest.mark.slow
def test_an_order_of_an_attempt_that_has_died_binds_nobody_in_the_next(tmp_path: Path) -> None:
    """Decided, and never carried out: the next attempt trains to its end, from what was saved and without the bad sample."""
    command = torchrun(*script("train.py", "--epochs", 1, "--bad", BAD, "--restore"), options=("--max-restarts", "1"))
    run = launch(tmp_path, [*watchdog("--job", "dying"), *command], **{VARIABLE: "rank-0 got Commit"})
    assert (run.code, run.lines("done")) == (0, ["rank 0 done", "rank 1 done"]), run.err
    assert run.lines("resumed") == [f"rank {rank} resumed at 4 updates, epoch 0" for rank in (0, 1)]
    killed, other = applied(run)[0], applied(run)[1]
    assert other == list(range(8))
    assert killed in (other, [0, 1, 2, 4, 5, 6, 7])  # it may have died with step 3 applied and not yet said
    assert "finished in attempt 1 after batch.index_out_of_range in attempt 0 (exit code 0)" in run.err


def outlived(folder: Path, command: list[str], point: str) -> Ended:
    process = start(folder, command, **{VARIABLE: point})
    run = ended(process, folder)
    size = -1

    def is_quiet() -> bool:
        nonlocal size
        before, size = size, (folder / "out").stat().st_size + (folder / "err").stat().st_size
        return before == size and not ranks_of(folder)

    until(is_quiet, "the ranks have ended", LONGEST_S)
    return Ended(run.code, (folder / "out").read_text(), (folder / "err").read_text(), folder)


def applied(run: Ended) -> dict[int, list[int]]:
    """The steps that each rank says it has done."""
    return {rank: [int(step) for step in re.findall(rf"rank {rank} step (\d+) loss", run.out)] for rank in (0, 1)}


def judge(run: Ended) -> None:
    """The bad step 4 was applied by nobody, the updates are the same, and what is called good is whole."""
    steps = applied(run)
    assert all(4 not in done for done in steps.values()), steps
    assert abs(len(steps[0]) - len(steps[1])) <= 1, steps  # a rank that was killed may not have said its last
    for folder in run.folder.rglob(COMMITTED):
        facts = manifest.verify(folder.parent)
        assert facts["updates_applied"] == 4
        assert sorted(facts["ranks"]) == [0, 1] or facts["kind"] == "rescue"
