"""Which images the shared store has: one manifest an image version, and a mark for every version number that was ever given.

``images/<name>/<n>.taken`` is made before ``<n>.json`` and never goes, so a number means one image for ever, whichever node gave it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec

from dsec.images.documents import decode
from dsec.images.limits import MIB
from dsec.images.shared import BlobMissing, Blobs, BlobTooLarge
from libdsec.errors import Conflict, ImageError, ImageNotFound
from libdsec.schema import ImageInfo, LayerInfo

MANIFEST_LIMIT = 16 * MIB
"""Bytes of one manifest; 500 layers take 200 KB."""
READS_AT_ONCE = 32
"""Manifests asked for at a time."""
KEY_LIMIT = 200
"""Bytes of a name in a key: a directory takes 255."""

_PLAIN = re.compile(rb"[A-Za-z0-9_-]")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_MANIFEST_KEY = re.compile(r"images/([^/]+)/([1-9][0-9]{0,8})\.json\Z")
_NUMBER = re.compile(r"([1-9][0-9]{0,8})\.(?:json|taken)\Z")


class Manifest(ImageInfo, kw_only=True):
    """An ImageInfo as it stands in the store, and whose it is."""

    project: str = ""

    def info(self) -> ImageInfo:
        """The image alone."""
        fields = msgspec.structs.asdict(self)
        del fields["project"]
        return ImageInfo(**fields)


@dataclass(frozen=True, slots=True)
class Held:
    """What a manifest keeps alive."""

    metas: frozenset[str]
    blobs: frozenset[str]
    """Both in hexadecimal."""


def name_key(name: str) -> str:
    """A name as one component of a key: bytes other than letters, digits, '_', '-' and inner dots as ``=XX``, long ones cut and hashed."""
    raw = name.encode()
    text = "".join(chr(byte) if _PLAIN.match(bytes((byte,))) or (byte == 0x2E and at) else f"={byte:02X}" for at, byte in enumerate(raw))
    return text if len(text) <= KEY_LIMIT else f"{text[:100]}~{hashlib.sha256(raw).hexdigest()}"


def manifest_key(name: str, version: int) -> str:
    return f"images/{name_key(name)}/{version}.json"


def held_by(layers: Sequence[LayerInfo]) -> Held:
    """The objects that an image with these layers needs."""
    metas = frozenset(layer.digest.removeprefix("sha256:") for layer in layers)
    return Held(metas, frozenset(layer.blob.removeprefix("sha256:") for layer in layers if layer.blob is not None))


def read_manifest(data: bytes) -> Manifest:
    """Raises ImageError for what is no manifest. Digests become file names, so they are looked at closely."""
    try:
        manifest = decode(data, Manifest)
    except msgspec.DecodeError as error:
        raise ImageError(f"this is no manifest: {error}") from error
    for layer in manifest.layers:
        for digest in (layer.digest, layer.blob, layer.index):
            if digest is not None and not _DIGEST.match(digest):
                raise ImageError(f"the manifest of {manifest.name}@{manifest.version} names a layer {digest[:80]!r}: that is no digest")
        if min(layer.meta_bytes, layer.blob_bytes) < 0 or (layer.blob is not None and layer.index is None):
            raise ImageError(f"the manifest of {manifest.name}@{manifest.version} has a layer without a chunk table, or of negative size")
    return manifest


class ManifestBroken(ImageError):
    """What the shared store has as a manifest can't be read, or is another image's."""


def manifest_at(key: str, content: bytes | BlobTooLarge) -> Manifest:
    """What the store has under ``key``, as a manifest. Raises ImageError where it is none, or another image's."""
    if isinstance(content, BlobTooLarge):
        raise content
    manifest = read_manifest(content)
    if manifest_key(manifest.name, manifest.version) != key:
        raise ImageError(f"it is the manifest of {manifest.name}@{manifest.version}")
    return manifest


def reference_at(key: str) -> str | None:
    """The ``name@version`` whose manifest lies under ``key``; None where the key doesn't tell, as that of a long name."""
    match = _MANIFEST_KEY.match(key)
    if match is None:
        return None
    name = unquote(match[1].replace("=", "%"), errors="surrogateescape")
    return f"{name}@{match[2]}" if name.isprintable() and manifest_key(name, int(match[2])) == key else None


