"""The launch plan: what a launch adds to the environment, what a job is called, which commands are a rank by themselves."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_watchdog.launch.plan import (
    is_by_accelerate,
    is_job_name,
    is_solo,
    job_name,
    options_to_resume,
    plan_launch,
    ranks_asked_for,
    resume_command,
    sees_all_ranks,
    with_agent,
    without_secrets,
)

NOW = datetime(2026, 1, 31, 23, 59, 58)
SHIM = "/site/torch_watchdog_agent/_shim"


def add(environment: dict[str, str]) -> dict[str, str]:
    return environment | with_agent(environment, shim_dir=SHIM, agent="{}")


def test_the_shim_comes_first_and_the_users_own_path_is_kept() -> None:
    assert add({"PYTHONPATH": "/a:/b"})["PYTHONPATH"] == f"{SHIM}:/a:/b"


@pytest.mark.parametrize("environment", [{}, {"PYTHONPATH": ""}])
def test_an_absent_or_empty_python_path_does_not_put_the_current_folder_on_it(environment: dict[str, str]) -> None:
    assert add(environment)["PYTHONPATH"] == SHIM


def test_an_empty_entry_of_the_users_path_means_the_current_folder_and_stays() -> None:
    assert add({"PYTHONPATH": "/a::/b"})["PYTHONPATH"] == f"{SHIM}:/a::/b"


@given(st.dictionaries(st.sampled_from(["PYTHONPATH", "HOME"]), st.text(alphabet="/ab:.", max_size=12)))
def test_planning_twice_is_the_same_as_once(environment: dict[str, str]) -> None:
    assert add(add(environment)) == add(environment)


def test_nothing_but_two_variables_is_added() -> None:
    plan = plan_launch(["torchrun", "train.py"], {"HOME": "/root", "RANK": "3"}, shim_dir=SHIM, agent="{}")
    assert set(plan.environment) == {"PYTHONPATH", "TORCH_WATCHDOG_AGENT"}
    assert plan.command == ("torchrun", "train.py")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["torchrun", "--nproc-per-node", "8", "train.py", "--lr", "1"], "train"),
        (["python", "/srv/my code/Fine Tune!.py"], "Fine-Tune"),
        (["python", "-m", "torch.distributed.run", "-m", "pkg.train_llm"], "train_llm"),
        (["llamafactory-cli", "train", "x.yaml"], "llamafactory-cli"),
        (["./%%%"], "job"),
    ],
)
def test_a_job_is_named_after_its_script_and_the_time(command: list[str], expected: str) -> None:
    assert job_name(command, NOW) == f"{expected}-20260131-235958"


@given(st.lists(st.text(max_size=200), min_size=1))
def test_a_derived_name_is_always_a_job_name(command: list[str]) -> None:
    assert is_job_name(job_name(command, NOW))


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "-x", "x" * 101, "a\n"])
def test_a_name_that_is_no_plain_folder_name_is_refused(name: str) -> None:
    assert not is_job_name(name)


@pytest.mark.parametrize(
    "line",
    [
        "python train.py",
        "python3.11 -u -W ignore train.py torchrun",
        "/usr/bin/python -m pkg.train",
        "./train.py",
        "uv run train.py",
        "env A=1 python train.py",
        "python -c pass",
    ],
)
def test_one_python_process_is_a_rank_by_itself(line: str) -> None:
    assert is_solo(line.split(), {})


@pytest.mark.parametrize(
    "line",
    [
        "torchrun train.py",
        "/opt/bin/torchrun train.py",
        "accelerate test",
        "accelerate launch --mpirun_hostfile hosts train.py",
        "srun accelerate launch train.py",
        "deepspeed train.py",
        "python -m torch.distributed.run train.py",
        "python /opt/bin/torchrun train.py",
        "srun python train.py",
        "bash run.sh",
        "python",
    ],
)
def test_a_launcher_or_an_unknown_program_is_no_rank(line: str) -> None:
    assert not is_solo(line.split(), {})


@pytest.mark.parametrize(
    "line",
    [
        "accelerate launch --num_processes 1 train.py",
        "/opt/bin/accelerate launch train.py",
        "accelerate-launch train.py",
        "uv run accelerate launch train.py",
        "python -u -m accelerate.commands.launch train.py",
        "python -m accelerate.commands.accelerate_cli launch train.py",
        "python /opt/bin/accelerate launch train.py",
    ],
)
def test_below_accelerate_a_process_without_rank_may_be_the_one_rank_but_not_accelerate_itself(line: str) -> None:
    assert is_solo(line.split(), {}) and is_by_accelerate(line.split())
    assert not is_solo(line.split(), {"RANK": "0"})


@pytest.mark.parametrize(
    "line", ["python train.py", "torchrun train.py", "accelerate test", "srun accelerate launch train.py", "bash run.sh"]
)
def test_other_commands_are_not_accelerates(line: str) -> None:
    assert not is_by_accelerate(line.split())


def test_where_rank_is_set_somebody_else_started_the_ranks() -> None:
    assert not is_solo(["python", "train.py"], {"RANK": "0"})


def test_a_run_that_may_have_paged_somebody_is_gone_on_with_under_its_name() -> None:
    assert options_to_resume(["--policy", "skip"], "train-1", pages=True) == ("--job", "train-1", "--policy", "skip")
    assert options_to_resume(["--job", "nightly"], "nightly.2", pages=True) == ("--job", "nightly")
    assert options_to_resume(["--policy", "skip"], "train-1", pages=False) == ("--policy", "skip")


def test_the_resume_command_keeps_the_given_options_and_the_command() -> None:
    line = resume_command(["--policy", "skip"], ["torchrun", "train.py"], "runs/j/checkpoints/step-4")
    assert line == ("watchdog", "--policy", "skip", "--resume", "runs/j/checkpoints/step-4", "torchrun", "train.py")


@pytest.mark.parametrize(
    ("line", "environment"),
    [
        ("torchrun --nproc-per-node 8 train.py", {}),
        ("torchrun --nnodes 1 train.py --nnodes-of-mine 4", {}),
        ("torchrun --nnodes=1:1 train.py", {}),
        ("accelerate launch --num_machines 1 train.py", {}),
        ("deepspeed --num_gpus 8 train.py", {}),
        ("python train.py", {"WORLD_SIZE": "1", "RANK": "0"}),
        ("python train.py", {"SLURM_NNODES": "4", "SLURM_STEP_NUM_TASKS": "1"}),
    ],
)
def test_a_launch_on_one_node_holds_every_rank(line: str, environment: dict[str, str]) -> None:
    assert sees_all_ranks(line.split(), environment, {})


@pytest.mark.parametrize(
    ("line", "environment"),
    [
        ("torchrun --nnodes 2 train.py", {}),
        ("torchrun --nnodes=1:4 train.py", {}),
        ("torchrun train.py", {"PET_NNODES": "2"}),
        ("accelerate launch --num_machines 2 train.py", {}),
        ("srun python train.py", {}),
        ("mpirun -n 8 python train.py", {}),
        ("deepspeed --hostfile hosts train.py", {}),
        ("python train.py", {"RANK": "3", "WORLD_SIZE": "8"}),
        ("python train.py", {"SLURM_STEP_NUM_TASKS": "8"}),
        ("python train.py", {"OMPI_COMM_WORLD_SIZE": "8"}),
    ],
)
def test_a_launch_that_holds_only_some_ranks_must_not_stop_them(line: str, environment: dict[str, str]) -> None:
    assert not sees_all_ranks(line.split(), environment, {})


def test_each_machine_that_accelerate_starts_on_cpus_is_a_training_of_its_own_and_may_be_stopped() -> None:
    line = "accelerate launch --num_machines 2 --machine_rank 1 train.py"
    assert not sees_all_ranks(line.split(), {}, {"use_cpu": "false"})
    assert sees_all_ranks(line.split(), {}, {"use_cpu": "true"})
    assert sees_all_ranks(line.replace("--num", "--cpu --num").split(), {}, {})
    assert not sees_all_ranks(line.replace("--num", "--multi_gpu --num").split(), {}, {"use_cpu": "true"})
    assert not sees_all_ranks(f"{line} --cpu".split(), {}, {})  # a word of the script's
    assert not sees_all_ranks(line.replace("--num", "--cpu --num").split(), {"RANK": "1", "WORLD_SIZE": "2"}, {})


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("torchrun --nproc-per-node 8 train.py", 8),
        ("torchrun --nproc_per_node=4 train.py", 4),
        ("torchrun --nproc-per-node gpu train.py", None),
        ("accelerate launch --num_processes 2 train.py", 2),
        ("accelerate launch train.py", None),
        ("python train.py", 1),
        ("bash run.sh", None),
    ],
)
def test_the_number_of_ranks_is_read_where_the_line_says_it(line: str, number: int | None) -> None:
    assert ranks_asked_for(line.split(), {}) == number


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("torchrun train.py --hf_token abcdef0123456789 --lr 1", "torchrun train.py --hf_token *** --lr 1"),
        ("torchrun train.py --hub-token=abcdef0123456789", "torchrun train.py --hub-token=***"),
        ("env WANDB_API_KEY=0123456789abcdef torchrun train.py", "env WANDB_API_KEY=*** torchrun train.py"),
        ("python train.py trainer.logger.api_key=0123456789abcdef", "python train.py trainer.logger.api_key=***"),
        ("python train.py --db postgres://me:word@host/runs", "python train.py --db postgres://***@host/runs"),
        ("python train.py hf_abcdefghijklmnopqrstuvwxyz", "python train.py ***"),
        ("python train.py --password", "python train.py --password"),
        ("python train.py --password p@ssw0rd!x --db_password=short", "python train.py --password *** --db_password=***"),
        (
            "python train.py --wandb_key 0123456789abcdef --credentials=0123456789abcdef",
            "python train.py --wandb_key *** --credentials=***",
        ),
        ("python train.py --db mysql://root:pa@ss@host/runs", "python train.py --db mysql://***@host/runs"),
        (
            "python train.py https://host/data?split=train&access_token=abc",
            "python train.py https://host/data?split=train&access_token=***",
        ),
        ("watchdog --alert https://hooks.slack.com/services/T0/B0/xyz train", "watchdog --alert https://hooks.slack.com/*** train"),
    ],
)
def test_a_command_is_recorded_without_its_secrets(line: str, shown: str) -> None:
    assert " ".join(without_secrets(line.split())) == shown


@pytest.mark.parametrize(
    "line",
    [
        "torchrun train.py --max_tokens 16384000 --tokenizer bert-base-uncased --pad_token <|endoftext|> --use_auth_token True",
        "python train.py --token --verbose data/long-name.json",
        "python train.py --eos-token endoftext --next-token prediction --image_token=imagetoken01",
        "accelerate launch train.py --token-dim 12345678 --data s3://bucket/key@2",
    ],
)
def test_what_is_no_secret_is_recorded_as_it_was_typed(line: str) -> None:
    assert " ".join(without_secrets(line.split())) == line
