"""One import, from the first byte of the body to the image: received, taken apart, verified, converted, named.

Everything happens in a workspace that vanishes whatever the outcome; only whole blobs leave it, and only the last step gives them a name.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from dsec.images.blobs import BlobDirectory, full_disk_told
from dsec.images.catalog import Caller, Catalog
from dsec.images.converter import CONVERTER_VERSION, Converter
from dsec.images.downloads import Download, Downloads
from dsec.images.flights import Flights
from dsec.images.limits import ImportLimits
from dsec.images.manifests import Format, ImageSource, LayerSource, RemoteLayer, detect_format, read_docker_archive, read_oci_archive
from dsec.images.registry import Credentials, Registry, RegistryReference, RemoteImage
from dsec.images.streams import Budget, Stored, compression_of, decompressed, receive, unpack
from dsec.images.threads import Check, in_pieces, to_end
from libdsec.errors import ImageError
from libdsec.schema import RECEIVING, ImageConfig, ImageInfo, ImportLine, LayerInfo

Kind = Literal["base", "workspace", "toolkit"]
Tell = Callable[[ImportLine], None]

UNPACKED = "the unpacked archive"
PROGRESS_BYTES = 8 << 20
"""A line of progress for every so many bytes received."""


@dataclass(frozen=True, kw_only=True)
class ImportRequest:
    """What the caller asked for, checked."""

    name: str
    kind: Kind
    format: Format | None
    """None: find out."""
    at: str
    """Where a plain tar's content is placed."""
    caller: Caller
    idempotency_key: str | None


@dataclass(frozen=True, kw_only=True)
class RegistrySource:
    """Where an image is fetched from, checked."""

    reference: RegistryReference
    credentials: Credentials | None
    insecure: bool
    """Plain HTTP."""


@dataclass(frozen=True)
class _Archive:
    """A decompressed layer in the workspace. ``key`` names its content."""

    path: Path
    size: int
    key: str


class Pins:
    """Digests that imports in progress count on: gc leaves them alone, though no image names them yet."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    @contextmanager
    def scope(self) -> Iterator[Callable[[LayerInfo], None]]:
        """Gives a function that pins a layer's blobs until the scope ends."""
        mine: list[str] = []

        def pin(layer: LayerInfo) -> None:
            for digest in (layer.digest, layer.blob):
                if digest is not None:
                    self._counts[digest] = self._counts.get(digest, 0) + 1
                    mine.append(digest)

        try:
            yield pin
        finally:
            for digest in mine:
                self._counts[digest] -= 1
                if not self._counts[digest]:
                    del self._counts[digest]

    def digests(self) -> set[str]:
        return set(self._counts)


