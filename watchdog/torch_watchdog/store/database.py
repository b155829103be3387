"""The shared store: what the run directories of a fleet hold, in one database, so that another daemon can go on where one has died.

Owns the tables and their versions. SQLite and PostgreSQL by the same code. Knows nothing of what
is in a record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from torch_watchdog.errors import MissingExtraError, StoreError
from torch_watchdog.store.record import REPLACED, Kind, Record

__all__ = ["DAEMONS", "RUNS", "Database", "check_store_url", "upsert"]

_CONNECT_S = 3  # a node waits 5 s for an answer to its hello

TABLES = sa.MetaData()
_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # only an INTEGER of SQLite counts by itself
VERSION = sa.Table("torch_watchdog_schema", TABLES, sa.Column("version", sa.Integer, nullable=False))
RUNS = sa.Table(
    "torch_watchdog_runs",
    TABLES,
    sa.Column("name", sa.String(100), primary_key=True),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("seen_s", sa.Float, nullable=False),
)
RECORDS = sa.Table(
    "torch_watchdog_records",
    TABLES,
    sa.Column("id", _ID, primary_key=True, autoincrement=True),
    sa.Column("run", sa.String(100), nullable=False),
    sa.Column("kind", sa.String(10), nullable=False),
    sa.Column("key", sa.String(400), nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("run", "kind", "key"),
)
DAEMONS = sa.Table(
    "torch_watchdog_daemons",
    TABLES,
    sa.Column("name", sa.String(200), primary_key=True),
    sa.Column("beat", sa.BigInteger, nullable=False),
)
# Each entry brings the tables from the version before it (0: none) to its own; one that was released is never changed.
_MIGRATIONS: Sequence[Sequence[sa.schema.ExecutableDDLElement]] = (
    (sa.schema.CreateTable(RUNS), sa.schema.CreateTable(RECORDS), sa.schema.CreateTable(DAEMONS)),
)


class Database:
    """One connection pool. Every method raises StoreError where the database does not answer; any thread may call."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine

    @classmethod
    def open(cls, url: str) -> Self:
        """Connects, and brings the tables up to date. Raises StoreError, MissingExtraError, ValueError."""
        database = cls(_engine(check_store_url(url)))
        with database.transaction() as connection:
            _migrate(connection)
        return database

    def close(self) -> None:
        self.engine.dispose()

    def transaction(self) -> _Transaction:
        """A context manager that gives a connection."""
        return _Transaction(self.engine)

    def write(self, records: Iterable[Record]) -> None:
        """All or nothing. What is there already stays, except for what only has newest words."""
        rows = [{"run": record.run, "kind": record.kind, "key": record.key, "body": record.body} for record in records]
        kept = [row for row in rows if row["kind"] not in REPLACED]
        with self.transaction() as connection:
            if kept:
                connection.execute(upsert(connection, RECORDS, dict.fromkeys(kept[0]), ()), kept)  # in one go
            for row in rows:
                if row["kind"] in REPLACED:
                    connection.execute(upsert(connection, RECORDS, row, ("body",)))

    def records(self, run: str, *kinds: Kind) -> Iterator[Record]:
        """In the order in which they were first written; of every kind where none is named."""
        query = sa.select(RECORDS.c.run, RECORDS.c.kind, RECORDS.c.key, RECORDS.c.body).where(RECORDS.c.run == run).order_by(RECORDS.c.id)
        if kinds:
            query = query.where(RECORDS.c.kind.in_(kinds))
        with self.transaction() as connection:
            for row in connection.execution_options(stream_results=True).execute(query):
                yield Record(run=row.run, kind=row.kind, key=row.key, body=bytes(row.body))

    def keys(self, run: str) -> set[tuple[str, str]]:
        """(kind, key) of what is there."""
        with self.transaction() as connection:
            return {(row.kind, row.key) for row in connection.execute(sa.select(RECORDS.c.kind, RECORDS.c.key).where(RECORDS.c.run == run))}

    def runs(self) -> Mapping[str, float]:
        """Every run's name, and when it was last written to (seconds since the epoch)."""
        with self.transaction() as connection:
            return {row.name: row.seen_s for row in connection.execute(sa.select(RUNS.c.name, RUNS.c.seen_s).order_by(RUNS.c.name))}

    def owner(self, run: str) -> str | None:
        """The daemon that decides for it; empty for nobody, None where there is no such run."""
        with self.transaction() as connection:
            found: str | None = connection.scalar(sa.select(RUNS.c.owner).where(RUNS.c.name == run))
        return found

    def newest(self, run: str) -> int:
        """The number of its newest record; 0 where it has none."""
        with self.transaction() as connection:
            return connection.scalar(sa.select(sa.func.max(RECORDS.c.id)).where(RECORDS.c.run == run)) or 0

    def keep_run(self, run: str, seen_s: float) -> None:
        """A run that no daemon decides for: the first one that is asked will."""
        with self.transaction() as connection:
            connection.execute(upsert(connection, RUNS, {"name": run, "owner": "", "seen_s": seen_s}, ()))

    def forget_older(self, before_s: float, held: Collection[str]) -> tuple[str, ...]:
        """Removes runs that nobody has written to since then."""
        old = tuple(run for run, seen_s in self.runs().items() if seen_s < before_s and run not in held)
        for run in old:
            self._forget(run)
        return old

    def _forget(self, run: str) -> None:
        with self.transaction() as connection:
            connection.execute(RECORDS.delete().where(RECORDS.c.run == run))
            connection.execute(RUNS.delete().where(RUNS.c.name == run))


class _Transaction:
    """`engine.begin()`, whose errors are ours."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._inner = engine.begin()

    def __enter__(self) -> sa.Connection:
        try:
            return self._inner.__enter__()
        except sa.exc.SQLAlchemyError as error:
            raise _store_error(self._engine, error) from error

    def __exit__(self, *raised: Any) -> None:
        try:
            self._inner.__exit__(*raised)
        except sa.exc.SQLAlchemyError as error:
            raise _store_error(self._engine, error) from error
        if isinstance(raised[1], sa.exc.SQLAlchemyError):
            raise _store_error(self._engine, raised[1]) from raised[1]


def upsert(connection: sa.Connection, table: sa.Table, values: Mapping[str, Any], replaced: Sequence[str]) -> Any:
    """Inserts a row; where its key is there already, replaces these columns, or nothing."""
    keys = [column.name for column in table.primary_key] if table is not RECORDS else ["run", "kind", "key"]
    insert: Any = (postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert)(table)
    if any(value is not None for value in values.values()):
        insert = insert.values(**values)  # else of rows that come with the call
    if not replaced:
        return insert.on_conflict_do_nothing(index_elements=keys)
    return insert.on_conflict_do_update(index_elements=keys, set_={name: values[name] for name in replaced})


def check_store_url(url: str) -> sa.URL:
    """Raises ValueError in words, without the URL: it may hold a password."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        parsed = None
    names = {"postgresql": "postgresql+psycopg", "postgresql+psycopg": "postgresql+psycopg", "sqlite": "sqlite"}
    if parsed is None or parsed.drivername not in names or not parsed.database:
        raise ValueError("must be postgresql://USER@HOST/DATABASE or sqlite:////PATH")
    return parsed.set(drivername=names[parsed.drivername])


def _engine(url: sa.URL) -> sa.Engine:
    if url.drivername == "sqlite":
        path = Path(url.database or "")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        engine = sa.create_engine(url, connect_args={"timeout": _CONNECT_S})
        sa.event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA journal_mode=WAL"))
        return engine
    try:
        # A server that hangs must not hold the daemon: each statement has a bound, and a pooled connection is tried before it is used.
        return sa.create_engine(
            url, pool_pre_ping=True, pool_size=4,
            connect_args={"connect_timeout": _CONNECT_S, "application_name": "torch-watchdog", "options": "-c statement_timeout=60000"},
        )  # fmt: skip
    except ModuleNotFoundError as error:
        raise MissingExtraError("a store on PostgreSQL", "psycopg[binary]") from error


def _migrate(connection: sa.Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(7484317)"))  # two daemons that start at once
    VERSION.create(connection, checkfirst=True)
    version = connection.scalar(sa.select(sa.func.max(VERSION.c.version))) or 0
    if version > len(_MIGRATIONS):
        raise StoreError(
            _shown(connection.engine), f"its tables are of version {version}, this daemon knows {len(_MIGRATIONS)}", "Upgrade this one"
        )
    for number, steps in enumerate(_MIGRATIONS[version:], version + 1):
        for step in steps:
            connection.execute(step)
        connection.execute(VERSION.delete())
        connection.execute(VERSION.insert().values(version=number))


def _store_error(engine: sa.Engine, error: sa.exc.SQLAlchemyError) -> StoreError:
    words = str(getattr(error, "orig", None) or error).strip().splitlines() or [type(error).__name__]
    is_refusal = isinstance(error, sa.exc.DataError | sa.exc.IntegrityError)
    return StoreError(_shown(engine), words[0][:200], "Is it running, and may this user write to it?", is_refusal=is_refusal)


def _shown(engine: sa.Engine) -> str:
    """Without its password."""
    return engine.url.render_as_string(hide_password=True)
