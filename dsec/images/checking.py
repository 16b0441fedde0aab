"""``dsec image fsck``: does this node have what its images name, does the shared store have what its manifests name, and is it right?

Finds, and with ``repair`` mends what can be mended from the other side: a node's file from the store, a store's object from a node that has
the layer whole, or knows the image whose manifest it is. A node's file that is broken and in no store goes, so that the next import makes
it again. What can't be mended is said, not hidden.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from typing import NoReturn

import msgspec

from dsec.images.blobs import BlobDirectory, digest_of, hex_of
from dsec.images.chunks import ChunkTable
from dsec.images.documents import decode
from dsec.images.leases import GC_KEY, GC_S, LIMIT, LeaseFile
from dsec.images.publishing import CLAIM_S, Publisher, frames_key, meta_key, table_key
from dsec.images.pulling import Puller
from dsec.images.shared import BlobMissing, Blobs, BlobTooLarge
from dsec.images.shared_catalog import Held, Manifest, manifest_at, manifest_key, reference_at
from dsec.images.sharing import Sharing
from dsec.images.store_gc import unnamed
from dsec.images.threads import Check, in_pieces
from libdsec.errors import DSecError, ImageError
from libdsec.schema import ImageFinding, LayerInfo

Found = Callable[[ImageFinding], None]

READ_PIECE = 1 << 20
CHUNKS_AT_ONCE = 8
"""Chunks of a blob in the store that are read together by a deep check: 8 MB of memory."""
HALF_MADE_S = 3600.0
"""What was last touched so long ago isn't being made any more."""
_HEX = re.compile(r"[0-9a-f]{64}\Z")