class Importer:
    """Carries out imports. Conversions are limited in number, and the same input is converted once, however many ask for it at a time."""

    def __init__(self, catalog: Catalog, blobs: BlobDirectory, converter: Converter, limits: ImportLimits) -> None:
        self._catalog = catalog
        self._blobs = blobs
        self._converter = converter
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.conversions)
        self._flights = Flights()
        self.downloads = Downloads(blobs.downloads, blobs, limits)
        self.pins = Pins()

    async def run(self, request: ImportRequest, body: AsyncIterator[bytes], tell: Tell) -> ImageInfo:
        """Imports ``body`` and returns the new image. Raises ImageError, NoCapacity, PermissionDenied; nothing of the import stays then."""
        async with self._import(request) as (workspace, pin):
            received = await self._receive(body, workspace, tell)
            layers, config = await self._layers(request, received, workspace, tell, pin)
            tell(ImportLine(step="storing", done_bytes=received.size))
            return await self._catalog.add(draft(request.name, request.kind, layers, config), request.caller, request.idempotency_key)

    async def run_registry(self, request: ImportRequest, source: RegistrySource, tell: Tell) -> ImageInfo:
        """Imports an image from a registry. Raises what :meth:`run` raises, ImageNotFound, and Unavailable when the registry can't be
        reached; then what was fetched stays for a day, so that the next attempt goes on with it."""
        async with (
            self._import(request) as (workspace, pin),
            Registry(source.reference, self._limits, credentials=source.credentials, insecure=source.insecure) as registry,
        ):
            tell(ImportLine(step="asking the registry"))
            image = await registry.image()
            place = f"{request.caller.project} {registry.origin}"
            layers = self._known(image, place, pin)
            if layers is None:
                async with self.downloads.scope() as download:
                    fetched = self._fetched(request, image, registry, download, workspace, tell)
                    layers = await self._collapse(fetched, workspace, tell, pin)
                await self._remember(image, place, layers)
            size = sum(layer.size for layer in image.layers)
            tell(ImportLine(step="storing", done_bytes=size))
            return await self._catalog.add(draft(request.name, request.kind, layers, image.config), request.caller, request.idempotency_key)

    @asynccontextmanager
    async def _import(self, request: ImportRequest) -> AsyncGenerator[tuple[Path, Callable[[LayerInfo], None]], None]:
        """What every import has: a name that the caller may use, a workspace, and pins against gc."""
        self._catalog.check_owner(request.name, request.caller)
        with full_disk_told():
            async with self._workspace() as workspace:
                with self.pins.scope() as pin:
                    yield workspace, pin

    @asynccontextmanager
    async def _workspace(self) -> AsyncGenerator[Path, None]:
        """A directory for one import. A thread removes it: gigabytes take their time; a cancelled import waits for it all the same."""
        path = self._blobs.make_workspace()
        try:
            yield path
        finally:
            await to_end(lambda: self._blobs.remove_workspace(path))

    async def _receive(self, body: AsyncIterator[bytes], workspace: Path, tell: Tell) -> Stored:
        told = 0

        def progress(size: int) -> None:
            nonlocal told
            if size - told >= PROGRESS_BYTES:
                told = size
                tell(ImportLine(step=RECEIVING, done_bytes=size))

        received = await receive(body, workspace / "body", self._blobs, self._limits.upload, progress)
        if received.size == 0:
            raise ImageError("the body is empty: an import needs an archive")
        return received

    async def _layers(
        self, request: ImportRequest, received: Stored, workspace: Path, tell: Tell, pin: Callable[[LayerInfo], None]
    ) -> tuple[list[LayerInfo], ImageConfig]:
        plain = await self._decompress(received, workspace, tell)
        kind = await to_end(lambda: _format_of(plain.path, request, self._limits))
        if kind == "tar":
            archive = _Archive(plain.path, plain.size, plain.digest)
            return [await self._layer([archive], request.at, workspace, tell, pin)], ImageConfig()
        if request.at != "/":
            raise ImageError(f"at={request.at} is for plain tars; this is a {kind}")
        source = await to_end(lambda: _read_source(plain.path, kind, self._limits))
        extracted = self._extracted(plain, source, workspace, tell)
        return await self._collapse(extracted, workspace, tell, pin), source.config

    async def _extracted(self, plain: Stored, source: ImageSource, workspace: Path, tell: Tell) -> AsyncGenerator[_Archive, None]:
        """The layers of an image archive, one after the other."""
        budget = Budget(self._limits.unpacked, UNPACKED)
        for index, layer in enumerate(source.layers):
            tell(ImportLine(step=f"verifying layer {index + 1} of {len(source.layers)}", done_bytes=plain.size))
            extract = partial(self._extract, plain.path, layer, workspace / f"layer-{index}.tar", budget)
            async with self._slots:
                archive = await in_pieces(extract)
            yield archive

    async def _fetched(
        self, request: ImportRequest, image: RemoteImage, registry: Registry, download: Download, workspace: Path, tell: Tell
    ) -> AsyncGenerator[_Archive, None]:
        """The layers of an image in a registry: several are fetched at a time, and taken apart in their order while others still come."""
        total = sum(layer.size for layer in image.layers)
        if total > self._limits.upload:
            raise ImageError(f"the layers have {total} bytes together, at most {self._limits.upload} are allowed")
        self._blobs.check_room(total)
        budget = Budget(self._limits.unpacked, UNPACKED)
        done = told = 0
        connections = asyncio.Semaphore(self._limits.connections)

        def progress(count: int) -> None:
            nonlocal done, told
            done += count
            if done - told >= PROGRESS_BYTES:
                told = done
                tell(ImportLine(step=f"fetching {len(image.layers)} layers", done_bytes=done, total_bytes=total))

        async def fetch(layer: RemoteLayer) -> Path:
            async with connections:
                return await download.fetch(request.caller.project, registry, layer, progress)

        fetches = [asyncio.create_task(fetch(layer)) for layer in image.layers]
        try:
            for index, (layer, fetching) in enumerate(zip(image.layers, fetches, strict=True)):
                path = await _first_failure(fetching, fetches)
                unpack_fetched = partial(self._unpack, path, layer, workspace / f"layer-{index}.tar", budget)
                async with self._slots:
                    archive = await in_pieces(unpack_fetched)
                yield archive
        finally:
            for task in fetches:
                task.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)

    async def _collapse(
        self, archives: AsyncGenerator[_Archive, None], workspace: Path, tell: Tell, pin: Callable[[LayerInfo], None]
    ) -> list[LayerInfo]:
        """Layers of adjacent archives, as many in each as the limit allows."""
        layers: list[LayerInfo] = []
        group: list[_Archive] = []
        async with aclosing(archives):
            async for archive in archives:
                if group and sum(each.size for each in group) + archive.size > self._limits.collapse:
                    layers.append(await self._layer(group, "/", workspace, tell, pin, layers))
                    group = []
                group.append(archive)
        layers.append(await self._layer(group, "/", workspace, tell, pin, layers))
        return layers

    def _known(self, image: RemoteImage, place: str, pin: Callable[[LayerInfo], None]) -> list[LayerInfo] | None:
        """The layers that an earlier import made of this manifest for the same project and from the same place, if all are still there."""
        for count in range(1, len(image.layers) + 1):
            found = [self._catalog.conversion(key) for key in _manifest_keys(image, place, count)]
            layers = [layer for layer in found if layer is not None and self._has(layer)]
            if len(layers) == count:
                for layer in layers:
                    pin(layer)
                return layers
        return None

    async def _remember(self, image: RemoteImage, place: str, layers: Sequence[LayerInfo]) -> None:
        for key, layer in zip(_manifest_keys(image, place, len(layers)), layers, strict=True):
            await self._catalog.remember_conversion(key, layer)

    def _has(self, layer: LayerInfo) -> bool:
        return all(self._blobs.has(digest) for digest in (layer.digest, layer.blob) if digest is not None)

    async def _decompress(self, received: Stored, workspace: Path, tell: Tell) -> Stored:
        budget = Budget(self._limits.unpacked, UNPACKED)
        with received.path.open("rb") as source:
            compression = compression_of(source)
        if compression == "none":
            budget.take(received.size)
            return received
        tell(ImportLine(step=f"decompressing ({compression})", done_bytes=received.size))

        def decompress(check: Check) -> Stored:
            with received.path.open("rb") as source:
                return unpack(source, received.size, compression, workspace / "plain.tar", self._blobs, budget, check)

        async with self._slots:
            plain = await in_pieces(decompress)
        await to_end(received.path.unlink)
        return plain

    def _extract(self, archive: Path, layer: LayerSource, path: Path, budget: Budget, check: Check) -> _Archive:
        """Takes one layer out of the outer archive, and holds it to its digests. Blocks."""
        with archive.open("rb") as source:
            if layer.digest is not None:
                _verify(source, layer, check)
            source.seek(layer.member.offset)
            compression = layer.compression or compression_of(source)
            source.seek(layer.member.offset)
            plain = unpack(source, layer.member.size, compression, path, self._blobs, budget, check)
        return _held_to(plain, layer.diff_id)

    def _unpack(self, file: Path, layer: RemoteLayer, path: Path, budget: Budget, check: Check) -> _Archive:
        """Takes a fetched layer, whose digest was checked, apart, and holds it to the other one. Blocks."""
        with file.open("rb") as source:
            plain = unpack(source, layer.size, layer.compression, path, self._blobs, budget, check)
        return _held_to(plain, layer.diff_id)

    async def _layer(
        self,
        archives: Sequence[_Archive],
        at: str,
        workspace: Path,
        tell: Tell,
        pin: Callable[[LayerInfo], None],
        below: Sequence[LayerInfo] = (),
    ) -> LayerInfo:
        """The layer that these archives become on top of ``below``: an earlier conversion's, or a new one."""
        key = conversion_key([archive.key for archive in archives], at, [layer.digest for layer in below])
        async with self._flights.of(key):
            layer = self._catalog.conversion(key)
            if layer is not None and self._has(layer):
                pin(layer)
            else:
                size = sum(archive.size for archive in archives)
                tell(ImportLine(step="converting", done_bytes=size))
                async with self._slots:
                    self._blobs.check_room(size)
                    layer = await self._converter.convert([archive.path for archive in archives], at, workspace, pin, below)
                await self._catalog.remember_conversion(key, layer)
        for archive in archives:
            await to_end(archive.path.unlink)
        return layer


