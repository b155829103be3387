"""Files of a run directory that are JSON and yet not what a launch writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torch_watchdog.errors import RunDirectoryError
from torch_watchdog.store.read import read_contract, read_incidents, read_job
from torch_watchdog.store.run_directory import RunDirectory
from torch_watchdog.store.shapes import JOB, fits, incident_schema, object_of

NEWER = {"schema_version": 1, "job": "a", "command": ["train"], "something new": [1, {"a": None}], "end": {"steps": 3, "newer": True}}


def job_file(folder: Path, job: Any) -> Path:
    RunDirectory(folder).job_file.write_text(json.dumps(job))
    return folder


@pytest.mark.parametrize(
    "job",
    [
        {"command": None, "options": None, "end": None},
        NEWER,
        {},
    ],
)
def test_what_is_missing_null_or_new_is_read(tmp_path: Path, job: Any) -> None:
    assert read_job(job_file(tmp_path, job)) == job


@pytest.mark.parametrize(
    "job",
    [
        [],
        None,
        {"command": "train"},
        {"command": ["train", 1]},
        {"started": 5},
        {"world_size": True},
        {"exit_code": 1.5},
        {"versions": []},
        {"end": {"steps": "3"}},
        {"exit_code": float("nan")},
    ],
)
def test_a_job_of_other_types_is_refused_in_one_sentence(tmp_path: Path, job: Any) -> None:
    with pytest.raises(RunDirectoryError, match="this is not the JSON object that a launch writes"):
        read_job(job_file(tmp_path, job))


def test_a_run_directory_of_a_newer_form_is_refused_by_its_version(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="a newer torch-watchdog wrote this \\(version 2 of its form\\)"):
        read_job(job_file(tmp_path, {"schema_version": 2, "job": "a"}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"summary": None},
        {"origin": []},
        {"action": {"checkpoint": True}},
        {"batch": {"element": "2,7"}},
        {"ranks_affected": ["1"]},
        {"evidence": {"bundle": 5}},
    ],
)
def test_an_incident_of_other_types_is_left_out_and_the_others_are_read(tmp_path: Path, wrong: dict[str, Any]) -> None:
    good = {"id": "2", "kind": "of a newer version", "summary": "s", "origin": {"rank": 1}}
    for number, incident in ((1, good | wrong), (2, good)):
        folder = RunDirectory(tmp_path).incidents / str(number)
        folder.mkdir(parents=True)
        (folder / "incident.json").write_text(json.dumps(incident))
    assert read_incidents(tmp_path) == (good,)


@pytest.mark.parametrize("text", ["[]", "null", "{", "[" * 100_000, '{"guarded": [1]}', '{"guarded": [{"bound": 5}]}', '{"opaque": "x"}'])
def test_a_contract_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rank-0.json"
    path.write_text(text)
    with pytest.raises(RunDirectoryError, match="this is not the JSON object that a rank writes"):
        read_contract(path)


def test_numbers_and_truth_values_are_told_apart_and_nan_is_no_json() -> None:
    assert fits({"world_size": 2}, JOB) and not fits({"world_size": False}, JOB)
    assert object_of('{"step": NaN}', incident_schema()) is None
