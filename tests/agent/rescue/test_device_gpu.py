"""The gate on a real device: its words outlive the rank, and a copy that never ends is given up."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torch_watchdog_agent.node.rings import RingFolder
from torch_watchdog_agent.recorder import Recorder
from torch_watchdog_agent.rescue import device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from torch_watchdog_agent.recorder import Recorder
from torch_watchdog_agent.rescue.device import DeviceGate

ring = Recorder(Path(sys.argv[1]), rank=0, attempt=0, world_size=1, local_world_size=1)
gate = DeviceGate(torch.device("cuda", 0), ring.device_words)
for update in range(1, 8):
    if update == 6:
        gate.close()  # the device comes no further; Python does
    gate.before_update(update)
    torch.ones(1000, device="cuda").sum()
    gate.after_update(update)
while gate.done < 5:
    pass
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def shm() -> Iterator[Path]:
    """Where rings lie: a driver takes no memory of a file on a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_how_far_the_device_was_is_read_from_the_ring_of_a_rank_that_was_killed(shm: Path) -> None:
    run = subprocess.run([sys.executable, "-c", KILLED, str(shm)], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout, run.stderr
    rings = RingFolder(shm, is_alive=lambda pid: False, say=print)
    rings.poll()
    assert rings.updates_on_device(int(run.stdout)) == 5


@pytest.mark.parametrize("shared", [True, False])
def test_a_copy_that_never_ends_is_given_up_and_the_gate_opens_again(shm: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    ring = Recorder(shm, rank=0, attempt=0, world_size=1, local_world_size=1)
    gate = device.DeviceGate(torch.device("cuda", 0), ring.device_words if shared else None)
    values = torch.arange(5.0, device="cuda")
    gate.before_update(1)
    gate.after_update(1)
    torch.cuda.synchronize()
    assert (gate.done, gate.is_between_updates) == (1, True)
    assert gate.read(lambda: gate.to_host([values]), within_s=30.0)[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    gate.close()
    with torch.cuda.stream(gate._beside):
        gate.before_update(2)  # what the copies are launched on waits behind the gate, too
    monkeypatch.setattr(device, "STALL_S", 0.3)
    with pytest.raises(TimeoutError, match="does not answer any more"):
        gate.read(lambda: gate.to_host({"a": values}), within_s=30.0)
    gate.open()
    torch.cuda.synchronize()
    assert gate.answers(values, within_s=3.0)


@pytest.mark.parametrize("launches", [1, 5000], ids=["behind a closed gate", "with a full launch queue"])
def test_a_device_is_busy_until_what_was_launched_is_done(launches: int) -> None:
    gate = device.DeviceGate(torch.device("cuda", 0))
    values = torch.ones(1000, device="cuda")
    values.add_(1)
    torch.cuda.synchronize()
    assert not gate.is_busy(within_s=5.0)
    gate.close()
    gate.before_update(1)
    stream = torch.cuda.current_stream()

    def launch() -> None:
        with torch.cuda.stream(stream):
            for _ in range(launches):
                values.add_(1)

    training = threading.Thread(target=launch)
    training.start()
    training.join(1.0)
    began = time.monotonic()
    assert gate.is_busy(within_s=0.5) and gate.is_busy(within_s=0.5)
    assert time.monotonic() - began < 5.0
    gate.open()
    training.join(60)
    torch.cuda.synchronize()
    assert not gate.is_busy(within_s=5.0)
