"""From the shared store to this node: metadata and chunk tables (small, whole, checked), and data blobs where somebody wants them whole."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dsec.images.blobs import BlobDirectory, full_disk_told, hex_of, write_synced
from dsec.images.chunks import ZEROS, ChunkTable, unpack_frame
from dsec.images.converter import Converter
from dsec.images.flights import Flights
from dsec.images.importing import Tell
from dsec.images.limits import ImportLimits
from dsec.images.publishing import frames_key, meta_key, table_key
from dsec.images.shared import BlobMissing, Blobs
from dsec.images.threads import Check, in_pieces, to_end
from libdsec.errors import ImageError, NoCapacity
from libdsec.schema import ImportLine, LayerInfo

RANGE_BYTES = 8 << 20
"""Of frames that are asked for together: one request for 8 MB costs what one for 1 MB does, but for the bytes."""
RANGES_AT_ONCE = 6
TABLES_KEPT = 256
"""Chunk tables kept in memory (48 KB for a GB of data), as every creation on a layer that isn't whole needs its one."""
SMALL_AT_ONCE = 16
"""Metadata files and tables fetched at a time."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """What the node has of a layer. Its metadata is here in any case."""

    layer: LayerInfo
    index: bytes | None
    """None: its data is whole here, or it has none. Else its chunk table, checked: the data is to be fetched as it is read."""

    @property
    def lazy(self) -> bool:
        return self.index is not None


class Puller:
    """Fetches. What several want at the same time is fetched once."""

    def __init__(self, local: BlobDirectory, shared: Blobs | None, limits: ImportLimits, judge: Converter) -> None:
        """``shared``: None where no store is configured: only what is here can be given. ``judge`` decides what metadata may come here."""
        self._local = local
        self._shared = shared
        self._limits = limits
        self._judge = judge
        self._flights = Flights()
        self._small = asyncio.Semaphore(SMALL_AT_ONCE)
        self._judging = asyncio.Semaphore(limits.conversions)
        self._tables: dict[str, bytes] = {}

    def here(self, layers: Sequence[LayerInfo]) -> bool:
        """Whether all layers are whole on this node."""
        return all(self._local.has(digest) for layer in layers for digest in (layer.digest, layer.blob) if digest is not None)

    async def states(self, layers: Sequence[LayerInfo]) -> list[LayerState]:
        """Metadata and, where the data isn't whole here, chunk tables, fetched if they are missing. Raises ImageError for what is broken
        or gone, Unavailable."""
        return list(await asyncio.gather(*map(self._state, layers)))

    async def metas(self, layers: Sequence[LayerInfo]) -> None:
        """The metadata alone. Raises what :meth:`states` raises."""
        await asyncio.gather(*map(self._meta, layers))

    async def _meta(self, layer: LayerInfo) -> None:
        if not self._local.has(layer.digest):
            async with self._flights.of(layer.digest):
                if not self._local.has(layer.digest):
                    await self._fetch_meta(layer)

    async def _state(self, layer: LayerInfo) -> LayerState:
        await self._meta(layer)
        if layer.blob is None or self._local.has(layer.blob):
            return LayerState(layer, None)
        return LayerState(layer, await self.table(layer))

    async def _fetch_meta(self, layer: LayerInfo) -> None:
        async with self._judged_meta(layer) as path:
            await to_end(lambda: self._local.commit([(path, layer.digest)]))

    async def check_meta(self, layer: LayerInfo) -> None:
        """Whether the metadata in the store may come here. Raises ImageError where it may not, Unavailable, NoCapacity."""
        async with self._judged_meta(layer):
            pass

    async def judge(self, path: Path, layer: LayerInfo) -> None:
        """Whether a metadata file is the layer's and of our making. Raises ImageError."""
        async with self._judging:
            await self._judge.check(path, layer)

    @asynccontextmanager
    async def _judged_meta(self, layer: LayerInfo) -> AsyncGenerator[Path, None]:
        """The metadata as the store has it, in a file that nobody else sees, after it was found to be the layer's and of our making."""
        if layer.meta_bytes > self._limits.metadata:
            raise ImageError(f"the metadata of {layer.digest} would have {layer.meta_bytes} bytes, {self._limits.metadata} are allowed")
        async with self._small:
            packed = await self._get(layer, meta_key(layer.digest))
        workspace = self._local.make_workspace()
        try:
            what = f"the metadata of {layer.digest}"
            async with self._judging:
                path = await to_end(lambda: write_synced(workspace / "layer.meta", unpack_frame(packed, layer.meta_bytes, what)))
                await self._judge.check(path, layer)
            yield path
        finally:
            await to_end(lambda: self._local.remove_workspace(workspace))

    async def check_frames(self, states: Sequence[LayerState]) -> None:
        """Looks whether the store still has what is to be read of layers that aren't whole here: another node may have removed their image
        before this one needed it. Raises ImageError, Unavailable."""
        blobs = [state.layer.blob for state in states if state.lazy and state.layer.blob is not None]
        assert self._shared is not None
        for blob, found in zip(blobs, await asyncio.gather(*(self._shared.stat(frames_key(blob)) for blob in blobs)), strict=True):
            if found is None:
                raise ImageError(f"the shared store has no data for {blob} any more: its image was removed, or is broken")

    async def can_be_had(self, layer: LayerInfo) -> bool:
        """Whether the data of a layer, were it not here, could be read by its chunk table, which is on this node when this says so. Raises
        Unavailable."""
        if layer.blob is None or self._shared is None:
            return False
        try:
            table = ChunkTable.decode(await self.table(layer))
        except (ImageError, NoCapacity):
            return False
        frames = await self._shared.stat(frames_key(layer.blob))
        return frames is not None and frames.size == table.stored_bytes

    async def table(self, layer: LayerInfo) -> bytes:
        """The chunk table of a layer with data, on this node when this returns. Raises ImageError, Unavailable."""
        assert layer.blob is not None
        if layer.index is None:
            raise ImageError(f"{layer.blob} is not on this node, and in no chunked store: import its image again")
        path = self._local.path(layer.index)
        known = self._tables.get(layer.index)
        if known is not None and path.exists():
            return known
        async with self._flights.of(layer.index), self._small:
            encoded = await to_end(path.read_bytes) if path.exists() else b""
            if f"sha256:{hashlib.sha256(encoded).hexdigest()}" != layer.index:
                encoded = await self._get(layer, table_key(layer.blob))
            if f"sha256:{hashlib.sha256(encoded).hexdigest()}" != layer.index:
                raise ImageError(f"the chunk table of {layer.blob} has another digest than its image says: `dsec image fsck` tells more")
            if ChunkTable.decode(encoded).size != layer.blob_bytes:
                raise ImageError(f"the chunk table of {layer.blob} is for another size than {layer.blob_bytes} bytes")
            if not path.exists():
                await to_end(partial(self._local.keep, encoded, layer.index))
            if len(self._tables) >= TABLES_KEPT:
                self._tables.clear()
            self._tables[layer.index] = encoded
            return encoded

    async def whole(self, layer: LayerInfo, told: Callable[[int], None]) -> None:
        """Fetches the data of a layer whose metadata is here. What an earlier attempt brought is kept. ``told``: bytes more that are here.

        Raises ImageError for what is broken or gone, Unavailable, NoCapacity.
        """
        if layer.blob is None or self._local.has(layer.blob):
            told(layer.blob_bytes)
            return
        table = ChunkTable.decode(await self.table(layer))
        with full_disk_told():
            await self._whole(layer, layer.blob, table, told)

    async def _whole(self, layer: LayerInfo, blob: str, table: ChunkTable, told: Callable[[int], None]) -> None:
        if self._shared is None:
            raise ImageError(f"{blob} is not on this node, and no shared store is configured")
        async with self._flights.of(blob):
            if self._local.has(blob):
                told(layer.blob_bytes)
                return
            self._local.check_room(layer.blob_bytes)
            begun = self._local.partial(blob)
            missing = await in_pieces(lambda check: _begin(begun, table, check))
            told(layer.blob_bytes - sum(map(table.length_of, missing)))
            slots = asyncio.Semaphore(RANGES_AT_ONCE)

            async def fetch(chunks: list[int]) -> None:
                async with slots:
                    await self._fetch_chunks(layer, table, begun, chunks)
                    told(sum(map(table.length_of, chunks)))

            try:
                async with asyncio.TaskGroup() as group:
                    for chunks in _ranges(table, missing):
                        group.create_task(fetch(chunks))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            await in_pieces(lambda check: self._finish(begun, blob, check))

    async def _fetch_chunks(self, layer: LayerInfo, table: ChunkTable, begun: Path, chunks: list[int]) -> None:
        first, last = table.chunks[chunks[0]], table.chunks[chunks[-1]]
        assert layer.blob is not None and self._shared is not None
        try:
            data = await self._shared.get_range(frames_key(layer.blob), first.offset, last.offset + last.length - first.offset)
        except BlobMissing as error:
            raise ImageError(f"the data of {layer.blob} is not whole in the shared store: {error.message}") from error
        await to_end(lambda: _write_chunks(begun, table, chunks, data))

    async def _get(self, layer: LayerInfo, key: str) -> bytes:
        if self._shared is None:
            raise ImageError(f"the layer {layer.digest} is not on this node, and no shared store is configured")
        try:
            return await self._shared.get(key)
        except BlobMissing as error:
            raise ImageError(f"the shared store lacks {key}, which an image names: `dsec image fsck` tells more") from error

    def _finish(self, begun: Path, blob: str, check: Check) -> None:
        digest = hashlib.sha256()
        with begun.open("rb") as file:
            while piece := file.read(1 << 20):
                check()
                digest.update(piece)
            os.fsync(file.fileno())
        if digest.hexdigest() != hex_of(blob):
            begun.unlink()
            raise ImageError(f"the chunks of {blob} are right one by one and wrong together: its chunk table is forged")
        self._local.commit([(begun, blob)])


def _begin(begun: Path, table: ChunkTable, check: Check) -> list[int]:
    """Makes the file, or takes over what an earlier attempt left; the chunks that it lacks. Content is looked at, not trusted."""
    if not begun.exists():
        with begun.open("xb") as file:
            file.truncate(table.size)
        return [index for index, chunk in enumerate(table.chunks) if chunk.flags != ZEROS]
    missing = []
    with begun.open("r+b") as file:
        file.truncate(table.size)
        for index, chunk in enumerate(table.chunks):
            check()
            content = os.pread(file.fileno(), table.length_of(index), index * table.chunk_bytes)
            if hashlib.sha256(content).digest() != chunk.sha256:
                if chunk.flags == ZEROS:
                    file.seek(index * table.chunk_bytes)
                    file.write(bytes(len(content)))
                else:
                    missing.append(index)
    return missing


def _ranges(table: ChunkTable, missing: Sequence[int]) -> list[list[int]]:
    """Chunks whose frames follow each other, up to RANGE_BYTES together."""
    ranges: list[list[int]] = []
    start = end = -1
    for index in missing:
        chunk = table.chunks[index]
        if ranges and chunk.offset == end and chunk.offset + chunk.length - start <= RANGE_BYTES:
            ranges[-1].append(index)
        else:
            ranges.append([index])
            start = chunk.offset
        end = chunk.offset + chunk.length
    return ranges


def _write_chunks(begun: Path, table: ChunkTable, chunks: Sequence[int], data: memoryview) -> None:
    """Checks and writes chunks whose frames are ``data``. Raises ImageError."""
    start = table.chunks[chunks[0]].offset
    with begun.open("r+b") as file:
        for index in chunks:
            chunk = table.chunks[index]
            content = table.unpack(index, data[chunk.offset - start : chunk.offset - start + chunk.length])
            file.seek(index * table.chunk_bytes)
            file.write(content)


async def pull(puller: Puller, layers: Sequence[LayerInfo], whole: bool, tell: Tell) -> None:
    """Brings layers here, their data too if ``whole``, and tells of it."""
    tell(ImportLine(step="fetching metadata"))
    await puller.states(layers)
    if not whole:
        return
    done = 0
    total = sum(layer.blob_bytes for layer in layers)

    def told(count: int) -> None:
        nonlocal done
        done += count
        tell(ImportLine(step="fetching data", done_bytes=done, total_bytes=total))

    for layer in layers:
        await puller.whole(layer, told)
