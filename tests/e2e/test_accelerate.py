"""`accelerate launch` for one process, which sets no RANK, and for two: a bad sample stops both cleanly, and both resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import BIN, launch, script, watchdog
from ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BAD = {1: 40, 2: 38}  # by the number of processes: met once the bounds are known


def accelerate(*arguments: str, processes: int) -> list[str]:
    where = ["--multi_gpu", "--main_process_port", str(free_port())] if processes > 1 else ["--cpu"]  # without a GPU both train on the CPU
    counted = ["--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [str(BIN / "accelerate"), "launch", *where, *counted, *arguments]


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_bad_sample_stops_every_process_that_accelerate_has_started_and_the_checkpoint_resumes(processes: int, tmp_path: Path) -> None:
    ended = launch(tmp_path, [*watchdog("--job", "bad"), *accelerate(*script("train.py", "--bad", BAD[processes]), processes=processes)])
    assert ended.code == 65, ended.err
    (incident,) = ended.incidents
    action = incident["action"]
    assert (incident["kind"], incident["batch"]["sample"]["dataset_index"]) == ("batch.index_out_of_range", BAD[processes])
    assert action["prevented"] and action["ranks_stopped"] == list(range(processes)) and action["checkpoint"]["committed"]
    assert not ended.lines(rf"step {incident['step']} loss") and len(ended.lines(rf"step {incident['step'] - 1} loss")) == processes
    checkpoint = tmp_path / action["checkpoint"]["path"]
    again = launch(tmp_path, [*watchdog("--resume", str(checkpoint)), *accelerate(*script("train.py", "--restore"), processes=processes)])
    assert again.code == 0, again.err
    assert len(again.lines(rf"resumed at {incident['step']} updates")) == processes


def test_on_cpus_each_of_several_machines_is_a_training_of_its_own_and_is_stopped_as_one(tmp_path: Path) -> None:
    """accelerate starts one process there and couples it to no other machine's."""
    meets = ("--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()))
    line = [str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "2", *meets, "--mixed_precision", "no", "--dynamo_backend", "no"]
    ended = launch(tmp_path, [*watchdog("--job", "bad"), *line, *script("train.py", "--bad", BAD[1])])
    (incident,) = ended.incidents
    assert (ended.code, incident["action"]["ranks_stopped"], incident["action"]["checkpoint"]["committed"]) == (65, [0], True), ended.err
