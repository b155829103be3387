"""The settings of a launch: flag, then environment TORCH_WATCHDOG_*, then watchdog.toml, then the default.

The one place that reads settings from the environment and from a file. What comes out is a frozen dataclass, checked; it must not know what
the settings are used for.
"""

from __future__ import annotations

import os
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch_watchdog.alerts.receivers import receiver_of
from torch_watchdog.errors import ConfigError
from torch_watchdog.launch.plan import is_job_name
from torch_watchdog_proto.messages import EXIT_BAD_DATA, EXIT_DIVERGED, EXIT_MACHINE, Policy

__all__ = ["SITE_FILE", "LaunchConfig", "load_config"]

DEFAULT_FILE = "watchdog.toml"
PREFIX = "TORCH_WATCHDOG_"
SITE_FILE = Path("/etc/torch-watchdog/config.toml")  # of the machine's owner: what it locks wins over every flag
LONGEST_GRACE_S = 86_400
MOST_SKIPS = 1_000_000
HIGHEST_PORT = 65_535
EXIT_CODES = {"bad_data": EXIT_BAD_DATA, "diverged": EXIT_DIVERGED, "machine": EXIT_MACHINE}


OnSignal: TypeAlias = Literal["checkpoint", "pass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """`daemon` is "auto", "HOST:PORT" or "unix:PATH"; paths are absolute. `bounds` are those of batch tensors by key.

    `enabled` False: this site wants the command to run as if we were not there.
    `overruled`: lines on settings that the site has locked.

    `scan` is set by `watchdog scan` alone.
    """

    policy: Policy = "stop"
    max_skips: int | None = None  # of 1000 steps, by policy skip; None: as the coordinator has it
    daemon: str = "auto"
    job: str | None = None
    directory: Path = Path("watchdog_runs")
    grace_s: float = 300.0
    keeper: bool = True
    on_signal: OnSignal = "checkpoint"
    signal_grace_s: float = 25.0
    web: str | None = None
    alerts: tuple[str, ...] = field(default=(), repr=False)  # URLs hold secrets
    resume: str | None = None
    quarantine: Path | None = None
    bounds: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scan: bool = False
    scan_after: str | None = None
    replay: str | None = None
    device_gate: bool = True
    bundles: bool = True
    watch_modules: bool = False
    watch_gradients: bool = False
    enabled: bool = True
    overruled: tuple[str, ...] = ()
    exit_codes: Mapping[int, int] = field(default_factory=dict)  # ours -> what this site's scheduler is to see

    @property
    def saves_on_signal(self) -> bool:
        """Whether a signal from outside becomes an order of the job's: all ranks save, and stop."""
        return self.on_signal == "checkpoint" and self.policy != "observe"


def load_config(flags: Mapping[str, Any], *, file: Path | None = None, site_file: Path = SITE_FILE) -> LaunchConfig:
    """The settings of this launch. `flags` holds only what was given on the command line. Raises ConfigError."""
    path, values = _read_file(file)
    enabled, locked = _site(site_file)
    found: dict[str, Any] = {"enabled": enabled}
    overruled = []
    for name, check in _CHECKS.items():
        where, value = _given(name, flags, path, values)
        if name in locked:
            if value is not None and value != locked[name]:
                overruled.append(f"{where} is not taken: {site_file} locks it for this site")
            where, value = f"{site_file}, locked, {name}", locked[name]
        if value is not None:
            found[_FIELDS.get(name, name)] = _checked(check, where, value)
    config = LaunchConfig(**found, overruled=tuple(overruled))
    return replace(config, directory=config.directory.absolute())


def _given(name: str, flags: Mapping[str, Any], path: Path, values: Mapping[str, Any]) -> tuple[str, Any]:
    """The value as it was given, None where it was not, and the place where a person can mend it. An empty variable gives nothing."""
    variable = PREFIX + name.upper()
    if name in flags:
        return f"--{name.replace('_', '-')}", flags[name]
    if os.environ.get(variable):
        return variable, os.environ[variable]
    return f"{path}, {name}", values.get(name)


def _checked(check: Callable[[Any], Any], where: str, value: Any) -> Any:
    try:
        return check(value)
    except ValueError as error:
        # A receiver's URL holds its secret; the others' errors show the value.
        shown = "" if check in (_alert, _rules, _resume) else f", not {value!r}"
        raise ConfigError(where, f"{error}{shown}") from None


def _read_file(file: Path | None) -> tuple[Path, dict[str, Any]]:
    """The file that was asked for must be there; the default one may be absent."""
    asked = file or (Path(os.environ[PREFIX + "CONFIG"]) if os.environ.get(PREFIX + "CONFIG") else None)
    path = asked or Path(DEFAULT_FILE)
    if asked is None and not path.exists():
        return path, {}
    values = _toml(path)
    _check_known(str(path), values, _CHECKS)
    return path, values


def _site(path: Path) -> tuple[bool, Mapping[str, Any]]:
    """Whether launches are to be watched at all here, and what nobody may change."""
    values = _toml(path) if path.exists() else {}
    _check_known(str(path), values, ("enabled", "locked"))
    enabled, locked = values.get("enabled", True), values.get("locked", {})
    if not isinstance(enabled, bool) or not isinstance(locked, dict):
        raise ConfigError(str(path), "must hold enabled = true or false, and a table [locked] with settings of launches")
    _check_known(f"{path}, locked", locked, _CHECKS)
    return enabled, locked


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is not TOML ({error})") from error


def _check_known(where: str, values: Mapping[str, Any], known: Iterable[str]) -> None:
    unknown = next((name for name in values if name not in known), None)
    if unknown is not None:
        raise ConfigError(where, f"unknown setting {unknown!r}; known are {', '.join(sorted(known))}")


# What each setting may be: a word from a command line or a variable, or a value of TOML. Each raises ValueError with what was expected.


def _text(value: Any) -> str:
    if isinstance(value, str) and value and value.isprintable():
        return value
    raise ValueError("must be a text of one line")


def _one_of(*words: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value in words:
            return str(value)
        raise ValueError(f"must be one of {', '.join(words)}")

    return check


def _daemon(value: Any) -> str:
    if value == "auto" or (_text(value).startswith("unix:") and len(value) > len("unix:")) or _is_host_and_port(value):
        return str(value)
    raise ValueError("must be auto, HOST:PORT or unix:PATH")


def _web(value: Any) -> str:
    """auto: any free port of this host."""
    if value == "auto":
        return "127.0.0.1:0"
    if _is_host_and_port(_text(value)):
        return str(value)
    raise ValueError("must be auto or HOST:PORT")


def _is_host_and_port(text: str) -> bool:
    found = re.fullmatch(r"(?:[^:\s]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", text)
    return found is not None and int(found[1]) <= HIGHEST_PORT


def _alert(value: Any) -> tuple[str, ...]:
    """URLs: a list, or one text with spaces between them. A page that nobody gets because of a typing error would be found out at 3 a.m."""
    urls = tuple(value) if isinstance(value, list | tuple) else tuple(_text(value).split())
    for number, url in enumerate(urls, 1):
        if not isinstance(url, str):
            raise ValueError("must be a URL, or a list of URLs")  # noqa: TRY004 - what every check raises
        receiver_of(str(number), url)
    return urls


def _job(value: Any) -> str:
    if is_job_name(_text(value)):
        return str(value)
    raise ValueError("must be letters, digits, dot, dash and underscore, at most 100, and begin with a letter or digit")


def _folder(value: Any) -> Path:
    return Path(value if isinstance(value, Path) else _text(value))


def _seconds(value: Any) -> float:
    try:
        seconds = float("" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        seconds = 0.0
    if 0 < seconds <= LONGEST_GRACE_S:
        return seconds
    raise ValueError(f"must be a number of seconds, more than 0 and at most {LONGEST_GRACE_S}")


def _skips(value: Any) -> int:
    if not isinstance(value, bool) and re.fullmatch(r"[0-9]{1,30}", str(value).strip()):
        return min(int(value), MOST_SKIPS)
    raise ValueError("must be a whole number of steps, 0 or more")


def _yes_or_no(value: Any) -> bool:
    word = str(value).lower()
    if word in ("true", "1", "yes", "on"):
        return True
    if word in ("false", "0", "no", "off"):
        return False
    raise ValueError("must be true or false")


def _resume(value: Any) -> str:
    """Absolute, because ranks may change their folder. A typing error must not begin the training anew."""
    path = Path(_text(value)).absolute()
    if path.is_dir():
        return str(path)
    raise ValueError(f"must be the folder of a checkpoint, or one that holds checkpoints, and there is none at {path}")


def _quarantine(value: Any) -> Path:
    """A typing error must not bring back the samples that were to be left out."""
    path = _folder(value)
    if path.is_file() and os.access(path, os.R_OK):
        return path.absolute()
    raise ValueError("must be a file that can be read, as a run leaves it in quarantine.jsonl")


def _bounds(value: Any) -> Mapping[str, Mapping[str, int]]:
    """`[bounds]`, a line for each tensor of the batch: `labels = {low = 0, high = 9, ignored = -100}`."""
    if isinstance(value, dict) and all(_is_bound(bound) for bound in value.values()):
        return value
    raise ValueError("must be lines such as labels = {low = 0, high = 9, ignored = -100}, with whole numbers and low not above high")


def _rules(value: Any) -> Mapping[str, Mapping[str, Any]]:
    """`[rules.NAME]`, with thresholds of that rule: `watchdog rules show NAME` lists them."""
    if not isinstance(value, dict):
        raise ValueError("must be tables such as [rules.straggler] with ratio = 2.0")  # noqa: TRY004 - as every check here
    from torch_watchdog.rules.catalogue import check_settings  # rules load numpy: a launch that changes none of them need not wait for it

    check_settings(value)
    return value


def _exit_codes(value: Any) -> Mapping[int, int]:
    """`[exit_codes]`: some schedulers retry, or do not, by codes of their own."""
    known = f"{', '.join(EXIT_CODES)}, each with a whole number from 1 to 255"
    if not isinstance(value, dict) or not value.keys() <= EXIT_CODES.keys() or not all(_is_code(code) for code in value.values()):
        raise ValueError(f"must be lines such as bad_data = 165; known are {known}")
    return {EXIT_CODES[name]: code for name, code in value.items()}


def _is_code(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 255


def _is_bound(value: Any) -> bool:
    if not isinstance(value, dict) or not value or not value.keys() <= {"low", "high", "ignored"}:
        return False
    return all(type(number) is int for number in value.values()) and value.get("low", 0) <= value.get("high", float("inf"))


# What a person writes is shorter than what we call it.
_FIELDS = {
    "alert": "alerts",
    "dir": "directory",
    "grace": "grace_s",
    "signal_grace": "signal_grace_s",
}
_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "policy": _one_of(*typing.get_args(Policy)),
    "max_skips": _skips,
    "daemon": _daemon,
    "job": _job,
    "dir": _folder,
    "grace": _seconds,
    "keeper": _yes_or_no,
    "device_gate": _yes_or_no,
    "bundles": _yes_or_no,
    "watch_modules": _yes_or_no,
    "watch_gradients": _yes_or_no,
    "on_signal": _one_of(*typing.get_args(OnSignal)),
    "signal_grace": _seconds,
    "web": _web,
    "alert": _alert,
    "resume": _resume,
    "quarantine": _quarantine,
    "bounds": _bounds,
    "rules": _rules,
    "exit_codes": _exit_codes,
}
