"""The settings of a launch: flag, then environment TORCH_WATCHDOG_*, then watchdog.toml, then the default.

The one place that reads settings from the environment and from a file. What comes out is a frozen dataclass, checked; it must not know what
the settings are used for.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from torch_watchdog.errors import ConfigError
from torch_watchdog.launch.plan import is_job_name
from torch_watchdog_proto.messages import Policy

__all__ = ["LaunchConfig", "load_config"]

DEFAULT_FILE = "watchdog.toml"
PREFIX = "TORCH_WATCHDOG_"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """`daemon` is "auto", "HOST:PORT" or "unix:PATH"; paths are absolute."""

    policy: Policy = "stop"
    daemon: str = "auto"
    job: str | None = None
    directory: Path = Path("watchdog_runs")
    grace_s: float = 300.0
    keeper: bool = True
    resume: str | None = None
    quarantine: Path | None = None


def _checked_daemon(value: str) -> str:
    if value == "auto" or re.fullmatch(r"unix:.+|[^:\s]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", value):
        return value
    raise ValueError("must be auto, HOST:PORT or unix:PATH")


def _checked_job(value: str) -> str:
    if is_job_name(value):
        return value
    raise ValueError("must be letters, digits, dot, dash and underscore, at most 100, and begin with a letter or digit")


def _checked_quarantine(value: Path) -> Path:
    """A typing error must not bring back the samples that were to be left out."""
    if value.is_file() and os.access(value, os.R_OK):
        return value.absolute()
    raise ValueError("must be a file that can be read, as a run leaves it in quarantine.jsonl")


class _Settings(BaseSettings):
    """Names as a person writes them: `grace` is `--grace`, TORCH_WATCHDOG_GRACE and `grace = 60` in the file."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)
    file_values: ClassVar[Mapping[str, Any]] = {}

    policy: Literal["stop", "skip", "observe"] = "stop"
    daemon: Annotated[str, AfterValidator(_checked_daemon)] = "auto"
    job: Annotated[str, AfterValidator(_checked_job)] | None = None
    dir: Path = Path("watchdog_runs")
    grace: float = Field(default=300.0, gt=0, le=86400)
    keeper: bool = True
    resume: str | None = None
    quarantine: Annotated[Path, AfterValidator(_checked_quarantine)] | None = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - a .env file belongs to the user's program
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - no setting is a secret
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=dict(cls.file_values))


def load_config(flags: Mapping[str, Any], *, file: Path | None = None) -> LaunchConfig:
    """The settings of this launch. `flags` holds only what was given on the command line. Raises ConfigError."""
    path, values = _read_file(file)

    class Sourced(_Settings):
        file_values = values

    try:
        found = Sourced(**flags)
    except ValidationError as error:
        raise _described(error, flags, path, values) from None
    return LaunchConfig(
        policy=found.policy,
        daemon=found.daemon,
        job=found.job,
        directory=found.dir.absolute(),
        grace_s=found.grace,
        keeper=found.keeper,
        resume=None if found.resume is None else str(Path(found.resume).absolute()),
        quarantine=found.quarantine,
    )


def _read_file(file: Path | None) -> tuple[Path, dict[str, Any]]:
    """The file that was asked for must be there; the default one may be absent."""
    asked = file or (Path(os.environ[PREFIX + "CONFIG"]) if os.environ.get(PREFIX + "CONFIG") else None)
    path = asked or Path(DEFAULT_FILE)
    if asked is None and not path.exists():
        return path, {}
    try:
        return path, tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is not TOML ({error})") from error


def _described(error: ValidationError, flags: Mapping[str, Any], path: Path, values: Mapping[str, Any]) -> ConfigError:
    """One sentence about the first problem, beginning with the place where a person can mend it."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        known = ", ".join(sorted(_Settings.model_fields))
        return ConfigError(str(path), f"unknown setting {name!r}; known are {known}")
    message = str(first["msg"]).removeprefix("Value error, ")
    return ConfigError(_where(name, flags, path, values), f"{message[:1].lower()}{message[1:]}, not {first['input']!r}")


def _where(name: str, flags: Mapping[str, Any], path: Path, values: Mapping[str, Any]) -> str:
    if name in flags:
        return f"--{name}"
    if name in values and (PREFIX + name.upper()) not in os.environ:
        return f"{path}, {name}"
    return PREFIX + name.upper()
