"""Recorded accesses of an image: which chunks its first sandbox touched, in order, to be fetched ahead for the next ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from dsec.images.blobs import full_disk_told
from dsec.images.documents import decode
from dsec.images.shared import BlobMissing, Blobs, BlobTooLarge
from libdsec.errors import InvalidArgument, NoCapacity, Unavailable
from libdsec.schema import ImageInfo

ENTRIES_MAX = 200_000
"""50 GB in chunks of 256 KiB: more isn't fetched ahead of anything."""
LIMIT = 16 << 20
"""Bytes of a trace's file."""
MISSING_FRESH_S = 60.0
"""An image without a trace is looked up again after so long."""
KEPT = 256

_log = structlog.get_logger("dsec.images")


class Touch(msgspec.Struct, array_like=True, frozen=True):
    """A first touch of a chunk: ``[layer, chunk, ms]``."""

    layer: int
    """Index into the image's layers, lowest first."""
    chunk: int
    ms: int
    """Since the sandbox started."""


class TraceFile(msgspec.Struct, kw_only=True):
    """``traces/<image digest>.json``, on the node and in the shared store."""

    image: str
    tables: list[str | None] = []
    """The chunk table of each layer (its ``index``): an image that was packed anew in other chunks has another trace."""
    chunks: list[Touch]


class _Name(NamedTuple):
    """What a trace is of."""

    image: str
    tables: tuple[str | None, ...]


class Traces:
    """What another node recorded comes from the shared store and is kept here."""

    def __init__(self, root: Path, shared: Blobs | None) -> None:
        self._root = root
        self._shared = shared
        self._kept: dict[_Name, tuple[float, list[Touch] | None]] = {}

    async def save(self, info: ImageInfo, touches: Sequence[Touch]) -> None:
        """Replaces the image's trace. Raises InvalidArgument for one that can't be, NoCapacity and Unavailable where the disk or the store
        doesn't take it: then it is kept in memory alone, or on this node alone."""
        if len(touches) > ENTRIES_MAX or any(min(each.layer, each.chunk, each.ms) < 0 for each in touches):
            raise InvalidArgument(f"a trace has {ENTRIES_MAX} touches at most, and no negative numbers")
        name = _name_of(info)
        data = msgspec.json.encode(TraceFile(image=info.digest, tables=list(name.tables), chunks=list(touches)))
        self._remember(name, list(touches))
        await asyncio.to_thread(self._write, info.digest, data)
        if self._shared is not None:
            await self._shared.put(self._key(info.digest), data)

    async def of(self, info: ImageInfo) -> list[Touch] | None:
        """The image's trace; None: there is none, or it can't be had now."""
        name = _name_of(info)
        at, kept = self._kept.get(name, (float("-inf"), None))
        if kept is not None or time.monotonic() - at < MISSING_FRESH_S:
            return kept
        data = await asyncio.to_thread(self._read, info.digest)
        touches = None if data is None else _decode(data, name)
        if touches is None and self._shared is not None:
            try:
                data = await self._shared.get(self._key(info.digest), LIMIT)
            except (BlobMissing, BlobTooLarge, Unavailable):
                data = None
            touches = None if data is None else _decode(data, name)
            if data is not None and touches is not None:
                # Kept in memory in any case.
                with contextlib.suppress(NoCapacity, Unavailable):
                    await asyncio.to_thread(self._write, info.digest, data)
        self._remember(name, touches)
        return touches

    def _remember(self, name: _Name, touches: list[Touch] | None) -> None:
        if len(self._kept) >= KEPT:
            self._kept.clear()
        self._kept[name] = (time.monotonic(), touches)

    def _key(self, image: str) -> str:
        return f"traces/{image.removeprefix('sha256:')}.json"

    def _path(self, image: str) -> Path:
        return self._root / f"{image.removeprefix('sha256:')}.json"

    def _read(self, image: str) -> bytes | None:
        try:
            return self._path(image).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("a trace can't be read", image=image, error=str(error))
            return None

    def _write(self, image: str, data: bytes) -> None:
        """Raises NoCapacity, Unavailable."""
        try:
            with full_disk_told():
                self._root.mkdir(mode=0o700, exist_ok=True)
                partial = self._path(image).with_suffix(".part")
                partial.write_bytes(data)
                partial.rename(self._path(image))
        except OSError as error:
            raise Unavailable(f"the trace of {image} can't be kept on this node: {error}") from error


def _name_of(info: ImageInfo) -> _Name:
    return _Name(info.digest, tuple(layer.index for layer in info.layers))


def _decode(data: bytes, name: _Name) -> list[Touch] | None:
    """A trace is a hint: one that can't be read is none."""
    try:
        trace = decode(data, TraceFile)
    except msgspec.DecodeError:
        return None
    return trace.chunks[:ENTRIES_MAX] if _Name(trace.image, tuple(trace.tables)) == name else None
