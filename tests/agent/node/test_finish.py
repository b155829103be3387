"""The end of a launch whose daemon does not answer: whoever looks at the terminal is told what is waited for."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import pytest

from torch_watchdog_agent.node import agent
from torch_watchdog_agent.node.agent import NodeAgent
from torch_watchdog_agent.node.config import JobOutcome, NodeConfig


def test_a_wait_that_is_long_enough_to_wonder_about_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_SILENT_S", 0.01)
    ending = concurrent.futures.Future[JobOutcome]()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        ending.set_result(JobOutcome(exit_code=65))  # it answers while the line is told

    config = NodeConfig(
        job="j", node="n", session="s", policy="stop", command=("train",), run_dir=tmp_path, runtime_dir=tmp_path, ring_dir=tmp_path, daemon="unix:/nowhere"
    )  # fmt: skip
    assert NodeAgent(config, say=say)._waited_for(ending, 10.0).exit_code == 65
    assert len(said) == 1 and "the daemon does not answer, and is waited for up to 10 s" in said[0]
