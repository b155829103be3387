"""A rank that only observes, around a user's script: what it tells its node process and records in its ring is what the hooks have heard."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch_watchdog_agent
from torch_watchdog_agent.config import ENVIRONMENT, AgentConfig
from torch_watchdog_proto.frames import Decoder
from torch_watchdog_proto.messages import Noticed, Refused, Violation
from torch_watchdog_proto.record import KeyNamed, MicroStep, RingReader, StepDone, TensorSeen, TokenizerSeen

TIMEOUT_S = 110
SCRIPTS = Path(__file__).parent / "scripts"
SHIM = Path(next(iter(torch_watchdog_agent.__path__))) / "_shim"


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Of one step with one batch."""

    loader_ns: int
    forward_ns: int
    backward_ns: int
    update_ns: int
    step_ns: int


@dataclass(frozen=True)
class Heard:
    """`printed`: the last line of the script's output, as JSON; `losses` by (step, micro-step), None where none was seen; `tensors` as (key, shape)."""

    printed: Any
    noticed: list[Violation]
    losses: dict[tuple[int, int], float | None]
    evaluated: int
    steps: list[int]
    tensors: list[tuple[str, tuple[int, ...]]]
    complaints: list[str]
    reaches: list[float]
    tokenizers: set[int]
    phases: list[Phases]

    @property
    def samples(self) -> list[tuple[int | None, int | None]]:
        """(index in the data set, worker) of each bad sample, in order."""
        return [(one.batch.sample.dataset_index, one.batch.sample.worker) for one in self.noticed if one.batch.sample is not None]


def listen_to(folder: Path, script: str, *arguments: object, policy: str = "observe") -> Heard:
    """Runs the script as the one rank of a launch, and returns what was heard of it."""
    told: list[Any] = []
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(folder / "control.sock"))
        line.listen(1)
        listener = threading.Thread(target=_listen, args=(line, told), daemon=True)
        listener.start()
        done = run_script(folder, script, [str(argument) for argument in arguments], policy)
        line.shutdown(socket.SHUT_RDWR)
        listener.join(TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    violations = [message.violation for message in told if isinstance(message, (Noticed, Refused))]
    return _heard(folder, json.loads(done.stdout.splitlines()[-1]), violations, done.stderr)


def run_script(folder: Path, script: str, arguments: list[str], policy: Any, **more: Any) -> subprocess.CompletedProcess[str]:
    at = str(folder)
    config = AgentConfig(
        job="j", session="s", policy=policy, run_dir=at, runtime_dir=at, ring_dir=at, version="0", launcher_pid=1, keeper=False, solo=True,
        **more,
    )  # fmt: skip
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    ours = {ENVIRONMENT: config.to_env(), "PYTHONPATH": os.pathsep.join([str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])])}
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    return subprocess.run(command, env={**kept, **quiet, **ours}, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder)


def _listen(line: socket.socket, told: list[Any]) -> None:
    try:
        connection, _ = line.accept()
    except OSError:
        return  # no rank ever spoke
    decoder = Decoder()
    with connection:
        while data := connection.recv(65536):
            told += decoder.feed(data)


def _heard(folder: Path, printed: Any, noticed: list[Violation], errors: str) -> Heard:
    losses: dict[tuple[int, int], float | None] = {}
    evaluated, steps, tensors, keys = 0, [], [], {}
    reaches, tokenizers, phases, batch = [], set(), [], None
    for path in folder.glob("*.ring"):
        records, _ = RingReader(memoryview(path.read_bytes())).read(1 << 20)
        for record in records:
            if isinstance(record, MicroStep):
                batch = record
                evaluated += record.evaluation
                if not record.evaluation:
                    reaches.append(record.reach)
                    losses[record.step, record.micro_step] = record.loss if record.loss_known else None
            elif isinstance(record, StepDone):
                steps.append(record.micro_steps)
                if batch is not None and batch.step == record.step:
                    phases.append(
                        Phases(
                            loader_ns=batch.loader_ns, forward_ns=batch.forward_ns, backward_ns=record.backward_ns, update_ns=record.update_ns,
                            step_ns=record.step_ns,
                        )
                    )  # fmt: skip
            elif isinstance(record, KeyNamed):
                keys[record.key_id] = record.name
            elif isinstance(record, TokenizerSeen):
                tokenizers.add(record.tokens)
            elif isinstance(record, TensorSeen):
                tensors.append((keys[record.key_id], tuple(record.shape)))
    said = [line for line in errors.splitlines() if line.startswith("[torch-watchdog]")]
    found = ": policy observe, so the training goes on unchanged"  # no complaint of its own
    complaints = [line for line in said if found not in line]
    return Heard(printed, noticed, losses, evaluated, steps, tensors, complaints, reaches, tokenizers, phases)
