"""Which images this node knows: tables in the Store, and all of it in memory for those who ask.

A version number is never given twice, also not after its image was removed: ``name@3`` means one thing for ever. Where nodes share a store,
that gives the numbers.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from sqlalchemy import Column, Float, Integer, String, Table, Text, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from dsec.images.names import ByDigest, ByName, Reference
from dsec.store import Store, metadata
from libdsec.errors import PermissionDenied
from libdsec.schema import ImageInfo, LayerInfo

_names = Table(
    "image_names",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("last_version", Integer, nullable=False),
)
_images = Table(
    "images",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("project", String(255), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("info", Text, nullable=False),
    Column("idempotency_key", String(300), unique=True),
)
_pushes = Table(
    "image_pushes",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("version", Integer, primary_key=True),
)
"""Images that were made here and are not yet in the shared store."""
_shared = Table(
    "image_shared",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("version", Integer, primary_key=True),
)
"""Images that the shared store has, or had when it was last asked."""
_conversions = Table(
    "image_conversions",
    metadata,
    Column("key", String(80), primary_key=True),
    Column("layer", Text, nullable=False),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """An image and whose it is."""

    info: ImageInfo
    project: str
    idempotency_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who imports or removes. Names belong to the project that used them first; an admin may do everything."""

    project: str
    admin: bool

    def may_change(self, project: str) -> bool:
        return self.admin or project == self.project


class Numbers(Protocol):
    """Who gives version numbers where several nodes make images."""

    async def next_version(self, name: str, above: int, caller: Caller) -> int:
        """A number that no node has had, larger than ``above``. Raises PermissionDenied where another project has the name, Unavailable."""


