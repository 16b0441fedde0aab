"""Which images there are: three tables in the Store, and all of it in memory for those who ask.

A version number is never given twice, also not after its image was removed: ``name@3`` means one thing for ever.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import Column, Float, Integer, String, Table, Text, delete, insert, select, update

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


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who imports or removes. Names belong to the project that used them first; an admin may do everything."""

    project: str
    admin: bool

    def may_change(self, project: str) -> bool:
        return self.admin or project == self.project


class Catalog:
    """Reads come from memory; changes go to the Store first. One per process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changing = asyncio.Lock()
        self._versions: dict[str, dict[int, Entry]] = {}
        self._by_digest: dict[str, list[Entry]] = {}
        self._order: list[tuple[str, int]] = []
        self._by_idempotency_key: dict[str, tuple[str, int]] = {}
        self._conversions: dict[str, LayerInfo] = {}

    async def open(self) -> None:
        """Loads everything into memory."""
        async with self._store.engine.connect() as connection:
            for row in await connection.execute(select(_images)):
                self._add(Entry(msgspec.json.decode(row.info, type=ImageInfo), row.project))
                if row.idempotency_key is not None:
                    self._by_idempotency_key[row.idempotency_key] = (row.name, row.version)
            for row in await connection.execute(select(_conversions)):
                self._conversions[row.key] = msgspec.json.decode(row.layer, type=LayerInfo)

    def find(self, reference: Reference | None) -> Entry | None:
        """The image that is referred to: the newest version where none is named, the newest image where several have the digest."""
        match reference:
            case ByName(name, None):
                versions = self._versions.get(name)
                return versions[max(versions)] if versions else None
            case ByName(name, version) if version is not None:
                return self._versions.get(name, {}).get(version)
            case ByDigest(digest):
                entries = self._by_digest.get(digest)
                return entries[-1] if entries else None
        return None

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

    def layers(self) -> Iterable[LayerInfo]:
        """Every layer of every image."""
        for versions in self._versions.values():
            for entry in versions.values():
                yield from entry.info.layers

    def check_owner(self, name: str, caller: Caller) -> None:
        """Raises PermissionDenied where the name belongs to another project."""
        versions = self._versions.get(name)
        if versions and not caller.may_change(versions[max(versions)].project):
            raise PermissionDenied(f"the image name {name} belongs to another project: choose another name")

    async def add(self, draft: ImageInfo, caller: Caller, idempotency_key: str | None) -> ImageInfo:
        """Makes ``draft`` the next version of its name, unless the same idempotency key has made one. Raises PermissionDenied."""
        async with self._changing:
            made = None if idempotency_key is None else self.made_by(idempotency_key)
            if made is not None:
                return made.info
            self.check_owner(draft.name, caller)
            versions = self._versions.get(draft.name)
            project = versions[max(versions)].project if versions else caller.project
            async with self._store.engine.begin() as connection:
                last = (await connection.execute(select(_names.c.last_version).where(_names.c.name == draft.name))).scalar()
                version = (last or 0) + 1
                if last is None:
                    await connection.execute(insert(_names).values(name=draft.name, last_version=version))
                else:
                    await connection.execute(update(_names).where(_names.c.name == draft.name).values(last_version=version))
                info = msgspec.structs.replace(draft, version=version)
                await connection.execute(
                    insert(_images).values(
                        name=info.name,
                        version=version,
                        project=project,
                        created_at=info.created_at,
                        info=msgspec.json.encode(info).decode(),
                        idempotency_key=idempotency_key,
                    )
                )
            self._add(Entry(info, project))
            if idempotency_key is not None:
                self._by_idempotency_key[idempotency_key] = (info.name, version)
            return info

    async def remove(self, images: Sequence[ImageInfo]) -> None:
        """Forgets these images; those that are gone already don't matter."""
        async with self._changing:
            async with self._store.engine.begin() as connection:
                for info in images:
                    await connection.execute(delete(_images).where(_images.c.name == info.name, _images.c.version == info.version))
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

    def _add(self, entry: Entry) -> None:
        info = entry.info
        self._versions.setdefault(info.name, {})[info.version] = entry
        self._by_digest.setdefault(info.digest, []).append(entry)
        insort(self._order, (info.name, info.version))

    def _drop(self, info: ImageInfo) -> None:
        versions = self._versions.get(info.name, {})
        if versions.pop(info.version, None) is None:
            return
        if not versions:
            del self._versions[info.name]
        self._order.remove((info.name, info.version))
        same = [entry for entry in self._by_digest[info.digest] if (entry.info.name, entry.info.version) != (info.name, info.version)]
        if same:
            self._by_digest[info.digest] = same
        else:
            del self._by_digest[info.digest]
        self._by_idempotency_key = {key: made for key, made in self._by_idempotency_key.items() if made != (info.name, info.version)}
