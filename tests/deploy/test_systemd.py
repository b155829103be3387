"""The unit that we ship, as systemd reads it: nothing to say against it, and as little exposed as deploy/README.md says; with what that adds, too. And
that its daemon starts, with the files that the page makes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port
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


class Etc:
    """What the page's commands make below /etc/torch-watchdog, and what systemd would make of unit and drop-in: a command, its environment, credentials."""

    def __init__(self, folder: Path) -> None:
        self.etc, self.credentials, self.runs = folder / "etc", folder / "credentials", folder / "state" / "runs"
        for made in (self.etc, self.credentials, self.runs.parent):
            made.mkdir()
        (self.etc / "token").write_text("t" * 43)
        (self.etc / "environment").write_text("TORCH_WATCHDOG_ALERT=pagerduty://KEY\n")

    def for_others(self) -> None:
        self._watchdog("certs", "--out", str(self.etc / "certs"), "127.0.0.1")
        self._watchdog("token", "add", "anna", "--role", "operator", "--tokens", str(self.etc / "tokens.json"))
        shutil.copy(UNIT.parents[1] / "serve.toml", self.etc / "serve.toml")
        sed = re.search(r"^sed -i '(.*?)' (\S+)", (UNIT.parents[1] / "README.md").read_text(), re.MULTILINE)
        assert sed is not None
        subprocess.run(["sed", "-i", sed[1], sed[2].replace("/etc/torch-watchdog", str(self.etc))], check=True)

    def serving(self, text: str) -> subprocess.Popen[str]:
        lines = [line.partition("=")[::2] for line in text.splitlines() if re.match(r"[A-Z]\w+=", line)]
        environment = dict(line.split("=", 1) for line in (self.etc / "environment").read_text().splitlines())
        command = ""
        for name, value in lines:
            known = value.replace("/etc/torch-watchdog", str(self.etc)).replace("%d", str(self.credentials)).replace("HOST", "127.0.0.1")
            if name == "LoadCredential":
                as_name, _, path = known.partition(":")
                shutil.copy(path, self.credentials / as_name)
            elif name == "Environment":
                environment |= dict(word.split("=", 1) for word in known.split())
            elif name == "ExecStart":
                command = known
        for port in ("9470", "9471"):
            command = command.replace(port, str(free_port()))
        environment |= {"TORCH_WATCHDOG_DIR": str(self.runs), "XDG_CACHE_HOME": str(self.runs.parent), "PATH": os.environ["PATH"]}
        words = [sys.executable, "-m", "torch_watchdog.cli", *command.split()[1:]]
        return subprocess.Popen(words, env=environment, cwd=self.runs.parent, stderr=subprocess.PIPE, text=True)

    def _watchdog(self, *words: str) -> None:
        subprocess.run([sys.executable, "-m", "torch_watchdog.cli", *words], check=True, capture_output=True)


@pytest.mark.parametrize("for_others", [False, True], ids=["as it is", "for other machines"])
def test_the_daemon_of_the_unit_starts_with_the_files_that_the_page_makes(tmp_path: Path, for_others: bool) -> None:
    etc, text = Etc(tmp_path), UNIT.read_text()
    if for_others:
        etc.for_others()
        text += UNIT.with_name("other-machines.conf").read_text()
    with etc.serving(text) as serving:
        assert serving.stderr is not None
        first, second = serving.stderr.readline(), serving.stderr.readline()
        serving.terminate()
        last = serving.communicate(timeout=60)[1]
    assert "daemon at 127.0.0.1" in first and f"page and API at http{'s' if for_others else ''}://127.0.0.1" in second, first + second
    assert serving.returncode == 0, last
