"""numpy comes into the wrapper of a training: quietly, and alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from torch_watchdog.numpy_loading import load_numpy
load_numpy()
threads = next(line for line in open("/proc/self/status") if line.startswith("Threads"))
print("numpy" in sys.modules, threads.split()[1], os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.parametrize("of_the_user", [None, "7"])
def test_it_is_loaded_without_threads_and_leaves_the_environment_as_it_was(of_the_user: str | None) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environment = kept | ({} if of_the_user is None else {"OPENBLAS_NUM_THREADS": of_the_user})
    told = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", "1", str(of_the_user)]
