"""The examples of the public API, as its docstrings and agent/README.md show them: they run as they stand, unwatched and in a wrapped launch."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import torch_watchdog_agent

pytestmark = pytest.mark.e2e

REPO = Path(__file__).resolve().parents[2]
PRELUDE = """
import os, sys, torch
import torch_watchdog_agent
import torch_watchdog_agent as watchdog
rank, BAD = 0, int(os.environ.get("BAD", "-1"))
torch.manual_seed(0)

def my_batches():
    for step in range(8):
        ids = torch.arange(12).reshape(4, 3) % 10
        if step == BAD:
            ids = ids + 10
        yield ids, torch.arange(4) % 2

my_generator = my_batches

def build_model():
    return torch.nn.Sequential(torch.nn.Embedding(12, 4), torch.nn.Flatten(), torch.nn.Linear(12, 2))

def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

def train_step(model, optimizer, ids, labels):
    loss = torch.nn.functional.cross_entropy(model(ids), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def update(of, gradients):
    with torch.no_grad():
        for parameter, gradient in zip(of.parameters() if hasattr(of, "parameters") else of, gradients):
            parameter -= 0.1 * gradient

model = build_model()
optimizer = build_optimizer(model)
parameters = list(model.parameters())
loss = torch.nn.functional.cross_entropy(model(torch.zeros(4, 3, dtype=torch.long)), torch.zeros(4, dtype=torch.long))
"""
TRAINS = """
for batch in torch_watchdog_agent.watch(my_batches()):
    train_step(model, optimizer, *batch)
"""


def example_of(name: str) -> str:
    """The indented block of its docstring."""
    text = textwrap.dedent((getattr(torch_watchdog_agent, name).__doc__ or "").partition("\n")[2])
    lines = [line for line in text.splitlines() if line.startswith("    ") or not line]
    return textwrap.dedent("\n".join(lines)).strip()


def of_the_readme() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (REPO / "agent" / "README.md").read_text(), re.DOTALL)


def run(folder: Path, program: str, *wrapper: str, **more: str) -> subprocess.CompletedProcess[str]:
    script = folder / "example.py"
    script.write_text(PRELUDE + program + "\nprint('through')\n")
    known = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_WATCHDOG")}
    command = [*wrapper, sys.executable, str(script)]
    return subprocess.run(command, cwd=folder, env=known | more, capture_output=True, text=True, timeout=100, check=False)


WATCHDOG = (sys.executable, "-m", "torch_watchdog.cli", "--job", "job")
NAMES = ("watch", "step", "attach", "on_checkpoint")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_shows_about_five_lines_that_run_where_nobody_watches(name: str, tmp_path: Path) -> None:
    example = example_of(name)
    assert 3 <= len(example.splitlines()) <= 6
    done = run(tmp_path, example)
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr


@pytest.mark.parametrize("name", [*NAMES, "restore", "declare_bound"])
def test_every_name_is_typed_and_documented(name: str) -> None:
    function = getattr(torch_watchdog_agent, name)
    signature = inspect.signature(function)
    told = [signature.return_annotation, *(parameter.annotation for parameter in signature.parameters.values())]
    assert name in torch_watchdog_agent.__all__ and inspect.getdoc(function)
    assert inspect.Signature.empty not in told


@pytest.mark.parametrize("name", NAMES)
def test_the_same_lines_run_under_the_watchdog(name: str, tmp_path: Path) -> None:
    done = run(tmp_path, example_of(name), *WATCHDOG)
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr


@pytest.mark.parametrize("name", ["watch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("step", "attach"))])
def test_a_bad_batch_in_the_example_is_kept_from_the_model(name: str, tmp_path: Path) -> None:
    done = run(tmp_path, example_of(name), *WATCHDOG, BAD="6")
    assert done.returncode == 65, done.stderr
    assert "allowed 0..11" in done.stderr and "through" not in done.stdout


def test_the_examples_own_save_is_what_a_stop_leaves(tmp_path: Path) -> None:
    done = run(tmp_path, example_of("on_checkpoint") + TRAINS, *WATCHDOG, BAD="6")
    assert done.returncode == 65, done.stderr
    (place,) = (tmp_path / "watchdog_runs" / "job" / "checkpoints").glob("step-*")
    assert {"rank-0.pt", "COMMITTED"} <= {path.name for path in place.iterdir()}


@pytest.mark.parametrize("number", range(len(of_the_readme())))
def test_every_example_of_the_readme_runs_as_it_stands(number: int, tmp_path: Path) -> None:
    done = run(tmp_path, of_the_readme()[number])
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr
