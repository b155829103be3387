"""Why a service did not take a message, which Apprise tells its log alone. Nothing that the receiver's URL holds is passed on, for it may be a secret."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

__all__ = ["hearing", "why"]

_LINES = 2
_CHARS = 300
_CONNECTION = re.compile(r"\[Errno -?\d+\] [\w ,]+|[Tt]imed out|certificate verify failed[\w :]*")
_HOST = re.compile(r"localhost|[\w-]+(\.[\w-]+)+")
_PUBLIC = 2  # letters, of which no secret is made


@contextmanager
def hearing() -> Iterator[list[logging.LogRecord]]:
    """What Apprise logs while the body runs, in whichever of its threads."""
    log, heard = logging.getLogger("apprise"), _Heard()
    before = log.level, log.propagate
    log.addHandler(heard)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield heard.records
    finally:
        log.removeHandler(heard)
        log.level, log.propagate = before


def why(records: Sequence[logging.LogRecord], url: str) -> str:
    """The last that was complained of, with what became of the connection; empty where nothing was said."""
    texts = [(record.levelno, record.getMessage()) for record in records]
    said = [_public(text, url) for level, text in texts if level >= logging.WARNING][-_LINES:]
    connection = [found[0] for level, text in texts if level < logging.WARNING and (found := _CONNECTION.search(text))][-1:]
    return " ".join(" ".join([*said, *(f"({text.strip()})" for text in connection)]).split())[:_CHARS]


def _public(text: str, url: str) -> str:
    """Without any word of the URL but its scheme and a host's name."""
    host = urlsplit(url).hostname or ""
    words = {unquote(word) for word in re.split(r"[/:@?&=#,]+", url.partition("://")[2])}
    for word in sorted(words, key=len, reverse=True):
        if len(word) > _PUBLIC and not (word.lower() == host and _HOST.fullmatch(word)):
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "***", text)
    return text


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
