"""The first promise: whatever happens to the watchdog, the training's numbers, output and end are those of a run without it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import BIN, Ended, ended, launch, script, start, torchrun, until, watchdog
from namespaces import needs_mounts, where_mounted
from ports import free_port

from torch_watchdog.daemon.client import DaemonClient, client_of
from torch_watchdog.errors import UnknownJobError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LOSS = r"step \d+ loss"


def numbers(run: Ended) -> tuple[list[str], list[str]]:
    """Every loss of every rank as hex, and the digests of all parameters, buffers and optimizer state."""
    return run.lines(LOSS), [path.read_text() for path in sorted((run.folder / "out.d").iterdir())]


def in_folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    "loader",
    [
        ("--workers", 0),
        pytest.param(("--workers", 2, "--context", "fork"), marks=pytest.mark.slow),
        pytest.param(("--workers", 2, "--context", "spawn"), marks=pytest.mark.slow),
    ],
)
def test_losses_parameters_and_output_are_bit_identical(loader: tuple[object, ...], tmp_path: Path) -> None:
    command = script("train.py", *loader, "--epochs", 1, "--out", "out.d")
    plain = launch(in_folder(tmp_path, "plain"), torchrun(*command))
    watched = launch(in_folder(tmp_path, "watched"), [*watchdog(), *torchrun(*command)])
    assert plain.code == 0, plain.err
    assert (watched.code, numbers(watched)) == (0, numbers(plain)), watched.err
    assert sorted(watched.out.splitlines()) == sorted(plain.out.splitlines())
    assert len(plain.lines(LOSS)) == 16


def test_a_sitecustomize_of_the_users_own_runs_first_in_line(tmp_path: Path) -> None:
    theirs = in_folder(tmp_path, "theirs")
    (theirs / "sitecustomize.py").write_text("import os\nos.environ['THEIRS'] = 'ran'\n")
    (tmp_path / "say.py").write_text("import os, sys, sitecustomize; print(os.environ['THEIRS'], sitecustomize.__file__, sys.path)")
    path = os.pathsep.join([str(theirs), *filter(None, [os.environ.get("PYTHONPATH")])])
    plain = launch(tmp_path, [str(BIN / "python"), "say.py"], PYTHONPATH=path)
    watched = launch(tmp_path, [*watchdog(), str(BIN / "python"), "say.py"], PYTHONPATH=path)
    assert plain.out.startswith("ran ")
    assert (watched.code, watched.out) == (0, plain.out), watched.err


def test_one_rank_under_plain_python_is_bit_identical_too(tmp_path: Path) -> None:
    command = [str(BIN / "python"), *script("train.py", "--epochs", 1, "--out", "out.d")]
    plain, watched = launch(in_folder(tmp_path, "plain"), command), launch(in_folder(tmp_path, "watched"), [*watchdog(), *command])
    assert (watched.code, numbers(watched)) == (0, numbers(plain)), watched.err


def test_what_a_training_deletes_is_gone(tmp_path: Path) -> None:
    """Parameters, optimizer state, buffers: memory that the next model of the same script may need."""
    run = launch(tmp_path, [*watchdog(), str(BIN / "python"), *script("lets_go.py", "cpu")])
    assert (run.code, run.lines("alive:")) == (0, ["alive: []"]), run.err


@needs_mounts
def test_without_dev_shm_the_training_goes_on_and_one_line_says_what_is_lost(tmp_path: Path) -> None:
    command = [*watchdog(), *torchrun(*script("train.py", "--epochs", 1))]
    run = launch(tmp_path, where_mounted("ro", "/dev/shm", command))
    assert run.code == 0, run.err
    assert len(run.lines("done")) == 2
    assert len([line for line in run.err.splitlines() if "shared memory" in line]) == 1


@needs_mounts
def test_on_a_full_disk_the_training_goes_on_and_says_what_is_lost(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    command = [*watchdog("--dir", "full"), *torchrun(*script("train.py", "--epochs", 2))]
    run = launch(tmp_path, where_mounted("size=16k", tmp_path / "full", command))
    assert run.code == 0, run.err
    assert len(run.lines("done")) == 2
    assert "No space left" in run.err or "disk is full" in run.err or "runs without the watchdog" in run.err


class Served:
    """A central daemon on a TCP port of this machine, and a training that waits in its middle."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "daemon").mkdir()
        self.daemon = self._serve()
        command = [*watchdog("--job", "served", "--daemon", self.address), *torchrun(*script("train.py", "--epochs", 1, "--meet", folder))]
        self.training = start(folder, command)
        until((folder / "here").exists, "the training is in its middle")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _serve(self):
        served = start(
            self.folder / "daemon", [*watchdog("serve"), "--port", str(self.port), "--dir", str(self.folder / "daemon" / "runs")]
        )
        until(lambda: self.address in (self.folder / "daemon" / "out").read_text() + (self.folder / "daemon" / "err").read_text(), "served")
        return served

    @contextlib.contextmanager
    def again(self) -> Iterator[DaemonClient]:
        """Another daemon over the same files, until it is asked no more."""
        self.daemon = self._serve()
        with client_of(self.address, os.environ) as client:
            yield client
        self.daemon.terminate()
        assert self.daemon.wait(30) == 0

    def go_on(self) -> Ended:
        (self.folder / "go").touch()
        return ended(self.training, self.folder)


