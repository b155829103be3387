"""What a launch will be: the command, the job's name, and the two variables that it adds to the environment.

Owns every decision about a launch that needs no look at the machine. Pure: argv, environment, options and `now` in, a LaunchPlan out; it must
not know processes, files or clocks. Planning on top of a planned environment changes nothing: twice is the same as once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import PurePath
from typing import Literal, TypeAlias

__all__ = [
    "HIDDEN",
    "LaunchPlan",
    "is_by_accelerate",
    "is_job_name",
    "is_launcher",
    "is_solo",
    "job_name",
    "option",
    "options_to_resume",
    "plan_launch",
    "ranks_asked_for",
    "resume_command",
    "script_position",
    "sees_all_ranks",
    "starts_uncoupled_machines",
    "with_agent",
    "without_secrets",
]

AGENT_VARIABLE = "TORCH_WATCHDOG_AGENT"

# Programs and modules that start the ranks themselves: the process that they run in is not a rank.
LAUNCHERS = frozenset(
    {"torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "horovodrun", "torchx", "ray", "composer", "colossalai"}
)
ACCELERATE_LAUNCH = frozenset({"accelerate-launch", "accelerate.commands.launch"})  # these by themselves
ACCELERATE = frozenset({"accelerate", "accelerate.commands.accelerate_cli"})  # and these with the word `launch` after them
Starter: TypeAlias = Literal["itself", "accelerate", "another"]
LAUNCHER_MODULES = frozenset(
    {
        "torch.distributed.run",
        "torch.distributed.launch",
        "torch.distributed.launcher",
        *ACCELERATE_LAUNCH,
        *ACCELERATE,
        "deepspeed.launcher.runner",
        "deepspeed.launcher.launch",
    }
)
_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # how many of us srun and mpirun have started
_PYTHON = re.compile(r"(python|pypy)[0-9.]*t?")
_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SECRET_NAME = re.compile(
    r"(^|[-_.])(token|secret|passw(or)?d|pwd|credentials?|(api|access|secret|private|auth|wandb)[-_]?key)$", re.IGNORECASE
)
_TOKEN_OF_TEXT = re.compile(
    r"(^|[-_.])(bos|eos|pad|unk|sep|cls|mask|next|prev(ious)?|start|end|stop|special|image|video|audio)[-_]?token$", re.IGNORECASE
)
_PASSWORD_NAME = re.compile(r"passw(or)?d$|pwd$", re.IGNORECASE)  # its value may be short, and of any characters
_SECRET_VALUE = re.compile(r"(?!-)[\w.~+/=-]{8,}")  # not `<pad>`, which is a token of another kind
# What shows by itself; a URL's user; what a URL is asked with; a chat's hook.
_BEARING = re.compile(
    r"\b(hf_|ghp_|github_pat_|glpat-|sk-)[\w-]{16,}|(?<=://)[^/\s]+(?=@)|(?<=[?&])((?:access_|api_)?(?:token|key)=)[^&\s]+|(?<=hooks\.slack\.com/)\S+",
    re.IGNORECASE,
)
HIDDEN = "***"
_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The command as given, and what is added to its environment: PYTHONPATH and TORCH_WATCHDOG_AGENT, nothing else."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def is_job_name(name: str) -> bool:
    """A job's name is a folder's name, a label in alerts and an argument on command lines: plain characters only."""
    return _JOB_NAME.fullmatch(name) is not None


def job_name(command: Sequence[str], now: datetime) -> str:
    """A name from the script and the time: `train-20260131-235959`."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", _script_name(command)).strip("._-")
    return f"{stem[:60] or 'job'}-{now:%Y%m%d-%H%M%S}"


def _script_name(command: Sequence[str]) -> str:
    """The first script on the line (`train.py` -> `train`), else the first module after -m, else the program itself."""
    for word in command:
        if word.endswith(".py"):
            return PurePath(word).stem
    for flag, module in pairwise(command):
        if flag in ("-m", "--module") and module not in LAUNCHER_MODULES:
            return module.rpartition(".")[2]
    return PurePath(command[0]).name if command else ""


