"""`watchdog report [JOB]`: the story of a job as one page, as Markdown, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from torch_watchdog.cli.options import json_option, look_options, settings
from torch_watchdog.cli.output import new_file, print_json
from torch_watchdog.cli.source import find_job
from torch_watchdog.report.evidence import Evidence, decoder_of, gather
from torch_watchdog.report.figures import gpu_figures, rank_figures, versions
from torch_watchdog.report.history import JobHistory
from torch_watchdog.report.markdown import markdown_report
from torch_watchdog.report.story import next_steps, story

__all__ = ["command"]


@click.command("report", short_help="Write what happened to a job as one page.")
@click.argument("job", required=False)
@click.option(
    "-o",
    "output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The page (default: report.html among the job's files).",
)
@click.option("--markdown", is_flag=True, help="Print Markdown for an issue tracker instead.")
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), metavar="PATH", help="A local tokenizer.json, or its folder: shows ids as text."
)
@look_options
@json_option
@click.pass_context
def command(
    context: click.Context, /, job: str | None, output: Path | None, markdown: bool, tokenizer: Path | None, as_json: bool, **_: object
) -> None:
    """Write what happened to a job as one page that needs no server and no network (the newest job where none is named)."""
    config = settings(context)
    look = find_job(job, directory=config.directory, daemon=config.daemon)
    history, folder, last_words = look.history(None), look.folder(), look.last_words(elsewhere=True)
    evidence = Evidence() if folder is None else gather(folder, history, decoder_of(tokenizer) if tokenizer is not None else None)
    if as_json:
        print_json(_as_json(history, evidence, last_words))
    elif markdown:
        print(markdown_report(history, evidence, last_words), end="")
    else:
        path = output or (folder / "report.html" if folder is not None else Path(f"{look.name}-report.html"))
        print(f"{path}: {_write(path, history, evidence, last_words)}")


def _write(path: Path, history: JobHistory, evidence: Evidence, last_words: Sequence[str]) -> str:
    from torch_watchdog.report.page import report_page

    text = report_page(history, evidence, last_words)
    with new_file(path) as partial:
        size = partial.write_bytes(text.encode("utf-8", "replace"))
    return f"{size / 1000:.0f} kB, opens without a network"


def _as_json(history: JobHistory, evidence: Evidence, last_words: Sequence[str]) -> dict[str, Any]:
    return {
        "job": history.name,
        "exit_code": history.record.get("exit_code"),
        "exit_reason": history.record.get("exit_reason"),
        "story": story(history),
        "next": [step.text for step in next_steps(history, last_words)],
        "incident": history.main_incident,
        "incidents": list(history.incidents),
        "contract": list(evidence.contract),
        "ranks": rank_figures(history),
        "gpus": gpu_figures(history),
        "logs": [{"rank": tail.rank, "lines": list(tail.lines), "telling": sorted(tail.telling)} for tail in evidence.logs],
        "stacks": dict(evidence.stacks),
        "versions": versions(history),
    }
