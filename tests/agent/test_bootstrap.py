"""Which processes of a launch are ranks, told by their environment and their parent alone."""

from __future__ import annotations

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
