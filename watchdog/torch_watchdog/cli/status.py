"""`watchdog status [JOB] [--watch]`: one job and its ranks, now or as it ended."""

from __future__ import annotations

import sys
import time

import click

from torch_watchdog.cli.options import json_option, look_options, settings
from torch_watchdog.cli.output import print_facts, print_json, print_last_words, print_table
from torch_watchdog.cli.source import JobLook, find_job, listed
from torch_watchdog.job.ranks import way_out
from torch_watchdog.phrases import ENDED_WITHOUT_A_WORD
from torch_watchdog.report.live import live_lines
from torch_watchdog_proto.envelopes import JobStatus, RankStatus
from torch_watchdog_proto.sentences import and_then

__all__ = ["command"]

_REFRESH_S = 1.0


@click.command("status", short_help="Show a job and its ranks.")
@click.argument("job", required=False)
@click.option("--watch", is_flag=True, help="Stay and show how it goes on, until the job ends or Ctrl-C.")
@look_options
@json_option
@click.pass_context
def command(context: click.Context, /, job: str | None, watch: bool, as_json: bool, **_: object) -> None:
    """Show a job and its ranks (the newest where none is named)."""
    config = settings(context)
    look = find_job(job, directory=config.directory, daemon=config.daemon)
    if watch:
        if as_json or not sys.stdout.isatty():
            raise click.UsageError("--watch needs a terminal; for a program: `watchdog status --json`, as often as it likes")
        _watch(look)
    found = look.status()
    if as_json:
        print_json(listed(found))
        return
    print_facts(_facts(found))
    print_table(
        ("rank", "node", "phase", "alive", "step", "updates", "loss", "step time"),
        [_row(rank) for rank in found.ranks],
        empty="no rank has reported" if _is_over(found) else "no rank has reported yet: they are known once the training has begun",
    )
    print_last_words(look)


def _watch(look: JobLook) -> None:
    """Returns once the job has ended: what it came to is then shown as without --watch."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)

    def frame(job: JobStatus) -> Group:
        width, height = console.size
        lines = live_lines(job, look.incidents(), now_s=time.time(), height=height - 1, width=width)
        return Group(*(Text.assemble(*line) for line in lines))

    with Live(console=console, auto_refresh=False, screen=True) as live:
        while (job := look.status()).state != "ended":
            live.update(frame(job), refresh=True)
            time.sleep(_REFRESH_S)


def _facts(job: JobStatus) -> dict[str, object]:
    seen = listed(job)
    facts: dict[str, object] = {
        "job": job.job,
        "state": seen.get("problem") or _state(job.state, seen["exit_code"]),
        "policy": seen["policy"],
        "ranks": job.world_size,
    }
    facts |= {"resumed": f"from {seen['resumed_from']}"} if seen["resumed_from"] else {}
    facts |= {"incidents": seen["incidents"], "files": job.run_dir}
    facts |= {"standstill": and_then(job.standstill, way_out(job.ranks, job.policy))} if job.standstill else {}
    if job.lost_records:
        facts["lost"] = f"{job.lost_records} records were overwritten before they could be read"
    return facts


def _state(state: str, exit_code: int | None) -> str:
    if state != "ended":
        return state
    return ENDED_WITHOUT_A_WORD if exit_code is None else f"ended, exit code {exit_code}"


def _is_over(job: JobStatus) -> bool:
    """Nobody is to report any more: it has ended, or nobody answers for it."""
    return job.state == "ended" or "problem" in listed(job)


def _row(rank: RankStatus) -> tuple[object, ...]:
    loss = "" if rank.loss is None else f"{rank.loss:.4g}"
    step_time = "" if rank.step_time_s is None else f"{rank.step_time_s * 1000:.3g} ms"
    return rank.rank, rank.node, rank.phase, "yes" if rank.alive else "no", rank.last_step, rank.updates_applied, loss, step_time
