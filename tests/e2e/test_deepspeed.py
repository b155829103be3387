"""DeepSpeed's engine on two ranks (CPU, gloo): stopped as one, saved as it saves itself, resumed bit-identically."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Ended, launch, script, torchrun, watchdog

from torch_watchdog_agent.checkpoint.manifest import verify

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

BAD, STEP = 27, 3  # meets rank 1 in its fourth step, of six
CPU = {"DS_ACCELERATOR": "cpu"}


def losses(*runs: Ended) -> set[str]:
    return {line for run in runs for line in run.lines(r"step \d+ loss")}


def digests(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted((folder / "digests").iterdir())]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stopped_engine_is_saved_in_its_own_form_and_resumes_bit_identically(stage: int, tmp_path: Path) -> None:
    of_stage = ("train_deepspeed.py", "--stage", stage, "--out", "digests")
    for name in ("reference", "loaded"):
        (tmp_path / name).mkdir()
    stopped = launch(tmp_path, [*watchdog("--job", "bad"), *torchrun(*script(*of_stage, "--bad", BAD))], **CPU)
    assert stopped.code == 65, stopped.err
    (incident,) = stopped.incidents
    saved = incident["action"]["checkpoint"]
    assert (incident["step"], saved["updates_applied"], saved["format"]) == (STEP, STEP, "deepspeed"), stopped.err
    checkpoint = tmp_path / str(saved["path"])
    names = {file["name"] for file in verify(checkpoint)["files"]}
    assert {"latest", "rank-0.json", "rank-1.json", f"global_step{STEP}/mp_rank_00_model_states.pt"} <= names
    reference = launch(tmp_path / "reference", torchrun(*script(*of_stage, "--never", STEP)), **CPU)
    loaded = launch(tmp_path / "loaded", torchrun(*script(*of_stage, "--load", checkpoint)), **CPU)
    assert (reference.code, loaded.code) == (0, 0), loaded.err
    assert loaded.lines("DeepSpeed says") == [f"rank {rank} resumed, DeepSpeed says {STEP}" for rank in (0, 1)]
    assert losses(stopped, loaded) == losses(reference) and losses(stopped).isdisjoint(losses(loaded))
    assert digests(tmp_path / "loaded") == digests(tmp_path / "reference")
    (checkpoint / "quarantine.jsonl").unlink()  # the data has been mended
    restored = launch(tmp_path, [*watchdog("--job", "on", "--resume", str(checkpoint)), *torchrun(*script(*of_stage, "--restore"))], **CPU)
    assert restored.code == 0, restored.err
    assert digests(tmp_path) == digests(tmp_path / "reference")


def test_under_stage_3_all_stop_and_nothing_is_called_a_checkpoint(tmp_path: Path) -> None:
    stopped = launch(tmp_path, [*watchdog("--job", "bad"), *torchrun(*script("train_deepspeed.py", "--stage", 3, "--bad", BAD))], **CPU)
    assert stopped.code == 65, stopped.err
    (incident,) = stopped.incidents
    assert incident["step"] == STEP and not (incident["action"]["checkpoint"] or {}).get("committed"), stopped.err
    assert "stage 3" in stopped.err