class SharedCatalog:
    """The manifests of a shared store. Every call may raise what Blobs raises."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._held: dict[str, Held] = {}
        """By key. A manifest never changes, so what was read once needn't be read by the next gc."""

    async def take_version(self, name: str, above: int, node: str) -> int:
        """A version number of ``name`` that no node has had, larger than ``above``."""
        version = max([above, *await self._numbers(name)]) + 1
        while not await self._blobs.put_new(f"images/{name_key(name)}/{version}.taken", node.encode()):
            version += 1
        return version

    async def add(self, manifest: Manifest) -> None:
        """Makes an image visible to every node. Repeatable. Raises Conflict where another image has its name and version,
        ManifestBroken."""
        key = manifest_key(manifest.name, manifest.version)
        await self._blobs.put_new(f"images/{name_key(manifest.name)}/{manifest.version}.taken", b"")
        if not await self._blobs.put_new(key, msgspec.json.encode(manifest)):
            there = _known(key, await self._content(key))
            if there.digest != manifest.digest:
                message = f"the shared store has another image as {manifest.name}@{manifest.version}: import it anew, or under another name"
                raise Conflict(message, reason="version")
        self._held[key] = held_by(manifest.layers)

    async def restore(self, manifest: Manifest) -> None:
        """Writes a manifest in the place of one that can't be read. Raises ImageNotFound where that was removed meanwhile, Conflict where
        another image's was put there. Where another node was first there is nothing to do."""
        key = manifest_key(manifest.name, manifest.version)
        try:
            there = await self.find(manifest.name, manifest.version)
        except ManifestBroken:
            # Replaced, not removed and made: in between others would forget the image, and gc its layers. Every node that knows the image
            # writes the same, so it doesn't matter which of several is last.
            await self._blobs.put(key, msgspec.json.encode(manifest))
            self._held[key] = held_by(manifest.layers)
            return
        if there is None:
            raise ImageNotFound(f"{manifest.name}@{manifest.version} was removed meanwhile")
        if there.digest != manifest.digest:
            raise Conflict(f"the shared store has another image as {manifest.name}@{manifest.version}", reason="version")

    async def versions(self, name: str) -> list[int]:
        """The versions of ``name`` that there are, ascending."""
        return sorted(int(match[2]) for match in map(_MANIFEST_KEY.match, await self._below(name)) if match is not None)

    async def find(self, name: str, version: int | None) -> Manifest | None:
        """The manifest of a version, the newest if None. Raises ManifestBroken."""
        if version is None:
            versions = await self.versions(name)
            if not versions:
                return None
            version = versions[-1]
        key = manifest_key(name, version)
        try:
            manifest = _known(key, await self._content(key))
        except BlobMissing:
            return None
        self._held[key] = held_by(manifest.layers)
        return manifest

    async def find_digest(self, name: str, digest: str) -> Manifest | None:
        """The newest version of ``name`` that has the digest."""
        for version in reversed(await self.versions(name)):
            manifest = await self.find(name, version)
            if manifest is not None and manifest.digest == digest:
                return manifest
        return None

    async def remove(self, name: str, version: int) -> None:
        """Takes a version out. Its number isn't given again."""
        key = manifest_key(name, version)
        await self._blobs.put_new(f"images/{name_key(name)}/{version}.taken", b"")
        await self._blobs.delete([key])
        self._held.pop(key, None)

    async def removed(self, name: str | None = None) -> set[str]:
        """The keys of manifests, of one name or of all, that were here and were removed. What this store never had isn't among them: it
        leaves a number behind for each that it has had."""
        listed = await self._below(name) if name is not None else [key async for batch in self._blobs.names("images") for key in batch]
        taken = {f"{key.removesuffix('.taken')}.json" for key in listed if key.endswith(".taken")}
        return taken.difference(listed)

    async def keys(self) -> list[str]:
        """The keys of all manifests."""
        return [key async for batch in self._blobs.names("images") for key in batch if _MANIFEST_KEY.match(key)]

    async def held(self, known: Mapping[str, Held]) -> dict[str, Held]:
        """What each manifest, by key, keeps alive; those in ``known`` aren't read. Raises ManifestBroken: nobody can say then what may
        go."""
        found: dict[str, Held] = {}
        unread = []
        for key in await self.keys():
            held = known.get(key) or self._held.get(key)
            if held is None:
                unread.append(key)
            else:
                found[key] = held
        async for key, data in self.read(unread):
            if data is not None:
                found[key] = held_by(_known(key, data).layers)
        self._held = dict(found)
        return found

    async def read(self, keys: Sequence[str]) -> AsyncIterator[tuple[str, bytes | BlobTooLarge | None]]:
        """The manifests as they stand, in the order of ``keys``: None for one that is gone, the error for one that can't be one."""

        async def one(key: str) -> bytes | BlobTooLarge | None:
            try:
                return await self._content(key)
            except BlobMissing:
                return None

        for start in range(0, len(keys), READS_AT_ONCE):
            part = keys[start : start + READS_AT_ONCE]
            for key, data in zip(part, await asyncio.gather(*map(one, part)), strict=True):
                yield key, data

    async def _content(self, key: str) -> bytes | BlobTooLarge:
        """Raises BlobMissing."""
        try:
            return await self._blobs.get(key, MANIFEST_LIMIT)
        except BlobTooLarge as error:
            return error

    async def _below(self, name: str) -> list[str]:
        return [key async for batch in self._blobs.names(f"images/{name_key(name)}") for key in batch]

    async def _numbers(self, name: str) -> list[int]:
        matches = map(_NUMBER.search, await self._below(name))
        return [int(match[1]) for match in matches if match is not None]


def _known(key: str, content: bytes | BlobTooLarge) -> Manifest:
    """Like :func:`manifest_at`, but raises ManifestBroken, which says where to look."""
    try:
        return manifest_at(key, content)
    except ImageError as error:
        raise ManifestBroken(f"{key} in the shared store is broken: {error.message}; `dsec image fsck` tells more") from error
