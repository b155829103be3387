"""`watchdog serve`: a daemon for many jobs."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from torch_watchdog.cli.options import settings
from torch_watchdog.config import LaunchConfig
from torch_watchdog.daemon.config import AlertsConfig, Certificate, DaemonConfig
from torch_watchdog.daemon.settings import ServeSettings, kinds_of_nothing, load_settings
from torch_watchdog.errors import ConfigError
from torch_watchdog.launch.say import say
from torch_watchdog_proto.loops import quiet_grpc

__all__ = ["command"]

DEFAULT_PORT = 9470


@click.command("serve", short_help="Serve a daemon for many jobs.")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, metavar="PORT", help="0: any free port.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="HOST",
    help="Another than this machine's own: with TLS, and for holders of the token that TORCH_WATCHDOG_TOKEN_FILE names.",
)
@click.option("--web", metavar="auto|HOST:PORT", help="Serve the page, the JSON API and the metrics too (default: not).")
@click.option(
    "--alert", multiple=True, metavar="URL", help="Tell of incidents: pagerduty://KEY, alertmanager://HOST:PORT, or any Apprise URL."
)
@click.option(
    "--settings",
    "settings_file",
    type=click.Path(path_type=Path),
    envvar="TORCH_WATCHDOG_SERVE_SETTINGS",
    metavar="FILE",
    help="Receivers, routes, escalation, silences, retention, quotas (deploy/serve.toml shows all).",
)
@click.option(
    "--tokens",
    type=click.Path(path_type=Path),
    envvar="TORCH_WATCHDOG_TOKENS",
    metavar="FILE",
    help="More tokens, with roles and jobs: `watchdog token add`.",
)
@click.option(
    "--cert",
    type=click.Path(path_type=Path),
    envvar="TORCH_WATCHDOG_CERT",
    metavar="FILE",
    help="Certificate of ports off this machine, the page's too.",
)
@click.option(
    "--key", type=click.Path(path_type=Path), envvar="TORCH_WATCHDOG_KEY", metavar="FILE", help="Its key: `watchdog certs HOST` makes both."
)
@click.option("--check", is_flag=True, help="Only say whether --settings holds what it must.")
@click.option("--dir", metavar="DIR", help="Where the run directories are (default: watchdog_runs).")
@click.option(
    "--store",
    envvar="TORCH_WATCHDOG_STORE",
    metavar="URL",
    help="A database that several daemons share, so that one goes on where another died: postgresql://USER@HOST/DATABASE.",
)
@click.pass_context
def command(context: click.Context, /, port: int, host: str, settings_file: Path | None, check: bool, **given: Any) -> None:
    """Serve a daemon for many jobs until SIGTERM or Ctrl-C."""
    config, file = settings(context), load_settings(settings_file) if settings_file is not None else ServeSettings()
    for line in kinds_of_nothing(file):
        say(f"{settings_file}, {line}")
    if check:
        _say_checked(settings_file, file)
        return
    if config.alerts and file.alerts is not None:
        raise ConfigError("--alert", f"{settings_file} names receivers already: add this one there, with its route")
    with quiet_grpc():
        from torch_watchdog.daemon.embedded import EmbeddedDaemon
        from torch_watchdog.daemon.token import TOKEN_FILE, kept_token, new_token
        from torch_watchdog.store.run_directory import make_folder
        from torch_watchdog_proto.tls import leaves_the_machine

    make_folder(config.directory)
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the daemon's threads start, so that they leave both to us
    listen, token = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}",), new_token(os.environ)
    if leaves_the_machine(listen[0]) and not os.environ.get(TOKEN_FILE):
        raise ConfigError(
            "--host", f"a port that other machines reach needs {TOKEN_FILE} to name a file with the token that they have, too"
        )
    known = _daemon_config(config, file, listen=listen, token=token, given=given)
    with EmbeddedDaemon(known) as daemon, kept_token(token, daemon.addresses[0], os.environ) as token_file:
        say(f"daemon at {daemon.addresses[0]}, runs in {config.directory}: launch with `watchdog --daemon {daemon.addresses[0]} ...`")
        for url in daemon.addresses[1:]:
            say(f"page and API at {url}, metrics at {url}metrics: all ask for the daemon's token, which lies in {token_file}")
        number = signal.sigwait(ends)
        say(f"{signal.Signals(number).name}: flushing and closing")


def _daemon_config(
    config: LaunchConfig, file: ServeSettings, *, listen: tuple[str, ...], token: str, given: Mapping[str, Any]
) -> DaemonConfig:
    """Of the options, and of the file where an option does not say it. Raises ConfigError."""
    return DaemonConfig(
        runs_dir=config.directory,
        listen=listen,
        index_file=_index_file(os.environ),
        token=token,
        web=config.web,
        alerts=file.alerts or AlertsConfig.to_all(config.alerts, restores_all=True),
        tokens_file=given["tokens"],
        audit_file=config.directory / "audit.jsonl",
        certificate=_certificate(given["cert"], given["key"]),
        store_url=_store_url(given["store"]) or file.store_url,
        retention_s=file.retention_s,
        heartbeat_url=file.heartbeat_url,
        heartbeat_s=file.heartbeat_s,
        max_jobs=file.max_jobs,
        reports_per_s=file.reports_per_s,
    )


def _say_checked(settings_file: Path | None, file: ServeSettings) -> None:
    click.echo(f"{settings_file}: {_told(file)}")
    if settings_file is not None and settings_file.stat().st_mode & 0o077:
        say(f"{settings_file} holds secrets, and others may read it: chmod 600")


def _told(file: ServeSettings) -> str:
    """What a person sees of it, without any URL."""
    alerts = file.alerts
    routes = f"{len(alerts.receivers)} receivers, {len(alerts.routes)} routes" if alerts is not None else "no receivers"
    kept = "for ever" if file.retention_s is None else f"{file.retention_s / 86_400:g} days"
    return f"good: {routes}, {len(file.silences)} silences, records are kept {kept}, heartbeat {'on' if file.heartbeat_url else 'off'}"


def _certificate(cert: Path | None, key: Path | None) -> Certificate | None:
    if (cert is None) != (key is None):
        raise ConfigError("--cert", "--cert and --key belong together")
    return None if cert is None or key is None else Certificate(certificate_file=cert, key_file=key)


def _store_url(url: str | None) -> str | None:
    if url is None:
        return None
    from torch_watchdog.store.database import check_store_url

    try:
        check_store_url(url)
    except ValueError as error:
        raise ConfigError("--store", str(error)) from None
    return url


def _index_file(environment: Mapping[str, str]) -> Path | None:
    """In the user's cache: the index may be lost at any time, and must not lie on a network disk as the runs may."""
    home = environment.get("HOME")
    cache = environment.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else None)
    return Path(cache, "torch-watchdog", "index.sqlite") if cache else None
