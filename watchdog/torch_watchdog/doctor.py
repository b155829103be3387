"""What works on this machine: each check looks at one thing and says ok, warn or fail, and what to do.

Owns the checks. A check that cannot even look reports that as its finding. The Python that runs this, into whose environment torch-watchdog was installed,
is asked in a process of its own: this one never imports torch. It must not know how findings are printed.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch_watchdog.config import SITE_FILE
from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.daemon.config import DaemonConfig
from torch_watchdog.daemon.embedded import EmbeddedDaemon
from torch_watchdog.errors import WatchdogError
from torch_watchdog.launch.places import MEMORY, open_ring_dir, open_runtime_dir
from torch_watchdog.launch.watch import shim_dir
from torch_watchdog_proto import __version__

__all__ = ["Changes", "Finding", "changes", "examine"]

State = Literal["ok", "warn", "fail"]

OLDEST_TORCH = (2, 4)
RING_BYTES_PER_NODE = 16 << 20
PROBE_TIMEOUT_S = 120.0

_PROBE = """
import json, sys
found = {"python": sys.version.split()[0], "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None)}
found["isolated"] = bool(sys.flags.isolated or sys.flags.ignore_environment or sys.flags.no_site)
for name in ("numpy", "wrapt", "torch_watchdog_agent", "torch_watchdog_proto", "torch"):
    try:
        module = __import__(name)
        found[name] = str(getattr(module, "__version__", "there"))
    except Exception as error:
        found[name + "_error"] = f"{type(error).__name__}: {error}"
if "torch" in found:
    import torch
    found["cuda"], found["gpus"] = torch.version.cuda, torch.cuda.device_count()
try:
    from torch_watchdog_agent.hooks.install import HOOKS
    found["hooks"] = HOOKS
except Exception as error:
    found["hooks_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`advice` says what to do where `state` is not ok."""

    name: str
    state: State
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """All that a wrapped launch gets: variables for every process below it, patches in the ranks (module -> hook)."""

    variables: Mapping[str, str]
    patches: Mapping[str, str]


def examine(*, directory: Path, enabled: bool = True) -> Iterator[Finding]:
    """Every finding as it is made; the slow ones come last. `enabled`: as this machine's site has it."""
    yield Finding(name="torch-watchdog", state="ok", text=f"{__version__} on Python {platform.python_version()}")
    yield _switch(enabled)
    yield _attempt("run directory", lambda: _run_directory(directory), "pass --dir DIR with a folder that can be written to")
    yield _attempt(
        "shared memory",
        _shared_memory,
        "the rings fall back to the runtime folder; in a container pass --shm-size or mount /dev/shm",
        "warn",
    )
    yield _attempt("runtime folder", _runtime_folder, "set TMPDIR or XDG_RUNTIME_DIR to a short path that only you can enter")
    yield _attempt("daemon", _daemon, "without a daemon a launch runs plain: reinstall grpcio and protobuf, and look at the sentence above")
    yield _attempt("gpu facts", _nvml, "fine on a CPU machine; with a GPU, install the driver's libnvidia-ml", "warn")
    yield _stacks()
    yield from _training_python()


def _attempt(name: str, look: Callable[[], str], advice: str, state: State = "fail") -> Finding:
    try:
        return Finding(name=name, state="ok", text=look())
    except (OSError, WatchdogError, ImportError, RuntimeError) as error:
        return Finding(name=name, state=state, text=str(error), advice=advice)


def _switch(enabled: bool) -> Finding:
    if not enabled:
        advice = "whoever looks after this machine has set enabled = false there"
        return Finding(name="switch", state="warn", text=f"{SITE_FILE}: launches run plain", advice=advice)
    if os.environ.get("TORCH_WATCHDOG", "").lower() == "off":
        return Finding(name="switch", state="warn", text="TORCH_WATCHDOG=off: launches run plain", advice="unset TORCH_WATCHDOG")
    return Finding(name="switch", state="ok", text="launches are watched (TORCH_WATCHDOG=off turns that off)")


def _run_directory(directory: Path) -> str:
    """The folder itself, or the nearest one above it that is there."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    with tempfile.TemporaryFile(dir=there):
        return f"{directory} can be written to"


def _shared_memory() -> str:
    with open_ring_dir("doctor-" + str(os.getpid())) as path:
        free = shutil.disk_usage(path).free
    if free < RING_BYTES_PER_NODE:
        raise OSError(f"{MEMORY} has {free >> 20} MiB free, a node's rings need {RING_BYTES_PER_NODE >> 20} MiB")
    return f"{MEMORY} has {free >> 20} MiB free"


def _runtime_folder() -> str:
    with open_runtime_dir("doctor-" + str(os.getpid()), os.environ) as path:
        return str(path.parent)


def _daemon() -> str:
    """A real one, asked over its socket."""
    with open_runtime_dir("doctor-" + str(os.getpid()), os.environ) as folder:
        config = DaemonConfig(runs_dir=folder / "runs", listen=(f"unix:{folder / 'daemon.sock'}",))
        with EmbeddedDaemon(config) as daemon, DaemonClient(daemon.addresses[0]) as client:
            client.jobs()
    return "starts, and answers over its socket"


def _nvml() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        return f"{pynvml.nvmlDeviceGetCount()} GPUs, driver {pynvml.nvmlSystemGetDriverVersion()}"
    except pynvml.NVMLError as error:
        raise OSError(f"NVML does not answer ({error})") from error


def _stacks() -> Finding:
    advice = "install py-spy to get stacks of a rank that hangs"
    where = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))  # as a node looks for it
    return (
        Finding(name="stacks", state="ok", text=where) if where else Finding(name="stacks", state="warn", text="no py-spy", advice=advice)
    )


def _training_python() -> Iterator[Finding]:
    """The one that this runs under: does it start our shim, and can the agent live in it?"""
    found = _probe(sys.executable)
    if "failure" in found:
        yield Finding(name="python", state="fail", text=f"{sys.executable}: {found['failure']}", advice="run it by hand: it must start")
        return
    yield _shim_runs(sys.executable, found)
    yield _agent_lives(found)
    yield _torch(found)
    yield _on_path()


def _on_path() -> Finding:
    """What `watchdog python train.py` would run. Environments are told apart by their prefix: a link or a shim may lie anywhere."""
    python = shutil.which("python") or shutil.which("python3")
    advice = f"activate the environment that trains, or name its programs by their paths, as {sys.executable}"
    if python is None:
        return Finding(name="path", state="warn", text="there is no python on PATH", advice=advice)
    try:
        asked = [python, "-c", "import sys; print(sys.prefix)"]
        prefix = subprocess.run(asked, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(name="path", state="warn", text=f"{python}: {error}", advice=advice)
    if prefix == sys.prefix:
        return Finding(name="path", state="ok", text=f"{python} is of the same environment")
    text = f"{python} is of another environment, {prefix}: `watchdog python train.py` runs that one, which is not what was looked at here"
    return Finding(name="path", state="warn", text=text, advice=advice)


def _probe(python: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, (shim_dir(), os.environ.get("PYTHONPATH"))))}
    try:
        done = subprocess.run([python, "-c", _PROBE], env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"failure": str(error)}
    return found


def _shim_runs(python: str, found: Mapping[str, Any]) -> Finding:
    if found["isolated"] or found["sitecustomize"] is None:
        advice = "start it without -I, -E and -S, and without PYTHONNOSITE: these keep us out"
        return Finding(name="python", state="fail", text=f"{python} does not run our start-up code", advice=advice)
    return Finding(name="python", state="ok", text=f"{python}, {found['python']}")


def _agent_lives(found: Mapping[str, Any]) -> Finding:
    missing = [found[name] for name in ("torch_watchdog_agent_error", "wrapt_error", "numpy_error", "hooks_error") if name in found]
    if missing:
        advice = "pip install torch-watchdog in the environment that trains"
        return Finding(name="agent", state="fail", text=missing[0], advice=advice)
    return Finding(name="agent", state="ok", text="can be imported there")


def _torch(found: Mapping[str, Any]) -> Finding:
    if "torch" not in found:
        advice = "activate the environment that trains: only the ranks need torch"
        return Finding(name="torch", state="warn", text=found["torch_error"], advice=advice)
    numbers = tuple(int(part) for part in found["torch"].split("+")[0].split(".")[:2])
    text = f"{found['torch']}, " + (f"CUDA {found['cuda']}, {found['gpus']} GPUs" if found["cuda"] else "CPU build")
    if numbers < OLDEST_TORCH:
        return Finding(name="torch", state="fail", text=text, advice="torch 2.4 or newer is needed: an older one is not watched")
    return Finding(name="torch", state="ok", text=text)


def changes() -> Changes:
    """Raises RuntimeError where the Python that this runs under cannot be asked."""
    found = _probe(sys.executable)
    if "hooks" not in found:
        raise RuntimeError(str(found.get("failure") or found.get("hooks_error")))
    variables = {
        "PYTHONPATH": f"{shim_dir()} comes first, the rest is kept",
        "TORCH_WATCHDOG_AGENT": "one JSON object: job, session, policy and folders of this launch",
        "TORCH_WATCHDOG_PID": "in ranks: the process that is the rank, so that its children are none",
        "TORCH_WATCHDOG_KEPT": "in ranks: the rank and its keeper",
    }
    return Changes(variables=variables, patches=found["hooks"])
