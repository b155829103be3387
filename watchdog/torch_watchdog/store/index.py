"""The SQLite index: which frame of which segment holds which steps of which rank.

Owns a cache and nothing that cannot be made again: the segments are the truth, and every look-up first reads what they have gained since the last.
On the daemon's local disk only (WAL does not work over a network file system). Where it cannot be opened or breaks, there is no index, and readers scan.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert

from torch_watchdog.store.read import holds_steps, step_range
from torch_watchdog.store.run_directory import RunDirectory
from torch_watchdog.store.segments import Frame, read_frames, segment_files
from torch_watchdog_proto.codec import MalformedMessageError, read_stored_report
from torch_watchdog_proto.messages import StepBlock

__all__ = ["BlockIndex"]

_TABLES = sa.MetaData()
_SEGMENTS = sa.Table(
    "segments",
    _TABLES,
    sa.Column("path", sa.String, primary_key=True),
    sa.Column("indexed_bytes", sa.Integer, nullable=False),
)
_BLOCKS = sa.Table(
    "blocks",
    _TABLES,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("path", sa.String, nullable=False),
    sa.Column("frame_start", sa.Integer, nullable=False),
    sa.Column("rank", sa.Integer, nullable=False),
    sa.Column("first_step", sa.Integer, nullable=False),
    sa.Column("last_step", sa.Integer, nullable=False),
)
sa.Index("blocks_by_rank", _BLOCKS.c.path, _BLOCKS.c.rank, _BLOCKS.c.last_step)


class BlockIndex:
    """Finds blocks without decoding every frame of a long run. One thread at a time."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """None where it cannot be opened: a read-only home, a full disk, a file that is no database."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            engine = sa.create_engine(f"sqlite:///{path}")
            with engine.begin() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode=WAL")
                connection.exec_driver_sql("PRAGMA synchronous=NORMAL")
                _TABLES.create_all(connection)
        except (OSError, sa.exc.SQLAlchemyError):
            return None
        return cls(engine)

    def close(self) -> None:
        self._engine.dispose()

    def blocks(
        self, run_dir: Path, rank: int | None = None, first_step: int | None = None, last_step: int | None = None
    ) -> Iterator[StepBlock]:
        """As `read_blocks`, by way of the index. Raises OSError where the index is broken."""
        for path in segment_files(RunDirectory(run_dir).blocks):
            try:
                self._catch_up(path)
                starts = self._frames(path, rank, first_step, last_step)
            except sa.exc.SQLAlchemyError as error:
                raise OSError(f"the index is broken ({error})") from error
            for start in starts:
                frame = next(read_frames(path, start), None)
                if frame is not None:
                    yield from holds_steps(_blocks_of(frame), rank, first_step, last_step)

    def _catch_up(self, path: Path) -> None:
        """Indexes the frames that the segment has gained."""
        with self._engine.begin() as connection:
            done = connection.scalar(sa.select(_SEGMENTS.c.indexed_bytes).where(_SEGMENTS.c.path == str(path))) or 0
            end = done
            for frame in read_frames(path, done):
                rows = [_row(path, frame, block) for block in _blocks_of(frame)]
                if rows:
                    connection.execute(_BLOCKS.insert(), rows)
                end = frame.end
            if end > done:
                position = insert(_SEGMENTS).values(path=str(path), indexed_bytes=end)
                connection.execute(position.on_conflict_do_update(index_elements=["path"], set_={"indexed_bytes": end}))

    def _frames(self, path: Path, rank: int | None, first_step: int | None, last_step: int | None) -> list[int]:
        query = sa.select(_BLOCKS.c.frame_start).where(_BLOCKS.c.path == str(path)).distinct().order_by(_BLOCKS.c.frame_start)
        if rank is not None:
            query = query.where(_BLOCKS.c.rank == rank)
        if first_step is not None:
            query = query.where(_BLOCKS.c.last_step >= first_step)
        if last_step is not None:
            query = query.where(_BLOCKS.c.first_step <= last_step)
        with self._engine.connect() as connection:
            return list(connection.scalars(query))


def _blocks_of(frame: Frame) -> tuple[StepBlock, ...]:
    try:
        _, _, report = read_stored_report(frame.payload)
    except MalformedMessageError:
        return ()
    return report.blocks


def _row(path: Path, frame: Frame, block: StepBlock) -> dict[str, object]:
    first, last = step_range(block)
    return {"path": str(path), "frame_start": frame.start, "rank": block.rank, "first_step": first, "last_step": last}
