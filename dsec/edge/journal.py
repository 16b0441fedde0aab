"""The journal: every sandbox of this edge in SQLite, written before the act.

One thread owns the database. Writes that arrive while it commits, or within :data:`WINDOW_S` of the last commit, share the next
transaction; a write that comes alone is committed at once. ``synchronous=NORMAL``: a killed process loses nothing, a power cut may lose the
last commits, and after one no sandbox is left that they could describe.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from dsec.edge.record import Record
from libdsec.schema import State

WINDOW_S = 0.002
"""Seconds between commits under load: about ten creates share one at 5,000 a second, and none waits longer than a start takes."""
WAL_LIMIT_BYTES = 16 << 20
"""The write-ahead log is cut back to this size after a checkpoint."""
CHECKPOINT_PAGES = 4_000
"""Pages (4 KiB) in the write-ahead log that bring a checkpoint: it syncs the disk, and creations wait for it. SQLite's own 1,000 would be
one in 200 creations."""
VACUUM_PAGES = 2_000
"""Free pages (4 KiB) given back to the filesystem by one prune."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sandboxes (
    id TEXT PRIMARY KEY, project TEXT NOT NULL, key TEXT, state TEXT NOT NULL, live INTEGER NOT NULL,
    created_at REAL NOT NULL, ended_at REAL, record BLOB NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS sandboxes_key ON sandboxes (project, key) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS sandboxes_ended ON sandboxes (ended_at) WHERE live = 0;
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT OR IGNORE INTO meta VALUES ('epoch', 0);
"""

_INSERT = """INSERT INTO sandboxes (id, project, key, state, live, created_at, ended_at, record) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (project, key) WHERE key IS NOT NULL DO NOTHING"""
_UPDATE = "UPDATE sandboxes SET state = ?, live = ?, ended_at = ?, record = ? WHERE id = ?"
_DELETE = "DELETE FROM sandboxes WHERE id = ?"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode

T = TypeVar("T")
Parameter = str | int | float | bytes | None


class JournalError(Exception):
    """The journal can't be read or written (disk full, corrupt). Nothing of the failed transaction happened."""


class _Write:
    __slots__ = ("done", "parameters", "result", "sql")

    def __init__(self, sql: str, parameters: tuple[Parameter, ...], done: asyncio.Future[int]) -> None:
        self.sql = sql
        self.parameters = parameters
        self.done = done
        self.result = 0


class _Read(Generic[T]):
    __slots__ = ("ask", "done", "error", "result")

    def __init__(self, ask: Callable[[sqlite3.Connection], T], done: asyncio.Future[T]) -> None:
        self.ask = ask
        self.done = done
        self.result: T | None = None
        self.error: sqlite3.Error | None = None


class _Batch:
    __slots__ = ("error", "reads", "writes")

    def __init__(self) -> None:
        self.writes: list[_Write] = []
        self.reads: list[_Read[object]] = []
        self.error: sqlite3.Error | None = None


