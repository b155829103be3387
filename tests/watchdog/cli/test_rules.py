"""`watchdog rules`, as a person meets it: over a run directory on disk, with thresholds of a file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import torch_watchdog_proto
from torch_watchdog.cli.rules import command
from torch_watchdog.errors import ConfigError
from torch_watchdog.store.job_files import JobFiles
from torch_watchdog_proto.messages import NodeReport, RankEvent, StepBlock, StepTable

SCHEMA = Path(torch_watchdog_proto.__path__[0]) / "incident.schema.json"
KINDS = json.loads(SCHEMA.read_text())["properties"]["kind"]["enum"]
SPIKE = """
run = "runs/job"
[[expect]]
kind = "loss.spike"
rank = 1
"""


def block(rank: int, step: int) -> StepBlock:
    loss = 20.0 if rank == 1 and step >= 60 else 1.0
    return StepBlock(
        rank=rank, attempt=0, pid=100 + rank, first_record=1, micro_step=(0,), micro_of_step=(step,), micro_time_ns=(1,), loader_ns=(1,), loss=(loss,),
        loss_known=(True,), evaluation=(False,), step=(step,), step_time_ns=(1,), step_ns=(10_000_000,),
    )  # fmt: skip


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The folder of a run of two ranks, one step a second, in which rank 1's loss leaves its range at step 60."""
    files = JobFiles(tmp_path / "runs" / "job")
    for step in range(70):
        report = NodeReport(seq=step + 1, time_ns=(1000 + step) * 10**9, steps=StepTable.of((block(0, step), block(1, step))))
        files.append_report("node", "session", report)
    files.close()
    (tmp_path / "runs" / "job" / "job.json").write_text("{}")
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(command, words, standalone_mode=False)


def judge_file(folder: Path, text: str) -> Result:
    (folder / "test.toml").write_text(text)
    return run("test", str(folder / "test.toml"))


def test_a_recorded_run_that_gives_what_is_expected_is_fine(recorded: Path) -> None:
    result = judge_file(recorded, SPIKE)
    assert (result.return_value, result.output) == (0, "ok: 1 finding, as expected\n")


def test_what_is_missing_and_what_is_a_surprise_is_said_and_fails(recorded: Path) -> None:
    result = judge_file(recorded, SPIKE.replace("rank = 1", "rank = 0"))
    assert result.return_value == 1
    assert result.output.splitlines()[0] == "missing  loss.spike of rank 0"
    assert result.output.splitlines()[1].startswith("surprise loss.spike: rank 1, step 65")


def test_how_the_ranks_of_a_recorded_run_ended_is_no_finding_of_its_rules(recorded: Path) -> None:
    """They were stopped before a bad batch, by an exception of ours: that had come out as a failure of a rank, which never was."""
    files = JobFiles(recorded / "runs" / "job")
    raised = tuple(
        RankEvent(rank=rank, attempt=0, pid=100 + rank, kind="exited", time_ns=1071 * 10**9, order=1 + rank, exit_code=1, text="step 70: held: ids[1, 2] = 71")
        for rank in range(2)
    )  # fmt: skip
    files.append_report("node", "session", NodeReport(seq=71, time_ns=1071 * 10**9, events=raised))
    files.append_report("node", "session", NodeReport(seq=72, time_ns=1080 * 10**9))
    files.close()
    assert judge_file(recorded, SPIKE).output == "ok: 1 finding, as expected\n"


def test_thresholds_can_be_tried_on_a_recorded_run(recorded: Path) -> None:
    result = judge_file(recorded, 'run = "runs/job"\n[rules.loss_spike]\nrise = 50.0\n')
    assert (result.return_value, result.output) == (0, "ok: silent, as expected\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must name a run directory"),
        ('run = "nowhere"', "is no run directory"),
        ('run = "runs/job"\n[rules.nix]\n', "names no rule"),
        ('run = "runs/job"\n[[expect]]\nrank = 1\n', "must hold a kind"),
        ('run = "runs/job"\n[[expect]]\nkind = "loss.spike"\nrnk = 1\n', "must hold a kind"),
        ('run = "runs/job"\n[[expect]]\nkind = "loss.spike"\nrank = "1"\n', "such as rank = 3"),
        ('run = "runs/job"\n[[expected]]\nkind = "loss.spike"\n', "has no place for expected: known are run, [rules.NAME] and [[expect]]"),
        ('run = "runs/job"\n[[expect]]\nkind = "rank.died"\n', "rank.died is not judged again: [[expect]] may name batch.empty, "),
        ('run = "runs/job"\n[rules.loss_spike]\nsteps = 40\n', "loss_spike steps must be from 1 to 32, not 40"),
        ("run = ", "Invalid"),
    ],
)
def test_a_wrong_file_is_refused_with_what_was_expected(recorded: Path, text: str, words: str) -> None:
    result = judge_file(recorded, text)
    assert isinstance(result.exception, ConfigError)
    assert words.lower() in str(result.exception).lower()


