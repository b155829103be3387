"""A process that trains alone, and ends by an exception: it saves what it held before that step, or says why it does not. A run that goes on from it equals one
in which nothing happened.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from launching import BIN, Ended, launch, script, watchdog

from torch_watchdog_agent.checkpoint.manifest import verify

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PYTHON = str(BIN / "python")


def alone(folder: Path, *arguments: object, options: tuple[str, ...] = ()) -> Ended:
    return launch(folder, [*watchdog("--job", "j", *options), PYTHON, *script("alone.py", "--restore", *arguments)])


def gone_on(run: Ended, *without: str) -> list[str]:
    """What the line that the summary says to type prints, typed without what made the run fail."""
    (line,) = re.findall(r"\[torch-watchdog\]   resume (.*)", run.err)
    words = [word for word in shlex.split(line) if word not in without]
    resumed = launch(run.folder, [*watchdog(), *words[1:]])
    assert resumed.code == 0, resumed.err
    return resumed.out.splitlines()


@pytest.mark.parametrize("where", ["backward", *(pytest.param(where, marks=pytest.mark.slow) for where in ("forward", "accumulated"))])
def test_what_it_held_before_its_step_is_saved_and_goes_on_bit_identically(tmp_path: Path, where: str) -> None:
    run = alone(tmp_path, "--fails", where)
    (incident,) = run.incidents
    assert (run.code, incident["kind"], incident["origin"]["rank"]) == (1, "rank.exception", 0), run.err
    checkpoint = incident["action"]["checkpoint"]
    assert (checkpoint["updates_applied"], checkpoint["committed"], checkpoint["saved_by"]) == (5, True, [0]), incident["cause"]
    assert verify(tmp_path / checkpoint["path"])["kind"] == "rescue"
    whole = launch(tmp_path, [PYTHON, *script("alone.py")]).out.splitlines()
    assert run.out.splitlines() == whole[:5]
    assert gone_on(run, "--fails", where) == ["resumed at 5", *whole[5:]]


def test_a_batch_that_is_refused_inside_the_step_is_saved_before_and_left_out_after(tmp_path: Path) -> None:
    """The loop reads the bad value itself, so that nobody may hold the batch before the step."""
    run = alone(tmp_path, "--bad", 21)
    (incident,) = run.incidents
    assert (run.code, incident["kind"], incident["batch"]["sample"]["dataset_index"]) == (65, "batch.index_out_of_range", 21), run.err
    assert incident["action"]["checkpoint"]["committed"], incident["cause"]
    resumed = gone_on(run)
    left_out = str(run.folder / "watchdog_runs" / "j" / "quarantine.jsonl")
    whole = launch(tmp_path, [*watchdog("--job", "whole", "--quarantine", left_out), PYTHON, *script("alone.py", "--bad", 21)])
    assert run.out.splitlines() + resumed[1:] == whole.out.splitlines()


@pytest.mark.slow
def test_lightning_on_one_device_goes_on_from_its_own_form(tmp_path: Path) -> None:
    run = launch(tmp_path, [*watchdog("--job", "j"), PYTHON, *script("alone_lightning.py", "--fails")])
    checkpoint = run.incidents[0]["action"]["checkpoint"]
    assert (run.code, checkpoint["format"], checkpoint["updates_applied"]) == (1, "lightning", 7), run.err
    whole = launch(tmp_path, [PYTHON, *script("alone_lightning.py")]).out.splitlines()
    assert run.out.splitlines() == whole[:7]
    assert gone_on(run, "--fails") == whole[7:]


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("step", "its update was under way, and a half step is never saved"),
        pytest.param("before-scheduler", "it failed between two steps", marks=pytest.mark.slow),
        ("after", "it failed between two steps"),  # what a script does there nobody knows: a teacher's weights, a scaler
        pytest.param("by-hand", "its script itself has changed parameters", marks=pytest.mark.slow),
    ],
)
def test_what_a_half_step_may_have_touched_is_not_saved(tmp_path: Path, where: str, why: str) -> None:
    run = alone(tmp_path, "--fails", where)
    (incident,) = run.incidents
    assert (run.code, incident["action"]["checkpoint"]) == (1, None), run.err
    assert why in incident["cause"]


def test_an_exit_of_its_own_is_not_kept_waiting(tmp_path: Path) -> None:
    run = alone(tmp_path, "--fails", "exit")
    (incident,) = run.incidents
    assert (run.code, incident["action"]["checkpoint"]) == (3, None), run.err
    assert not list((run.run_dir / "checkpoints").glob("*"))
