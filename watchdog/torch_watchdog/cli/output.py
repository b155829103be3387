"""How commands print: a table for a person, one object for a program.

Colour only on a terminal, and never where NO_COLOR is set. On a terminal sentences are folded to its width, in a pipe nothing is. Text from jobs is
shown as text: no markup and no control character of theirs works.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_watchdog.cli.source import JobLook
from torch_watchdog.errors import OutputError
from torch_watchdog.phrases import one_line, without_others
from torch_watchdog.report.text import WIDTH, Line, folded, plain

__all__ = ["line_width", "moment", "new_file", "print_facts", "print_json", "print_last_words", "print_lines", "print_table", "print_text"]

PIPE_WIDTH = 10_000  # a pipe has no width: nothing is cut or wrapped for it


def _console(**options: Any) -> Console:
    """Without colour it has no other styles either: bold is an escape sequence, too."""
    return Console(highlight=False, markup=False, emoji=False, **({"color_system": None} if os.environ.get("NO_COLOR") else {}) | options)


def moment(epoch_s: float) -> str:
    """`2026-01-31 00:00:05Z`."""
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def line_width() -> int:
    """Of a drawing: a terminal's, else what fits everywhere."""
    return max(60, _console().width) if sys.stdout.isatty() else WIDTH


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str) -> None:
    """Says `empty` where there is no row."""
    if not rows:
        print(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else one_line(str(cell))) for cell in row))
    if sys.stdout.isatty():
        _console().print(table)
    else:
        _print_piped(table)


def _print_piped(table: Table) -> None:
    console = _console(width=PIPE_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def print_facts(facts: Mapping[str, Any]) -> None:
    """Names on the left, values on the right."""
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        print_text(f"{name:<{width}}  {one_line(str(value))}")


def print_text(text: str) -> None:
    print_lines([[(line, "")] for line in text.split("\n")])


def print_lines(lines: Sequence[Line]) -> None:
    console = _console()
    for line in lines:
        if not console.is_terminal:
            print(plain(line))
            continue
        text = Text.assemble(*line)
        for indent, begin, end in folded(text.plain, console.width):
            console.print(Text(" " * indent) + text[begin:end], soft_wrap=True)


def print_last_words(look: JobLook, *, told: Collection[str] = ()) -> None:
    """What the launch said at its end: the terminal that it said it on is perhaps gone. Without what has been `told` above it: lines by their names, and
    `others`, the way to the other incidents."""
    words = [line for line in look.last_words() if not (line.startswith(" ") and line.split(maxsplit=1)[0] in told)]
    words = list(map(without_others, words)) if "others" in told else words
    if words:
        print()
    print_lines([[(line, "")] for line in words])


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file of mode 0600 to write to, which takes the place of `path` once it is whole. Raises OutputError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        yield partial
        partial.replace(path)
    except OSError as error:
        raise OutputError(path, f"it cannot be written ({error.strerror})", "Name another file") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, indent=2, allow_nan=False, default=str))
