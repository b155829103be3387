"""deploy/README.md as an operator types it: what one line makes must be good for the next."""

from __future__ import annotations

import re
import shutil
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import click
import pytest
from services import needs, program

from torch_watchdog.cli.main import watchdog

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def test_the_launch_that_is_shown_is_for_a_job_that_the_tokens_fit() -> None:
    text = (DEPLOY / "README.md").read_text()
    patterns = re.findall(r"token add \S+ --role agent --job '(\S+)'", text)
    (job,) = re.findall(r"watchdog --daemon \S+ --job (\S+) torchrun", text)
    assert len(patterns) == 1 and fnmatchcase(job, patterns[0])


def test_every_file_and_command_that_the_page_names_is_there() -> None:
    text = (DEPLOY / "README.md").read_text()
    for file in re.findall(r"deploy/[a-z-]+/[\w.-]+|deploy/[\w-]+\.toml", text):
        assert (DEPLOY.parent / file).is_file(), file
    commands = {match.split()[0] for match in re.findall(r"`?watchdog ((?:[a-z]+ ?)+)", text)}
    assert {"certs", "token", "serve", "alert", "ack", "store", "jobs"} <= commands & set(watchdog.list_commands(click.Context(watchdog)))


@needs("promtool")
@pytest.mark.parametrize("tls", [False, True])
def test_prometheus_takes_its_file_as_it_is_and_with_the_lines_for_tls(tmp_path: Path, tls: bool) -> None:
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    for line in ("scheme: https", "tls_config: {ca_file"):
        assert f"    # {line}" in text
        text = text.replace(f"    # {line}", f"    {line}") if tls else text
    for name in ("torch-watchdog.token", "torch-watchdog-ca.crt"):
        assert f"/etc/prometheus/{name}" in text and f"/etc/prometheus/{name}" in (DEPLOY / "README.md").read_text()
        (tmp_path / name).touch()
        text = text.replace(f"/etc/prometheus/{name}", str(tmp_path / name))
    shutil.copy(DEPLOY / "prometheus" / "torch-watchdog.rules.yml", tmp_path)
    (tmp_path / "prometheus.yml").write_text(text)
    done = subprocess.run(
        [program("promtool") or "", "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
