"""From this node to the shared store: layers first, the manifest last, so that whatever a reader finds by name is whole.

A layer goes in the order frames, chunk table, metadata: each one says that what stands before it is complete. What is there already isn't
sent again, so a push that broke off goes on where it was.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import structlog
import zstandard

from dsec.images.blobs import BlobDirectory, digest_of, full_disk_told, hex_of
from dsec.images.chunks import CHUNK_BYTES, ChunkTable, pack
from dsec.images.documents import decode
from dsec.images.flights import Flights
from dsec.images.importing import Tell
from dsec.images.leases import POLL_S, Lease
from dsec.images.shared import BlobMissing, Blobs, BlobTooLarge
from dsec.images.shared_catalog import Manifest, SharedCatalog, held_by
from dsec.images.threads import Check, in_pieces, to_end
from libdsec.errors import ImageError, ImageNotFound
from libdsec.schema import ImageInfo, ImportLine, LayerInfo

META_LEVEL = 9
"""Metadata is small, written once and read by every node."""
PROGRESS_BYTES = 16 << 20
CLAIM_S = 600.0
"""A node that uploads a blob says so; one that hasn't for so long is dead, and another takes over."""
CLAIM_REFRESH_S = 60.0
PACKINGS = 2
"""Blobs packed at a time; each uses every core."""

_log = structlog.get_logger("dsec.images")


class ClaimFile(msgspec.Struct, kw_only=True):
    """``uploads/<blob>.json``: who writes the frames of this blob. Two packers of different versions of zstd would mix theirs."""

    node: str
    at: float


def meta_key(digest: str) -> str:
    return f"metas/{hex_of(digest)}.zst"


def frames_key(blob: str) -> str:
    return f"blobs/{hex_of(blob)}.z"


def table_key(blob: str) -> str:
    return f"blobs/{hex_of(blob)}.idx"