class Journal:
    """The journal of one edge. All methods belong to the event loop that opened it; all raise :class:`JournalError`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._pending = _Batch()
        self._scheduled = False
        self._committing = False
        self._last_commit = 0.0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.commits = 0
        """Transactions so far."""

    async def open(self) -> int:
        """Opens or makes the database; returns the epoch: how many times it has been opened."""
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[int] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="journal", daemon=True)
        self._thread.start()
        return await opened

    async def close(self) -> None:
        """Commits what is pending and ends the thread."""
        if self._thread is None:
            return
        await self._idle.wait()
        self._batches.put(None)
        thread, self._thread = self._thread, None
        await asyncio.get_running_loop().run_in_executor(None, thread.join)

    async def insert(self, record: Record) -> bool:
        """Writes a new sandbox. False: its project has a record under the same key already, and nothing was written."""
        row = (
            record.id,
            record.project,
            record.key,
            record.state,
            int(record.live),
            record.created_at,
            record.ended_at,
            _encode(record),
        )
        return await self._write(_INSERT, row) == 1

    def update(self, record: Record) -> asyncio.Future[int]:
        """Writes the record as it is now; the future is done when that is committed."""
        return self._write(_UPDATE, (record.state, int(record.live), record.ended_at, _encode(record), record.id))

    def delete(self, sandbox: str) -> asyncio.Future[int]:
        """Forgets a sandbox that nobody was told about."""
        return self._write(_DELETE, (sandbox,))

    async def find(self, sandbox: str) -> Record | None:
        """The record of a sandbox, live or ended."""
        return await self._read(lambda db: _first(db.execute("SELECT record FROM sandboxes WHERE id = ?", (sandbox,))))

    async def find_key(self, project: str, key: str) -> Record | None:
        """The record that a project made under an idempotency key."""
        return await self._read(lambda db: _first(db.execute("SELECT record FROM sandboxes WHERE project = ? AND key = ?", (project, key))))

    async def live(self) -> list[Record]:
        """Every sandbox of which kernel objects may exist."""
        return await self._read(lambda db: [_decode(row[0]) for row in db.execute("SELECT record FROM sandboxes WHERE live = 1")])

    async def ended(self, project: str, states: Sequence[State], after: tuple[float, str], limit: int) -> list[Record]:
        """Records of a project's ended sandboxes in one of ``states``, by (created_at, id), those after ``after``."""
        marks = ",".join("?" * len(states))
        sql = (
            f"SELECT record FROM sandboxes WHERE live = 0 AND project = ? AND state IN ({marks}) AND (created_at, id) > (?, ?)"
            " ORDER BY created_at, id LIMIT ?"
        )
        return await self._read(lambda db: [_decode(row[0]) for row in db.execute(sql, (project, *states, *after, limit))])

    async def prune(self, *, before: float, keep: int) -> int:
        """Removes records of sandboxes that ended before ``before`` (Unix seconds), and of the rest all but the newest ``keep``."""
        old = await self._write("DELETE FROM sandboxes WHERE live = 0 AND ended_at < ?", (before,))
        excess = "DELETE FROM sandboxes WHERE id IN (SELECT id FROM sandboxes WHERE live = 0 ORDER BY ended_at DESC LIMIT -1 OFFSET ?)"
        removed = old + await self._write(excess, (keep,))
        await self._read(_shrink)
        return removed

    def _write(self, sql: str, parameters: tuple[Parameter, ...]) -> asyncio.Future[int]:
        done: asyncio.Future[int] = self._running_loop().create_future()
        self._pending.writes.append(_Write(sql, parameters, done))
        self._schedule()
        return done

    async def _read(self, ask: Callable[[sqlite3.Connection], T]) -> T:
        done: asyncio.Future[T] = self._running_loop().create_future()
        self._pending.reads.append(_Read(ask, done))  # type: ignore[arg-type]  # the future and the question agree on T
        self._schedule()
        return await done

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._thread is None:
            raise JournalError("the journal is closed")
        return self._loop

    def _schedule(self) -> None:
        if self._scheduled or self._committing:
            return
        loop = self._running_loop()
        self._scheduled = True
        self._idle.clear()
        wait = self._last_commit + WINDOW_S - loop.time()
        if wait > 0:
            loop.call_later(wait, self._flush)
        else:
            loop.call_soon(self._flush)

    def _flush(self) -> None:
        batch, self._pending = self._pending, _Batch()
        self._scheduled = False
        self._committing = True
        self._batches.put(batch)

    def _committed(self, batch: _Batch) -> None:
        self._committing = False
        self.commits += 1
        self._last_commit = self._running_loop().time() if self._thread else 0.0
        for write in batch.writes:
            if write.done.done():
                continue
            if batch.error is not None:
                write.done.set_exception(JournalError(f"the journal can't be written: {batch.error}"))
            else:
                write.done.set_result(write.result)
        for read in batch.reads:
            if read.done.done():
                continue
            if read.error is not None:
                read.done.set_exception(JournalError(f"the journal can't be read: {read.error}"))
            else:
                read.done.set_result(read.result)
        if self._pending.writes or self._pending.reads:
            self._schedule()
        else:
            self._idle.set()

    def _run(self, opened: asyncio.Future[int]) -> None:
        loop = self._running_loop()
        try:
            db, epoch = _open(self._path)
        except sqlite3.Error as error:
            loop.call_soon_threadsafe(opened.set_exception, JournalError(f"{self._path} can't be opened: {error}"))
            return
        loop.call_soon_threadsafe(opened.set_result, epoch)
        while (batch := self._batches.get()) is not None:
            _commit(db, batch)
            loop.call_soon_threadsafe(self._committed, batch)
        db.close()


def _open(path: Path) -> tuple[sqlite3.Connection, int]:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
    db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    db.executescript(_SCHEMA)
    db.execute("UPDATE meta SET value = value + 1 WHERE name = 'epoch'")
    epoch: int = db.execute("SELECT value FROM meta WHERE name = 'epoch'").fetchone()[0]
    return db, epoch


def _commit(db: sqlite3.Connection, batch: _Batch) -> None:
    if batch.writes:
        try:
            db.execute("BEGIN IMMEDIATE")
            for write in batch.writes:
                write.result = db.execute(write.sql, write.parameters).rowcount
            db.execute("COMMIT")
        except sqlite3.Error as error:
            batch.error = error
            if db.in_transaction:
                db.execute("ROLLBACK")
    for read in batch.reads:
        try:
            read.result = read.ask(db)
        except sqlite3.Error as error:
            read.error = error


def _first(cursor: sqlite3.Cursor) -> Record | None:
    row = cursor.fetchone()
    return None if row is None else _decode(row[0])


def _shrink(db: sqlite3.Connection) -> None:
    db.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
