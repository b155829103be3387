"""Starts two ranks of a script, as a launcher does, without loading torch itself: the suite starts hundreds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

GRACE_S = 10.0


def main() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [start(rank, port) for rank in range(2)]
    while all(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
    deadline = time.monotonic() + (GRACE_S if any(rank.poll() for rank in ranks) else 600.0)
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
        if any(rank.poll() for rank in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(signal.SIGTERM)
    codes = [rank.wait(60) for rank in ranks]
    return next((1 if code < 0 else code for code in codes if code), 0)


def start(rank: int, port: int) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, **{name: str(value) for name, value in place.items()}})


if __name__ == "__main__":
    sys.exit(main())
