"""What sandboxes have read of the layers on this node: blobfs' figures, summed up over its restarts and ours, in the Store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import BigInteger, Column, Integer, String, Table, delete, insert, select

from dsec.images.blobs import hex_of
from dsec.store import Store, metadata
from libdsec.schema import LayerInfo


def _figures(name: str) -> Table:
    """A row a blob; bytes."""
    columns = (Column(column, BigInteger, nullable=False) for column in ("needed", "fetched", "from_cache"))
    return Table(name, metadata, Column("blob", String(64), primary_key=True), *columns)


_reads = _figures("blob_reads")
_seen = _figures("blob_reads_seen")
"""What blobfs said last, written together with the sums that it is part of: blobfs goes on counting when we begin anew. A table of its own,
as a table that an earlier version made gets no new columns."""
_starts = Table(
    "image_starts",
    metadata,
    Column("image", String(300), primary_key=True),
    Column("sandboxes", Integer, nullable=False),
)


class BlobFigures(msgspec.Struct, kw_only=True):
    """Of one blob, in bytes, as blobfs counts since it registered the blob. ``needed``: distinct bytes that were read, the others: all."""

    needed: int = 0
    fetched: int = 0
    from_cache: int = 0


class Reads:
    """Sums. Memory has them all; :meth:`save` writes what has changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sums: dict[str, BlobFigures] = {}
        self._last: dict[str, BlobFigures] = {}
        """What blobfs said last: it counts from zero again after a restart."""
        self._starts: dict[str, int] = {}
        self._changed: set[str] = set()
        self._changed_starts: set[str] = set()

    async def open(self) -> None:
        async with self._store.engine.connect() as connection:
            for row in await connection.execute(select(_reads)):
                self._sums[row.blob] = BlobFigures(needed=row.needed, fetched=row.fetched, from_cache=row.from_cache)
            for row in await connection.execute(select(_seen)):
                self._last[row.blob] = BlobFigures(needed=row.needed, fetched=row.fetched, from_cache=row.from_cache)
            for row in await connection.execute(select(_starts)):
                self._starts[row.image] = row.sandboxes

    def started(self, images: Sequence[str]) -> None:
        """Counts a sandbox that starts from these images (``name@version``)."""
        for image in images:
            self._starts[image] = self._starts.get(image, 0) + 1
            self._changed_starts.add(image)

    async def record(self, figures: Mapping[str, BlobFigures]) -> None:
        """Adds what blobfs has counted since it was asked last, by blob (hexadecimal), and saves."""
        for blob, now in figures.items():
            before = self._last.get(blob, BlobFigures())
            if now.needed < before.needed or now.fetched < before.fetched or now.from_cache < before.from_cache:
                before = BlobFigures()
            if now == before:
                continue
            sums = self._sums.setdefault(blob, BlobFigures())
            # Distinct bytes can't be added: what a restarted blobfs reads again may be the same ones.
            sums.needed = max(sums.needed, now.needed)
            sums.fetched += now.fetched - before.fetched
            sums.from_cache += now.from_cache - before.from_cache
            self._last[blob] = now
            self._changed.add(blob)
        await self.save()

    async def save(self) -> None:
        """Writes what has changed since the last time."""
        blobs, images = list(self._changed), list(self._changed_starts)
        if not blobs and not images:
            return
        self._changed, self._changed_starts = set(), set()
        async with self._store.engine.begin() as connection:
            for blob in blobs:
                for table, figures in ((_reads, self._sums[blob]), (_seen, self._last[blob])):
                    await connection.execute(delete(table).where(table.c.blob == blob))
                    await connection.execute(insert(table).values(blob=blob, **msgspec.structs.asdict(figures)))
            for image in images:
                await connection.execute(delete(_starts).where(_starts.c.image == image))
                await connection.execute(insert(_starts).values(image=image, sandboxes=self._starts[image]))

    def of(self, layers: Sequence[LayerInfo]) -> BlobFigures:
        """The figures of an image's layers together."""
        blobs = {hex_of(layer.blob) for layer in layers if layer.blob is not None}
        found = [self._sums[blob] for blob in blobs if blob in self._sums]
        return BlobFigures(
            needed=sum(each.needed for each in found),
            fetched=sum(each.fetched for each in found),
            from_cache=sum(each.from_cache for each in found),
        )

    def measured(self, layers: Sequence[LayerInfo]) -> bool:
        """Whether anything of an image's layers was ever read through blobfs."""
        return any(hex_of(layer.blob) in self._sums for layer in layers if layer.blob is not None)

    def starts_of(self, image: str) -> int:
        """Sandboxes that were started from ``name@version``."""
        return self._starts.get(image, 0)
