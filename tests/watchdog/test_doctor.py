"""Doctor says what works, and what to do about what does not; each check ends in a finding, whatever it meets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from torch_watchdog.doctor import Finding, examine

BIN = str(Path(sys.executable).parent)


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **variables}
    command = [sys.executable, "-m", "torch_watchdog.cli", "doctor", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)


def findings(directory: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(directory=directory)}


def test_where_everything_works_nothing_fails(tmp_path: Path) -> None:
    found = findings(tmp_path / "runs")
    assert {name for name, finding in found.items() if finding.state == "fail"} == set()
    assert found["daemon"].state == "ok" and "answers" in found["daemon"].text
    assert list(tmp_path.iterdir()) == []


def test_every_finding_that_is_not_ok_says_what_to_do() -> None:
    done = run("--json", "--dir", "/dev/null/runs", TORCH_WATCHDOG="off")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert checks["run directory"]["state"] == "fail" and checks["switch"]["state"] == "warn"
    assert all(check["advice"] for check in checks.values() if check["state"] != "ok")


def test_a_site_that_has_switched_us_off_is_told(tmp_path: Path) -> None:
    (switch,) = (finding for finding in examine(directory=tmp_path, enabled=False) if finding.name == "switch")
    assert switch.state == "warn" and "/etc/torch-watchdog/config.toml: launches run plain" in switch.text


def test_a_python_without_torch_is_a_warning_and_not_a_failure(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    done = run("--json", PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["torch"]["state"] == "warn" and "no torch here" in checks["torch"]["text"]


def test_the_python_that_it_runs_under_is_looked_at_and_another_one_on_path_is_told(tmp_path: Path) -> None:
    """The environment of a person who types the path of `watchdog` is not active: what is first on PATH has none of ours."""
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho /elsewhere\n")
    other.chmod(0o755)
    for path, state in ((f"{tmp_path}:{os.environ['PATH']}", "warn"), (f"{BIN}:{os.environ['PATH']}", "ok"), ("/nowhere", "warn")):
        checks = {check["name"]: check for check in json.loads(run("--json", PATH=path).stdout)["checks"]}
        assert checks["python"]["text"].startswith(f"{sys.executable}, ") and checks["agent"]["state"] == "ok"
        assert checks["path"]["state"] == state
        assert path == "/nowhere" or ("another environment, /elsewhere" in checks["path"]["text"]) == (state == "warn")


def test_the_changes_of_a_launch_are_listed() -> None:
    shown = run("--changes").stdout
    assert all(name in shown for name in ("PYTHONPATH", "TORCH_WATCHDOG_AGENT", "torch.optim.optimizer", "transformers.trainer"))