def conversion_key(archives: Sequence[str], at: str, below: Sequence[str] = ()) -> str:
    """Names what these archives become on top of the layers ``below``: the same key, the same layer."""
    inputs = [str(CONVERTER_VERSION), at, *archives, *(["below", *below] if below else [])]
    return hashlib.sha256(msgspec.json.encode(inputs)).hexdigest()


def _manifest_keys(image: RemoteImage, place: str, count: int) -> list[str]:
    """Names what a manifest became, if it became ``count`` layers: one key for each."""
    inputs = [[str(CONVERTER_VERSION), "manifest", place, image.digest, str(index), str(count)] for index in range(count)]
    return [hashlib.sha256(msgspec.json.encode(each)).hexdigest() for each in inputs]


def _held_to(plain: Stored, diff_id: str) -> _Archive:
    """The unpacked layer. Raises ImageError if its digest isn't the one that the configuration promises."""
    if plain.digest != diff_id:
        raise ImageError(f"a layer unpacks to {plain.digest}, the configuration promises {diff_id}")
    return _Archive(plain.path, plain.size, plain.digest)


async def _first_failure(wanted: asyncio.Task[Path], others: Sequence[asyncio.Task[Path]]) -> Path:
    """What ``wanted`` gives. If another one fails before, that one's error is raised at once: there is no use in waiting."""
    while not wanted.done():
        pending = [task for task in others if not task.done()]
        done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    return wanted.result()


