"""The real servers that tests marked `services` talk to: found where Debian puts them, and said where they are not."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import pytest
from ports import free_port

__all__ = ["AlertmanagerServer", "PostgresServer", "needs", "program"]

_T = TypeVar("_T", bound=Callable[..., object])
_PACKAGES = {
    "promtool": "prometheus",
    "prometheus": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "systemd-analyze": "systemd",
    "initdb": "postgresql",
    "postgres": "postgresql",
}


def program(name: str) -> str | None:
    """Its path; PostgreSQL's are not on the PATH."""
    found = shutil.which(name)
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
    return found if found or not versions else str(versions[-1])


def needs(*names: str) -> Callable[[_T], _T]:
    """A decorator: marks the test `services`, and says what to install where something is not there."""
    absent = sorted({_PACKAGES[name] for name in names if program(name) is None})
    skip = pytest.mark.skipif(bool(absent), reason=f"not installed here: apt-get install {' '.join(absent)}")
    return lambda test: pytest.mark.services(skip(test))


class PostgresServer:
    """A real PostgreSQL of its own, at `url`, that can be stopped and started again. Its files lie in `folder`, which this user owns."""

    def __init__(self, folder: Path) -> None:
        self._data, self.port = folder / "data", free_port()
        self.url = f"postgresql://watchdog@127.0.0.1:{self.port}/postgres"
        self._user = "postgres" if os.getuid() == 0 else None  # PostgreSQL refuses to run as root
        folder.chmod(0o755)
        self._data.mkdir(mode=0o700)
        if self._user:
            shutil.chown(self._data, self._user)
        self._run("initdb", "-U", "watchdog", "--auth=trust", "--no-sync", "-D", str(self._data))

    def start(self) -> None:
        """Returns once it answers."""
        options = f"-p {self.port} -h 127.0.0.1 -c fsync=off -k {self._data}"
        self._run("pg_ctl", "start", "-w", "-D", str(self._data), "-o", options, "-l", str(self._data / "log"))

    def stop(self) -> None:
        """At once, as a crash does."""
        self._run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", str(self._data))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", str(self._data), check=False)

    def _run(self, name: str, *arguments: str, check: bool = True) -> None:
        # Not subprocess's own `user`: that forks, and gRPC's threads in this process make the child of a fork crash now and then.
        command = [*(("runuser", "-u", self._user, "--") if self._user else ()), program(name) or name, *arguments]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        done = subprocess.run(command, cwd="/", check=False, **quiet)
        assert done.returncode == 0 or not check, f"{name} failed: see {self._data}"


_NOBODY = "route: {receiver: none, group_by: [alertname, training_job]}\nreceivers: [{name: none}]\n"
_READY_S = 30.0


class AlertmanagerServer:
    """A real one, with its files in `folder`. `config` is its alertmanager.yml; by itself it tells nobody."""

    def __init__(self, folder: Path, config: str = _NOBODY) -> None:
        self.port = free_port()
        (folder / "alertmanager.yml").write_text(config)
        self._command = [
            program("prometheus-alertmanager") or "", f"--config.file={folder / 'alertmanager.yml'}", f"--storage.path={folder / 'am'}",
            f"--web.listen-address=127.0.0.1:{self.port}", "--cluster.listen-address=",
        ]  # fmt: skip

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _READY_S
        while not self._is_ready():
            assert time.monotonic() < deadline, "Alertmanager did not start"
            time.sleep(0.05)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()

    def alerts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"http://127.0.0.1:{self.port}/api/v2/alerts").json()
        return found

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/-/ready").is_success
        except httpx.HTTPError:
            return False
