"""The unit that we ship, as systemd reads it: nothing to say against it, and as little exposed as deploy/README.md says; with what that adds, too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from services import needs, program

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "torch-watchdog.service"
FOR_OTHERS = UNIT.with_name("other-machines.conf").read_text().replace("/opt/torch-watchdog/bin/watchdog", sys.executable)


def unit(folder: Path, *, more: str = "") -> Path:
    """With a program that is there in the place of the installed one: systemd looks for it."""
    made = folder / UNIT.name
    made.write_text(UNIT.read_text().replace("/opt/torch-watchdog/bin/watchdog", sys.executable))
    if more:
        (folder / f"{UNIT.name}.d").mkdir()
        (folder / f"{UNIT.name}.d" / "override.conf").write_text(more)
    return made


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("systemd-analyze") or "", *words], capture_output=True, text=True, timeout=60, check=False)


@needs("systemd-analyze")
@pytest.mark.parametrize("more", ["", FOR_OTHERS], ids=["as it is", "for other machines"])
def test_systemd_has_nothing_to_say_against_it(tmp_path: Path, more: str) -> None:
    done = analyze("verify", "--man=no", str(unit(tmp_path, more=more)))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs("systemd-analyze")
def test_what_systemd_does_not_know_would_be_found(tmp_path: Path) -> None:
    assert "Unknown key" in analyze("verify", "--man=no", str(unit(tmp_path, more="[Service]\nLoadCredentials=x\n"))).stderr


@needs("systemd-analyze")
def test_it_is_as_little_exposed_as_deploy_says(tmp_path: Path) -> None:
    done = analyze("security", "--offline=true", "--threshold=13", "--no-pager", str(unit(tmp_path)))
    found = re.search(r"Overall exposure level for torch-watchdog\.service: ([\d.]+)", done.stdout)
    assert done.returncode == 0 and found is not None, done.stdout + done.stderr
    assert f"`systemd-analyze security --offline` {found[1]} " in (UNIT.parents[1] / "README.md").read_text()
