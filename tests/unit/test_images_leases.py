"""Leases, and one gc at a time: what holds when clocks go on, nodes die, and several come at once."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import msgspec
import pytest

from dsec.images.leases import GC_KEY, GC_S, LEASE_S, CondemnedFile, Lease, keep_refreshed
from dsec.images.shared import DirectoryBlobs
from dsec.images.shared_catalog import SharedCatalog
from dsec.images.store_gc import StoreGc
from libdsec.errors import Conflict, Unavailable

DEADLINE_S = 20.0
GARBAGE = "a" * 64


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def blobs(tmp_path: Path) -> DirectoryBlobs:
    return DirectoryBlobs(tmp_path / "shared")


def lease_of(node: str, blobs: DirectoryBlobs, clock: Clock, needed: set[str] | None = None) -> Lease:
    made = Lease(blobs, lambda: needed or set(), clock)
    made.node = node
    return made


def gc_of(node: str, blobs: DirectoryBlobs, clock: Clock) -> StoreGc:
    return StoreGc(blobs, SharedCatalog(blobs), lease_of(node, blobs, clock), clock)


async def put_garbage(blobs: DirectoryBlobs, clock: Clock) -> Path:
    key = f"metas/{GARBAGE}.zst"
    await blobs.put(key, b"garbage")
    path = Path(blobs.url, key)
    os.utime(path, (clock.now - 7200,) * 2)
    return path


def condemned_by(node: str, at: float) -> bytes:
    return msgspec.json.encode(CondemnedFile(node=node, at=at, digests=[]))


# -- leases


async def test_what_is_held_is_looked_for_again_after_the_lease_had_lapsed(blobs: DirectoryBlobs, clock: Clock) -> None:
    lease = lease_of("a", blobs, clock, {"x"})
    assert await lease.hold(["x"])
    assert not await lease.hold(["x"])
    clock.now += LEASE_S / 2 - 1
    await lease.refresh()
    assert not await lease.hold(["x"]), "it counted all the time"
    clock.now += LEASE_S
    await lease.refresh()
    assert await lease.hold(["x"]), "another node may have taken it"
    assert not await lease.hold(["x"])


async def test_a_lease_that_cannot_be_written_in_time_is_unavailable(tmp_path: Path, clock: Clock) -> None:
    class Hanging(DirectoryBlobs):
        async def put(self, key: str, data: bytes) -> None:
            await asyncio.Event().wait()

    lease = lease_of("a", Hanging(tmp_path / "shared"), clock)
    with pytest.raises(Unavailable, match="within"):
        await lease.hold(["x"], 60.0, within_s=0.01)


async def test_refreshing_goes_on_whatever_an_attempt_fails_with(
    blobs: DirectoryBlobs, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.images.leases.REFRESH_S", 0.0)
    failures: list[Exception] = [OSError("stale file handle"), Unavailable("cut"), KeyError("x")]
    written = asyncio.Event()

    class Failing(Lease):
        async def refresh(self) -> None:
            if failures:
                raise failures.pop(0)
            written.set()

    told: list[Exception] = []
    refreshing = asyncio.create_task(keep_refreshed(Failing(blobs, set, clock), told.append))
    async with asyncio.timeout(DEADLINE_S):
        await written.wait()
    refreshing.cancel()
    assert [type(each) for each in told] == [OSError, Unavailable, KeyError]


# -- gc


async def test_of_two_that_take_over_from_a_dead_gc_one_does(blobs: DirectoryBlobs, clock: Clock) -> None:
    garbage = await put_garbage(blobs, clock)
    await blobs.put(GC_KEY, condemned_by("dead", clock.now - GC_S - 1))
    gcs = [gc_of(name, blobs, clock) for name in ("a", "b", "c")]
    outcomes = await asyncio.gather(*(gc._condemn([]) for gc in gcs), return_exceptions=True)
    assert [isinstance(outcome, Conflict) for outcome in outcomes].count(True) == 2
    [mine] = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    assert await blobs.get(GC_KEY) == mine.data
    assert garbage.exists()


async def test_a_takeover_that_died_itself_is_taken_over_in_its_turn(blobs: DirectoryBlobs, clock: Clock) -> None:
    garbage = await put_garbage(blobs, clock)
    await blobs.put(GC_KEY, condemned_by("dead", clock.now - GC_S - 1))

    class Dying(DirectoryBlobs):
        async def put(self, key: str, data: bytes) -> None:
            raise Unavailable("cut")

    with pytest.raises(Unavailable):
        await gc_of("a", Dying(Path(blobs.url)), clock).collect({})
    with pytest.raises(Conflict, match="node a"):
        await gc_of("b", blobs, clock).collect({})
    clock.now += GC_S + 1
    assert await gc_of("b", blobs, clock).collect({}) > 0
    assert not garbage.exists() and not Path(blobs.url, GC_KEY).exists()


async def test_a_node_takes_over_from_its_own_gc_of_before_a_crash_at_once(blobs: DirectoryBlobs, clock: Clock) -> None:
    await put_garbage(blobs, clock)
    await blobs.put(GC_KEY, condemned_by("a", clock.now - 1))
    with pytest.raises(Conflict):
        await gc_of("b", blobs, clock).collect({})
    assert await gc_of("a", blobs, clock).collect({}) > 0


async def test_a_gc_that_another_has_replaced_deletes_nothing_of_it(
    blobs: DirectoryBlobs, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    garbage = await put_garbage(blobs, clock)
    gc = gc_of("a", blobs, clock)
    theirs = condemned_by("b", clock.now)

    async def overtaken() -> None:
        await blobs.put(GC_KEY, theirs)

    monkeypatch.setattr(gc._lease, "refresh", overtaken)
    with pytest.raises(Conflict, match="another node"):
        await gc.collect({})
    assert garbage.exists() and await blobs.get(GC_KEY) == theirs


async def test_what_passes_before_the_first_deletion_counts_against_the_time_of_a_gc(
    blobs: DirectoryBlobs, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others heed what is condemned for ten minutes from when it was written, however long this one took to read leases."""
    garbage = await put_garbage(blobs, clock)
    gc = gc_of("a", blobs, clock)

    async def slowly() -> None:
        clock.now += GC_S

    monkeypatch.setattr(gc._lease, "refresh", slowly)
    with pytest.raises(Unavailable, match="too slow"):
        await gc.collect({})
    assert garbage.exists()
