"""`watchdog replay BUNDLE [-- CMD...]`: one step of the user's script with the recorded batch, where the stack is true."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from torch_watchdog.cli.options import settings
from torch_watchdog.launch.places import here
from torch_watchdog.launch.plan import HIDDEN, is_launcher
from torch_watchdog.launch.say import say
from torch_watchdog.phrases import as_typed, one_line
from torch_watchdog.replay.plan import doubts, environment_of, script_of
from torch_watchdog.replay.recorded import batch_of, recorded_for, run_of

__all__ = ["command"]

_MAX_NAMED = 4


@click.command("replay", short_help="Run a recorded batch once more, on the CPU.", context_settings={"allow_interspersed_args": False})
@click.option("--cuda", is_flag=True, help="On the GPU, waiting for every kernel (CUDA_LAUNCH_BLOCKING), instead of on the CPU.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD...]")
@click.pass_context
def command(context: click.Context, bundle: Path, words: tuple[str, ...], cuda: bool) -> int:
    """Run the script that BUNDLE was recorded from up to its first step, in one process, with the recorded batch in the place of the first.

    The exception that comes is the script's own, with its true stack. Without CMD it is the script of the launch that wrote the bundle.
    """
    if not bundle.is_file():
        raise click.UsageError(_no_bundle(bundle, settings(context).directory))
    if words[:1] == ("--cuda",):  # typed behind BUNDLE
        cuda, words = True, words[1:]
    given = words[words[:1] == ("--",) :]
    script = given or script_of(_recorded_command(bundle))
    if is_launcher(given):
        script = script_of(given)
        if not script:
            raise click.UsageError(
                "a replay is one process: say the script alone, without its launcher, as `-- python train.py ARGS` or `-- python -m ...`"
            )
        say(f"a replay is one process: {Path(script[0]).name} is run without its launcher")
    if not script:
        raise click.UsageError("no script can be told from the launch of this bundle: say it after --, as `-- python train.py`")
    if not given and any(HIDDEN in word for word in script):
        raise click.UsageError(f"the launch of this bundle was recorded without its secrets ({HIDDEN}): say its script after --, with them")
    to_run = (sys.executable, *script) if script[0].endswith(".py") else script
    say(f"replay of {bundle.name} on the {'GPU' if cuda else 'CPU'}: {' '.join(to_run)[:200]}")
    if not given:
        other = f"watchdog replay {'--cuda ' if cuda else ''}{shlex.quote(str(bundle))} -- {shlex.quote(script[0])} ARGS"
        say(f"with the arguments of the job: files that the script writes under them are appended to or overwritten; with others: {other}")
    for incident in recorded_for(bundle):
        say(f"recorded for: {one_line(str(incident.get('summary', '')))}")
    for doubt in () if cuda else doubts(ops=_learned_ops(bundle), not_finite=_not_finite(bundle)):
        say(f"on the CPU: {doubt}")
    ours = ["--policy", "observe", "--dir", str(run_of(bundle) / "replays"), "run", "--replay", str(bundle.absolute()), "--", *to_run]
    environment = environment_of(os.environ, cuda=cuda, port=_free_port())
    return subprocess.run([sys.executable, "-m", "torch_watchdog.cli", *ours], env=environment, check=False).returncode


def _no_bundle(name: Path, runs_dir: Path) -> str:
    """What to type instead, of a job's name or run directory: whoever reads of a failed job has its name at hand."""
    run = next((path for path in (name, runs_dir / name) if path.is_dir()), None)
    if run is None:
        return f"there is no file {str(name)!r}: BUNDLE is one of a run directory, as {runs_dir.name}/JOB/bundles/0-3.safetensors"
    bundles = (run if run.name == "bundles" else run / "bundles").glob("*.safetensors")
    found = sorted(bundles, key=lambda path: (not batch_of(path), path))  # those first that an incident names
    if not found:
        return f"{name} is a run directory without a bundle: no batch of it was held, and no rank failed on one that could be kept"
    lines = [f"watchdog replay {shlex.quote(as_typed(str(path.absolute()), here()))} ({_told(path)})" for path in found[:_MAX_NAMED]]
    more = f", and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return f"{name} is a run directory, and a replay takes one bundle of it: {', '.join(lines)}{more}"


def _told(bundle: Path) -> str:
    return batch_of(bundle) or f"of rank {_rank_of(bundle)}, which no incident is laid to"


def _rank_of(bundle: Path) -> str:
    """That it is named for."""
    return bundle.name.partition("-")[2].partition(".")[0].partition("-")[0]


def _recorded_command(bundle: Path) -> Sequence[str]:
    """Of the run directory that the bundle lies in."""
    try:
        record = json.loads((run_of(bundle) / "job.json").read_text(encoding="utf-8"))
        return [str(word) for word in record["command"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _learned_ops(bundle: Path) -> set[str]:
    """Of the contract of the rank that the bundle is named for, beside it in its run directory."""
    try:
        contract = json.loads((run_of(bundle) / "contract" / f"rank-{_rank_of(bundle)}.json").read_text(encoding="utf-8"))
        return {str(row["op"]) for row in (*contract["guarded"], *contract["opaque"])}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _not_finite(bundle: Path) -> list[str]:
    """Tensors of the batch with NaN or infinity in them, as far as numpy knows their dtype."""
    found = []
    try:
        numpy = importlib.import_module("numpy")
        with importlib.import_module("safetensors").safe_open(bundle, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(key)
                if tensor.dtype.kind == "f" and not numpy.isfinite(tensor).all():
                    found.append(key)
    except Exception:  # noqa: BLE001 - safetensors raises its own error for a torn file, numpy others for a dtype that it does not know
        return found
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