class Catalog:
    """Reads come from memory; changes go to the Store first. One per process."""

    def __init__(self, store: Store, numbers: Numbers | None = None) -> None:
        """``numbers``: None where no store is shared: then this node counts by itself."""
        self._store = store
        self._numbers = numbers
        self._pushes: set[tuple[str, int]] = set()
        self._shared: set[tuple[str, int]] = set()
        self._named: dict[str, int] = {}
        """Digest of metadata, data or chunk table to the number of image layers that name it."""
        self._with_data: dict[str, LayerInfo] = {}
        """Digest of data to a layer that names it, one with a chunk table if there is any."""
        self.changes = 0
        """Rises with every image that comes, goes or changes."""
        self._changing = asyncio.Lock()
        self._versions: dict[str, dict[int, Entry]] = {}
        self._by_digest: dict[str, list[Entry]] = {}
        self._order: list[tuple[str, int]] = []
        self._by_idempotency_key: dict[str, tuple[str, int]] = {}
        self._conversions: dict[str, LayerInfo] = {}

    async def open(self) -> None:
        """Loads everything into memory."""
        async with self._store.engine.connect() as connection:
            decode = msgspec.json.Decoder(ImageInfo).decode
            for row in await connection.execute(select(_images)):
                self._index(Entry(decode(row.info), row.project, row.idempotency_key))
            self._order = sorted((name, version) for name, versions in self._versions.items() for version in versions)
            for row in await connection.execute(select(_conversions)):
                self._conversions[row.key] = msgspec.json.decode(row.layer, type=LayerInfo)
            self._shared = {(row.name, row.version) for row in await connection.execute(select(_shared))}
            self._pushes = {(row.name, row.version) for row in await connection.execute(select(_pushes))}

    def find(self, reference: Reference | None) -> Entry | None:
        """The image that is referred to: the newest version where none is named, the newest image where several have the digest."""
        match reference:
            case ByName(name, None):
                versions = self._versions.get(name)
                return versions[max(versions)] if versions else None
            case ByName(name, version) if version is not None:
                return self._versions.get(name, {}).get(version)
            case ByDigest(digest, name):
                # Other names may have it too. One beside the digest says where to look for it, and doesn't exclude them.
                entries = self._by_digest.get(digest, [])
                named = [entry for entry in entries if entry.info.name == name]
                return next(reversed(named or entries), None)
        return None

    def with_digest(self, digest: str) -> list[Entry]:
        """All images that have this digest, the one that became known last at the end."""
        return list(self._by_digest.get(digest, ()))

    def versions(self, name: str) -> list[Entry]:
        """All versions of a name, oldest first."""
        return [entry for _, entry in sorted(self._versions.get(name, {}).items())]

    def made_by(self, idempotency_key: str) -> Entry | None:
        """The image that an earlier import with this key made."""
        made = self._by_idempotency_key.get(idempotency_key)
        return None if made is None else self._versions.get(made[0], {}).get(made[1])

    def page(self, after: tuple[str, int] | None, limit: int) -> list[ImageInfo]:
        """Up to ``limit`` images in the order of name and version, beginning after that one."""
        start = 0 if after is None else bisect_right(self._order, after)
        return [self._versions[name][version].info for name, version in self._order[start : start + limit]]

    def conversion(self, key: str) -> LayerInfo | None:
        """The layer that a conversion gave. Whether its blobs are still there is another question."""
        return self._conversions.get(key)

    def check_owner(self, name: str, caller: Caller) -> None:
        """Raises PermissionDenied where the name belongs to another project."""
        versions = self._versions.get(name)
        if versions and not caller.may_change(versions[max(versions)].project):
            raise PermissionDenied(f"the image name {name} belongs to another project: choose another name")

    async def add(self, draft: ImageInfo, caller: Caller, idempotency_key: str | None) -> ImageInfo:
        """Makes ``draft`` the next version of its name, unless the same idempotency key has made one. Raises PermissionDenied."""
        made = None if idempotency_key is None else self.made_by(idempotency_key)
        if made is not None:
            return made.info
        # Before the lock: a slow shared store holds nobody else up.
        given = None
        if self._numbers is not None:
            given = await self._numbers.next_version(draft.name, await self._last_version(draft.name), caller)
        async with self._changing:
            made = None if idempotency_key is None else self.made_by(idempotency_key)
            if made is not None:
                return made.info
            self.check_owner(draft.name, caller)
            versions = self._versions.get(draft.name)
            project = versions[max(versions)].project if versions else caller.project
            last = await self._last_version(draft.name)
            version = last + 1 if given is None else given
            info = msgspec.structs.replace(draft, version=version)
            async with self._store.engine.begin() as connection:
                await connection.execute(delete(_names).where(_names.c.name == info.name))
                await connection.execute(insert(_names).values(name=info.name, last_version=max(version, last)))
                await connection.execute(insert(_images).values(_row(info, project, idempotency_key)))
                if self._numbers is not None:
                    await connection.execute(insert(_pushes).values(name=info.name, version=version))
            self._add(Entry(info, project, idempotency_key))
            if self._numbers is not None:
                self._pushes.add((info.name, version))
            return info

    async def _last_version(self, name: str) -> int:
        async with self._store.engine.connect() as connection:
            return (await connection.execute(select(_names.c.last_version).where(_names.c.name == name))).scalar() or 0

    async def adopt(self, info: ImageInfo, project: str) -> ImageInfo:
        """Takes over an image of the shared store under the version that it has there."""
        async with self._changing:
            known = self._versions.get(info.name, {}).get(info.version)
            if known is not None:
                return known.info
            last = await self._last_version(info.name)
            async with self._store.engine.begin() as connection:
                if info.version > last:
                    await connection.execute(delete(_names).where(_names.c.name == info.name))
                    await connection.execute(insert(_names).values(name=info.name, last_version=info.version))
                await connection.execute(insert(_images).values(_row(info, project, None)))
                await _insert_shared(connection, info)
            self._shared.add((info.name, info.version))
            self._add(Entry(info, project))
            return info

    async def pushed(self, info: ImageInfo) -> None:
        """Remembers that the image is in the shared store, and the digests of its chunk tables; of one that is gone from here nothing."""
        async with self._changing:
            entry = self._versions.get(info.name, {}).get(info.version)
            if entry is None:
                return
            async with self._store.engine.begin() as connection:
                this = (_pushes.c.name == info.name, _pushes.c.version == info.version)
                await connection.execute(delete(_pushes).where(*this))
                where = (_images.c.name == info.name, _images.c.version == info.version)
                await _insert_shared(connection, info)
                await connection.execute(update(_images).where(*where).values(info=msgspec.json.encode(info).decode()))
            self._pushes.discard((info.name, info.version))
            self._shared.add((info.name, info.version))
            self._replace(Entry(info, entry.project, entry.idempotency_key))

    def is_shared(self, name: str, version: int) -> bool:
        """Whether the shared store has the image, or had it when it was last asked."""
        return (name, version) in self._shared

    def names(self, digest: str) -> bool:
        """Whether an image needs this metadata, data or chunk table."""
        return digest in self._named

    def chunked(self, blob: str) -> LayerInfo | None:
        """A layer with this data, where each image that names the data names the same chunk table: all can do without the whole blob."""
        layer = self._with_data.get(blob)
        if layer is None or layer.index is None or self._named.get(layer.index) != self._named.get(blob):
            return None
        return layer

    def unpushed(self) -> list[Entry]:
        """Images made here that are not yet in the shared store, oldest names first."""
        return [self._versions[name][version] for name, version in sorted(self._pushes) if version in self._versions.get(name, {})]

    def entries(self) -> Iterable[Entry]:
        """Every image."""
        for versions in self._versions.values():
            yield from versions.values()

    async def remove(self, images: Sequence[ImageInfo]) -> None:
        """Forgets these images; those that are gone already don't matter."""
        async with self._changing:
            async with self._store.engine.begin() as connection:
                for info in images:
                    for table in (_images, _pushes, _shared):
                        await connection.execute(delete(table).where(table.c.name == info.name, table.c.version == info.version))
            for info in images:
                self._drop(info)

    async def remember_conversion(self, key: str, layer: LayerInfo) -> None:
        """Remembers what an input became, so that it isn't converted again."""
        async with self._changing:
            async with self._store.engine.begin() as connection:
                await connection.execute(delete(_conversions).where(_conversions.c.key == key))
                await connection.execute(insert(_conversions).values(key=key, layer=msgspec.json.encode(layer).decode()))
            self._conversions[key] = layer

    async def forget_conversions(self, keys: Sequence[str]) -> None:
        """Forgets conversions whose layers are gone."""
        async with self._changing:
            async with self._store.engine.begin() as connection:
                for key in keys:
                    await connection.execute(delete(_conversions).where(_conversions.c.key == key))
            for key in keys:
                self._conversions.pop(key, None)

    def conversions(self) -> dict[str, LayerInfo]:
        """All conversions by key."""
        return dict(self._conversions)

    def _index(self, entry: Entry) -> None:
        info = entry.info
        self._versions.setdefault(info.name, {})[info.version] = entry
        self._by_digest.setdefault(info.digest, []).append(entry)
        if entry.idempotency_key is not None:
            self._by_idempotency_key[entry.idempotency_key] = (info.name, info.version)
        self._name(info)

    def _name(self, info: ImageInfo) -> None:
        self.changes += 1
        for layer in info.layers:
            for digest in digests(layer):
                self._named[digest] = self._named.get(digest, 0) + 1
            if layer.blob is not None and (layer.index is not None or layer.blob not in self._with_data):
                self._with_data[layer.blob] = layer

    def _unname(self, info: ImageInfo) -> None:
        self.changes += 1
        for layer in info.layers:
            for digest in digests(layer):
                self._named[digest] -= 1
                if not self._named[digest]:
                    del self._named[digest]
                    self._with_data.pop(digest, None)

    def _add(self, entry: Entry) -> None:
        self._index(entry)
        insort(self._order, (entry.info.name, entry.info.version))

    def _replace(self, entry: Entry) -> None:
        info = entry.info
        self._name(info)
        self._unname(self._versions[info.name][info.version].info)
        self._versions[info.name][info.version] = entry
        same = self._by_digest[info.digest]
        same[:] = [entry if (each.info.name, each.info.version) == (info.name, info.version) else each for each in same]

    def _drop(self, info: ImageInfo) -> None:
        versions = self._versions.get(info.name, {})
        entry = versions.pop(info.version, None)
        self._pushes.discard((info.name, info.version))
        self._shared.discard((info.name, info.version))
        if entry is None:
            return
        self._unname(entry.info)
        if not versions:
            del self._versions[info.name]
        del self._order[bisect_left(self._order, (info.name, info.version))]
        if entry.idempotency_key is not None:
            del self._by_idempotency_key[entry.idempotency_key]
        same = [entry for entry in self._by_digest[info.digest] if (entry.info.name, entry.info.version) != (info.name, info.version)]
        if same:
            self._by_digest[info.digest] = same
        else:
            del self._by_digest[info.digest]


def digests(layer: LayerInfo) -> Iterator[str]:
    """The digests of the files that a layer consists of."""
    yield from (digest for digest in (layer.digest, layer.blob, layer.index) if digest is not None)


async def _insert_shared(connection: AsyncConnection, info: ImageInfo) -> None:
    # A row may have stayed when its image went.
    await connection.execute(delete(_shared).where(_shared.c.name == info.name, _shared.c.version == info.version))
    await connection.execute(insert(_shared).values(name=info.name, version=info.version))


def _row(info: ImageInfo, project: str, idempotency_key: str | None) -> dict[str, object]:
    return {
        "name": info.name,
        "version": info.version,
        "project": project,
        "created_at": info.created_at,
        "info": msgspec.json.encode(info).decode(),
        "idempotency_key": idempotency_key,
    }
