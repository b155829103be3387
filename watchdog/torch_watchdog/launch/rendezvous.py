"""Where the nodes of one launch meet, as its own command line and environment say it: our nodes find each other by the same address.

Pure: words, variables and (for accelerate) the settings of its file in, a Rendezvous out. It must not know sockets, files or the daemon.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from torch_watchdog.launch.plan import LAUNCHER_MODULES, is_by_accelerate, option, script_position, starts_uncoupled_machines

__all__ = ["Rendezvous", "accelerate_file", "rendezvous_of"]

_PORT = "29500"  # torchrun's and accelerate's own default
_PORT_DISTANCE = 10_000
_ACCELERATE_NAMES = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend")
_BY_ADDRESS = frozenset({"static", "c10d"})  # etcd has an address of its own: none of the nodes is there


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """`node_rank` None: the launcher gives ranks to nodes only later, and the node whose address `host` is hosts ours too. `unused_rank`: what somebody has
    given all the same, which tells them apart where each takes `host` for itself.
    """

    nodes: int
    host: str
    port: int
    node_rank: int | None
    run_id: str = "none"
    unused_rank: int | None = None

    @property
    def key(self) -> str:
        """The same on all nodes of a launch, another for another launch at the same time."""
        return hashlib.sha256(f"{self.host}:{self.port}/{self.run_id}".encode()).hexdigest()[:16]

    @property
    def daemon_port(self) -> int:
        """Where all nodes look without being told: far from the ports that people give to their next launch."""
        return self.port - _PORT_DISTANCE if self.port >= _PORT_DISTANCE + 1024 else self.port + _PORT_DISTANCE


def rendezvous_of(command: Sequence[str], environment: Mapping[str, str], accelerate: Mapping[str, str]) -> Rendezvous | None:
    """None where there is one node only, or where the launch does not say where its nodes meet."""
    before_script = command[: script_position(command)]
    names = {PurePath(word).name for word in before_script}
    if is_by_accelerate(command):
        return None if starts_uncoupled_machines(command, accelerate) else _of_accelerate(before_script, accelerate)
    if "torchrun" in names or names & {name for name in LAUNCHER_MODULES if name.startswith("torch.distributed.")}:
        return _of_torchrun(before_script, environment)
    return _of_variables(environment)


def accelerate_file(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The file that accelerate reads its settings from, whether it is there or not."""
    home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or environment.get('HOME', '') + '/.cache'}/huggingface"
    return option(command[: script_position(command)], ("--config_file", "--config-file")) or f"{home}/accelerate/default_config.yaml"


def _of_torchrun(words: Sequence[str], environment: Mapping[str, str]) -> Rendezvous | None:
    def given(name: str, default: str) -> str:
        spellings = (f"--{name}", f"--{name.replace('_', '-')}")
        return option(words, spellings) or environment.get(f"PET_{name.upper()}") or default

    nodes = _number(given("nnodes", "1").rpartition(":")[2], 1)
    backend, endpoint = given("rdzv_backend", "static"), given("rdzv_endpoint", "")
    if nodes < 2 or "--standalone" in words or backend not in _BY_ADDRESS:
        return None
    host, _, port = (endpoint or f"{given('master_addr', '127.0.0.1')}:{given('master_port', _PORT)}").rpartition(":")
    return _at(nodes, host or endpoint, port if host else _PORT, backend, given("node_rank", ""), given("rdzv_id", "none"))


def _of_accelerate(words: Sequence[str], file: Mapping[str, str]) -> Rendezvous | None:
    given = {name: option(words, (f"--{name}", f"--{name.replace('_', '-')}")) or file.get(name, "") for name in _ACCELERATE_NAMES}
    nodes, host = _number(given["num_machines"], 1), given["main_process_ip"]
    backend = given["rdzv_backend"] or "static"
    if nodes < 2 or not host or backend not in _BY_ADDRESS:
        return None
    return _at(nodes, host, given["main_process_port"] or _PORT, backend, given["machine_rank"])


def _of_variables(environment: Mapping[str, str]) -> Rendezvous | None:
    """One wrapper a rank: the variables that a scheduler sets for `python train.py`."""
    world, rank, host = (environment.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR"))
    if _number(world, 1) < 2 or not rank.isdecimal() or not host:
        return None
    return _at(int(world), host, environment.get("MASTER_PORT") or _PORT, "static", rank)


def _at(nodes: int, host: str, port: str, backend: str, node_rank: str, run_id: str = "none") -> Rendezvous | None:
    number = _number(port, 0)
    if not 0 < number < 65_536:
        return None  # 0: any free port, which no other node can know
    is_static, given = backend == "static", int(node_rank) if node_rank.isdecimal() else None
    return Rendezvous(
        nodes=nodes, host=host.strip("[]"), port=number, node_rank=(given or 0) if is_static else None, run_id=run_id,
        unused_rank=None if is_static else given,
    )  # fmt: skip


def _number(text: str, default: int) -> int:
    return int(text) if text.isdecimal() else default
