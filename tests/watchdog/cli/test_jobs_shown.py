"""What commands show of jobs, from their run directories on disk, without a daemon."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from typing import Any

from cli_runs import INCIDENT, Runs, add_steps

from torch_watchdog.store.run_directory import RunDirectory, write_json


def test_jobs_are_listed_newest_first(runs: Runs) -> None:
    runs.add_job("old", started="2026-01-30T00:00:00.000Z")
    again = runs.add_job("new").job_file
    write_json(again, json.loads(again.read_text()) | {"end": {"attempt": 1}})
    lines = runs("jobs").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["job", "new", "old"]
    assert [(job["job"], job["attempt"]) for job in json.loads(runs("jobs", "--json").stdout)["jobs"]] == [("new", 1), ("old", 0)]


def test_a_scan_is_listed_as_one_with_the_exit_code_that_it_had(runs: Runs) -> None:
    root = runs.add_job("scan-1").root
    state = {"rank": 0, "world_size": 1, "batches": 9, "samples": 36, "total_batches": 9, "unconfirmed": 0, "driving": True, "seconds": 1.0}
    write_json(root / "scan" / "rank-0.json", state | {"finished": True})
    (job,) = json.loads(runs("jobs", "--json").stdout)["jobs"]
    assert (job["policy"], job["incidents"], job["exit_code"]) == ("scan", 0, 0)
    write_json(root / "scan" / "rank-0.json", state | {"finished": False})
    (job,) = json.loads(runs("jobs", "--json").stdout)["jobs"]
    assert job["exit_code"] not in (0, None)


def test_the_timeline_and_the_report_of_a_scan_say_what_it_found(runs: Runs) -> None:
    root = runs.add_job("scan-1").root
    state = {"rank": 0, "world_size": 1, "batches": 9, "samples": 36, "total_batches": 9, "unconfirmed": 0, "driving": True, "seconds": 1.0}
    write_json(root / "scan" / "rank-0.json", state | {"finished": True})
    said = "scan: 36 samples in 9 batches, 1 rank, 1.0 s, 36 samples/s: no sample would fail"
    assert runs("timeline", "scan-1").stdout.startswith(said)
    assert json.loads(runs("report", "scan-1", "--json").stdout)["story"][0].endswith(f"{said}.")


def test_every_view_of_a_scan_with_a_bad_sample_says_the_same(runs: Runs) -> None:
    root = runs.add_job("scan-1").root
    state = {"rank": 0, "world_size": 1, "batches": 9, "samples": 36, "total_batches": 9, "unconfirmed": 0, "driving": True, "seconds": 1.0}
    write_json(root / "scan" / "rank-0.json", state | {"finished": True})
    bad = {
        "rank": 0,
        "batch": 3,
        "dataset_index": 17,
        "key": "labels",
        "element": [2],
        "value": 9,
        "low": 0,
        "high": 3,
        "op": "cross_entropy",
    }
    (root / "scan" / "rank-0.jsonl").write_text(json.dumps(bad) + "\n")
    (listed,) = json.loads(runs("jobs", "--json").stdout)["jobs"]
    status = json.loads(runs("status", "scan-1", "--json").stdout)
    for seen in (listed, status):
        assert (seen["policy"], seen["incidents"], seen["exit_code"]) == ("scan", 1, 65)
    for command in ("status", "timeline"):
        said = runs(command, "scan-1").stdout
        assert "exit code 65" in said and "1 sample would fail" in said and "nothing found" not in said, said
    assert "labels[2] = 9" in (said := runs("incidents", "scan-1").stdout) and "no incident" not in said
    told = runs("report", "scan-1", "--markdown").stdout
    assert "It ended with exit code 65." in told and "Nothing was found" not in told and "1 sample would fail" in told


def test_no_job_is_no_error(runs: Runs) -> None:
    assert runs("jobs").returncode == 0
    assert json.loads(runs("jobs", "--json").stdout) == {"jobs": []}


def test_the_status_of_an_ended_job_comes_from_disk(runs: Runs, ended_job: RunDirectory) -> None:
    status = json.loads(runs("status", "train-1", "--json").stdout)
    assert (status["state"], status["exit_code"], status["world_size"], status["incidents"]) == ("ended", 65, 2, 1)
    assert [(rank["rank"], rank["last_step"], rank["loss"], rank["alive"]) for rank in status["ranks"]] == [
        (0, 3, 1.0, False),
        (1, 3, 1.0, False),
    ]
    assert "ended, exit code 65" in runs("status", "train-1").stdout


def test_a_job_whose_launch_was_killed_is_not_called_running(runs: Runs) -> None:
    file = runs.add_job("killed", exit_code=None).job_file
    write_json(file, json.loads(file.read_text()) | {"host": socket.gethostname()})
    for command in ("status", "timeline"):
        assert "ended without a word: the launch was killed" in runs(command, "killed").stdout
    assert "  ended without a word  " in runs("jobs").stdout
    runs("report", "killed")
    assert "the launch was killed" in (runs.folder / "watchdog_runs" / "killed" / "report.html").read_text()


def test_a_job_whose_launch_alone_was_killed_is_not_called_ended(runs: Runs) -> None:
    directory = runs.add_job("alone", exit_code=None)
    add_steps(directory)
    write_json(
        directory.job_file, json.loads(directory.job_file.read_text()) | {"host": socket.gethostname(), "session": "00c0ffee00c0ffed"}
    )
    lives, variables = "print('up', flush=True); input()", {"TORCH_WATCHDOG_AGENT": '{"session":"00c0ffee00c0ffed"}'}
    with subprocess.Popen([sys.executable, "-c", lives], env=os.environ | variables, stdin=-1, stdout=-1, text=True) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == "up\n"
        told = f"goes on unwatched: the launch was killed, 1 process of it lives on (pid {rank.pid})"
        for command in ("status", "timeline"):
            assert told in runs(command, "alone").stdout
        assert f"{told}; `kill {rank.pid}` ends it\n" in runs("status", "alone").stdout
        for command in (("stop",), ("stop", "--cancel"), ("checkpoint",)):
            asked = runs(*command, "alone")
            assert asked.returncode == 1 and f"did not take the order: it {told}; `kill {rank.pid}` ends it" in asked.stderr
        listed = runs("jobs")
        assert "  running, unwatched  " in listed.stdout and told in listed.stderr
        assert f"It {told}." in runs("report", "alone", "--markdown").stdout
        rank.communicate("\n")


def test_ranks_that_live_though_their_launch_was_killed_before_their_first_report_are_shown(runs: Runs) -> None:
    file = runs.add_job("early", exit_code=None).job_file
    write_json(file, json.loads(file.read_text()) | {"host": socket.gethostname(), "session": "00c0ffee00c0ffeb"})
    makes_its_ring = """import mmap, os, sys
