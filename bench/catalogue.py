"""A catalogue as large as a lab's: 11,000 bases, 100,000 workspaces and 39,000 diffs, a layer each, in an image store that shares its
store (a directory) with others. Layers are tiny; their number is what is measured.

The rows, manifests and files are written in bulk; what is timed is the product's own: opening, resolving, list pages over HTTP, gc here and
in the shared store, with every tenth layer garbage.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec
import uvicorn
from sqlalchemy import insert
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from bench.claim import Claim, Outcome, Setting, WrongAnswer, percentile, rounded
from dsec.api.listener import bind
from dsec.images import ImageStore, ImportLimits
from dsec.images.shared import open_blobs
from dsec.images.shared_catalog import Manifest, manifest_key
from dsec.store import Store, metadata
from libdsec.schema import ImageConfig, ImageInfo, LayerInfo

BASES, WORKSPACES, DIFFS = 11_000, 100_000, 39_000
QUICK_SHARE = 100
"""A quick run has a hundredth of everything."""
GARBAGE_SHARE = 10
"""Of ten layers that lie in the stores nothing names one more."""
RESOLVES = 20_000
PAGES = 300
PAGE_LIMIT = 1000
DIFF_OF = 4
"""Every so many bases has a chain of diffs on it."""
DISK_RESERVE = 1 << 30
OLD_S = 7200
"""Garbage is older than gc's grace."""


@dataclass(frozen=True)
class Size:
    """How many images of each kind."""

    bases: int
    workspaces: int
    diffs: int

    @property
    def layers(self) -> int:
        return self.bases + self.workspaces + self.diffs


def _hex(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _layer(kind: str, number: int) -> LayerInfo:
    return LayerInfo(
        digest=f"sha256:{_hex(kind, number, 'meta')}",
        blob=f"sha256:{_hex(kind, number, 'blob')}",
        meta_bytes=4,
        blob_bytes=4,
        index=f"sha256:{_hex(kind, number, 'index')}",
    )


def _image(name: str, version: int, kind: Literal["base", "workspace"], layers: list[LayerInfo]) -> ImageInfo:
    return ImageInfo(
        name=name,
        version=version,
        kind=kind,
        digest=f"sha256:{_hex(name, version)}",
        layers=layers,
        config=ImageConfig(env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}, workdir="/work"),
        created_at=1.7e9,
        size=sum(layer.meta_bytes + layer.blob_bytes for layer in layers),
    )


def _images(size: Size) -> Iterator[ImageInfo]:
    """Bases, workspaces, and chains of diffs: each one a further version of its base with a layer more."""
    bases = [[_layer("base", number)] for number in range(size.bases)]
    versions = [1] * size.bases
    for number, layers in enumerate(bases):
        yield _image(f"team-{number % 97}/base-{number}:latest", 1, "base", layers)
    for number in range(size.workspaces):
        yield _image(f"tasks/repo-{number}", 1, "workspace", [_layer("workspace", number)])
    for number in range(size.diffs):
        base = number * DIFF_OF % size.bases
        versions[base] += 1
        bases[base] = [*bases[base], _layer("diff", number)]
        yield _image(f"team-{base % 97}/base-{base}:latest", versions[base], "base", bases[base])


def _write(path: Path, old: bool) -> None:
    path.write_bytes(b"tiny")
    if old:
        os.utime(path, (time.time() - OLD_S,) * 2)