def is_solo(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a process without RANK may be the one rank of this launch: `python train.py`, and what `accelerate launch` starts for one process."""
    return "RANK" not in environment and _starter(command) != "another"


def is_by_accelerate(command: Sequence[str]) -> bool:
    """Whether the command's own process is `accelerate launch`, which sets RANK only where it starts several."""
    return _starter(command) == "accelerate"


def is_launcher(command: Sequence[str]) -> bool:
    """Whether the command's own process is one of those that start the ranks themselves."""
    names = {word if word in LAUNCHER_MODULES else PurePath(word).name for word in command[: script_position(command)]}
    return bool(names & (LAUNCHERS | LAUNCHER_MODULES))


def _starter(command: Sequence[str]) -> Starter:
    """What makes the first rank of this command: its own Python process, accelerate below it, or another launcher (or who knows)."""
    for position, word in enumerate(command):
        name, rest = PurePath(word).name, command[position + 1 :]
        if name in LAUNCHERS or name in ACCELERATE_LAUNCH:
            return _launcher(name, list(rest))
        if _PYTHON.fullmatch(name):
            return _started_by_python(rest)
        if name.endswith(".py"):
            return "itself"
    return "another"


def _launcher(name: str, arguments: Sequence[str]) -> Starter:
    launches = name in ACCELERATE_LAUNCH or (name in ACCELERATE and arguments[:1] == ["launch"])
    by_mpi = any(word.partition("=")[0] == "--mpirun_hostfile" for word in arguments)
    return "accelerate" if launches and not by_mpi else "another"


def _started_by_python(arguments: Sequence[str]) -> Starter:
    """An interpreter with these arguments runs a launcher, or something that may train, or (without any) nothing."""
    words = iter(arguments)
    for word in words:
        if word in _OPTIONS_WITH_VALUE:
            next(words, None)
        elif word == "-m":
            module = next(words, "")
            return _launcher(module, list(words)) if module in LAUNCHER_MODULES else "itself"
        elif word == "-c" or not word.startswith("-"):
            name = PurePath(word).name
            return _launcher(name, list(words)) if name in LAUNCHERS or name in ACCELERATE_LAUNCH else "itself"
    return "another"


def with_agent(environment: Mapping[str, str], *, shim_dir: str, agent: str) -> dict[str, str]:
    """The variables to add: the shim's folder first on PYTHONPATH (the rest kept as it is), and the agent's configuration."""
    kept = [entry for entry in environment.get("PYTHONPATH", "").split(":") if entry != shim_dir]
    python_path = ":".join([shim_dir, *kept]) if kept != [""] else shim_dir
    return {"PYTHONPATH": python_path, AGENT_VARIABLE: agent}


def plan_launch(command: Sequence[str], environment: Mapping[str, str], *, shim_dir: str, agent: str) -> LaunchPlan:
    return LaunchPlan(command=tuple(command), environment=with_agent(environment, shim_dir=shim_dir, agent=agent))


def options_to_resume(options: Sequence[str], job: str, *, pages: bool) -> tuple[str, ...]:
    """Ours, of the launch that goes on. Where somebody may be paged with the name: alerts of this run are over once one of the same name trains."""
    return ("--job", job, *options) if pages and "--job" not in options else tuple(options)


def resume_command(options: Sequence[str], command: Sequence[str], checkpoint: str) -> tuple[str, ...]:
    """The launch that goes on from `checkpoint`: the options that were given (without an earlier --resume), and the same command."""
    return ("watchdog", *options, "--resume", checkpoint, *command)


def starts_uncoupled_machines(command: Sequence[str], accelerate: Mapping[str, str]) -> bool:
    """For CPUs accelerate starts one process on each machine and couples them by nothing (but under mpirun, which is another launcher to us): each is
    a training of its own. `accelerate`: the settings of its file.
    """
    words = command[: script_position(command)]
    by_file = accelerate.get("use_cpu", "").lower() == "true" and "--multi_gpu" not in words
    return is_by_accelerate(command) and ("--cpu" in words or by_file)


def sees_all_ranks(command: Sequence[str], environment: Mapping[str, str], accelerate: Mapping[str, str]) -> bool:
    """Whether every rank of the job is started below this wrapper. Where not, a stop from here would leave the other nodes waiting."""
    if any(_number(environment.get(name, "1")) > 1 for name in _SIZES) or (
        "RANK" in environment and _number(environment.get("WORLD_SIZE", "1")) > 1
    ):
        return False  # one wrapper per rank: `srun watchdog python train.py`
    names = {PurePath(word).name for word in command}
    if names & {"srun", "mpirun", "mpiexec"} or ("deepspeed" in names and option(command, ("--hostfile", "-H"))):
        return False
    if starts_uncoupled_machines(command, accelerate):
        return True
    nodes = option(command, ("--nnodes", "--num_nodes", "--num-nodes", "--num_machines", "--num-machines")) or environment.get(
        "PET_NNODES", "1"
    )
    return _number(nodes.rpartition(":")[2]) <= 1


def script_position(command: Sequence[str]) -> int:
    """Where the words of the script begin: what stands before them is the launcher's."""
    for position, word in enumerate(command):
        if word.endswith(".py") and position:
            return position
        if word in ("-m", "--module") and command[position + 1 : position + 2] and command[position + 1] not in LAUNCHER_MODULES:
            return position
    return len(command)


def ranks_asked_for(command: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """How many ranks the command line says it starts on this node, where it does."""
    if is_solo(command, environment) and not is_by_accelerate(command):
        return 1
    number = option(command, ("--nproc-per-node", "--nproc_per_node", "--num_processes", "--num-processes", "--num_gpus"))
    return _number(number) if number and number.isdecimal() else None


def without_secrets(command: Sequence[str]) -> tuple[str, ...]:
    """The command as it is recorded, sent and shown: `***` in the place of values that their names, or they themselves, call a secret."""
    found = list(command)
    for position, word in enumerate(command):
        name, equals, value = word.partition("=")
        following = "".join(command[position + 1 : position + 2])
        if equals and _is_secret(name, value):
            found[position] = f"{name}={HIDDEN}"
        elif not equals and name.startswith("-") and _is_secret(name, following):
            found[position + 1] = HIDDEN
    return tuple(_BEARING.sub(lambda bearing: f"{bearing[2] or ''}{HIDDEN}", word) for word in found)


def _is_secret(name: str, value: str) -> bool:
    """By its name, where the value may be one: the name of a token of text is followed by a word of the vocabulary."""
    if _PASSWORD_NAME.search(name):
        return bool(value) and not value.startswith("--")
    return bool(_SECRET_NAME.search(name) and not _TOKEN_OF_TEXT.search(name) and _SECRET_VALUE.fullmatch(value))


def option(command: Sequence[str], names: tuple[str, ...]) -> str | None:
    """The value of the first of these options on the line, as `--name value` or `--name=value`."""
    for position, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(command[position + 1 : position + 2]), None)
    return None


def _number(text: str) -> int:
    """A count that cannot be read counts as one: the launcher will say what it thinks of it."""
    return int(text) if text.isdecimal() else 1
