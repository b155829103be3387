"""What the workers of a data loader are doing, seen from beside them, on real ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torch_watchdog_agent.group import lives
from torch_watchdog_agent.node.loaders import look_at_loader

SCRIPT = """
import sys, time
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        while index == 0:
            time.sleep(1000)
        return index

if __name__ == "__main__":
    next(iter(DataLoader(Rows(), num_workers=2, multiprocessing_context=sys.argv[1])))
"""


@contextmanager
def loading(folder: Path, how: str) -> Iterator[int]:
    """A process whose loader has one worker that never comes back with its batch, and one that has nothing left to do."""
    (folder / "rows.py").write_text(SCRIPT)
    with subprocess.Popen([sys.executable, str(folder / "rows.py"), how], start_new_session=True) as process:
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGTERM)  # a worker that sleeps does not look for its parent
            until_ended(process.pid)


def until_ended(group: int) -> None:
    """Python's tracker of its semaphores, too: killed with the others it would leave them."""
    deadline = time.monotonic() + 30
    while lives(group) and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["fork", "forkserver"])
def test_a_worker_that_is_stuck_in_the_data_set_is_told_from_one_that_has_nothing_to_do(tmp_path: Path, how: str) -> None:
    with loading(tmp_path, how) as pid:
        deadline, awaited = time.monotonic() + 90, (f"rank, pid {pid}: waits", "Rows.__getitem__ (rows.py:", "for the loop to ask")
        text = look_at_loader(pid)
        while not all(word in text for word in awaited):  # on its way into any of them it runs, for as long as others do
            assert time.monotonic() < deadline, text
            text = look_at_loader(pid)
    heads = [line for line in text.splitlines() if not line.startswith(" ")]
    assert heads[0].startswith(f"rank, pid {pid}: waits") and len(heads) == 3
    stuck, idle = sorted(heads[1:], key=lambda line: "for the loop to ask" in line)
    assert stuck.startswith("worker, pid ") and ", in Rows.__getitem__ (rows.py:1" in stuck
    assert idle.endswith(", for the loop to ask for a batch")
    assert "    _worker_loop (torch/utils/data/_utils/worker.py:" in text


def test_a_rank_that_has_ended_has_no_workers() -> None:
    assert look_at_loader(2**22 + 1) == f"rank, pid {2**22 + 1}: has ended\n"
