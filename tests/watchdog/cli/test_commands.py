"""The commands as a person meets them: real processes over a run directory on disk; what they show of jobs is tried beside it."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import pytest
from cli_runs import TIMEOUT_S, Runs
from click.testing import CliRunner
from namespaces import needs_mounts, where_mounted
from terminal import Screen

from torch_watchdog.alerts.alert import Alert
from torch_watchdog.alerts.open import Open
from torch_watchdog.cli.main import COMMANDS, watchdog
from torch_watchdog.cli.options import given_words, launch_options
from torch_watchdog.store.database import Database
from torch_watchdog.store.run_directory import RunDirectory, write_json


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


@pytest.mark.parametrize(
    ("words", "whose"),
    [
        (("stop", "--foo"), "watchdog stop"),
        (("token", "list", "--foo"), "watchdog token list"),
        (("ack", "1"), "watchdog ack"),
        (("--foo",), "watchdog"),
    ],
)
def test_what_is_mistyped_names_the_help_of_its_own_command(runs: Runs, words: tuple[str, ...], whose: str) -> None:
    done = runs(*words)
    assert done.returncode == 2 and done.stderr.endswith(f" ({whose} --help)\n")


def test_every_command_that_prints_a_table_takes_json(runs: Runs) -> None:
    """README says so; the tokens' list did not."""

    def lists(group: click.Group) -> list[click.Command]:
        found = [group.get_command(click.Context(group), name) for name in group.list_commands(click.Context(group))]
        inner = [one for command in found if isinstance(command, click.Group) for one in lists(command)]
        return [command for command in found if command is not None and not isinstance(command, click.Group)] + inner

    tables = [
        command for command in lists(watchdog) if command.callback and "print_table" in inspect.getsource(inspect.unwrap(command.callback))
    ]
    assert len(tables) >= 6
    assert [command.name for command in tables if not any("--json" in parameter.opts for parameter in command.params)] == []


def test_tokens_are_listed_for_a_program_too_without_their_digests(runs: Runs) -> None:
    assert runs("token", "add", "anna", "--role", "viewer", "--job", "team-*", "--tokens", "t.json").returncode == 0
    told = json.loads(runs("token", "list", "--tokens", "t.json", "--json").stdout)
    assert told == {"tokens": [{"name": "anna", "role": "viewer", "jobs": ["team-*"], "until_s": None}]}


def test_an_option_that_a_command_has_itself_is_told_where_it_stands(runs: Runs) -> None:
    done = runs("--job", "mine", "scan", "true")
    assert done.returncode == 2 and "--job stands behind the command here: `watchdog scan --job ...`" in done.stderr


def test_an_incident_that_is_named_without_its_job_is_told_how_it_is_named(runs: Runs) -> None:
    done = runs("ack", "1")
    assert done.returncode == 2 and "'1' is no JOB/ID" in done.stderr and "train/1" in done.stderr


def test_who_acknowledges_what_a_launch_died_of_is_told_that_nobody_is_told_more(runs: Runs, ended_job: RunDirectory) -> None:
    """The daemon that would take it has ended with the launch: its last alert had named this very command, which was refused."""
    done = runs("ack", "train-1/1")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout.startswith("train-1/1: the launch of train-1 has ended and sends no more alerts") and "where it arrived" in done.stdout
    )
    other = runs("ack", "train-1/9")
    assert other.returncode == 1 and "it has no incident '9' (`watchdog incidents train-1` lists them)" in other.stderr


def test_alerts_that_ended_launches_left_open_are_listed_from_their_run_directories(runs: Runs, ended_job: RunDirectory) -> None:
    now = time.time()
    alert = Alert(
        key="k", training_job="train-1", job="train-1", attempt=0, incident="1", kind="rank.died", severity="critical", title="what died", lines=(),
        starts_s=now,
    )  # fmt: skip
    stands, old, over = (
        Open(alert, {}, now),
        Open(replace(alert, incident="2"), {}, now),
        Open(replace(alert, incident="3", resolved=True), {}, now),
    )
    stands.stands_since_s, old.stands_since_s = now, now - 25 * 3600.0
    write_json(ended_job.alerts_file, {"schema_version": 1, "alerts": [one.saved() for one in (stands, old, over)]})
    done = runs("alert", "list")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert "no daemon runs here: what the launches in ./watchdog_runs have left open" in done.stderr
    assert "train-1/1" in done.stdout and "train-1/2" not in done.stdout and "train-1/3" not in done.stdout
    told = json.loads(runs("alert", "list", "--json").stdout)
    assert [one["name"] for one in told["alerts"]] == ["train-1/1"] and told["silences"] == []
    named = runs("alert", "list", "--daemon", "unix:/nowhere/x.sock")
    assert named.returncode == 1 and "no daemon answered at unix:/nowhere/x.sock" in named.stderr


def test_alerts_are_kept_quiet_by_a_daemon_that_runs(runs: Runs, ended_job: RunDirectory) -> None:
    done = runs("alert", "silence", "--for", "2h")
    assert done.returncode == 2 and "the newest launch here has ended: name a `watchdog serve`" in done.stderr


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


@needs_mounts
def test_a_launch_that_cannot_write_its_record_says_one_line(runs: Runs) -> None:
    (runs.folder / "full").mkdir()
    command = [sys.executable, "-m", "torch_watchdog.cli", "--dir", "full", "echo", "trained"]
    inside = where_mounted("nr_inodes=2", runs.folder / "full", command)  # room for the run's folder, and for no file in it
    done = subprocess.run(inside, cwd=runs.folder, capture_output=True, text=True, timeout=TIMEOUT_S)
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
    (job,) = json.loads(runs("jobs", *other, "--json").stdout)["jobs"]
    assert (job["job"], job["world_size"], job["exit_code"]) == ("train-1", 2, 65)
    said = [runs(command, "train-1", *other) for command in ("status", "incidents", "timeline", "report")]
    assert [done.returncode for done in said] == [0] * 4, [done.stderr for done in said]
    assert "ended, exit code 65" in said[0].stdout and "exit code 65 (as its daemon was told)" in said[2].stdout
    assert "input_ids[2,7] is 70" in said[1].stdout and "rank 0" in said[2].stdout


def test_the_line_that_resumes_keeps_the_name_whose_alerts_are_over_then_and_that_a_token_may_be_for() -> None:
    said: list[tuple[str, ...]] = []

    @click.command()
    @launch_options
    @click.pass_context
    def launched(context: click.Context, /, **_: object) -> None:
        said.append(given_words(context))

    words = ["--job", "team-a-1", "--policy", "skip", "--resume", "runs/x/checkpoints/step-5"]
    assert CliRunner().invoke(launched, words, catch_exceptions=False).exit_code == 0
    assert said == [("--job", "team-a-1", "--policy", "skip")]


@pytest.mark.parametrize("missing", ["grpc", "google.protobuf"])
def test_a_launch_without_what_it_needs_runs_the_command_all_the_same(missing: str, tmp_path: Path) -> None:
    """A torn installation, or one that another package has pulled apart: the training had not been started."""
    launch = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == {missing!r} or name.startswith({missing + "."!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}")
sys.meta_path.insert(0, Hidden())
from torch_watchdog.cli.main import main
main()
"""
    command = [sys.executable, "-c", launch, "--dir", str(tmp_path), sys.executable, "-c", "print('trained'); raise SystemExit(3)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, "trained\n")
    assert done.stderr == f"[torch-watchdog] this launch runs without the watchdog: ModuleNotFoundError: No module named {missing!r}\n"