def test_rules_that_fail_have_not_found_the_run_to_be_silent(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_watchdog.rules.engine.Engine.judge", lambda *_, **__: 1 / 0)
    result = judge_file(recorded, 'run = "runs/job"\n')
    assert result.return_value == 1
    assert "the rules have ended by a mistake of ours (ZeroDivisionError: division by zero)" in result.output
    assert "ok" not in result.output


def test_the_list_and_a_rule_show_the_thresholds_that_are_set(recorded: Path) -> None:
    config = recorded / "watchdog.toml"
    config.write_text("[rules.straggler]\nratio = 3.0\nenabled = false\n")
    shown = run("show", "straggler", "--config", str(config), "--json")
    assert json.loads(shown.output)["settings"]["ratio"] == 3.0
    listed = run("list", "--config", str(config))
    (line,) = [line for line in listed.output.splitlines() if line.startswith("straggler")]
    assert "off" in line


def test_of_what_is_always_watched_the_numbers_that_one_may_set_are_shown_as_they_are_set(recorded: Path) -> None:
    config = recorded / "watchdog.toml"
    config.write_text("[rules.hang]\nshortest_s = 60\n[rules.loss_not_finite]\nin_a_row = 8\n[rules.size_outlier]\ntimes = 4\n")
    shown = run("show", "rank.hang", "--config", str(config)).output
    assert "[rules.hang]" in shown
    assert "shortest_s = 60" in " ".join(shown.split())
    assert "of_timeout = 0.8" in " ".join(shown.split())
    always = {one["name"]: one.get("settings") for one in json.loads(run("list", "--config", str(config), "--json").output)["always"]}
    assert (always["loss_not_finite"], always["size_outlier"], always["rank_failed"]) == ({"in_a_row": 8}, {"times": 4}, None)


@pytest.mark.parametrize(
    "setting", ["hang]\nshortest_s = 1", "hang]\nenabled = false", "loss_not_finite]\nin_a_row = 0", "size_outlier]\ntimes = 1"]
)
def test_a_number_that_would_stop_healthy_jobs_is_refused(recorded: Path, setting: str) -> None:
    assert isinstance(judge_file(recorded, f"{SPIKE}\n[rules.{setting}\n").exception, ConfigError)


def test_a_scaler_that_may_look_for_longer_is_judged_by_what_is_set(tmp_path: Path) -> None:
    """Six losses in a row that are infinite, under a GradScaler."""
    files = JobFiles(tmp_path / "runs" / "job")
    for step in range(20):
        loss = float("inf") if 8 <= step < 14 else 1.0
        blocks = tuple(dataclasses.replace(block(rank, step), loss=(loss,), scale=(1024.0,)) for rank in range(2))
        files.append_report("node", "session", NodeReport(seq=step + 1, time_ns=(1000 + step) * 10**9, steps=StepTable.of(blocks)))
    files.close()
    (tmp_path / "runs" / "job" / "job.json").write_text("{}")
    expected = SPIKE.replace("loss.spike", "loss.not_finite").replace("rank = 1", "")
    assert judge_file(tmp_path, expected).output == "ok: 1 finding, as expected\n"
    assert judge_file(tmp_path, 'run = "runs/job"\n[rules.loss_not_finite]\nin_a_row = 8\n').output == "ok: silent, as expected\n"


def test_a_rule_that_is_not_there_is_said(recorded: Path) -> None:
    assert "there is no rule 'nix'" in str(run("show", "nix").exception)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("order.")])
def test_every_kind_of_incident_shows_all_that_gives_it(kind: str) -> None:
    """`rules show memory.pressure` had said that there is no such rule, and `rules show batch.empty` nothing of the rule that warns before."""
    listed = json.loads(run("list", "--json").output)
    names = [one["name"] for one in (*listed["rules"], *listed["always"]) if one["kind"] == kind]
    shown = json.loads(run("show", kind, "--json").output)
    assert [one["name"] for one in (*shown["rules"], *shown["always"])] == names != []
    text = run("show", kind).output.splitlines()
    assert [line.split()[-1] for line in text if line.startswith("name")] == names


def test_every_kind_of_incident_is_one_of_a_rule_or_of_an_order() -> None:
    listed = json.loads(run("list", "--json").output)
    told = {one["kind"] for one in listed["rules"]} | {one["kind"] for one in listed["always"]}
    assert {kind for kind in KINDS if not kind.startswith("order.")} == told


@pytest.mark.parametrize("name", ["loss_not_finite", "rank.hang", "rank_failed"])
def test_what_has_no_threshold_is_shown_with_what_follows(name: str) -> None:
    result = run("show", name)
    assert "watches" in result.output and "action" in result.output


def test_a_run_whose_loss_is_nan_is_judged_again_as_such(tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "runs" / "job")
    for step in range(6):
        blocks = tuple(block(rank, step) for rank in range(2))
        blocks = (blocks[0], dataclasses.replace(blocks[1], loss=(float("nan"),))) if step == 4 else blocks
        files.append_report("node", "session", NodeReport(seq=step + 1, time_ns=(1000 + step) * 10**9, steps=StepTable.of(blocks)))
    files.close()
    (tmp_path / "runs" / "job" / "job.json").write_text("{}")
    expected = SPIKE.replace("loss.spike", "loss.not_finite")
    assert judge_file(tmp_path, expected).output == "ok: 1 finding, as expected\n"