def _format_of(path: Path, request: ImportRequest, limits: ImportLimits) -> Format:
    """What a plain archive is: as the caller says, else a tar if it is to be placed somewhere, else what it looks like."""
    if request.format is not None:
        return request.format
    if request.at != "/":
        return "tar"
    with path.open("rb") as archive:
        return detect_format(archive, limits)


def _read_source(path: Path, kind: Format, limits: ImportLimits) -> ImageSource:
    with path.open("rb") as archive:
        return read_oci_archive(archive, limits) if kind == "oci-archive" else read_docker_archive(archive, limits)


def _verify(source: BinaryIO, layer: LayerSource, check: Check) -> None:
    """Raises ImageError if the layer's bytes in the archive haven't the digest that the manifest promises."""
    digest = hashlib.sha256()
    source.seek(layer.member.offset)
    for piece in decompressed(source, layer.member.size, "none", check):
        digest.update(piece)
    if f"sha256:{digest.hexdigest()}" != layer.digest:
        raise ImageError(f"the layer {layer.digest} has another digest: it is broken or forged")


def draft(name: str, kind: Kind, layers: list[LayerInfo], config: ImageConfig) -> ImageInfo:
    """The image but for its version. Its digest covers what it is made of and how it is run."""
    content = {"kind": kind, "layers": [layer.digest for layer in layers], "config": config}
    return ImageInfo(
        name=name,
        version=0,
        kind=kind,
        digest=f"sha256:{hashlib.sha256(msgspec.json.encode(content, order='deterministic')).hexdigest()}",
        layers=layers,
        config=config,
        created_at=time.time(),
        size=sum(layer.meta_bytes + layer.blob_bytes for layer in layers),
    )
