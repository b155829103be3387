"""What comes while ranks save: a launch whose torchrun is killed waits for them and calls none gone that lives; a stop waits for a checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from launching import Ended, ended, is_torchrun, launch, script, start, torchrun, until, watchdog
from process_tree import children

from torch_watchdog_agent.node.processes import is_alive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def saving(
    folder: Path, *arguments: str, ranks: tuple[int, ...], options: tuple[str, ...] = (), asks: str = "stop"
) -> subprocess.Popen[str]:
    """A launch whose `ranks` are in their save, each until `let_them_save`, because somebody `asks` for one, or rank 1 fails."""
    for rank in (0, 1):
        os.mkfifo(folder / f"fifo-{rank}")
    wrapper = start(folder, [*watchdog("--job", "j", *options), *torchrun(*script("held_save.py", *arguments))])
    until(lambda: all((folder / f"step-{rank}").exists() for rank in (0, 1)), "both ranks train")
    if asks:
        launch(folder, [*watchdog(asks, "--no-wait"), "j"])
    until_they_save(folder, *ranks)
    return wrapper


def until_they_save(folder: Path, *ranks: int) -> None:
    until(lambda: all((folder / f"saving-{rank}").exists() for rank in ranks), "they save")


def kill_torchrun(wrapper: subprocess.Popen[str]) -> None:
    (pid,) = (child for child in children(wrapper.pid) if is_torchrun(child))
    os.kill(pid, signal.SIGKILL)


def let_them_save(folder: Path, *ranks: int) -> None:
    """Returns once each has opened its end, too."""
    for rank in ranks:
        (folder / f"saving-{rank}").unlink()
        (folder / f"fifo-{rank}").open("wb").close()


def live(folder: Path) -> list[int]:
    return [pid for path in folder.glob("pid-*") if is_alive(pid := int(path.read_text()))]


def killed(wrapper: subprocess.Popen[str], folder: Path) -> Ended:
    kill_torchrun(wrapper)
    return ended(wrapper, folder)


@pytest.mark.parametrize(
    ("arguments", "asks", "savers", "told"),
    [((), "stop", (0, 1), "stopped on request (exit code 0)"), (("--fail",), "", (0,), "failed: rank.exception (exit code 137)")],
    ids=["stop", "rescue"],
)
def test_the_launch_waits_and_tells_the_checkpoint(
    tmp_path: Path, arguments: tuple[str, ...], asks: str, savers: tuple[int, ...], told: str
) -> None:
    wrapper = saving(tmp_path, *arguments, ranks=savers, asks=asks)
    kill_torchrun(wrapper)
    until(lambda: "the launch waits" in (tmp_path / "err").read_text(), "the launch says for whom it waits")
    let_them_save(tmp_path, *savers)
    run = ended(wrapper, tmp_path)
    assert told in run.err, run.err
    assert "  saved  watchdog_runs/j/checkpoints/step-" in run.err
    assert "  resume " in run.err
    (checkpoint,) = (run.run_dir / "checkpoints").iterdir()
    assert (checkpoint / "COMMITTED").exists()
    assert "left behind" not in run.err
    until(lambda: not live(tmp_path), "no rank is left behind")


def test_it_waits_for_the_grace_and_calls_no_rank_gone_that_lives(tmp_path: Path) -> None:
    wrapper = saving(tmp_path, ranks=(0, 1), options=("--grace", "1"))
    run = killed(wrapper, tmp_path)
    assert "no word from ranks 0, 1 in time (saving)" in run.err, run.err
    assert "gone" not in (run.run_dir / "events.jsonl").read_text().replace("the node process is gone", "")
    let_them_save(tmp_path, 0, 1)
    until(lambda: not live(tmp_path), "the ranks end")


def test_a_signal_that_asks_for_the_end_reaches_the_ranks_and_ends_the_wait(tmp_path: Path) -> None:
    wrapper = saving(tmp_path, ranks=(0, 1))
    kill_torchrun(wrapper)
    until(lambda: "the launch waits" in (tmp_path / "err").read_text(), "the launch says for whom it waits")
    wrapper.send_signal(signal.SIGINT)
    wrapper.wait(20)
    until(lambda: not live(tmp_path), "the ranks end, too")


def test_ranks_that_only_train_are_not_waited_for_and_told_as_left_behind(tmp_path: Path) -> None:
    wrapper = start(tmp_path, [*watchdog("--job", "j"), *torchrun(*script("held_save.py"))])
    until(lambda: all((tmp_path / f"step-{rank}").exists() for rank in (0, 1)), "both ranks train")
    run = killed(wrapper, tmp_path)
    left = sorted(live(tmp_path))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(left) == 2
    words = f"2 ranks left behind, unwatched: pids {left[0]}, {left[1]}"
    record = json.loads((run.run_dir / "job.json").read_text())
    assert words in run.err and "nothing found (exit code 137)" in run.err, run.err
    assert record["end"]["left_behind"] == left and words in record["exit_reason"]
    assert "gone" not in (run.run_dir / "events.jsonl").read_text().replace("the node process is gone", "")


def test_a_stop_that_is_asked_for_while_a_checkpoint_is_written_comes_after_it(tmp_path: Path) -> None:
    wrapper = saving(tmp_path, ranks=(0, 1), asks="checkpoint")
    (tmp_path / "stop").mkdir()
    stop = start(tmp_path / "stop", [*watchdog("stop"), str(tmp_path / "watchdog_runs" / "j")])
    until(lambda: "a checkpoint is under way" in (tmp_path / "stop" / "err").read_text(), "it says what it waits for")
    let_them_save(tmp_path, 0, 1)
    until_they_save(tmp_path, 0, 1)  # for the stop
    let_them_save(tmp_path, 0, 1)
    asked, run = ended(stop, tmp_path / "stop"), ended(wrapper, tmp_path)
    assert (asked.code, run.code) == (0, 0), asked.err + run.err
    assert len([path for path in (run.run_dir / "checkpoints").iterdir() if (path / "COMMITTED").exists()]) == 2
