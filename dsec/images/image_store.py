"""The image store of an instance: imports, references, removal, garbage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from starlette.routing import BaseRoute

from dsec.images.blobs import BlobDirectory, digest_of, hex_of
from dsec.images.catalog import Caller, Catalog, Entry
from dsec.images.converter import Converter
from dsec.images.environments import Environment, compose
from dsec.images.importing import Importer, ImportRequest, RegistrySource, Tell
from dsec.images.limits import ImportLimits
from dsec.images.names import ByName, exact, parse_reference
from dsec.images.registry_access import RegistryPolicy
from dsec.images.routes import ImageRoutes
from dsec.store import Store
from libdsec.errors import Conflict, ImageNotFound, PermissionDenied
from libdsec.schema import ImageInfo

ENVIRONMENTS_KEPT = 10_000
"""Composed environments kept in memory; beyond it they are composed anew, which takes some microseconds more."""


def _nobody() -> set[str]:
    return set()


class ImageStore:
    """Images by name, version and digest, and their layers as files.

    ``in_use`` is set by whoever runs sandboxes: the metadata digests (with or without ``sha256:``) of the layers that live ones hold. What
    is in use is neither removed nor collected.
    """

    def __init__(
        self,
        root: Path,
        store: Store,
        *,
        limits: ImportLimits | None = None,
        converter: Path | None = None,
        registries: RegistryPolicy | None = None,
    ) -> None:
        """``root`` will hold the blobs; ``converter`` is the path of dsec-mklayer, looked for in its usual places if not given;
        ``registries``: which ones the keys of projects may import from, none if not given."""
        self.limits = limits or ImportLimits()
        self.registries = registries or RegistryPolicy()
        self.in_use: Callable[[], set[str]] = _nobody
        self._blobs = BlobDirectory(root, disk_reserve=self.limits.disk_reserve)
        self._catalog = Catalog(store)
        self._importer = Importer(self._catalog, self._blobs, Converter(converter, self._blobs, self.limits), self.limits)
        self._collecting = asyncio.Lock()
        self._environments: dict[tuple[str, str | None, tuple[str, ...]], Environment] = {}

    async def open(self) -> None:
        """Loads the catalog and removes what a crash left: half-made files, and blobs that no image names. Raises OSError, and what the
        database raises."""
        await asyncio.to_thread(self._blobs.open)
        await self._catalog.open()
        await self.collect_garbage()

    def routes(self) -> list[BaseRoute]:
        """The routes below ``/v1/images``, to be mounted behind authentication."""
        return ImageRoutes(self).routes()

    def resolve(self, image: str, workspace: str | None, toolkits: Sequence[str]) -> Environment:
        """The layers and the configuration of a sandbox. From memory: no disk, no database.

        Raises ImageNotFound, InvalidArgument for an image of another kind, ImageError where the parts are too much together.
        """
        key = (image, workspace, tuple(toolkits))
        known = self._environments.get(key)
        if known is None:
            known = compose(self._catalog, image, workspace, toolkits)
            if len(self._environments) >= ENVIRONMENTS_KEPT:
                self._environments.clear()
            self._environments[key] = known
        return known

    def get(self, reference: str) -> ImageInfo:
        """The image that is referred to. Raises ImageNotFound."""
        return self._entry(reference).info

    def page(self, after: tuple[str, int] | None, limit: int) -> list[ImageInfo]:
        """Up to ``limit`` images in the order of name and version, beginning after that one."""
        return self._catalog.page(after, limit)

    def made_by(self, idempotency_key: str) -> ImageInfo | None:
        """The image that an earlier import with this key made, if any."""
        entry = self._catalog.made_by(idempotency_key)
        return None if entry is None else entry.info

    async def import_archive(self, request: ImportRequest, body: AsyncIterator[bytes], tell: Tell) -> ImageInfo:
        """Imports an archive as the next version of its name. Raises ImageError, NoCapacity, PermissionDenied; then nothing of it stays."""
        image = await self._importer.run(request, body, tell)
        self._environments.clear()
        return image

    async def import_registry(self, request: ImportRequest, source: RegistrySource, tell: Tell) -> ImageInfo:
        """Imports an image from a registry, which the caller may name. Raises what :meth:`import_archive` raises, ImageNotFound,
        Unavailable; then what was fetched of it stays for a day, for the next attempt."""
        image = await self._importer.run_registry(request, source, tell)
        self._environments.clear()
        return image

    async def remove(self, reference: str, caller: Caller) -> ImageInfo:
        """Removes an image: ``name@n`` and a digest one version, a plain name all versions. Returns the (newest) one removed.

        Its layers stay on the disk until :meth:`collect_garbage`. Raises ImageNotFound, PermissionDenied, Conflict while a sandbox uses any
        of its layers.
        """
        entry = self._entry(reference)
        if not caller.may_change(entry.project):
            raise PermissionDenied(f"the image {reference} belongs to another project")
        parsed = parse_reference(reference)
        whole_name = isinstance(parsed, ByName) and parsed.version is None
        doomed = [each.info for each in self._catalog.versions(entry.info.name)] if whole_name else [entry.info]
        used = {hex_of(digest) for digest in self.in_use()}
        for info in doomed:
            if any(hex_of(layer.digest) in used for layer in info.layers):
                raise Conflict(f"{exact(info.name, info.version)} is in use: stop the sandboxes that run on it", reason="in_use")
        await self._catalog.remove(doomed)
        self._environments.clear()
        return entry.info

    async def collect_garbage(self) -> int:
        """Deletes the blobs that no image, no live sandbox and no import in progress needs; returns their bytes. Partial downloads that
        nobody went on with go, too, uncounted."""
        async with self._collecting:
            await self._importer.downloads.sweep()
            keep = self._importer.pins.digests() | {digest_of(hex_of(digest)) for digest in self.in_use()}
            conversions = self._catalog.conversions()
            named = list(self._catalog.layers())
            # A layer in use is known by its metadata alone: its data is found through the conversions.
            named += [layer for layer in conversions.values() if layer.digest in keep]
            for layer in named:
                keep.add(layer.digest)
                if layer.blob is not None:
                    keep.add(layer.blob)
            retired = self._blobs.retire(keep)
            await self._catalog.forget_conversions([key for key, layer in conversions.items() if layer.digest not in keep])
            return await asyncio.to_thread(self._blobs.delete, retired)

    def _entry(self, reference: str) -> Entry:
        entry = self._catalog.find(parse_reference(reference))
        if entry is None:
            raise ImageNotFound(f"there is no image {reference!r}")
        return entry
