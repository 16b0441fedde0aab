"""What a sandbox wrote becomes an image: the sandbox's layers, and the new one on top. Long chains of such layers are made shorter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from dsec.images.blobs import BlobDirectory, full_disk_told
from dsec.images.catalog import Caller, Catalog
from dsec.images.converter import Converter, Report, layer_of
from dsec.images.environments import LOWER_LAYERS_MAX, Environment
from dsec.images.importing import Pins, draft
from dsec.images.limits import ImportLimits
from dsec.images.names import check_name
from dsec.images.pulling import Puller
from dsec.images.threads import to_end
from libdsec.errors import ImageError, NoCapacity, Unavailable
from libdsec.schema import ImageInfo, LayerInfo

DIFF_LAYERS_MAX = 8
"""Layers of an image that were packed from sandboxes: beyond it neighbours are made to one. Each costs every sandbox's start a mount,
and every look-up of a path a directory more."""
FETCHED_MAX = 4 << 30
"""Bytes of diffs that are fetched so that they can be merged, where those that are on the node aren't enough."""

_log = structlog.get_logger("dsec.images")
_report = msgspec.json.Decoder(Report)


@dataclass(frozen=True, kw_only=True)
class PackedLayer:
    """A layer that was made of a sandbox, and what it goes on top of."""

    report: Report
    directory: Path
    """Holds its files, ``meta`` and ``blob``, on the blobs' filesystem."""
    base: Environment
    """What the sandbox runs on."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The image that was made."""

    image: ImageInfo
    layer: LayerInfo
    merged: int
    """Diff layers that became one; 0: none."""


class Packing:
    """Takes packed layers into the store."""

    def __init__(
        self,
        catalog: Catalog,
        blobs: BlobDirectory,
        converter: Converter,
        puller: Puller,
        pins: Pins,
        limits: ImportLimits,
        *,
        changed: Callable[[], None],
    ) -> None:
        """``changed`` is called when an image was made, so that a name means another one than before."""
        self.limits = limits
        self._catalog = catalog
        self._blobs = blobs
        self._converter = converter
        self._puller = puller
        self._pins = pins
        self._changed = changed
        # Merging keeps a core busy.
        self._slots = asyncio.Semaphore(limits.conversions)

    def check(self, name: str, caller: Caller, wanted: int) -> None:
        """Before anything is done: may the caller use this name, and has the disk room for ``wanted`` bytes? Raises InvalidArgument,
        PermissionDenied, NoCapacity."""
        self._catalog.check_owner(check_name(name), caller)
        self._blobs.check_room(wanted)

    def made_by(self, idempotency_key: str) -> ImageInfo | None:
        """The image that an earlier pack with this key made, if any."""
        made = self._catalog.made_by(idempotency_key)
        return None if made is None else made.info

    def read_report(self, report: str) -> Report:
        """What dsec-mklayer printed. Raises msgspec.MsgspecError."""
        return _report.decode(report)

    async def store(
        self,
        packed: PackedLayer,
        name: str,
        labels: dict[str, str],
        caller: Caller,
        idempotency_key: str | None,
        tell: Callable[[str], None],
    ) -> Packed:
        """Makes the next version of ``name``. Raises ImageError (too many layers), NoCapacity, PermissionDenied; then only blobs that
        nothing names are left, for gc."""
        config = packed.base.config
        config = msgspec.structs.replace(config, labels={**config.labels, **labels})
        with full_disk_told(), self._pins.scope() as pin:
            base = list(reversed(packed.base.layers))
            for each in base:
                pin(each)
            layer = await self._commit(packed, pin)
            layers, merged = await self._shorten([*base, layer], pin, tell)
            if len(layers) > LOWER_LAYERS_MAX:
                raise ImageError(f"{len(layers)} layers together, a sandbox takes {LOWER_LAYERS_MAX}")
            tell("storing")
            image = await self._catalog.add(draft(name, "base", layers, config), caller, idempotency_key)
        self._changed()
        return Packed(image=image, layer=layer, merged=merged)

    async def _commit(self, packed: PackedLayer, pin: Callable[[LayerInfo], None]) -> LayerInfo:
        layer = msgspec.structs.replace(layer_of(packed.report), diff=True)
        pin(layer)
        # The metadata comes last: where it is, its data is.
        files = [] if layer.blob is None else [(packed.directory / "blob", layer.blob)]
        await to_end(lambda: self._blobs.commit([*files, (packed.directory / "meta", layer.digest)]))
        return layer

    async def _shorten(
        self, layers: list[LayerInfo], pin: Callable[[LayerInfo], None], tell: Callable[[str], None]
    ) -> tuple[list[LayerInfo], int]:
        """The layers (lowest first) with at most :data:`DIFF_LAYERS_MAX` diffs among them, if enough neighbours are whole on this node or
        can be had; and how many became one."""
        span = to_merge(layers, self._is_whole)
        if still_many(layers, span):
            span = await self._fetched(layers, span, tell)
        if span is None:
            return layers, 0
        merged = layers[span]
        tell(f"merging {len(merged)} layers")
        workspace = self._blobs.make_workspace()
        try:
            async with self._slots:
                self._blobs.check_room(sum(layer.blob_bytes for layer in merged))
                one = await self._converter.merge(merged, workspace, pin)
        finally:
            await to_end(lambda: self._blobs.remove_workspace(workspace))
        return [*layers[: span.start], msgspec.structs.replace(one, diff=True), *layers[span.stop :]], len(merged)

    async def _fetched(self, layers: Sequence[LayerInfo], here: slice | None, tell: Callable[[str], None]) -> slice | None:
        """Which layers shall become one when those may be fetched that aren't here: they are here when this returns. ``here``, what can be
        merged without, where they are too large or can't be had now: the next pack tries again."""
        span = to_merge(layers, lambda layer: True)
        if span is None:
            return here
        missing = [layer for layer in layers[span] if not self._is_whole(layer)]
        size = sum(layer.blob_bytes for layer in missing)
        if size > FETCHED_MAX:
            return here
        tell(f"fetching {len(missing)} layers to merge, {size >> 20} MB")
        try:
            # What is fetched, and what they become.
            self._blobs.check_room(size + sum(layer.blob_bytes for layer in layers[span]))
            for layer in missing:
                await self._puller.whole(layer, lambda count: None)
        except (Unavailable, ImageError, NoCapacity) as error:
            _log.warning("diffs stay as many as they are, for some can't be fetched", error=error.message)
            return here
        return span

    def _is_whole(self, layer: LayerInfo) -> bool:
        return all(self._blobs.has(digest) for digest in (layer.digest, layer.blob) if digest is not None)


def still_many(layers: Sequence[LayerInfo], span: slice | None) -> bool:
    """Whether there are too many diffs also when ``span`` of them became one."""
    gone = 0 if span is None else span.stop - span.start - 1
    return sum(layer.diff for layer in layers) - gone > DIFF_LAYERS_MAX


def to_merge(layers: Sequence[LayerInfo], whole: Callable[[LayerInfo], bool]) -> slice | None:
    """Which layers (lowest first) shall become one: the longest run of neighbouring diffs that are whole on this node, the topmost of
    several; None while there are few diffs, or no two such neighbours."""
    if sum(layer.diff for layer in layers) <= DIFF_LAYERS_MAX:
        return None
    best = slice(0, 0)
    start = 0
    for position in range(len(layers) + 1):
        if position < len(layers) and layers[position].diff and whole(layers[position]):
            continue
        if position - start >= best.stop - best.start:
            best = slice(start, position)
        start = position + 1
    return best if best.stop - best.start > 1 else None