class Checker:
    """One check. Each finding goes to ``found`` once, with what became of it."""

    def __init__(
        self, local: BlobDirectory, puller: Puller, in_use: Callable[[], set[str]], found: Found, *, deep: bool, repair: bool
    ) -> None:
        """``in_use``: digests (hexadecimal) that live sandboxes and calls in progress count on."""
        self._local = local
        self._puller = puller
        self._in_use = in_use
        self._found = found
        self._deep = deep
        self._repair = repair
        self._told: set[tuple[str, str]] = set()
        """Objects in the store, and what was found wrong with each."""

    # -- this node

    async def node(self, layers: Iterable[tuple[str, LayerInfo, bool]], is_needed: Callable[[], Callable[[str], bool]]) -> None:
        """Checks the files of layers (with the image that names each, and whether the store has that image). ``is_needed``: gives a
        test whether something counts on a digest (hexadecimal) now."""
        by_digest: dict[str, tuple[str, LayerInfo]] = {}
        # Without data there is no chunk table to know the store's copy by: then it is the image's being there that counts.
        shared: set[str] = set()
        for image, layer, is_shared in layers:
            if is_shared and layer.blob is None:
                shared.add(layer.digest)
            # Of several the one that knows the store's copy: it was pushed after another that says nothing of one.
            if layer.digest not in by_digest or by_digest[layer.digest][1].index is None:
                by_digest[layer.digest] = (image, layer)
        for image, layer in by_digest.values():
            await self._file(image, layer, layer.digest, required=layer.index is None and layer.digest not in shared)
            if layer.blob is not None:
                await self._file(image, layer, layer.blob, required=layer.index is None)
            if layer.index is not None:
                await self._file(image, layer, layer.index, required=False)
        needed = is_needed()
        for name in await asyncio.to_thread(self._local.names):
            if not _HEX.match(name):
                await self._stray(name, "half-made", "a file that is no blob")
            # Asked again where it counts: a sandbox may have started on it since. Nobody comes between this and its going.
            elif not needed(name) and not (needed := is_needed())(name):
                await self._stray(name, "orphan", "no image names it; `dsec image gc` takes it")

    async def _file(self, image: str, layer: LayerInfo, digest: str, *, required: bool) -> None:
        path = self._local.path(digest)
        if not path.exists():
            if required:
                problem = self._finding(
                    "node", "missing", hex_of(digest), "not on this node, and in no shared store that it knows of", image
                )
                await self._mend(problem, self._fetch(layer, digest))
            return
        if not self._deep:
            expected = {layer.digest: layer.meta_bytes, layer.blob: layer.blob_bytes}.get(digest)
            size = path.stat().st_size
            if expected is None or size == expected:
                return
            detail = f"{size} bytes instead of {expected}"
        else:
            actual = await in_pieces(lambda check: _digest(path, check))
            if actual != hex_of(digest):
                detail = f"its content has the digest {actual}"
            elif digest != layer.digest:
                return
            else:
                # What an earlier version fetched wasn't judged.
                try:
                    await self._puller.judge(path, layer)
                    return
                except ImageError as error:
                    detail = error.message
        problem = self._finding("node", "corrupt", hex_of(digest), detail, image)
        await self._mend(problem, self._replace(layer, digest))

    async def _replace(self, layer: LayerInfo, digest: str) -> str:
        """Only once it is known that the store has another copy, or that an import can make one, is the broken one removed."""
        if layer.blob is not None and layer.index is None:
            await self._make_way(layer, digest)
        [retired] = self._local.retire([self._local.path(digest)])
        try:
            outcome = await self._fetch(layer, digest)
        except DSecError as error:
            # A broken file that others may read in parts is better than none.
            retired.rename(self._local.path(digest))
            retired.parent.rmdir()
            if layer.index is None and isinstance(error, ImageError):
                await self._make_way(layer, digest)
            raise
        await asyncio.to_thread(self._local.delete, [retired])
        return outcome

    async def _make_way(self, layer: LayerInfo, digest: str) -> NoReturn:
        """Removes a broken file that no store has, where an import can make it again: that takes a file that is there for right. Raises
        ImageError, which says what became of it."""
        if layer.diff:
            raise ImageError("it is in no shared store, and what a sandbox wrote can't be imported again")
        if hex_of(digest) in self._in_use():
            raise ImageError("it is in no shared store, and in use: repair again when no sandbox runs on it")
        # Nobody comes between the question and this.
        retired = self._local.retire([self._local.path(digest)])
        await asyncio.to_thread(self._local.delete, retired)
        raise ImageError("it is in no shared store, and was removed: import the image again")

    async def _fetch(self, layer: LayerInfo, digest: str) -> str:
        if digest == layer.blob:
            await self._puller.whole(layer, lambda count: None)
        elif digest == layer.index:
            await self._puller.table(layer)
        else:
            await self._puller.metas([layer])
        return "fetched from the shared store"

    async def _stray(self, name: str, problem: str, detail: str) -> None:
        finding = self._finding("node", problem, name, detail, None)

        async def drop() -> str:
            await asyncio.to_thread(self._local.delete, self._local.retire([self._local.path(name)]))
            return "removed"

        await self._mend(finding, drop())

    # -- the shared store

    async def store(self, sharing: Sharing) -> None:
        """Checks what the manifests in the store name, and what lies there besides."""
        blobs, catalog = sharing.blobs, sharing.catalog
        sizes = {each.key: each.size for prefix in ("metas", "blobs") async for batch in blobs.list(prefix) for each in batch}
        checked: set[tuple[object, ...]] = set()
        metas: set[str] = set()
        data: set[str] = set()
        async for key, content in catalog.read(await catalog.keys()):
            if content is None:
                continue
            manifest: Manifest | None
            try:
                manifest = manifest_at(key, content)
            except ImageError as error:
                manifest = await self._broken_manifest(sharing, key, error.message)
                if manifest is None:
                    continue
            for layer in manifest.layers:
                metas.add(hex_of(layer.digest))
                data.update([hex_of(layer.blob)] if layer.blob is not None else [])
                # Two manifests may say different things of one layer: both are checked.
                what = msgspec.structs.astuple(layer)
                if what not in checked and await self._stored(blobs, sharing.publisher, manifest, layer, sizes):
                    checked.add(what)
        for garbage in await unnamed(blobs, {"": Held(frozenset(metas), frozenset(data))}):
            if garbage.object.modified < time.time() - HALF_MADE_S:
                await self._object(blobs, "orphan", garbage.object.key, "no manifest names it; `dsec image gc` takes it", drop=False)
        await self._half_made(blobs)

    async def _broken_manifest(self, sharing: Sharing, key: str, wrong: str) -> Manifest | None:
        """Reports one that can't be read. What it says by now, or should say, as far as this node knows."""
        reference = reference_at(key)
        if sharing.known(key) is None:
            cure = f"repair it on a node that knows it, or remove it with `dsec image rm {reference or 'NAME@N'}`"
            self._found(self._finding("store", "corrupt", key, f"{wrong}; this node doesn't know the image: {cure}", reference))
            return None

        async def write() -> str:
            await sharing.restore(key)
            return "written again from this node"

        await self._mend(self._finding("store", "corrupt", key, wrong, reference), write())
        entry = sharing.known(key)
        return None if entry is None else Manifest(**msgspec.structs.asdict(entry.info), project=entry.project)

    async def _stored(self, blobs: Blobs, publisher: Publisher, manifest: Manifest, layer: LayerInfo, sizes: dict[str, int]) -> bool:
        """Checks one layer; False: its image was removed meanwhile, so that nobody can say."""
        image = f"{manifest.name}@{manifest.version}"
        problems = [problem async for problem in self._wrong(blobs, layer, sizes) if problem not in self._told]
        if problems and await blobs.stat(manifest_key(manifest.name, manifest.version)) is None:
            return False
        self._told.update(problems)
        for key, wrong in problems:
            kind = "missing" if key not in sizes else "corrupt"

            async def send(key: str = key) -> str:
                await publisher.mend(layer, [key])
                return "sent again from this node"

            await self._mend(self._finding("store", kind, key, wrong, image), send())
        return True

    async def _wrong(self, blobs: Blobs, layer: LayerInfo, sizes: dict[str, int]) -> AsyncIterator[tuple[str, str]]:
        """Keys of the layer's objects that are missing or wrong, and how. ``sizes``: of the objects when the check began."""
        meta = meta_key(layer.digest)
        if await _size(blobs, meta, sizes) is None:
            yield meta, "not in the store"
        elif self._deep:
            try:
                await self._puller.check_meta(layer)
            except ImageError as error:
                yield meta, error.message
        if layer.blob is None:
            return
        table, frames = table_key(layer.blob), frames_key(layer.blob)
        stored = await _size(blobs, frames, sizes)
        if stored is None:
            yield frames, "not in the store"
        if await _size(blobs, table, sizes) is None:
            yield table, "not in the store"
            return
        try:
            encoded = await blobs.get(table)
            if digest_of(hashlib.sha256(encoded).hexdigest()) != layer.index:
                raise ImageError("it has another digest than the manifest says")
            decoded = ChunkTable.decode(encoded)
        except (ImageError, BlobMissing) as error:
            yield table, error.message
            return
        if stored is None:
            return
        if stored != decoded.stored_bytes:
            # It may have been sent anew since the check began.
            listed = await blobs.stat(frames)
            stored = 0 if listed is None else listed.size
        if stored != decoded.stored_bytes:
            yield frames, f"{stored} bytes instead of {decoded.stored_bytes}"
        elif self._deep:
            wrong = await self._wrong_chunks(blobs, frames, decoded)
            if wrong:
                yield (
                    frames,
                    f"{len(wrong)} of {len(decoded.chunks)} chunks are not what the chunk table says, number {wrong[0]} first",
                )

    async def _wrong_chunks(self, blobs: Blobs, key: str, table: ChunkTable) -> list[int]:
        async def is_wrong(index: int) -> bool:
            chunk = table.chunks[index]
            try:
                frame = await blobs.get_range(key, chunk.offset, chunk.length) if chunk.length else b""
                await asyncio.to_thread(table.unpack, index, frame)
            except (ImageError, BlobMissing):
                return True
            return False

        wrong = []
        for start in range(0, len(table.chunks), CHUNKS_AT_ONCE):
            part = range(start, min(start + CHUNKS_AT_ONCE, len(table.chunks)))
            wrong += [index for index, bad in zip(part, await asyncio.gather(*map(is_wrong, part)), strict=True) if bad]
        return wrong

    async def _half_made(self, blobs: Blobs) -> None:
        now = time.time()
        async for batch in blobs.list("uploads"):
            for each in batch:
                if each.modified < now - 2 * CLAIM_S:
                    await self._object(blobs, "half-made", each.key, "an upload that nobody carries on")
        condemned = await blobs.stat(GC_KEY)
        if condemned is not None and condemned.modified < now - GC_S:
            await self._object(blobs, "half-made", GC_KEY, "a gc that broke off")
        async for batch in blobs.list("leases"):
            for each in batch:
                try:
                    decode(await blobs.get(each.key, LIMIT), LeaseFile)
                except (msgspec.DecodeError, BlobTooLarge) as error:
                    await self._object(blobs, "corrupt", each.key, f"it is no lease: {error}")
                except BlobMissing:
                    pass
        for name in await blobs.staging("", now - HALF_MADE_S):
            finding = self._finding("store", "half-made", name, "a file that never became an object", None)

            async def drop(name: str = name) -> str:
                await blobs.drop_staging([name])
                return "removed"

            await self._mend(finding, drop())

    async def _object(self, blobs: Blobs, problem: str, key: str, detail: str, *, drop: bool = True) -> None:
        async def remove() -> str:
            if not drop:
                # gc knows about leases; a check doesn't.
                raise ImageError("left for `dsec image gc`, which minds what other nodes need")
            await blobs.delete([key])
            return "removed"

        await self._mend(self._finding("store", problem, key, detail, None), remove())

    # -- findings

    def _finding(self, where: str, problem: str, what: str, detail: str, image: str | None) -> ImageFinding:
        return msgspec.convert(
            {"where": where, "problem": problem, "object": what, "detail": detail, "image": image, "repaired": False}, ImageFinding
        )

    async def _mend(self, finding: ImageFinding, mending: Coroutine[None, None, str]) -> None:
        """Reports a finding, after ``mending`` it where that was asked for."""
        if not self._repair:
            mending.close()
            self._found(finding)
            return
        try:
            outcome = await mending
        except DSecError as error:
            self._found(msgspec.structs.replace(finding, detail=f"{finding.detail}; it can't be repaired here: {error.message}"))
        else:
            self._found(msgspec.structs.replace(finding, repaired=True, detail=f"{finding.detail}; {outcome}"))


async def _size(blobs: Blobs, key: str, sizes: dict[str, int]) -> int | None:
    """Bytes of an object; None: there is none. One that came after the listing that ``sizes`` are from is added to them."""
    if key not in sizes:
        listed = await blobs.stat(key)
        if listed is None:
            return None
        sizes[key] = listed.size
    return sizes[key]


def _digest(path: Path, check: Check) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_PIECE):
            check()
            digest.update(piece)
    return digest.hexdigest()
