"""Which processes of a launch are ranks, told by their environment and their parent alone."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_watchdog_agent.bootstrap import is_rank
from torch_watchdog_agent.config import AgentConfig

WRAPPER, COMMAND, CHILD = 10, 11, 12


def config(*, solo: bool = False, by_accelerate: bool = False) -> AgentConfig:
    return AgentConfig(
        job="j", session="s", policy="stop", run_dir="/r", runtime_dir="/r", ring_dir="/r", version="0.1.0", launcher_pid=WRAPPER,
        solo=solo, by_accelerate=by_accelerate,
    )  # fmt: skip


SOLO, ACCELERATE, TORCHRUN = config(solo=True), config(solo=True, by_accelerate=True), config()


@pytest.mark.parametrize(
    ("launch", "pid", "environment", "expected"),
    [
        (TORCHRUN, COMMAND, {}, False),  # torchrun itself
        (TORCHRUN, CHILD, {"RANK": "0"}, True),
        (TORCHRUN, CHILD, {"RANK": "0", "TORCH_WATCHDOG_PID": str(CHILD)}, True),  # the rank after an exec
        (TORCHRUN, CHILD + 1, {"RANK": "0", "TORCH_WATCHDOG_PID": str(CHILD)}, False),  # a rank's loader worker
        (SOLO, COMMAND, {}, True),
        (ACCELERATE, COMMAND, {}, False),  # accelerate itself
        (ACCELERATE, CHILD, {}, True),  # its one process
        (ACCELERATE, CHILD, {"RANK": "1"}, True),  # one of its several
        (
            ACCELERATE,
            CHILD,
            {"OMPI_COMM_WORLD_SIZE": "2"},
            False,
        ),  # of several too, by a hostfile in its configuration: they would all be rank 0
    ],
)
def test_a_process_is_a_rank_or_not(launch: AgentConfig, pid: int, environment: dict[str, str], expected: bool) -> None:
    parent = WRAPPER if pid == COMMAND else COMMAND
    assert is_rank(launch, environment, pid=pid, parent_pid=parent) is expected


AGENT = Path(__file__).parents[2] / "agent" / "torch_watchdog_agent"


def in_watched_python(code: str, folder: Path) -> list[str]:
    """What `code` prints in the one process of a solo launch, with a module `torch` of a line in its folder."""
    (folder / "torch.py").write_text("import sys; first = 'torch_watchdog_agent.hooks.active' in sys.modules\n")
    text = dataclasses.replace(SOLO, run_dir=str(folder), keeper=False).to_env()
    environment = os.environ | {
        "PYTHONPATH": f"{AGENT / '_shim'}:{folder}:{os.environ.get('PYTHONPATH', '')}",
        "TORCH_WATCHDOG_AGENT": text,
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize(("ranks", "printed"), [({"TORCH_WATCHDOG_RANKS": "1"}, "1 False"), ({}, "None False")])
def test_a_process_that_a_rank_starts_as_another_rank_is_told_its_number(
    ranks: dict[str, str], printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning tells LOCAL_RANK only; what it starts itself is not meant by the sign any more."""
    for name, value in ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"} | ranks).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    assert in_watched_python("import os; print(os.environ.get('RANK'), 'TORCH_WATCHDOG_RANKS' in os.environ)", tmp_path) == [printed]


def test_a_python_that_never_imports_torch_does_not_pay_for_the_hooks(tmp_path: Path) -> None:
    loaded = "print(*(name for name in sys.modules if name.partition('.')[0] in ('wrapt', 'asyncio', 'torch_watchdog_proto')))"
    assert in_watched_python(f"import sys; {loaded}", tmp_path) == [""]


def test_the_hooks_are_there_once_torch_is_imported_and_not_before(tmp_path: Path) -> None:
    code = "import sys, torch; from torch_watchdog_agent.hooks import active; print(torch.first, active._config is not None)"
    assert in_watched_python(code, tmp_path) == ["False True"]


def test_where_torch_is_absent_its_import_fails_as_without_us(tmp_path: Path) -> None:
    code = f"import sys; sys.path.remove({str(tmp_path)!r}); sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\nimport torch"
    assert in_watched_python(code, tmp_path)[-1] == "ModuleNotFoundError: No module named 'torch'"
