"""`watchdog serve --host`: TLS and the token, or no port at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.errors import WatchdogError

NAME = "0.0.0.0"  # every address: TLS; a connection to it stays on this machine


def serve(folder: Path, *arguments: str, token: str | None) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_WATCHDOG")}
    if token is not None:
        (folder / "token").write_text(token)
        kept["TORCH_WATCHDOG_TOKEN_FILE"] = str(folder / "token")
    command = [sys.executable, "-m", "torch_watchdog.cli", "serve", "--port", "0", "--dir", str(folder / "runs"), *arguments]
    return subprocess.Popen(command, env=kept, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("token", "words"), [(None, "TORCH_WATCHDOG_TOKEN_FILE"), ("short", "32 or more")])
def test_no_port_opens_off_this_host_without_a_token_that_is_strong(tmp_path: Path, token: str | None, words: str) -> None:
    process = serve(tmp_path, "--host", "0.0.0.0", token=token)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (1, 2) and words in said


def test_holders_of_the_token_get_in_and_nobody_else(tmp_path: Path) -> None:
    token = "t" * 43
    process = serve(tmp_path, "--host", NAME, token=token)
    try:
        assert process.stderr is not None
        address = next(line for line in process.stderr if "daemon at " in line).split("daemon at ")[1].split(",")[0]
        with DaemonClient(address, token=token) as client:
            assert client.jobs() == ()
        with DaemonClient(address, token="u" * 43, timeout_s=3) as client, pytest.raises(WatchdogError):
            client.jobs()
        with grpc.insecure_channel(address) as plain, pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(plain).result(timeout=2)
    finally:
        process.terminate()
        process.communicate(timeout=60)
