"""START HERE for the command line: the first word that is none of our commands starts the wrapped launch.

Owns the choice of the command and how errors end: one sentence on stderr and a non-zero exit, never a traceback. It must not know what any
command does; each is imported when it is used, so that a launch does not wait for the tables.
"""

from __future__ import annotations

import difflib
import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import click

from torch_watchdog.cli.options import launch_options
from torch_watchdog.errors import ConfigError, WatchdogError
from torch_watchdog.launch.plain import EXIT_NOT_FOUND
from torch_watchdog.launch.say import say
from torch_watchdog_proto import __version__

__all__ = ["main"]

COMMANDS = (
    "run",
    "jobs",
    "status",
    "incidents",
    "timeline",
    "report",
    "contract",
    "rules",
    "scan",
    "replay",
    "stop",
    "checkpoint",
    "serve",
    "ack",
    "alert",
    "token",
    "certs",
    "store",
    "doctor",
    "demo",
)

OF_EVERY_COMMAND = {"dir", "daemon", "config"}


class _Commands(click.Group):
    """Our commands by name, and every program of the user's as the launch of it."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"torch_watchdog.cli.{cmd_name}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in COMMANDS:
            return super().resolve_command(ctx, args)
        if not shutil.which(args[0]) and not ("/" in args[0] and Path(args[0]).is_file()):  # a file that is no program: the launch says why
            _say_unknown(args[0])
            ctx.exit(EXIT_NOT_FOUND)
        return "run", self.get_command(ctx, "run"), args


def _say_unknown(word: str) -> None:
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    advice = f"did you mean `watchdog {near[0]}`?" if near else "see `watchdog --help` for our own commands"
    say(f"{word}: no such program or command: {advice}")


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "allow_interspersed_args": False},
    subcommand_metavar="COMMAND...",
)
@launch_options
@click.version_option(__version__, prog_name="torch-watchdog")
@click.pass_context
def watchdog(context: click.Context, /, **_: object) -> None:
    """Run a PyTorch training so that a bad batch stops it cleanly, and the first rank to fail is named.

    \b
    watchdog torchrun --nproc-per-node 8 train.py ...    wrap any launch
    watchdog COMMAND ...                                 look at or steer jobs
    """
    if context.invoked_subcommand not in ("run", None) and context.invoked_subcommand in COMMANDS:
        _refuse_launch_options(context)


def _refuse_launch_options(context: click.Context) -> None:
    given = [name for name in context.params if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    foreign = [name for name in given if name not in OF_EVERY_COMMAND]
    if foreign:
        option, command = f"--{foreign[0].replace('_', '-')}", context.invoked_subcommand or ""
        found = watchdog.get_command(context, command)
        if found is not None and any(option in parameter.opts for parameter in found.params):
            raise click.UsageError(f"{option} stands behind the command here: `watchdog {command} {option} ...`")
        raise click.UsageError(f"{option} is an option of a launch, `watchdog {command}` does not take it")


def main() -> NoReturn:
    """The program `watchdog`."""
    try:
        code = watchdog.main(sys.argv[1:] or ["--help"], prog_name="watchdog", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        say(f"{error.format_message()} ({_whose_help(error)} --help)")
        sys.exit(error.exit_code)
    except ConfigError as error:
        say(str(error))
        sys.exit(2)
    except WatchdogError as error:
        say(str(error))
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        _end_quietly()
    except OSError as error:
        say(f"{error.filename or 'a file or socket'}: {error.strerror or error}")
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - a person is to read one sentence
        from torch_watchdog.phrases import as_our_fault

        say(as_our_fault(error))
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _whose_help(error: click.ClickException) -> str:
    """`watchdog token list`: the command that did not understand, where click or the words say which it was."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        return context.command_path
    return " ".join(("watchdog", *(word for word in sys.argv[1:2] if word in COMMANDS)))


def _end_quietly() -> NoReturn:
    """`watchdog jobs | head`: the reader has seen enough. The interpreter must not flush into the closed pipe at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