os.makedirs(folder := sys.argv[1])
with open(f"{folder}/0-1-{os.getpid()}.ring", "w+b") as file:
    file.truncate(mmap.PAGESIZE)
    ring = mmap.mmap(file.fileno(), 0)
print("up", flush=True)
input()"""
    folder, variables = runs.folder / "00c0ffee00c0ffeb", {"TORCH_WATCHDOG_AGENT": '{"session":"00c0ffee00c0ffeb"}'}
    command = [sys.executable, "-c", makes_its_ring, str(folder)]
    with subprocess.Popen(command, env=os.environ | variables, stdin=-1, stdout=-1, text=True) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == "up\n"
        shown = runs("status", "early").stdout
        assert re.search(r"\n1 +\S+ +train +yes\n", shown) and "no rank has reported" not in shown
        failed = {"time": "2026-01-31T00:00:00+00:00", "order": 1, "attempt": 0, "kind": "rank.failed", "rank": 1, "step": 0, "text": "no"}
        RunDirectory(file.parent).events_file.write_text(json.dumps(failed) + "\n")
        shown = runs("status", "early").stdout  # it is still on its way out
        assert re.search(r"\n1 +\S+ +end +yes\n", shown) and "is ending unwatched: the launch was killed after rank 1 had failed" in shown
        rank.communicate("\n")
    assert "no rank has reported\n" in runs("status", "early").stdout


def test_without_a_name_the_newest_job_is_meant(runs: Runs, ended_job: RunDirectory) -> None:
    assert runs("incidents", "--json").stdout == runs("incidents", "train-1", "--json").stdout


def test_a_run_directory_may_be_named_by_its_path(runs: Runs, ended_job: RunDirectory) -> None:
    assert json.loads(runs("status", str(ended_job.root), "--json").stdout)["job"] == "train-1"


def test_incidents_are_shown_without_control_characters_of_the_data(runs: Runs, ended_job: RunDirectory) -> None:
    shown = runs("incidents", "train-1").stdout
    assert "batch.index_out_of_range" in shown and "\x1b" not in shown
    assert json.loads(runs("incidents", "train-1", "--json").stdout)["incidents"] == [INCIDENT]


def test_a_step_of_a_later_attempt_is_told_as_one(runs: Runs, ended_job: RunDirectory) -> None:
    path = ended_job.root / "incidents" / "1" / "incident.json"
    step = json.loads(path.read_text())["step"]
    assert f"  {step} of attempt " not in runs("incidents", "train-1").stdout
    write_json(path, json.loads(path.read_text()) | {"attempt": 1})
    assert f"  {step} of attempt 1  " in runs("incidents", "train-1").stdout


def test_a_timeline_shows_a_strip_per_rank_and_pipes_cleanly(runs: Runs, ended_job: RunDirectory) -> None:
    lines = runs("timeline", "train-1").stdout.splitlines()
    assert lines[2].startswith("rank 0  |...v ") and lines[3].startswith("rank 1  |...X ")
    assert max(map(len, lines[:5])) <= 80 and not any("\x1b" in line or line != line.rstrip() for line in lines)
    assert [track["rank"] for track in json.loads(runs("timeline", "train-1", "--json").stdout)["ranks"]] == [0, 1]


def test_a_timeline_of_one_rank_shows_only_that_rank(runs: Runs, ended_job: RunDirectory) -> None:
    assert [track["rank"] for track in json.loads(runs("timeline", "train-1", "--rank", "1", "--json").stdout)["ranks"]] == [1]


LEARNED: dict[str, Any] = {
    "traces": 2,
    "guarded": [
        {
            "key": "input_ids", "expression": "input_ids", "op": "embedding", "module": "wte", "kind": "range", "acts_alone": True,
            "bound": {"low": 0, "high": 63, "ignored": []}, "source": "/elsewhere/train.py:7", "learned_from": "batch 1",
        },
        {
            "key": "input_ids", "expression": "cumsum(input_ids != 1) + 1", "op": "embedding", "module": "positions", "kind": "range",
            "acts_alone": False, "bound": {"low": 0, "high": 33, "ignored": []}, "source": "x.py:1", "learned_from": "batch 1",
        },
        {"key": "labels", "op": "cross_entropy", "kind": "some", "bound": {"low": None, "high": None, "ignored": [-100]}},
        {"key": None, "op": "batch_norm", "kind": "spread", "bound": {"low": 2, "high": None, "ignored": []}},
    ],
    "opaque": [{"key": None, "op": "gather", "module": "router", "source": "x.py:9", "why": "made by the model"}],
}  # fmt: skip


def test_a_contract_is_shown_as_the_rank_wrote_it(runs: Runs, ended_job: RunDirectory) -> None:
    write_json(ended_job.contract_file(0), LEARNED)
    assert json.loads(runs("contract", "train-1", "--json").stdout) == LEARNED
    shown = runs("contract", "train-1").stdout
    assert re.search(r"input_ids +0\.\.63 +embedding in wte +/elsewhere/train.py:7 +batch 1 +held\n", shown)
    assert re.search(r"input_ids +cumsum\(input_ids != 1\) \+ 1 +0\.\.33 +embedding in positions .* confirmed\n", shown)
    assert re.search(r"labels +not -100 everywhere", shown)
    assert re.search(r"more than one value per channel", shown)
    assert re.search(r"gather in router +x.py:9 +made by the model", shown)
    assert all(re.search(rf"^{column}  ", shown, re.MULTILINE) for column in ("tensor     ", "learned from", "a bad batch "))


def test_a_line_of_an_installed_library_is_shown_without_its_folder_of_packages(runs: Runs, ended_job: RunDirectory) -> None:
    row = LEARNED["guarded"][0] | {"source": "/opt/env/lib/python3.11/site-packages/transformers/models/bert/modeling_bert.py:100"}
    write_json(ended_job.contract_file(0), LEARNED | {"guarded": [row]})
    shown = runs("contract", "train-1").stdout
    assert "  transformers/models/bert/modeling_bert.py:100  " in shown and "site-packages" not in shown


def test_the_newest_jobs_contract_is_shown_where_none_is_named(runs: Runs, ended_job: RunDirectory) -> None:
    write_json(ended_job.contract_file(0), LEARNED)
    assert "rank 0 of job train-1" in runs("contract").stdout


def test_a_rank_that_never_came_to_learn_anything_says_so(runs: Runs, ended_job: RunDirectory) -> None:
    write_json(ended_job.contract_file(0), {"traces": 0, "guarded": [], "opaque": []})
    assert runs("contract", "train-1").stdout == "job train-1 ended before anything was learned\n"


def test_a_job_is_found_by_the_number_of_its_slurm_job(runs: Runs, ended_job: RunDirectory) -> None:
    record = json.loads(ended_job.job_file.read_text())
    write_json(ended_job.job_file, record | {"scheduler": {"slurm_job_id": "4711"}})
    assert json.loads(runs("status", "4711", "--json").stdout)["job"] == "train-1"
    assert "there is no job '4712'" in runs("status", "4712").stderr


def test_a_timeline_is_written_for_other_tools_as_private_files(runs: Runs, ended_job: RunDirectory) -> None:
    done = runs("timeline", "train-1", "--perfetto", "t.json", "--html", "t.html", "--parquet", "t.parquet")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3
    assert {event["ph"] for event in json.loads((runs.folder / "t.json").read_text())["traceEvents"]} >= {"M", "X", "C", "i"}
    assert [(runs.folder / name).stat().st_mode & 0o777 for name in ("t.json", "t.html", "t.parquet")] == [0o600] * 3


def test_a_file_that_cannot_be_written_is_one_sentence(runs: Runs, ended_job: RunDirectory) -> None:
    done = runs("timeline", "train-1", "--html", "nowhere/t.html")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "nowhere/t.html: it cannot be written" in done.stderr


def test_a_report_lies_among_the_jobs_files_and_can_be_markdown_or_json(runs: Runs, ended_job: RunDirectory) -> None:
    assert runs("report", "train-1").returncode == 0
    assert "input_ids[2,7] is 70" in (ended_job.root / "report.html").read_text()
    assert runs("report", "train-1", "--markdown").stdout.startswith("## Job `train-1`")
    assert json.loads(runs("report", "train-1", "--json").stdout)["incident"]["id"] == "1"


def test_two_jobs_are_compared_and_an_attempt_that_is_not_there_is_named(runs: Runs, ended_job: RunDirectory) -> None:
    assert "the losses are the same in all 3 common steps" in runs("timeline", "train-1", "train-1@0").stdout
    assert "no steps of an attempt 7: 0 reported" in runs("timeline", "train-1", "train-1@7").stderr


def test_watching_without_a_terminal_says_what_to_use_instead(runs: Runs, ended_job: RunDirectory) -> None:
    done = runs("status", "train-1", "--watch")
    assert done.returncode == 2 and "--watch needs a terminal" in done.stderr


def test_a_resumed_job_names_the_one_that_it_goes_on_from(runs: Runs) -> None:
    runs.add_job("first", started="2026-01-30T00:00:00.000Z")
    file = runs.add_job("second").job_file
    write_json(file, json.loads(file.read_text()) | {"resume": str(runs.folder / "watchdog_runs/first/checkpoints/step-5")})
    newest, oldest = runs("jobs").stdout.splitlines()[1:]
    assert newest.endswith("first at step 5") and "at step" not in oldest
    assert "from first at step 5" in runs("status", "second").stdout
    assert [job["resumed_from"] for job in json.loads(runs("jobs", "--json").stdout)["jobs"]] == ["first at step 5", ""]


def test_the_list_of_all_incidents_does_not_end_by_naming_itself(runs: Runs, ended_job: RunDirectory) -> None:
    write_json(ended_job.job_file, json.loads(ended_job.job_file.read_text()) | {"end": {"stopped_by_us": True}, "ranks_reported": 2})
    write_json(ended_job.incident("2") / "incident.json", INCIDENT | {"id": "2", "step": 4})
    more = "watchdog timeline watchdog_runs/train-1"
    assert runs("status", "train-1").stdout.endswith(f"  more   {more}; 1 incident more: watchdog incidents watchdog_runs/train-1\n")
    assert runs("incidents", "train-1").stdout.endswith(f"  more   {more}\n")
