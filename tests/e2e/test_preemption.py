"""SIGTERM and SIGUSR1, to one process of a launch or to all at once, become one checkpoint and stop; whoever has a handler of its own keeps it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import BIN, Ended, ended, is_torchrun, launch, script, start, torchrun, until, watchdog
from process_tree import tree

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def to_the_wrapper(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)


def to_everybody(process: subprocess.Popen[str], number: int) -> None:
    for pid in tree(process.pid):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def to_the_launcher(process: subprocess.Popen[str], number: int) -> None:
    (launcher,) = (pid for pid in tree(process.pid) if is_torchrun(pid))
    os.kill(launcher, number)


def signalled(folder: Path, send: Callable[[subprocess.Popen[str], int], None], number: int, command: list[str], *options: str) -> Ended:
    """A launch that is signalled when it has trained for some steps, and then goes on."""
    process = start(folder, [*watchdog("--job", "job", *options), *command])
    until(lambda: (folder / "here").exists() or process.poll() is not None, "rank 0 waits")
    assert process.poll() is None, (folder / "err").read_text()
    send(process, number)
    (folder / "go").touch()
    return ended(process, folder)


def losses(*runs: Ended) -> set[str]:
    return {line for run in runs for line in run.lines(r"step \d+ loss")}


@pytest.mark.parametrize(
    ("send", "number"),
    [
        pytest.param(to_the_wrapper, signal.SIGTERM, marks=pytest.mark.slow),
        (to_the_wrapper, signal.SIGUSR1),
        (to_everybody, signal.SIGTERM),
        pytest.param(to_everybody, signal.SIGUSR1, marks=pytest.mark.slow),
        (to_the_launcher, signal.SIGTERM),
    ],
)
def test_the_job_is_saved_once_and_stops_with_the_signals_code(
    send: Callable[[subprocess.Popen[str], int], None], number: signal.Signals, tmp_path: Path
) -> None:
    run = signalled(tmp_path, send, number, torchrun(*script("train.py", "--epochs", 40, "--meet", tmp_path)))
    assert run.code == 128 + number, run.err
    (incident,) = run.incidents
    assert (incident["kind"], incident["action"]["exit_code"]) == ("order.preemption", 128 + number)
    assert len(list((run.run_dir / "checkpoints").glob("*/COMMITTED"))) == 1
    assert number.name in run.err and "resume watchdog" in run.err


def test_a_job_that_was_taken_off_its_machine_resumes_bit_identically(tmp_path: Path) -> None:
    trained = ("train.py", "--epochs", 40)  # more steps than it has time for before the order comes
    run = signalled(tmp_path, to_everybody, signal.SIGTERM, torchrun(*script(*trained, "--meet", tmp_path)))
    checkpoint = run.incidents[0]["action"]["checkpoint"]["path"]
    (tmp_path / "again").mkdir()
    resumed = launch(tmp_path / "again", [*watchdog("--resume", checkpoint), *torchrun(*script(*trained, "--restore", "--out", "digests"))])
    plain = launch(tmp_path, torchrun(*script(*trained, "--out", "digests")))
    assert (run.code, resumed.code, plain.code) == (143, 0, 0), resumed.err
    assert losses(run, resumed) == losses(plain) and losses(run).isdisjoint(losses(resumed))
    for rank in (0, 1):
        assert (tmp_path / "again" / "digests" / f"digest-{rank}").read_text() == (tmp_path / "digests" / f"digest-{rank}").read_text()


def test_a_single_process_is_saved_too(tmp_path: Path) -> None:
    run = signalled(tmp_path, to_the_wrapper, signal.SIGUSR1, [sys.executable, *script("train.py", "--epochs", 40, "--meet", tmp_path)])
    assert run.code == 128 + signal.SIGUSR1, run.err
    assert len(list((run.run_dir / "checkpoints").glob("*/COMMITTED"))) == 1


def test_the_one_process_of_accelerate_is_saved_too_and_not_left_behind(tmp_path: Path) -> None:
    """`accelerate launch` would end by SIGTERM, and its process train on without anybody."""
    line = [str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    command = [*line, "--dynamo_backend", "no", *script("train.py", "--epochs", 40, "--meet", tmp_path)]
    run = signalled(tmp_path, to_the_wrapper, signal.SIGTERM, command)
    assert run.code == 128 + signal.SIGTERM, run.err
    assert len(list((run.run_dir / "checkpoints").glob("*/COMMITTED"))) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_scripts_own_handler_wins_and_nothing_is_saved_twice(number: signal.Signals, tmp_path: Path) -> None:
    """It ends its loop in its own way: as without us, whose handlers it does not meet."""
    command = torchrun(*script("train.py", "--epochs", 40, "--meet", tmp_path, "--ends-by-signal"))
    run = signalled(tmp_path, to_the_wrapper, number, command)
    assert run.lines("done") == ["rank 0 done", "rank 1 done"], run.err
    assert run.lines("got signal") == [f"rank {rank} got signal {int(number)}" for rank in (0, 1)]
    assert not (run.run_dir / "checkpoints").exists() and run.incidents == []


@pytest.mark.slow
def test_with_pass_a_signal_acts_as_without_us(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    command = torchrun(*script("train.py", "--epochs", 40, "--meet", tmp_path / "plain"))
    process = start(tmp_path / "plain", command)
    until(lambda: (tmp_path / "plain" / "here").exists(), "rank 0 waits")
    process.send_signal(signal.SIGTERM)
    plain = ended(process, tmp_path / "plain")
    run = signalled(
        tmp_path, to_the_wrapper, signal.SIGTERM, torchrun(*script("train.py", "--epochs", 40, "--meet", tmp_path)), "--on-signal", "pass"
    )
    assert run.code == plain.code and not (run.run_dir / "checkpoints").exists()
    assert run.incidents == [] and "was ended by SIGTERM from outside: 2 ranks" in run.err


def test_trainers_own_checkpoint_on_a_signal_wins(tmp_path: Path) -> None:
    command = torchrun(*script("train_trainer.py", "--meet", tmp_path, "--jit", "--epochs", 40))
    run = signalled(tmp_path, to_the_wrapper, signal.SIGTERM, command)
    saved = sorted(path.name for path in (tmp_path / "trained").iterdir())
    assert not any((tmp_path / "trained" / name / "watchdog.json").exists() for name in saved), run.err
    assert all(incident["kind"] != "order.preemption" for incident in run.incidents)


@pytest.mark.slow
def test_a_trainer_without_one_is_saved_by_us_where_it_finds_it(tmp_path: Path) -> None:
    run = signalled(tmp_path, to_everybody, signal.SIGTERM, torchrun(*script("train_trainer.py", "--meet", tmp_path, "--epochs", 40)))
    assert run.code == 143, run.err
    (incident,) = run.incidents
    place = Path(incident["action"]["checkpoint"]["path"])
    assert place.parent == tmp_path / "trained" and (place / "COMMITTED").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_whose_grace_runs_out_behind_the_training_advises_no_other_training(ranks: int, tmp_path: Path) -> None:
    """The script still saves, say, and is not done in time."""
    command = script("slow_end.py", tmp_path)
    process = start(tmp_path, [*watchdog("--signal-grace", "1"), *(torchrun(*command) if ranks > 1 else [sys.executable, *command])])
    until(lambda: len(list(tmp_path.glob("trained-*"))) == ranks or process.poll() is not None, "all have trained")
    process.send_signal(signal.SIGTERM)
    run = ended(process, tmp_path)
    assert run.code in (1, -15) and "after its training was over" in run.err, run.err
    assert "  again " not in run.err and "  resume " not in run.err