def test_a_ranks_statistics_are_read_back_over_tcp_while_the_job_runs(tmp_path: Path) -> None:
    served = Served(tmp_path)
    with client_of(served.address, os.environ) as client:
        until(lambda: any(3 in block.step for block in client.steps("served", rank=1)), "step 3 of rank 1 is there")
        blocks = client.steps("served", rank=1)
    tensors = {column.key: column for block in blocks for column in block.tensors}
    assert set(tensors) == {"ids", "labels"}
    assert tensors["ids"].dtype == "int64"
    assert all(0 <= low <= high < 40 for low, high in zip(tensors["ids"].low, tensors["ids"].high, strict=True))
    losses = [loss for block in blocks for loss in block.loss]
    run = served.go_on()
    served.daemon.terminate()
    printed = [float.fromhex(line.rsplit(" ", 1)[1]) for line in run.lines(r"rank 1 step [0-2] loss")]
    assert losses[:3] == printed
    assert served.daemon.wait(30) == 0


def test_a_training_goes_on_when_its_daemon_is_killed_and_says_what_is_lost(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.daemon.kill()
    served.daemon.wait()
    run = served.go_on()
    assert run.code == 0, run.err
    assert len(run.lines("done")) == 2
    assert len([line for line in run.err.splitlines() if "cannot be reached" in line or ("daemon" in line and "lost" in line)]) == 1
    with served.again() as client:
        with pytest.raises(UnknownJobError):
            client.job("served")  # neither running nor known to have ended
        runs = tmp_path / "watchdog_runs"
        after = launch(in_folder(tmp_path, "after"), [*watchdog("--dir", str(runs), "--daemon", served.address), "true"])
        assert after.code == 0, after.err
        assert not list(runs.glob(".unsaid/*")), "the next launch with those runs has told it"
        assert (client.job("served").state, client.job("served").exit_code) == ("ended", 0)


def test_a_training_goes_on_to_its_own_numbers_when_its_node_process_is_killed(tmp_path: Path) -> None:
    folder = in_folder(tmp_path, "watched")
    training = start(folder, [*watchdog(), *torchrun(*script("train.py", "--epochs", 1, "--out", "out.d", "--meet", folder))])
    until((folder / "here").exists, "the training is in its middle")
    os.kill(training.pid, signal.SIGKILL)
    training.wait()
    (folder / "go").touch()
    until(lambda: (folder / "out").read_text().count("done") == 2, "both ranks came to their own end")
    plain = launch(in_folder(tmp_path, "plain"), torchrun(*script("train.py", "--epochs", 1, "--out", "out.d")))
    watched = Ended(0, (folder / "out").read_text(), (folder / "err").read_text(), folder)
    assert numbers(watched) == numbers(plain)
    assert watched.err.count("the node process is gone") == 2  # once a rank