class Publisher:
    """Pushes images. One per node."""

    def __init__(self, local: BlobDirectory, shared: Blobs, catalog: SharedCatalog, lease: Lease) -> None:
        self.chunk_bytes = CHUNK_BYTES
        self._local = local
        self._shared = shared
        self._catalog = catalog
        self._lease = lease
        self._flights = Flights()
        self._slots = asyncio.Semaphore(PACKINGS)
        self._pushing: dict[str, int] = {}

    def digests(self) -> set[str]:
        """Digests (hexadecimal) of what is being pushed."""
        return set(self._pushing)

    async def push(self, image: ImageInfo, project: str, tell: Tell) -> ImageInfo:
        """Makes ``image``, whose layers are on this node, visible to all; returns it with the digests of the chunk tables. Repeatable.

        Raises Conflict where the store has another image of that name and version, ImageNotFound where a layer isn't here whole, ImageError
        where what is here is broken, Unavailable and NoCapacity: then what was sent stays for the next attempt.
        """
        async with self._sent(image, tell) as pushed:
            await self._catalog.add(Manifest(**msgspec.structs.asdict(pushed), project=project))
            return pushed

    async def restore(self, image: ImageInfo, project: str) -> ImageInfo:
        """Like :meth:`push`, for an image whose manifest in the store can't be read. Raises ImageNotFound also where that was removed
        meanwhile."""
        async with self._sent(image, lambda line: None) as pushed:
            await self._catalog.restore(Manifest(**msgspec.structs.asdict(pushed), project=project))
            return pushed

    @asynccontextmanager
    async def _sent(self, image: ImageInfo, tell: Tell) -> AsyncGenerator[ImageInfo, None]:
        """The image with the digests of its chunk tables. Its layers are in the store, and stay there, while the body runs."""
        held = held_by(image.layers)
        digests = held.metas | held.blobs
        async with self._scope(digests):
            await self._lease.hold(digests)
            layers = []
            for index, layer in enumerate(image.layers):
                layers.append(await self._push_layer(layer, f"sending layer {index + 1} of {len(image.layers)}", tell))
            tell(ImportLine(step="publishing", done_bytes=image.size))
            yield msgspec.structs.replace(image, layers=layers)

    async def mend(self, layer: LayerInfo, keys: Sequence[str]) -> None:
        """Replaces objects of a layer that the store has already by what this node has of it.

        Raises ImageNotFound where that isn't whole, ImageError where this node would pack it in another way than the layer's table says:
        nodes that have that table would read nonsense. Raises Unavailable, NoCapacity.
        """
        if meta_key(layer.digest) in keys:
            await self._send_meta(layer)
        if layer.blob is None or not {frames_key(layer.blob), table_key(layer.blob)} & set(keys):
            return
        workspace = self._local.make_workspace()
        try:
            async with self._flights.of(layer.blob), self._slots:
                table = await self._pack(layer.blob, workspace / "frames", "sending layer", lambda line: None)
                encoded = table.encode()
                if digest_of(hashlib.sha256(encoded).hexdigest()) != layer.index:
                    raise ImageError("this node packs the blob in another way than its table says: import the image again")
                if frames_key(layer.blob) in keys:
                    await self._shared.put_file(frames_key(layer.blob), workspace / "frames")
                if table_key(layer.blob) in keys:
                    await self._shared.put(table_key(layer.blob), encoded)
        finally:
            await to_end(lambda: self._local.remove_workspace(workspace))

    @asynccontextmanager
    async def _scope(self, digests: frozenset[str]) -> AsyncGenerator[None, None]:
        for digest in digests:
            self._pushing[digest] = self._pushing.get(digest, 0) + 1
        try:
            yield
        finally:
            for digest in digests:
                self._pushing[digest] -= 1
                if not self._pushing[digest]:
                    del self._pushing[digest]

    async def _push_layer(self, layer: LayerInfo, step: str, tell: Tell) -> LayerInfo:
        async with self._flights.of(layer.digest):
            index = None if layer.blob is None else await self._push_blob(layer.blob, step, tell)
            if await self._shared.stat(meta_key(layer.digest)) is None:
                await self._send_meta(layer)
            return msgspec.structs.replace(layer, index=index)

    async def _send_meta(self, layer: LayerInfo) -> None:
        def pack_meta() -> bytes:
            content = self._local.path(layer.digest).read_bytes()
            if digest_of(hashlib.sha256(content).hexdigest()) != layer.digest:
                raise ImageError(f"the content of {layer.digest} on this node is broken: `dsec image fsck --deep` tells more")
            return zstandard.ZstdCompressor(level=META_LEVEL).compress(content)

        try:
            packed = await to_end(pack_meta)
        except FileNotFoundError:
            raise _not_whole(layer.digest) from None
        await self._shared.put(meta_key(layer.digest), packed)

    async def _push_blob(self, blob: str, step: str, tell: Tell) -> str:
        """The digest of the blob's chunk table, once both are in the store."""
        async with self._flights.of(blob):
            while True:
                table = await self._published(blob)
                if table is not None:
                    return table
                if not self._local.has(blob):
                    raise _not_whole(blob)
                if await self._claim(blob):
                    break
                tell(ImportLine(step=f"{step}: another node is sending it"))
                await asyncio.sleep(POLL_S)
            claiming = asyncio.create_task(self._keep_claim(blob))
            try:
                # Between the look and the claim another node may have sent it, and its table is what its manifests name.
                table = await self._published(blob)
                if table is not None:
                    return table
                async with self._slots:
                    return await self._send(blob, step, tell)
            finally:
                claiming.cancel()
                await asyncio.gather(claiming, return_exceptions=True)
                await self._shared.delete([f"uploads/{hex_of(blob)}.json"])

    async def _published(self, blob: str) -> str | None:
        """The digest of the table that the store has for the blob, if its frames are there too."""
        try:
            encoded = await self._shared.get(table_key(blob))
            table = ChunkTable.decode(encoded)
        except (BlobMissing, ImageError):
            return None
        frames = await self._shared.stat(frames_key(blob))
        if frames is None or frames.size != table.stored_bytes:
            return None
        return digest_of(hashlib.sha256(encoded).hexdigest())

    async def _send(self, blob: str, step: str, tell: Tell) -> str:
        workspace = self._local.make_workspace()
        try:
            frames = workspace / "frames"
            table = await self._pack(blob, frames, step, tell)
            size = table.stored_bytes
            tell(ImportLine(step=step, done_bytes=0, total_bytes=size))
            told = 0

            def progress(done: int) -> None:
                nonlocal told
                if done - told >= PROGRESS_BYTES:
                    told = done
                    tell(ImportLine(step=step, done_bytes=done, total_bytes=size))

            # An older table belongs to other frames than these.
            await self._shared.delete([table_key(blob)])
            await self._shared.put_file(frames_key(blob), frames, progress)
            encoded = table.encode()
            await self._shared.put(table_key(blob), encoded)
            digest = digest_of(hashlib.sha256(encoded).hexdigest())
            await to_end(lambda: self._local.keep(encoded, digest))
            return digest
        finally:
            await to_end(lambda: self._local.remove_workspace(workspace))

    async def _pack(self, blob: str, target: Path, step: str, tell: Tell) -> ChunkTable:
        """Raises ImageNotFound where the blob isn't here whole, ImageError where it is broken, NoCapacity."""
        source = self._local.path(blob)
        loop = asyncio.get_running_loop()
        packing = step.replace("sending", "packing", 1)
        told = 0

        def pack_checked(check: Check) -> ChunkTable:
            size = source.stat().st_size

            def progress(done: int) -> None:
                nonlocal told
                check()
                if done - told >= PROGRESS_BYTES:
                    told = done
                    loop.call_soon_threadsafe(tell, ImportLine(step=packing, done_bytes=done, total_bytes=size))

            self._local.check_room(size)
            return pack(source, target, chunk_bytes=self.chunk_bytes, progress=progress, sha256=hex_of(blob))

        try:
            with full_disk_told():
                return await in_pieces(pack_checked)
        except FileNotFoundError:
            raise _not_whole(blob) from None

    async def _claim(self, blob: str) -> bool:
        """Whether this node may send the blob now."""
        key = f"uploads/{hex_of(blob)}.json"
        mine = msgspec.json.encode(ClaimFile(node=self._lease.node, at=time.time()))
        if await self._shared.put_new(key, mine):
            return True
        try:
            claim = decode(await self._shared.get(key), ClaimFile)
        except BlobMissing:
            return False
        except (msgspec.DecodeError, BlobTooLarge):
            claim = ClaimFile(node="", at=0.0)
        # One of our own is from before a crash: within this process the flights see to it that a blob is sent once.
        if claim.node == self._lease.node or claim.at + CLAIM_S < time.time():
            await self._shared.put(key, mine)
            return True
        return False

    async def _keep_claim(self, blob: str) -> None:
        while True:
            await asyncio.sleep(CLAIM_REFRESH_S)
            claim = ClaimFile(node=self._lease.node, at=time.time())
            try:
                await self._shared.put(f"uploads/{hex_of(blob)}.json", msgspec.json.encode(claim))
            except Exception as failure:
                # It counts for ten times as long.
                _log.warning("the claim on an upload can't be renewed", blob=blob, error=str(failure))


def _not_whole(digest: str) -> ImageNotFound:
    return ImageNotFound(f"{digest} is not whole on this node, so it can't be sent: `dsec image pull --whole` fetches it")
