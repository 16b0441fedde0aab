"""Nodes of a cluster for tests: image stores with state directories of their own that share one store."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dsec.images import ImageStore, ImportLimits
from dsec.images.catalog import Caller
from dsec.images.importing import ImportRequest, Kind
from dsec.images.retiring import CACHE_BYTES
from dsec.images.shared import Blobs, open_blobs
from dsec.store import Store
from libdsec.schema import ImageInfo, ImportLine
from tests.unit.images_archives import files

ADMIN = Caller(project="root", admin=True)


def quiet(line: object) -> None:
    """Takes lines of progress that no test looks at."""


@dataclass
class Node:
    """One node. ``live``: the metadata digests that its sandboxes hold."""

    images: ImageStore
    root: Path
    live: set[str] = field(default_factory=set)

    def blobs(self) -> set[str]:
        return set(os.listdir(self.root / "images" / "blobs"))

    async def load(
        self,
        name: str,
        contents: Mapping[str, bytes],
        *,
        kind: Kind = "base",
        caller: Caller = ADMIN,
        tell: Callable[[ImportLine], None] = lambda line: None,
        key: str | None = None,
    ) -> ImageInfo:
        """Imports a tar of plain files."""
        return await self.load_tar(name, files(contents), kind=kind, caller=caller, tell=tell, key=key)

    async def load_tar(
        self,
        name: str,
        archive: bytes,
        *,
        kind: Kind = "base",
        caller: Caller = ADMIN,
        tell: Callable[[ImportLine], None] = lambda line: None,
        key: str | None = None,
    ) -> ImageInfo:
        async def body() -> AsyncIterator[bytes]:
            yield archive

        request = ImportRequest(name=name, kind=kind, format="tar", at="/", caller=caller, idempotency_key=key)
        return await self.images.import_archive(request, body(), tell)


@asynccontextmanager
async def node(root: Path, shared: str | Blobs | None, *, cache_bytes: int = CACHE_BYTES) -> AsyncIterator[Node]:
    """A node with its state below ``root``. Opened again with the same root it is the same node after a restart."""
    root.mkdir(exist_ok=True)
    store = await Store.open_file(root / "store.sqlite")
    blobs = open_blobs(shared) if isinstance(shared, str) else shared
    images = ImageStore(root / "images", store, shared=blobs, limits=ImportLimits(disk_reserve=0), cache_bytes=cache_bytes)
    made = Node(images, root)
    images.in_use = lambda: made.live
    await images.open()
    images.start()
    try:
        yield made
    finally:
        await images.close()
        await store.close()


def content(seed: int, size: int) -> bytes:
    """Bytes that pack to about half their size, the same for the same seed."""
    generator = random.Random(seed)
    return b"".join(generator.randbytes(512) + bytes(512) for _ in range(size // 1024))
