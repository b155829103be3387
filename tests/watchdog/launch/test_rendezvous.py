"""Where the nodes of a launch meet, read from what a person or a scheduler has written for the launcher."""

from __future__ import annotations

import pytest

from torch_watchdog.launch.rendezvous import Rendezvous, accelerate_file, rendezvous_of


def of(line: str, environment: dict[str, str] | None = None, file: dict[str, str] | None = None) -> tuple[int, str, int, int | None] | None:
    found = rendezvous_of(line.split(), environment or {}, file or {})
    return None if found is None else (found.nodes, found.host, found.port, found.node_rank)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun --nnodes 2 --node-rank 1 --master-addr n0 --master-port 7 train.py", (2, "n0", 7, 1)),
        ("torchrun --nnodes=2 --node_rank=0 --master_addr=n0 train.py", (2, "n0", 29500, 0)),
        ("torchrun --nnodes 2 --node-rank 1 --rdzv-endpoint n0:99 train.py", (2, "n0", 99, 1)),
        ("torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint n0:99 train.py", (4, "n0", 99, None)),
        ("torchrun --nnodes 1:4 --rdzv_backend=c10d --rdzv_endpoint=n0 train.py", (4, "n0", 29500, None)),
        ("torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint [fd00::1]:99 train.py", (2, "fd00::1", 99, None)),
        ("python -m torch.distributed.run --nnodes 2 --node-rank 1 --master-addr n0 -m pkg.train --nnodes 9", (2, "n0", 29500, 1)),
        ("srun torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint n0:1 train.py", (2, "n0", 1, None)),
    ],
)
def test_torchrun_says_it_by_its_flags(line: str, expected: tuple[int, str, int, int | None]) -> None:
    assert of(line) == expected


def test_torchrun_says_it_by_its_variables_and_a_flag_beats_them() -> None:
    pet = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456"}
    assert of("torchrun train.py", pet) == (2, "job-master-0", 23456, 1)
    assert of("torchrun --node-rank 0 train.py", pet) == (2, "job-master-0", 23456, 0)


@pytest.mark.parametrize(
    "line",
    [
        "torchrun train.py --nnodes 2",
        "torchrun --standalone --nnodes 2 train.py",
        "torchrun --nnodes 2 --rdzv-backend etcd-v2 --rdzv-endpoint etcd:2379 train.py",
        "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint n0:0 train.py",
        "accelerate launch --num_machines 1 train.py",
        "accelerate launch --num_machines 2 train.py",
        "deepspeed --hostfile hosts train.py",
        "python train.py",
    ],
)
def test_one_node_or_a_meeting_place_that_nobody_names_is_none(line: str) -> None:
    assert of(line) is None


def test_accelerate_says_it_by_flags_or_by_its_file() -> None:
    flags = "accelerate launch --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 5 train.py"
    file = {"num_machines": "2", "machine_rank": "1", "main_process_ip": "10.0.0.1", "main_process_port": "5"}
    assert of(flags) == of("accelerate launch train.py", file=file) == (2, "10.0.0.1", 5, 1)
    assert of("accelerate launch --machine_rank 0 train.py", file=file) == (2, "10.0.0.1", 5, 0)
    assert of("accelerate launch train.py", file=file | {"rdzv_backend": "c10d"}) == (2, "10.0.0.1", 5, None)


def test_machines_that_accelerate_starts_on_cpus_are_coupled_by_nothing_and_are_jobs_of_their_own() -> None:
    flags = "--num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 5 train.py"
    assert of(f"accelerate launch --cpu {flags}") is None
    assert of(f"accelerate launch {flags}", file={"use_cpu": "true"}) is None
    assert of(f"accelerate launch --multi_gpu {flags}", file={"use_cpu": "true"}) == (2, "10.0.0.1", 5, 1)
    assert of(f"accelerate launch {flags}", file={"use_cpu": "false"}) == (2, "10.0.0.1", 5, 1)


def test_accelerates_file_is_the_one_that_it_is_given_or_its_default() -> None:
    assert accelerate_file(["accelerate", "launch", "--config_file", "a.yaml", "train.py"], {}) == "a.yaml"
    assert accelerate_file(["accelerate", "launch", "train.py"], {"HOME": "/h"}) == "/h/.cache/huggingface/accelerate/default_config.yaml"
    assert accelerate_file(["accelerate", "launch", "train.py"], {"HF_HOME": "/hf"}) == "/hf/accelerate/default_config.yaml"


def test_a_rank_of_a_scheduler_says_it_by_the_variables_of_torch() -> None:
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23"}
    assert of("python train.py", ranks) == (2, "pod-0", 23, 1)
    assert of("python train.py", ranks | {"WORLD_SIZE": "1"}) is None


def meeting(**more: object) -> Rendezvous:
    return Rendezvous(**{"nodes": 2, "host": "n0", "port": 29500, "node_rank": 0} | more)  # type: ignore[arg-type]


def test_all_nodes_of_a_launch_have_one_key_and_other_launches_another() -> None:
    assert meeting().key == meeting(node_rank=1, nodes=4).key
    assert len({meeting().key, meeting(port=29501).key, meeting(host="n1").key, meeting(run_id="7").key}) == 4


@pytest.mark.parametrize(("port", "daemons"), [(29500, 19500), (65535, 55535), (11024, 1024), (11023, 21023), (1, 10001)])
def test_the_daemons_port_follows_from_the_launchers_and_needs_no_privilege(port: int, daemons: int) -> None:
    assert meeting(port=port).daemon_port == daemons
