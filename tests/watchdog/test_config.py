"""Flag before environment before file before default; what is wrong is said in one sentence that begins with where it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torch_watchdog.config import load_config
from torch_watchdog.errors import ConfigError


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_without_any_setting_the_defaults_stand(tmp_path: Path) -> None:
    config = load_config({})
    assert (config.policy, config.daemon, config.job, config.grace_s, config.keeper, config.resume) == (
        "stop",
        "auto",
        None,
        300.0,
        True,
        None,
    )
    assert config.directory == tmp_path / "watchdog_runs"


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "watchdog.toml").write_text('policy = "skip"\ngrace = 60\njob = "from-file"\nkeeper = false\n')
    monkeypatch.setenv("TORCH_WATCHDOG_GRACE", "70")
    monkeypatch.setenv("TORCH_WATCHDOG_JOB", "from-environment")
    config = load_config({"job": "from-flag"})
    assert (config.policy, config.grace_s, config.job, config.keeper) == ("skip", 70.0, "from-flag", False)


def test_a_resume_path_is_made_absolute_because_ranks_may_change_their_folder(tmp_path: Path) -> None:
    (tmp_path / "runs" / "step-4").mkdir(parents=True)
    assert load_config({"resume": "runs/step-4"}).resume == str(tmp_path / "runs/step-4")


def test_a_resume_path_that_is_not_there_is_refused_before_anything_starts() -> None:
    with pytest.raises(
        ConfigError, match=f"--resume: must be the folder of a checkpoint.* there is none at {re.escape(str(Path.cwd()))}/runs/step-5$"
    ):
        load_config({"resume": "runs/step-5"})


def test_the_variables_of_a_launch_around_us_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_WATCHDOG_AGENT", "{}")
    monkeypatch.setenv("TORCH_WATCHDOG_PID", "1")
    assert load_config({}).policy == "stop"


@pytest.mark.parametrize(
    ("flags", "begins"),
    [
        ({"policy": "halt"}, "--policy: "),
        ({"daemon": "somewhere"}, "--daemon: must be auto, HOST:PORT or unix:PATH"),
        ({"daemon": "unix:"}, "--daemon: must be auto, HOST:PORT or unix:PATH"),
        ({"daemon": "10.0.0.1:65536"}, "--daemon: must be auto, HOST:PORT or unix:PATH"),
        ({"web": "localhost:99999"}, "--web: must be auto or HOST:PORT"),
        ({"job": "a/b"}, "--job: must be letters"),
        ({"grace": "0"}, "--grace: "),
        ({"grace": "soon"}, "--grace: must be a number of seconds"),
        ({"grace": "nan"}, "--grace: "),
        ({"grace": "inf"}, "--grace: "),
        ({"dir": ""}, "--dir: "),
        ({"resume": "a\nb"}, "--resume: "),
    ],
)
def test_a_wrong_flag_is_named(flags: dict[str, str], begins: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(flags)
    assert str(error.value).startswith(begins)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ('policy = "halt"', "watchdog.toml, policy: "),
        ("alarm = []", "watchdog.toml: unknown setting 'alarm'; known are "),
        ("policy = ", "watchdog.toml: is not TOML"),
        ("policy = 1", "watchdog.toml, policy: must be one of stop, skip, observe, not 1"),
        ("grace = true", "watchdog.toml, grace: "),
        ("keeper = 'perhaps'", "watchdog.toml, keeper: must be true or false"),
        ("job = []", "watchdog.toml, job: "),
        ("[bounds]\nlabels = 9", "watchdog.toml, bounds: must be lines such as "),
        ("[bounds]\nlabels = {low = 9, high = 0}", "watchdog.toml, bounds: must be lines such as "),
        ("[bounds]\nlabels = {max = 9}", "watchdog.toml, bounds: must be lines such as "),
        (
            "[exit_codes]\nbad_date = 165",
            "watchdog.toml, exit_codes: must be lines such as bad_data = 165; known are bad_data, diverged, machine",
        ),
        ("[exit_codes]\nmachine = 0", "watchdog.toml, exit_codes: must be lines such as "),
        ("[exit_codes]\nmachine = 256", "watchdog.toml, exit_codes: must be lines such as "),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, begins: str) -> None:
    (tmp_path / "watchdog.toml").write_text(text)
    with pytest.raises(ConfigError, match="^" + begins):
        load_config({})


@pytest.mark.parametrize(("word", "meant"), [("false", False), ("0", False), ("No", False), ("true", True), ("1", True)])
def test_a_switch_is_written_as_people_write_it(word: str, meant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_WATCHDOG_KEEPER", word)
    assert load_config({}).keeper is meant


def test_an_empty_variable_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_WATCHDOG_POLICY", "")
    monkeypatch.setenv("TORCH_WATCHDOG_CONFIG", "")
    assert load_config({}).policy == "stop"


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_WATCHDOG_POLICY", "halt")
    with pytest.raises(ConfigError, match=r"^TORCH_WATCHDOG_POLICY: "):
        load_config({})


def test_a_file_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config({}, file=tmp_path / "absent.toml")


@pytest.mark.parametrize("address", ["auto", "unix:/run/x.sock", "localhost:9470", "10.0.0.1:1", "[::1]:9470"])
def test_addresses_that_a_daemon_can_have_are_taken(address: str) -> None:
    assert load_config({"daemon": address}).daemon == address


def test_bounds_are_lines_of_their_own_table(tmp_path: Path) -> None:
    (tmp_path / "watchdog.toml").write_text('[bounds]\nlabels = {low = 0, high = 9, ignored = -100}\n"0.ids" = {high = 99}\n')
    assert load_config({}).bounds == {"labels": {"low": 0, "high": 9, "ignored": -100}, "0.ids": {"high": 99}}


def test_exit_codes_are_those_of_the_site(tmp_path: Path) -> None:
    (tmp_path / "watchdog.toml").write_text("[exit_codes]\nbad_data = 165\nmachine = 130\n")
    assert load_config({}).exit_codes == {65: 165, 75: 130}


def site(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_what_the_site_locks_wins_over_every_flag_and_says_so(tmp_path: Path) -> None:
    locked = site(tmp_path, "[locked]\npolicy = 'observe'\ngrace = 60\n")
    config = load_config({"policy": "stop", "job": "mine"}, site_file=locked)
    assert (config.policy, config.grace_s, config.job) == ("observe", 60.0, "mine")
    assert config.overruled == (f"--policy is not taken: {locked} locks it for this site",)


def test_the_site_switches_everything_off(tmp_path: Path) -> None:
    assert load_config({}, site_file=tmp_path / "none").enabled
    assert not load_config({}, site_file=site(tmp_path, "enabled = false\n")).enabled


@pytest.mark.parametrize(
    "text", ["enabled = 3", "locked = 3", "policy = 'stop'", "[locked]\npolicy = 'x'", "[locked]\nfoo = 1", "not toml"]
)
def test_a_wrong_site_file_is_said_with_its_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.toml"):
        load_config({}, site_file=site(tmp_path, text))


def test_switched_off_the_command_runs_as_if_we_were_not_there(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch_watchdog.cli",
        sys.executable,
        "-c",
        "import os; print('TORCH_WATCHDOG_AGENT' in os.environ); raise SystemExit(7)",
    ]
    environment = os.environ | {"TORCH_WATCHDOG": "off"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "False\n", "") and list(tmp_path.iterdir()) == []


def test_how_many_steps_may_be_skipped_is_a_setting_of_the_file_and_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_config({}).max_skips is None
    (tmp_path / "watchdog.toml").write_text("max_skips = 0\n")
    assert load_config({}).max_skips == 0
    monkeypatch.setenv("TORCH_WATCHDOG_MAX_SKIPS", "25")
    assert load_config({}).max_skips == 25


@pytest.mark.parametrize("value", ["-1", "1.5", "true", '"ten"'])
def test_a_number_of_skips_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "watchdog.toml").write_text(f"max_skips = {value}\n")
    with pytest.raises(ConfigError, match="max_skips: must be a whole number of steps, 0 or more"):
        load_config({})
