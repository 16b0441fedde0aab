"""The Store: what the apiserver must remember across restarts and shares with others (keys, image names), in one SQL database.

Owns the connection, the durability settings and the shared :data:`metadata`. Knows no table: each is declared by the module that owns it,
on that metadata, and is created when the store opens. A node's sandboxes are not here; they are in its edge's own journal.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Self

from sqlalchemy import MetaData, event
from sqlalchemy.engine import make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

metadata = MetaData()
"""Every table of the store hangs here; a module that declares one must be imported before :meth:`Store.open`."""

SQLITE_BUSY_TIMEOUT_MS = 5_000
"""How long a writer waits for another process (a backup, an operator's shell) before it fails with "database is locked"."""


class Store:
    """An open database. ``engine`` is SQLAlchemy's async engine: ``async with store.engine.begin() as connection: …``."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    @classmethod
    async def open(cls, url: str) -> Self:
        """Connect to ``url`` (``sqlite+aiosqlite:///<path>`` or ``postgresql+<async driver>://…``) and create the tables that are missing.

        An SQLite file is made readable by its owner only. Raises SQLAlchemy's ``ArgumentError`` for a malformed URL and ``DBAPIError`` (or
        the driver's own error) where the database can't be opened.
        """
        parsed = make_url(url)
        is_sqlite = parsed.get_backend_name() == "sqlite"
        if is_sqlite and parsed.database and parsed.database != ":memory:":
            _create_private(Path(parsed.database))
        engine = create_async_engine(parsed)
        if is_sqlite:
            event.listen(engine.sync_engine, "connect", _configure_sqlite)
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        return cls(engine)

    @classmethod
    async def open_file(cls, path: Path) -> Self:
        """The SQLite store of one machine, at the absolute ``path``."""
        return await cls.open(f"sqlite+aiosqlite:///{path}")

    async def close(self) -> None:
        """Close every connection; the write-ahead log is folded into the file by the last one."""
        await self.engine.dispose()


def _create_private(path: Path) -> None:
    """Create the file before SQLite does, so that it (and the -wal and -shm files, which copy its mode) never is world-readable."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))


def _configure_sqlite(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
    """WAL with synchronous=NORMAL: a crash of the process loses nothing, a power cut may lose the last commits but never the database."""
    cursor = connection.cursor()
    try:
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", f"busy_timeout={SQLITE_BUSY_TIMEOUT_MS}"):
            cursor.execute(f"PRAGMA {pragma}")
    except sqlite3.Error as error:
        raise RuntimeError(f"the store can't be set up for use ({error}); is its directory writable?") from error
    finally:
        cursor.close()
