"""The main promise on real launches: one bad sample, every rank stops before the same step, and the checkpoint resumes bit-identically."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from launching import BIN, Ended, launch, script, torchrun, watchdog
from safetensors.numpy import load_file

pytestmark = pytest.mark.e2e

BAD = 38  # meets rank 1 at step 4
SCHEMA = Path(__file__).resolve().parents[2] / "proto" / "torch_watchdog_proto" / "incident.schema.json"


def stopped_step(ended: Ended) -> int:
    (incident,) = ended.incidents
    return int(incident["step"])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "trail").mkdir()
    return launch(folder, [*watchdog("--job", "bad"), *torchrun(*script("train.py", "--bad", BAD, "--trail", "trail"))])


def test_the_job_ends_with_65_and_one_incident_by_the_schema(stopped: Ended) -> None:
    assert stopped.code == 65, stopped.err
    (incident,) = stopped.incidents
    jsonschema.validate(incident, json.loads(SCHEMA.read_text()))


def test_the_incident_names_rank_step_sample_element_value_range_op_and_module(stopped: Ended) -> None:
    (incident,) = stopped.incidents
    batch, bound, action = incident["batch"], incident["bound"], incident["action"]
    assert incident["kind"] == "batch.index_out_of_range"
    assert incident["origin"]["rank"] in (0, 1)
    assert (batch["key"], batch["value"], batch["count"], batch["element"][1]) == ("ids", 51, 1, 4)
    assert batch["sample"]["dataset_index"] == BAD
    assert (bound["low"], bound["high"]) == (0, 39)
    assert "embedding" in bound["op"]
    assert bound["module"] == "table"
    assert "train.py" in bound["source"]
    assert action["prevented"] is True
    assert action["policy"] == "stop"
    assert action["exit_code"] == 65
    assert sorted(action["ranks_stopped"]) == [0, 1]
    assert action["stopped_at_step"] == incident["step"]
    assert action["checkpoint"]["committed"] is True


def test_the_bad_batch_is_kept_and_the_report_shows_it_around_the_bad_value(stopped: Ended) -> None:
    (incident,) = stopped.incidents
    bundle = stopped.run_dir / incident["evidence"]["bundle"]
    assert bundle.stat().st_mode & 0o777 == 0o600
    row, column = incident["batch"]["element"]
    assert load_file(bundle)["ids"][row, column] == 51
    (left_out,) = map(json.loads, (stopped.run_dir / "quarantine.jsonl").read_text().splitlines())
    assert stopped.run_dir / left_out["bundle"] == bundle
    report = launch(stopped.folder, [*watchdog("report"), "bad", "--markdown"])
    around = " ".join(
        f"[{int(value)}]" if place == column else str(int(value)) for place, value in enumerate(load_file(bundle)["ids"][row])
    )
    assert around in report.out, report.out


def test_no_rank_runs_the_step_or_anything_after_the_loop_but_finally_does(stopped: Ended) -> None:
    step = stopped_step(stopped)
    assert not stopped.lines(rf"step {step} loss")
    assert len(stopped.lines(rf"step {step - 1} loss")) == 2
    trail = {path.name for path in (stopped.folder / "trail").iterdir()}
    assert trail == {"finally-0", "finally-1"}


def test_the_summary_says_what_happened_and_how_to_resume_in_ten_lines(stopped: Ended) -> None:
    lines = [line for line in (stopped.err + stopped.out).splitlines() if line.startswith("[torch-watchdog]")]
    text = "\n".join(lines)
    assert "ids[" in text
    assert str(BAD) in text
    assert "--resume" in text
    assert "call   torch_watchdog_agent.restore(" in text  # this script, run so, calls none
    assert len(lines) <= 11  # the job's first line and ten at the end


def test_resuming_equals_an_uninterrupted_run_in_which_the_step_never_happened(stopped: Ended, tmp_path: Path) -> None:
    checkpoint = Path(stopped.incidents[0]["action"]["checkpoint"]["path"])
    (checkpoint / "quarantine.jsonl").unlink()  # the data has been mended: the sample may come back in the second epoch
    resumed = launch(
        tmp_path,
        [*watchdog("--resume", str(checkpoint)), *torchrun(*script("train.py", "--restore", "--out", "resumed"))],
    )
    reference = launch(tmp_path, torchrun(*script("train.py", "--never", stopped_step(stopped), "--out", "reference")))
    assert resumed.code == 0, resumed.err
    assert reference.code == 0
    assert len(resumed.lines("resumed at")) == 2
    later = reference.lines(r"step \d+ loss")
    assert set(resumed.lines(r"step \d+ loss")) <= set(later)
    assert set(stopped.lines(r"step \d+ loss")) | set(resumed.lines(r"step \d+ loss")) == set(later)
    for rank in (0, 1):
        assert (tmp_path / "resumed" / f"digest-{rank}").read_text() == (tmp_path / "reference" / f"digest-{rank}").read_text()


def test_without_a_gate_a_bad_batch_is_refused_and_never_replaced(tmp_path: Path) -> None:
    """And ends by the code that this site's scheduler knows for it."""
    (tmp_path / "watchdog.toml").write_text("[exit_codes]\nbad_data = 165\n")
    run = launch(tmp_path, [*watchdog(), str(BIN / "python"), *script("by_hand.py")])
    assert run.code == 165, run.err
    assert run.lines("done") == [f"step {step} done" for step in range(6)]
    (incident,) = run.incidents
    assert (incident["batch"]["value"], incident["batch"]["sample"]["dataset_index"]) == (77, 25)
    assert "BadBatchError" in run.err
    left_out = str(run.run_dir / "quarantine.jsonl")
    again = launch(tmp_path, [*watchdog("--job", "again", "--quarantine", left_out), str(BIN / "python"), *script("by_hand.py")])
    assert again.code == 0, again.err
    assert len(again.lines("done")) == 10
    assert "samples left out from the start: 1" in again.err