def _write_files(home: Path, size: Size, images: list[ImageInfo]) -> None:
    """Layers on the node and in the shared store, garbage among them, and the manifests."""
    blobs, shared = home / "images" / "blobs", home / "shared"
    for directory in (blobs, shared / "metas", shared / "blobs", shared / "images"):
        directory.mkdir(parents=True)
    named = [layer for image in images for layer in image.layers[-1:]]
    garbage = [_layer("garbage", number) for number in range(size.layers // GARBAGE_SHARE)]
    for layers, old in ((named, False), (garbage, True)):
        for layer in layers:
            meta, blob = layer.digest[7:], (layer.blob or "")[7:]
            _write(blobs / meta, old)
            _write(blobs / blob, old)
            _write(shared / "metas" / f"{meta}.zst", old)
            _write(shared / "blobs" / f"{blob}.z", old)
            _write(shared / "blobs" / f"{blob}.idx", old)
    for image in images:
        path = shared / manifest_key(image.name, image.version)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(msgspec.json.encode(Manifest(**msgspec.structs.asdict(image), project="bench")))
        path.with_suffix(".taken").write_bytes(b"")


async def _write_rows(store: Store, images: list[ImageInfo]) -> None:
    rows = [
        {
            "name": image.name,
            "version": image.version,
            "project": "bench",
            "created_at": image.created_at,
            "info": msgspec.json.encode(image).decode(),
            "idempotency_key": None,
        }
        for image in images
    ]
    async with store.engine.begin() as connection:
        await connection.execute(insert(metadata.tables["images"]), rows)
        shared = [{"name": image.name, "version": image.version} for image in images]
        await connection.execute(insert(metadata.tables["image_shared"]), shared)


@asynccontextmanager
async def _http(images: ImageStore) -> AsyncIterator[str]:
    """The image routes behind a real listener; the address."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope.update({"dsec.project": "bench", "dsec.admin": True, "app": app})
        await Router(images.routes(), redirect_slashes=False)(scope, receive, send)

    listening = bind("127.0.0.1", 0)
    listening.listen()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def _pages(images: ImageStore, count: int, total: int) -> list[float]:
    """Seconds of list pages, the whole list over and over."""
    times: list[float] = []
    async with _http(images) as url, aiohttp.ClientSession() as session:
        # The first request of a process also imports and connects.
        async with session.get(f"{url}/v1/images?limit=1") as response:
            await response.read()
        cursor: str | None = None
        seen = 0
        while len(times) < count:
            query = {"limit": str(PAGE_LIMIT), **({} if cursor is None else {"cursor": cursor})}
            started = time.perf_counter()
            async with session.get(f"{url}/v1/images", params=query) as response:
                body = await response.read()
            times.append(time.perf_counter() - started)
            page = msgspec.json.decode(body)
            seen += len(page["images"])
            cursor = page["cursor"]
            if cursor is None:
                if seen != total:
                    raise WrongAnswer(f"the list had {seen} of {total} images")
                seen = 0
    return times


def _resolves(images: ImageStore, size: Size, count: int) -> list[float]:
    """Seconds of resolutions, each of a base and a workspace that weren't asked for together before."""
    chosen = random.Random(1)
    times = []
    for number in range(count):
        base, workspace = chosen.randrange(size.bases), number * 7919 % size.workspaces
        started = time.perf_counter()
        environment = images.resolve(f"team-{base % 97}/base-{base}:latest", f"tasks/repo-{workspace}", ())
        times.append(time.perf_counter() - started)
        if environment.workspace != f"tasks/repo-{workspace}@1":
            raise WrongAnswer(f"repo-{workspace} resolved to {environment.workspace}")
    return times


async def measure(setting: Setting) -> Outcome:
    share = QUICK_SHARE if setting.quick else 1
    size = Size(BASES // share, WORKSPACES // share, DIFFS // share)
    home = Path(tempfile.mkdtemp(prefix="dsec-catalogue-", dir=setting.parent))
    async with contextlib.AsyncExitStack() as closing:
        closing.push_async_callback(_remove, home)
        made = list(_images(size))
        started = time.perf_counter()
        await asyncio.to_thread(_write_files, home, size, made)
        store = await Store.open_file(home / "store.sqlite")
        closing.push_async_callback(store.close)
        await _write_rows(store, made)
        written = time.perf_counter() - started
        images = ImageStore(home / "images", store, shared=open_blobs(str(home / "shared")), limits=ImportLimits(disk_reserve=DISK_RESERVE))
        closing.push_async_callback(images.close)
        started = time.perf_counter()
        await images.open()
        opened = time.perf_counter() - started
        # As the service does once it is up.
        gc.collect()
        gc.freeze()
        resolves = _resolves(images, size, RESOLVES // share)
        pages = await _pages(images, max(PAGES // share, 5), len(made))
        # Opening has collected the node's garbage already; it is put back, so that gc has both sides to do.
        for number in range(size.layers // GARBAGE_SHARE):
            _write(home / "images" / "blobs" / _layer("garbage", number).digest[7:], old=True)
        started = time.perf_counter()
        removed = await images.collect_garbage()
        collected = time.perf_counter() - started
        _check(home, size, removed)
        print(f"catalogue: gc took {collected:.1f} s; removing {size.layers} layers takes minutes", file=sys.stderr, flush=True)
    return Outcome(
        figures={
            "resolve_p99_ms": percentile(resolves, 0.99) * 1e3,
            "list_page_p99_ms": percentile(pages, 0.99) * 1e3,
            "gc_s": collected,
        },
        detail={
            "layers": size.layers,
            "images": len(made),
            "garbage_layers": size.layers // GARBAGE_SHARE,
            "open_s": round(opened, 2),
            "written_in_s": round(written, 2),
            "resolve_ms": rounded([percentile(resolves, rank) * 1e3 for rank in (0.5, 0.9, 0.99, 1.0)], 4),
            "list_page_ms": rounded([percentile(pages, rank) * 1e3 for rank in (0.5, 0.9, 0.99, 1.0)]),
            "images_in_a_page": PAGE_LIMIT,
        },
    )


async def _remove(home: Path) -> None:
    """Removes everything, the large directories side by side: one after the other a million files take ten minutes."""
    parts = [home / "images" / "blobs", *(home / "shared").iterdir()]
    await asyncio.gather(*(asyncio.to_thread(shutil.rmtree, part, ignore_errors=True) for part in parts))
    await asyncio.to_thread(shutil.rmtree, home)


def _check(home: Path, size: Size, removed: int) -> None:
    """Counts files: gc must have left exactly what is named, on both sides."""
    counts = {
        "node": (len(os.listdir(home / "images" / "blobs")), 2 * size.layers),
        "metas": (len(os.listdir(home / "shared" / "metas")), size.layers),
        "blobs": (len(os.listdir(home / "shared" / "blobs")), 2 * size.layers),
    }
    for what, (left, expected) in counts.items():
        if left != expected:
            raise WrongAnswer(f"gc left {left} files in {what}, {expected} are named ({removed} bytes removed)")


CLAIM = Claim(
    name="catalogue",
    what="150,000 layers: resolve, a list page, gc of the node and of the shared store",
    floors={"resolve_p99_ms": ("<=", 5), "list_page_p99_ms": ("<=", 50), "gc_s": ("<=", 60)},
    measure=measure,
)
