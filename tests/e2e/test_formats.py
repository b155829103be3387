"""Checkpoints in the form that each framework resumes from by itself, from real launches with two ranks."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from launching import Ended, ended, launch, script, start, torchrun, until, watchdog

from torch_watchdog_agent.checkpoint.manifest import verify

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BAD = 7  # meets rank 1 in its sixth batch, behind the one before it


def digests(folder: Path) -> list[str]:
    return [(folder / f"digest-{rank}").read_text() for rank in (0, 1)]


def losses(*runs: Ended) -> set[str]:
    return {line for run in runs for line in run.lines(r"step \d+ loss")}


def checkpoint_of(run: Ended) -> dict[str, object]:
    (incident,) = run.incidents
    checkpoint: dict[str, object] = incident["action"]["checkpoint"]
    return checkpoint


# transformers.Trainer


@pytest.mark.parametrize(
    ("accumulate", "step", "others"), [(1, 5, ["checkpoint-2", "checkpoint-4"]), pytest.param(2, 2, [], marks=pytest.mark.slow)]
)
def test_an_unchanged_trainer_resumes_and_equals_a_run_in_which_the_bad_sample_never_was(
    accumulate: int, step: int, others: list[str], tmp_path: Path
) -> None:
    """With two batches a step the Trainer has itself saved at this step: that is the checkpoint."""
    train = script("train_trainer.py", "--accumulate", accumulate)
    stopped = launch(tmp_path, [*watchdog("--job", "bad"), *torchrun(*train, "--bad", str(BAD))])
    assert stopped.code == 65, stopped.err
    checkpoint = checkpoint_of(stopped)
    assert (checkpoint["path"], checkpoint["format"], checkpoint["updates_applied"]) == (
        str(tmp_path / "trained" / f"checkpoint-{step}"), "transformers", step,
    )  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "trained").iterdir()) == sorted([*others, f"checkpoint-{step}"])
    manifest = verify(tmp_path / "trained" / f"checkpoint-{step}")
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"} <= {
        file["name"] for file in manifest["files"]
    }
    resumed = launch(tmp_path, [*watchdog("--job", "again"), *torchrun(*train, "--bad", str(BAD), "--resume", "--out", "resumed")])
    assert resumed.code == 0, resumed.err
    reference = launch(tmp_path, torchrun(*script("train_trainer.py", "--accumulate", accumulate, "--instead", BAD, "--out", "reference")))
    assert losses(stopped, resumed) == losses(reference) and losses(stopped).isdisjoint(losses(resumed))
    assert digests(tmp_path / "resumed") == digests(tmp_path / "reference")


@pytest.mark.slow
def test_a_trainer_that_is_stopped_between_two_epochs_resumes_as_if_it_had_not_been(tmp_path: Path) -> None:
    process = start(tmp_path, [*watchdog("--job", "asked"), *torchrun(*script("train_trainer.py", "--meet", tmp_path))])
    until(lambda: (tmp_path / "here").exists() or process.poll() is not None, "rank 0 waits")
    assert process.poll() is None
    assert launch(tmp_path, [*watchdog("stop", "asked")]).code == 0
    (tmp_path / "go").touch()
    stopped = ended(process, tmp_path)
    assert stopped.code == 0, stopped.err
    state = json.loads((tmp_path / "trained" / "checkpoint-6" / "trainer_state.json").read_text())
    assert (state["global_step"], state["epoch"]) == (6, 1.0)
    verify(tmp_path / "trained" / "checkpoint-6")
    resumed = launch(tmp_path, torchrun(*script("train_trainer.py", "--resume", "--out", "resumed")))
    assert resumed.code == 0, resumed.err
    (tmp_path / "plain").mkdir()
    reference = launch(tmp_path / "plain", torchrun(*script("train_trainer.py", "--out", "reference")))
    assert losses(stopped, resumed) == losses(reference)
    assert digests(tmp_path / "resumed") == digests(tmp_path / "plain" / "reference")


# accelerate


@pytest.fixture(scope="module")
def stopped_accelerate(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("stopped")
    return launch(folder, [*watchdog("--job", "bad"), *torchrun(*script("train_accelerate.py", "--bad", BAD))])


@pytest.fixture(scope="module")
def reference_accelerate(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The sixth step never happens in it."""
    folder = tmp_path_factory.mktemp("reference")
    return launch(folder, torchrun(*script("train_accelerate.py", "--never", 5, "--out", "digests")))


