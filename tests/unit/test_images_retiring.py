"""Whole blobs that the shared store has too are bounded: the oldest unused ones go, and are loaded on demand again."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from edge_fakes import eventually

from dsec.images.blobs import hex_of
from dsec.images.importing import draft
from dsec.images.publishing import frames_key
from dsec.serve import _parse
from libdsec.errors import Unavailable
from libdsec.schema import ImageInfo, LayerInfo
from tests.unit.images_nodes import ADMIN, Node, content, node, quiet

SIZE = 1 << 20
"""Of an image's data, bytes."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "shared")


@pytest.fixture
async def a(tmp_path: Path, url: str) -> AsyncIterator[Node]:
    """Makes the images."""
    async with node(tmp_path / "a", url) as made:
        yield made


@pytest.fixture
async def b(tmp_path: Path, url: str) -> AsyncIterator[Node]:
    """Runs the sandboxes, and has room for two images."""
    async with node(tmp_path / "b", url, cache_bytes=2 * SIZE + SIZE // 2) as made:
        yield made


def blob_of(image: ImageInfo) -> str:
    [layer] = image.layers
    assert layer.blob is not None
    return hex_of(layer.blob)


def file_of(node: Node, image: ImageInfo) -> Path:
    return node.root / "images" / "blobs" / blob_of(image)


async def make(a: Node, *names: str) -> list[ImageInfo]:
    return [await a.load(name, {"data": content(seed, SIZE)}) for seed, name in enumerate(names)]


async def adopt(node: Node, made: Node, image: ImageInfo, age_s: float) -> None:
    """Has a node take over the whole blob of an image, as from blobfs, whose last chunk came so long ago."""
    await node.images.pull(image.name, False, quiet)
    fetched = node.root / "fetched"
    shutil.copy(file_of(made, image), fetched)
    age(fetched, age_s)
    held = await asyncio.to_thread(node.images.hold_blob, fetched)
    await asyncio.to_thread(node.images.adopt_blob, blob_of(image), held)
    await asyncio.to_thread(node.images.release_blob, held)
    fetched.unlink()


def age(file: Path, seconds: float) -> None:
    os.utime(file, (time.time() - seconds,) * 2)


async def lazy(node: Node, name: str) -> list[bool]:
    """What the edge asks before it mounts: whether each layer is read on demand."""
    return [state.lazy for state in await node.images.ensure(node.images.resolve(name, None, ()))]


def whole(node: Node, *images: ImageInfo) -> list[str]:
    return [image.name for image in images if file_of(node, image).exists()]


async def test_beyond_the_bound_the_oldest_unused_blob_goes_and_is_loaded_on_demand_again(a: Node, b: Node) -> None:
    old, older, oldest_but_used, _ = images = await make(a, "old", "older", "oldest-but-used", "new")
    for image, hours in zip(images, (2, 3, 4, 1), strict=True):
        await adopt(b, a, image, hours * 3600)
    b.live.add(blob_of(oldest_but_used))
    data, small = file_of(b, older).read_bytes(), b.blobs() - set(map(blob_of, images))
    assert await b.images._retiring.retire() == 2 * old.layers[0].blob_bytes
    assert whole(b, *images) == ["oldest-but-used", "new"]
    assert small < b.blobs(), "metadata and chunk tables stay"
    assert await lazy(b, "older") == [True]
    assert await lazy(b, "new") == [False]
    await b.images.pull("older", True, quiet)
    assert file_of(b, older).read_bytes() == data
    assert not os.listdir(b.root / "images" / "tmp")


async def test_within_the_bound_nothing_goes(a: Node, b: Node) -> None:
    images = await make(a, "x", "y")
    for image in images:
        await adopt(b, a, image, 3600)
    assert await b.images._retiring.retire() == 0
    assert whole(b, *images) == ["x", "y"]


async def test_a_disk_without_its_reserve_has_blobs_go_within_the_bound(a: Node, b: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    images = await make(a, "x", "y")
    for hours, image in enumerate(images, 1):
        await adopt(b, a, image, hours * 3600)
    monkeypatch.setattr(b.images._blobs, "shortage", lambda: SIZE // 2)
    assert await b.images._retiring.retire() > 0
    assert whole(b, *images) == ["x"]


async def test_what_was_used_a_moment_ago_stays_and_its_use_is_known_after_a_restart(tmp_path: Path, url: str, a: Node) -> None:
    images = await make(a, "x", "y")
    async with node(tmp_path / "b", url) as b:
        for hours, image in enumerate(images, 1):
            await adopt(b, a, image, hours * 3600)
        await lazy(b, "y")
        await b.images._retiring.retire()
    async with node(tmp_path / "b", url, cache_bytes=1) as b:
        assert await b.images._retiring.retire() > 0
        assert whole(b, *images) == ["y"]
        age(file_of(b, images[1]), 3600)
        b.images.note_start(b.images.resolve("y", None, ()))
        assert await b.images._retiring.retire() == 0
        age(file_of(b, images[1]), 3600)
        assert await b.images._retiring.retire() > 0


async def test_a_blob_that_a_sandbox_starts_from_meanwhile_stays(
    tmp_path: Path, url: str, a: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    [image] = await make(a, "x")
    async with node(tmp_path / "b", url, cache_bytes=1) as b:
        await adopt(b, a, image, 3600)
        asked, answer = asyncio.Event(), asyncio.Event()
        can_be_had = b.images._puller.can_be_had

        async def slowly(layer: LayerInfo) -> bool:
            asked.set()
            await answer.wait()
            return await can_be_had(layer)

        monkeypatch.setattr(b.images._puller, "can_be_had", slowly)
        retiring = asyncio.create_task(b.images._retiring.retire())
        await asked.wait()
        assert await lazy(b, "x") == [False]
        answer.set()
        assert await retiring == 0
        assert whole(b, image) == ["x"]


async def test_a_blob_that_blobfs_still_shows_stays(tmp_path: Path, url: str, a: Node) -> None:
    [image] = await make(a, "x")
    async with node(tmp_path / "b", url, cache_bytes=1) as b:
        await adopt(b, a, image, 3600)
        (b.root / "shown").hardlink_to(file_of(b, image))
        assert await b.images._retiring.retire() == 0
        (b.root / "shown").unlink()
        assert await b.images._retiring.retire() > 0


async def test_an_image_that_is_not_in_the_shared_store_stays(tmp_path: Path, url: str) -> None:
    async with node(tmp_path / "b", None) as b:
        image = await b.load("x", {"data": content(1, SIZE)})
    async with node(tmp_path / "b", url, cache_bytes=1) as b:
        age(file_of(b, image), 3600)
        assert await b.images._retiring.retire() == 0
        await b.images.push("x", ADMIN, quiet)
        assert await b.images._retiring.retire() > 0
        assert await lazy(b, "x") == [True]


async def test_layers_below_an_image_that_waits_to_be_pushed_stay(tmp_path: Path, url: str, a: Node) -> None:
    [base] = await make(a, "x")
    async with node(tmp_path / "b", url, cache_bytes=1) as b:
        await adopt(b, a, base, 3600)
        on_top = await b.images._catalog.add(draft("y", "base", base.layers, base.config), ADMIN, None)
        assert await b.images._retiring.retire() == 0
        await b.images.push("y", ADMIN, quiet)
        age(file_of(b, on_top), 3600)
        assert await b.images._retiring.retire() > 0


async def test_a_blob_stays_while_one_of_its_images_knows_no_other_copy(tmp_path: Path, url: str, a: Node) -> None:
    [image] = await make(a, "x")
    async with node(tmp_path / "b", None) as b:
        await b.load("mine", {"data": content(0, SIZE)})
    async with node(tmp_path / "b", url, cache_bytes=1) as b:
        await b.images.find("x")
        age(file_of(b, image), 3600)
        assert await b.images._retiring.retire() == 0
        await b.images.remove("mine", ADMIN)
        assert await b.images._retiring.retire() > 0


async def test_what_the_shared_store_lost_stays(tmp_path: Path, url: str, a: Node) -> None:
    lost, cut, there = images = await make(a, "lost", "cut", "there")
    async with node(tmp_path / "b", url, cache_bytes=1) as b:
        for image in images:
            await adopt(b, a, image, 3600)
        Path(url, frames_key(blob_of(lost))).unlink()
        os.truncate(Path(url, frames_key(blob_of(cut))), 10)
        assert await b.images._retiring.retire() == there.layers[0].blob_bytes
        assert whole(b, *images) == ["lost", "cut"]


async def test_without_a_shared_store_nothing_goes(tmp_path: Path, url: str, a: Node) -> None:
    [image] = await make(a, "x")
    async with node(tmp_path / "b", url) as b:
        await adopt(b, a, image, 3600)
    async with node(tmp_path / "b", None, cache_bytes=1) as b:
        assert await b.images._retiring.retire() == 0
        assert await lazy(b, "x") == [False]


async def test_an_adoption_has_the_bound_looked_at(tmp_path: Path, url: str, a: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.images.retiring.LOOK_EVERY_S", 3600.0)
    monkeypatch.setattr("dsec.images.retiring.SETTLE_S", 0.0)
    images = await make(a, "x", "y")
    async with node(tmp_path / "b", url, cache_bytes=SIZE + SIZE // 2) as b:
        await b.images.pull("x", True, quiet)
        age(file_of(b, images[0]), 3600)
        await adopt(b, a, images[1], 60)
        await eventually(lambda: whole(b, *images) == ["y"])


async def test_a_look_that_fails_is_followed_by_others(tmp_path: Path, url: str, a: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    [image] = await make(a, "x")
    failures: list[Exception] = [Unavailable("cut"), OSError("stale file handle")]
    async with node(tmp_path / "b", url, cache_bytes=1) as b:
        can_be_had = b.images._puller.can_be_had

        async def cut(layer: LayerInfo) -> bool:
            if failures:
                raise failures.pop()
            return await can_be_had(layer)

        monkeypatch.setattr(b.images._puller, "can_be_had", cut)
        await adopt(b, a, image, 3600)
        await b.images._retiring.close()
        monkeypatch.setattr("dsec.images.retiring.LOOK_EVERY_S", 0.0)
        b.images._retiring.start()
        await eventually(lambda: not whole(b, image))
        assert not failures


def test_the_service_is_told_the_bound() -> None:
    words = ["--state-dir", "/s", "--run-dir", "/r"]
    assert _parse(words).cache_gb == 64
    assert _parse([*words, "--cache-gb", "5"]).cache_gb == 5
