"""`watchdog replay BUNDLE [-- CMD...]`: one step of the user's script with the recorded batch, where the stack is true."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from torch_watchdog.launch.say import say
from torch_watchdog.replay.plan import MISLEADING, environment_of, script_of

__all__ = ["command"]


@click.command("replay", short_help="Run a recorded batch once more, on the CPU.", context_settings={"allow_interspersed_args": False})
@click.option("--cuda", is_flag=True, help="On the GPU, waiting for every kernel (CUDA_LAUNCH_BLOCKING), instead of on the CPU.")
@click.argument("bundle", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD...]")
def command(bundle: Path, words: tuple[str, ...], cuda: bool) -> int:
    """Run the script that BUNDLE was recorded from up to its first step, in one process, with the recorded batch in the place of the first.

    The exception that comes is the script's own, with its true stack. Without CMD it is the script of the launch that wrote the bundle.
    """
    script = words[words[:1] == ("--",) :] or script_of(_recorded_command(bundle))
    if not script:
        raise click.UsageError("no script can be told from the launch of this bundle: say it after --, as `-- python train.py`")
    script = (sys.executable, *script) if script[0].endswith(".py") else script
    say(f"replay of {bundle.name} on the {'GPU' if cuda else 'CPU'}: {' '.join(script)[:200]}")
    if not cuda:
        say(MISLEADING)
    with tempfile.TemporaryDirectory(prefix="torch-watchdog-replay-") as folder:
        ours = ["--policy", "observe", "--dir", folder, "run", "--replay", str(bundle.absolute()), "--", *script]
        done = subprocess.run(
            [sys.executable, "-m", "torch_watchdog.cli", *ours], env=environment_of(os.environ, cuda=cuda, port=_free_port()), check=False
        )
    return done.returncode


def _recorded_command(bundle: Path) -> Sequence[str]:
    """Of the run directory that the bundle lies in."""
    try:
        record = json.loads((bundle.absolute().parent.parent / "job.json").read_text(encoding="utf-8"))
        return [str(word) for word in record["command"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
