"""The user's page names every error, command and option that there is."""

from __future__ import annotations

import re
from pathlib import Path

from torch_watchdog import errors
from torch_watchdog.cli.main import COMMANDS, watchdog

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_every_error_has_its_row_in_the_table() -> None:
    named = set(re.findall(r"`(\w+Error)`", README))
    assert named == set(errors.__all__) - {"WatchdogError"}


def test_every_command_is_shown() -> None:
    assert set(re.findall(r"`watchdog ([a-z]+)", README)) >= set(COMMANDS)


def test_every_option_of_a_launch_has_its_row_and_no_other() -> None:
    table = README.split("### Options of a launch")[1].split("###")[0]
    options = {option for parameter in watchdog.params for option in parameter.opts} - {"--help", "-h", "--version"}
    assert set(re.findall(r"^\| `(--[a-z-]+)", table, re.MULTILINE)) == options