def test_an_accelerate_loop_is_saved_as_accelerate_does(stopped_accelerate: Ended) -> None:
    assert stopped_accelerate.code == 65, stopped_accelerate.err
    (incident,) = stopped_accelerate.incidents
    checkpoint = checkpoint_of(stopped_accelerate)
    assert (incident["step"], checkpoint["format"]) == (5, "accelerate")
    names = {file["name"] for file in verify(stopped_accelerate.folder / str(checkpoint["path"]))["files"]}
    assert {"model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "random_states_1.pkl", "rank-1.json"} <= names


@pytest.mark.parametrize("how", ["--load-state", "--restore"])
def test_an_accelerate_loop_loads_its_state_and_goes_on_at_the_next_batch(
    how: str, stopped_accelerate: Ended, reference_accelerate: Ended, tmp_path: Path
) -> None:
    """Without a wrapped launch: accelerate's own load_state() and our restore(loader=...), or restore() for everything."""
    checkpoint = stopped_accelerate.folder / str(checkpoint_of(stopped_accelerate)["path"])
    resumed = launch(tmp_path, torchrun(*script("train_accelerate.py", how, checkpoint, "--out", "digests")))
    assert resumed.code == 0, resumed.err
    assert losses(stopped_accelerate, resumed) == losses(reference_accelerate)
    assert losses(stopped_accelerate).isdisjoint(losses(resumed))
    assert digests(tmp_path / "digests") == digests(reference_accelerate.folder / "digests")


@pytest.mark.parametrize("inside", [False, True], ids=["ours", "a folder in it"])
def test_a_script_that_only_calls_load_state_has_taken_the_checkpoint_of_the_launch(
    inside: bool, stopped_accelerate: Ended, tmp_path: Path
) -> None:
    checkpoint = stopped_accelerate.folder / str(checkpoint_of(stopped_accelerate)["path"])
    loaded = checkpoint
    if inside:  # as a saving function of the script's own may have it
        checkpoint, loaded = tmp_path / "step-5", tmp_path / "step-5" / "state"
        shutil.copytree(stopped_accelerate.folder / str(checkpoint_of(stopped_accelerate)["path"]), loaded)
        for name in ("watchdog.json", "COMMITTED"):
            (loaded / name).rename(checkpoint / name)
    train = script("train_accelerate.py", "--load-state", loaded, "--bare")
    again = launch(tmp_path, [*watchdog("--job", "again", "--resume", str(checkpoint)), *torchrun(*train)])
    assert again.code == 0, again.err
    assert "has not been taken" not in again.err and "taken by nobody" not in again.err
    assert "updates 6 to" in again.err, again.err


# Lightning


@pytest.mark.slow
def test_lightning_takes_the_checkpoint_by_ckpt_path(tmp_path: Path) -> None:
    train = script("train_lightning.py")
    stopped = launch(tmp_path, [*watchdog("--job", "bad"), *torchrun(*train, "--bad", str(BAD))])
    assert stopped.code == 65, stopped.err
    (incident,) = stopped.incidents
    checkpoint = tmp_path / str(checkpoint_of(stopped)["path"])
    assert checkpoint_of(stopped)["format"] == "lightning"
    assert "lightning.ckpt" in {file["name"] for file in verify(checkpoint)["files"]}
    resumed = launch(tmp_path, torchrun(*train, "--ckpt", str(checkpoint / "lightning.ckpt")))
    assert resumed.code == 0, resumed.err
    left = [line.replace(f"after step {incident['step'] - 1}", "begins") for line in stopped.lines(f"after step {incident['step'] - 1} ")]
    assert len(left) == 2 and resumed.lines("begins at") == left


@pytest.mark.slow
def test_lightning_that_starts_its_ranks_by_itself_is_watched_as_under_torchrun(tmp_path: Path) -> None:
    """`python train.py` with `devices=2`: rank 0 is the command's own process, which had been taken for the only one; the bad sample is the other's."""
    train = [sys.executable, *script("train_lightning.py"), "--bad", str(BAD)]
    stopped = launch(tmp_path, [*watchdog("--job", "bad"), *train])
    assert stopped.code == 65, stopped.err
    (incident,) = stopped.incidents
    assert (incident["origin"]["rank"], incident["step"], checkpoint_of(stopped)["committed"]) == (1, 5, True)
    resume = next(line for line in stopped.err.splitlines() if "[torch-watchdog]   resume " in line)
    resumed = launch(tmp_path, [*watchdog(), *shlex.split(resume.split("  resume ")[1])[1:]])
    assert resumed.code == 0, resumed.err
    left = [line.replace("after step 4", "begins") for line in stopped.lines("after step 4 ")]
    assert len(left) == 2 and resumed.lines("begins at") == left
    reference = launch(tmp_path, [*train[:2], "--instead", str(BAD)])
    assert resumed.lines("after step 11 ") == reference.lines("after step 11 ")


def test_lightning_that_is_told_to_end_saves_and_stops_as_any_other(tmp_path: Path) -> None:
    """Its `fit()` installs a handler of its own, which ends the training and saves nothing. Only the stop ends so many epochs."""
    train = script("train_lightning.py", "--told", 1, 4, "--epochs", 2000)
    stopped = launch(tmp_path, [*watchdog("--job", "told"), *torchrun(*train)])
    assert stopped.code == 143, stopped.err
    checkpoint = checkpoint_of(stopped)
    assert (checkpoint["format"], checkpoint["committed"]) == ("lightning", True)


def test_a_handler_that_a_script_has_beside_lightnings_wins(tmp_path: Path) -> None:
    """As ever then: Lightning calls it, and ends the training behind that batch."""
    train = script("train_lightning.py", "--told", 0, 4, "--handler")
    run = launch(tmp_path, [*watchdog("--job", "told"), *torchrun(*train, ranks=1)])
    assert run.lines("the script's own handler") == ["the script's own handler"]
    assert run.lines("after step 4 ") and not run.lines("after step 5 ")
    assert not list(run.run_dir.glob("checkpoints/*"))
