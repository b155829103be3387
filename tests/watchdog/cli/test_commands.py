"""The commands as a person meets them: real processes over a run directory on disk, without a daemon."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from terminal import Screen

from torch_watchdog.cli.main import COMMANDS, watchdog
from torch_watchdog.cli.options import given_words, launch_options
from torch_watchdog.store.database import Database
from torch_watchdog.store.job_files import JobFiles
from torch_watchdog.store.run_directory import RunDirectory, write_json
from torch_watchdog_proto.messages import NodeReport, StepBlock

TIMEOUT_S = 60
INCIDENT: dict[str, Any] = {
    "id": "1",
    "severity": "critical",
    "kind": "batch.index_out_of_range",
    "time": "2026-01-31T00:00:05Z",
    "attempt": 0,
    "origin": {"rank": 1},
    "step": 3,
    "summary": "rank 1 fetched a batch whose input_ids[2,7] is 70\x1b[31m",
}


@dataclass(frozen=True)
class Runs:
    """A folder of run directories, and `watchdog` in it."""

    folder: Path

    def __call__(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_WATCHDOG")} | variables
        return subprocess.run(
            [sys.executable, "-m", "torch_watchdog.cli", *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def add_job(self, name: str, *, started: str = "2026-01-31T00:00:00.000Z", exit_code: int | None = 65) -> RunDirectory:
        root = self.folder / "watchdog_runs" / name
        record = {
            "schema_version": 1,
            "job": name,
            "policy": "stop",
            "daemon": "unix:/nowhere/0/daemon.sock",
            "session": "0",
            "host": "node-a",
            "started": started,
            "ended": None if exit_code is None else "2026-01-31T00:00:12.000Z",
            "exit_code": exit_code,
            "exit_reason": "stopped by the watchdog",
            "world_size": 2,
        }
        write_json(RunDirectory(root).job_file, record)
        return RunDirectory(root)


def add_steps(directory: RunDirectory) -> None:
    files = JobFiles(directory.root)
    for rank in (0, 1):
        block = StepBlock(
            rank=rank,
            attempt=0,
            pid=1,
            first_record=1,
            micro_step=(0,) * 4,
            micro_of_step=(0, 1, 2, 3),
            micro_time_ns=(1, 2, 3, 4),
            loader_ns=(0,) * 4,
            loss=(2.0, 1.5, 1.25, 1.0),
            loss_known=(True,) * 4,
            evaluation=(False,) * 4,
            step=(0, 1, 2, 3),
            step_time_ns=(10**9, 2 * 10**9, 3 * 10**9, 4 * 10**9),
            step_ns=(10**7,) * 4,
            vetoed=(False, False, False, True),
            allocated_bytes=(0,) * 4,
            reserved_bytes=(0,) * 4,
            peak_bytes=(0,) * 4,
            updates_applied=(1, 2, 3, 3),
        )
        files.append_report("node-a", "0", NodeReport(seq=rank + 1, time_ns=5, blocks=(block,)))
    files.write_incident(INCIDENT, None)
    files.close()


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture
def ended_job(runs: Runs) -> RunDirectory:
    directory = runs.add_job("train-1")
    add_steps(directory)
    return directory


def test_the_version_is_told(runs: Runs) -> None:
    assert runs("--version").stdout.startswith("torch-watchdog, version ")


def test_help_lists_every_command(runs: Runs) -> None:
    text = runs("--help").stdout
    for name in ("run", "jobs", "status", "incidents", "timeline", "contract", "stop", "checkpoint", "serve", "doctor", "demo"):
        assert f"\n  {name} " in text


@pytest.mark.parametrize(("word", "suggestion"), [("statsu", "watchdog status"), ("job", "watchdog jobs")])
def test_a_near_miss_of_a_command_gets_a_suggestion(runs: Runs, word: str, suggestion: str) -> None:
    done = runs(word)
    assert done.returncode == 127
    assert f"did you mean `{suggestion}`?" in done.stderr


def test_a_program_that_is_not_there_is_said_as_a_shell_says_it(runs: Runs) -> None:
    done = runs("no-such-program-anywhere")
    assert done.returncode == 127 and done.stderr.count("\n") == 1


def test_a_file_that_cannot_be_executed_is_said_as_a_shell_says_it(runs: Runs) -> None:
    (runs.folder / "train").write_text("no program")
    done = runs("./train")
    assert done.returncode == 126 and "./train: Permission denied" in done.stderr


def test_an_option_of_a_launch_is_refused_where_it_means_nothing(runs: Runs) -> None:
    done = runs("--policy", "skip", "jobs")
    assert done.returncode == 2 and "--policy is an option of a launch" in done.stderr


def test_jobs_are_listed_newest_first(runs: Runs) -> None:
    runs.add_job("old", started="2026-01-30T00:00:00.000Z")
    runs.add_job("new")
    lines = runs("jobs").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["job", "new", "old"]
    assert [job["job"] for job in json.loads(runs("jobs", "--json").stdout)["jobs"]] == ["new", "old"]


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


def test_an_incident_that_is_named_without_its_job_is_told_how_it_is_named(runs: Runs) -> None:
    done = runs("ack", "1")
    assert done.returncode == 2 and "'1' is no JOB/ID" in done.stderr and "train/1" in done.stderr


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


def test_a_job_whose_launcher_was_killed_is_not_called_running(runs: Runs) -> None:
    runs.add_job("killed", exit_code=None)
    assert "its launcher was killed" in runs("status", "killed").stdout


def test_without_a_name_the_newest_job_is_meant(runs: Runs, ended_job: RunDirectory) -> None:
    assert runs("incidents", "--json").stdout == runs("incidents", "train-1", "--json").stdout


def test_a_run_directory_may_be_named_by_its_path(runs: Runs, ended_job: RunDirectory) -> None:
    assert json.loads(runs("status", str(ended_job.root), "--json").stdout)["job"] == "train-1"


def test_incidents_are_shown_without_control_characters_of_the_data(runs: Runs, ended_job: RunDirectory) -> None:
    shown = runs("incidents", "train-1").stdout
    assert "batch.index_out_of_range" in shown and "\x1b" not in shown
    assert json.loads(runs("incidents", "train-1", "--json").stdout)["incidents"] == [INCIDENT]


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


def test_the_newest_jobs_contract_is_shown_where_none_is_named(runs: Runs, ended_job: RunDirectory) -> None:
    write_json(ended_job.contract_file(0), LEARNED)
    assert "rank 0 of job train-1" in runs("contract").stdout


def test_a_rank_that_never_came_to_learn_anything_says_so(runs: Runs, ended_job: RunDirectory) -> None:
    write_json(ended_job.contract_file(0), {"traces": 0, "guarded": [], "opaque": []})
    assert runs("contract", "train-1").stdout == "job train-1 ended before anything was learned\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("status", "nope"), "there is no job 'nope' here (known: train-1)"),
        (("timeline", "nope"), "there is no job 'nope' here"),
        (("contract", "train-1"), "Rank 0 has learned nothing yet"),
        (("stop", "train-1"), "did not take the order: it is not running"),
        (("checkpoint", "train-1"), "did not take the order: it is not running"),
        (("status", "train-1", "--daemon", "unix:/nowhere/x.sock"), "no daemon answered at unix:/nowhere/x.sock"),
        (("status", "--dir", "elsewhere"), "holds no job"),
    ],
)
def test_an_error_is_one_sentence(runs: Runs, ended_job: RunDirectory, words: tuple[str, ...], sentence: str) -> None:
    done = runs(*words)
    assert done.returncode == 1
    assert sentence in done.stderr and done.stderr.startswith("[torch-watchdog] ")
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("serve", "--dir", "a-file"), 1, "a-file: is no folder. Pass --dir DIR"),
        (("certs", ""), 2, "a name or an address of a machine, not ''"),
        (("certs", "node\n0"), 2, "a name or an address of a machine"),
    ],
)
def test_what_a_command_cannot_take_is_one_sentence(runs: Runs, words: tuple[str, ...], code: int, sentence: str) -> None:
    (runs.folder / "a-file").write_text("")
    done = runs(*words)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert sentence in done.stderr and "Traceback" not in done.stderr


def test_a_launch_whose_dir_is_a_file_says_that_and_runs_the_command(runs: Runs) -> None:
    (runs.folder / "a-file").write_text("")
    done = runs("--dir", "a-file", "echo", "trained")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.startswith("[torch-watchdog] this launch runs without the watchdog: ") and "a-file: is no folder" in done.stderr


def test_a_run_directory_that_is_removed_while_the_job_runs_is_said(runs: Runs) -> None:
    done = runs(sys.executable, "-c", "import shutil; shutil.rmtree('watchdog_runs')")
    assert done.returncode == 0
    assert "the run directory was removed while the job ran" in done.stderr


def test_a_launch_that_cannot_write_its_record_says_one_line(runs: Runs) -> None:
    (runs.folder / "full").mkdir()
    mount = f'mount -t tmpfs -o nr_inodes=2 tmpfs {runs.folder}/full && exec "$@"'  # room for the run's folder, and for no file in it
    inside = ["unshare", "-rm", "sh", "-c", mount, "sh", sys.executable, "-m", "torch_watchdog.cli"]
    done = subprocess.run([*inside, "--dir", "full", "echo", "trained"], cwd=runs.folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.startswith("[torch-watchdog] this launch runs without the watchdog: ") and done.stderr.count("\n") == 1


def test_a_certificate_for_a_name_longer_than_a_subject_may_be_is_made(runs: Runs) -> None:
    assert runs("certs", f"{'node.' * 20}example").returncode == 0


def test_another_users_job_hides_nobody_elses(runs: Runs, ended_job: RunDirectory) -> None:
    broken = runs.add_job("their-job").root  # as a folder that may not be entered: root could
    shutil.rmtree(broken)
    broken.symlink_to(broken)
    assert "train-1" in runs("jobs").stdout
    assert "there is no job 'their-job' here" in runs("status", "their-job").stderr


def test_a_job_file_that_is_torn_is_one_sentence(runs: Runs, ended_job: RunDirectory) -> None:
    ended_job.job_file.write_text('{"job": "trai')
    done = runs("status", "train-1")
    assert done.returncode == 1 and done.stderr.count("\n") == 1


def test_one_broken_job_does_not_hide_the_others(runs: Runs, ended_job: RunDirectory) -> None:
    runs.add_job("broken").job_file.write_text("{")
    assert [job["job"] for job in json.loads(runs("jobs", "--json").stdout)["jobs"]] == ["train-1"]


def test_a_malformed_configuration_is_one_sentence_and_exit_2(runs: Runs) -> None:
    (runs.folder / "watchdog.toml").write_text("policy = ")
    done = runs("jobs")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "watchdog.toml: is not TOML" in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error_to_talk_about(runs: Runs) -> None:
    for number in range(40):
        runs.add_job(f"job-{number}")
    script = f"{sys.executable} -m torch_watchdog.cli jobs --json | head -c 1"
    done = subprocess.run(["sh", "-c", script], cwd=runs.folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.stdout == "{" and done.stderr == ""


LOOKS = (
    ("jobs",), ("status", "train-1"), ("incidents", "train-1"), ("timeline", "train-1"), ("timeline", "train-1", "train-1@0"),
    ("rules", "list"), ("rules", "show", "straggler"),
)  # fmt: skip


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_on_a_terminal_text_fits_80_columns_and_no_color_means_plain_text(
    runs: Runs, ended_job: RunDirectory, words: tuple[str, ...]
) -> None:
    command = [sys.executable, "-m", "torch_watchdog.cli", *words]
    plain = Screen(command, cwd=runs.folder, variables={"NO_COLOR": "1"}).finished()
    coloured = Screen(command, cwd=runs.folder).finished()
    long = [line for line in plain.splitlines() if len(line) > 80 and str(runs.folder) not in line]  # a path is one piece, for copying
    assert long == [] and "\x1b" not in plain
    assert "\x1b[" in coloured or "\x1b" not in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_in_a_pipe_text_is_plain_and_a_reader_of_one_line_is_enough(runs: Runs, ended_job: RunDirectory, words: tuple[str, ...]) -> None:
    whole = runs(*words).stdout
    script = shlex.join([sys.executable, "-m", "torch_watchdog.cli", *words]) + " | head -n 1"
    done = subprocess.run(["sh", "-c", script], cwd=runs.folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert "\x1b" not in whole and (done.returncode, done.stdout, done.stderr) == (0, whole.partition("\n")[0] + "\n", "")


def test_a_timeline_on_a_terminal_is_coloured(runs: Runs, ended_job: RunDirectory) -> None:
    assert "\x1b[1;31mX" in Screen([sys.executable, "-m", "torch_watchdog.cli", "timeline"], cwd=runs.folder).finished()


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_help_of_every_command_fits_80_columns(name: str) -> None:
    text = CliRunner().invoke(watchdog, [*([name] if name else []), "--help"]).output
    assert text and max(map(len, text.splitlines())) <= 80


def test_switched_off_the_command_is_executed_and_nothing_else(runs: Runs) -> None:
    done = runs("sh", "-c", "echo $PPID; exit 3", TORCH_WATCHDOG="off")
    assert done.returncode == 3 and int(done.stdout) == os.getpid() and done.stderr == ""
    assert not (runs.folder / "watchdog_runs").exists()


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


def test_commands_of_the_store_say_where_there_is_nothing_to_do(runs: Runs) -> None:
    store = f"sqlite:///{runs.folder / 'store.sqlite'}"
    said = [
        runs("store", *words, TORCH_WATCHDOG_STORE=store).stdout for words in (("import",), ("export",), ("prune", "--older-than", "3"))
    ]
    assert said == [f"no run in {runs.folder}/watchdog_runs\n", "the store has no run\n", "nothing is older than 3 days\n"]


def test_what_daemons_decide_for_is_never_old_and_their_copies_of_others_runs_are_none(runs: Runs) -> None:
    url = f"sqlite:///{runs.folder / 'store.sqlite'}"
    database = Database.open(url)
    for job, seen_s in (("runs", time.time()), ("ended", time.time() - 90)):
        database.keep_run(job, seen_s)
    (runs.folder / "watchdog_runs" / ".elsewhere").mkdir(parents=True)
    assert runs("store", "import", TORCH_WATCHDOG_STORE=url).stdout == f"no run in {runs.folder}/watchdog_runs\n"
    assert runs("store", "prune", "--older-than", "0", TORCH_WATCHDOG_STORE=url).stdout == "ended: removed from the store\n"
    assert set(database.runs()) == {"runs"}


def test_a_run_out_of_a_store_is_read_by_every_command_though_its_launch_wrote_its_record_elsewhere(
    runs: Runs, ended_job: RunDirectory
) -> None:
    ended_job.job_file.unlink()
    left = {
        "time": "2026-11-28T10:00:09.000+00:00",
        "order": 99,
        "attempt": 0,
        "kind": "node.left",
        "text": "the command on n ended",
        "exit_code": 65,
    }
    with ended_job.events_file.open("a") as events:
        events.write(json.dumps(left) + "\n")
    store = f"sqlite:///{runs.folder / 'store.sqlite'}"
    assert runs("store", "import", TORCH_WATCHDOG_STORE=store).returncode == 0
    other = ("--dir", "other")
    assert runs("store", "export", *other, TORCH_WATCHDOG_STORE=store).returncode == 0
    assert "train-1" in runs("jobs", *other).stdout
    said = [runs(command, "train-1", *other) for command in ("status", "incidents", "timeline", "report")]
    assert [done.returncode for done in said] == [0] * 4, [done.stderr for done in said]
    assert "ended, exit code 65" in said[0].stdout and "exit code 65 (as its daemon was told)" in said[2].stdout
    assert "input_ids[2,7] is 70" in said[1].stdout and "rank 0" in said[2].stdout


@pytest.mark.parametrize(("daemon", "kept"), [("auto", ()), ("daemon.example.org:9470", ("--job", "team-a-1"))])
def test_the_line_that_resumes_keeps_the_name_at_a_central_daemon_whose_token_may_be_for_this_name_only(
    daemon: str, kept: tuple[str, ...]
) -> None:
    said: list[tuple[str, ...]] = []

    @click.command()
    @launch_options
    @click.pass_context
    def launched(context: click.Context, /, **_: object) -> None:
        said.append(given_words(context, daemon=daemon))

    words = ["--job", "team-a-1", "--policy", "skip", "--resume", "runs/x/checkpoints/step-5"]
    assert CliRunner().invoke(launched, words, catch_exceptions=False).exit_code == 0
    assert said == [("--policy", "skip", *kept)]
