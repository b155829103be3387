"""A signal that the launcher would not take goes to the ranks of the node themselves."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from torch_watchdog_agent.node.agent import NodeAgent
from torch_watchdog_agent.node.config import NodeConfig
from torch_watchdog_proto.frames import encode
from torch_watchdog_proto.messages import BatchFact, Noticed, RankHello, Violation

WARNING = Violation(kind="batch.shape_mismatch", summary="s", cause="c", fix="f", batch=BatchFact(key="x"), severity="warning")


def test_a_rank_that_has_noticed_something_gets_it_too(tmp_path: Path) -> None:
    """Its words had been taken for hellos, which alone name a pid: no rank behind it got the signal, and the job was not saved."""
    config = NodeConfig(
        job="j", node="n", session="s", policy="stop", command=("train",), run_dir=tmp_path, runtime_dir=tmp_path / "run", ring_dir=tmp_path,
        daemon=f"unix:{tmp_path}/nobody",
    )  # fmt: skip
    agent = NodeAgent(config, say=lambda _: None)
    agent.start()
    ranks = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in (0, 1)]
    lines = [socket.socket(socket.AF_UNIX) for _ in ranks]
    try:
        for number, (line, process) in enumerate(zip(lines, ranks, strict=True)):
            hello = RankHello(rank=number, local_rank=number, world_size=2, pid=process.pid, attempt=0, host="h", version="0.1.0")
            line.connect(str(tmp_path / "run" / "control.sock"))
            line.sendall(encode(hello) + encode(Noticed(rank=number, step=3, micro_step=0, violation=WARNING)))
        deadline = time.monotonic() + 20
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            agent.signal_ranks(signal.SIGTERM)
            time.sleep(0.05)
        assert [process.poll() for process in ranks] == [-signal.SIGTERM] * 2
    finally:
        for line, process in zip(lines, ranks, strict=True):
            line.close()
            process.kill()
            process.wait(10)
        agent.finish(0, None, timeout_s=0.1)
