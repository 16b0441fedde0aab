"""The journal: group commit, unique keys, reopening, pruning."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.edge.journal import Journal, JournalError
from dsec.edge.record import LayerRef, Record


def record(number: int, **changes: object) -> Record:
    made = Record(
        id=f"sb-e1-{number:024}", project="p", state="creating", created_at=float(number), env={"A": "b"}, layers=(LayerRef("m", None),)
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    yield journal
    await journal.close()


async def test_what_was_written_is_read_back_whole(journal: Journal) -> None:
    await journal.insert(record(1, key="k"))
    assert await journal.find(record(1).id) == record(1, key="k")
    assert await journal.find_key("p", "k") == record(1, key="k")
    assert await journal.find_key("other", "k") is None


async def test_writes_of_many_creates_share_commits(journal: Journal) -> None:
    await asyncio.gather(*(journal.insert(record(number)) for number in range(500)))
    assert len(await journal.live()) == 500
    assert journal.commits < 20


async def test_a_key_is_taken_once_in_a_project(journal: Journal) -> None:
    assert await journal.insert(record(1, key="k"))
    assert not await journal.insert(record(2, key="k"))
    assert await journal.insert(record(3, key="k", project="other"))
    assert await journal.find(record(2).id) is None


async def test_a_deleted_sandbox_frees_its_key(journal: Journal) -> None:
    await journal.insert(record(1, key="k"))
    await journal.delete(record(1).id)
    assert await journal.insert(record(2, key="k"))


async def test_a_read_sees_the_writes_before_it(journal: Journal) -> None:
    done = journal.update(record(1))
    inserting = asyncio.ensure_future(journal.insert(record(1)))
    await asyncio.sleep(0)
    assert await journal.find(record(1).id) is not None
    await asyncio.gather(done, inserting)


async def test_a_committed_row_survives_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    child = os.fork()
    if child == 0:

        async def write() -> None:
            journal = Journal(path)
            await journal.open()
            await journal.insert(record(1))
            os.kill(os.getpid(), 9)

        try:
            asyncio.new_event_loop().run_until_complete(write())
        finally:
            os._exit(1)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == -9
    journal = Journal(path)
    assert await journal.open() == 2
    assert [found.id for found in await journal.live()] == [record(1).id]
    await journal.close()


async def test_records_are_pruned_by_age_and_by_number(journal: Journal) -> None:
    for number in range(10):
        await journal.insert(record(number, live=False, state="stopped", ended_at=float(number)))
    await journal.insert(record(99, state="running"))
    await journal.prune(before=3.0, keep=4)
    left = await journal.ended("p", ["stopped"], (0.0, ""), 100)
    assert [found.ended_at for found in left] == [6.0, 7.0, 8.0, 9.0]
    assert len(await journal.live()) == 1


async def test_churn_does_not_grow_the_file(journal: Journal, tmp_path: Path) -> None:
    async def churn() -> int:
        made = [record(number, live=False, ended_at=1.0, reason="x" * 500) for number in range(2_000)]
        await asyncio.gather(*(journal.insert(one) for one in made))
        await journal.prune(before=2.0, keep=0)
        return size_of(tmp_path)

    first = await churn()
    for _ in range(3):
        last = await churn()
    assert last <= first * 1.1


async def test_a_failed_transaction_fails_all_its_writes_and_none_is_kept(journal: Journal) -> None:
    good, bad = record(1), record(2)
    bad.project = None  # type: ignore[assignment]
    outcomes = await asyncio.gather(journal.insert(good), journal.insert(bad), return_exceptions=True)
    assert all(isinstance(outcome, JournalError) for outcome in outcomes)
    assert await journal.find(good.id) is None
    assert await journal.insert(good)


async def test_a_broken_file_is_an_error_at_open(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(JournalError, match=r"can't be opened"):
        await Journal(path).open()


async def test_close_commits_what_is_pending(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    await journal.open()
    pending = asyncio.ensure_future(journal.insert(record(1)))
    await asyncio.sleep(0)
    await journal.close()
    assert await pending
    rows = sqlite3.connect(tmp_path / "journal.sqlite").execute("SELECT count(*) FROM sandboxes").fetchone()
    assert rows == (1,)
