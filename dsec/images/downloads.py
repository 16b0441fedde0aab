"""Layers on their way from a registry: files named by what they are to become, kept for a while when an import fails, so that the next
attempt goes on where this one stopped. A file counts as the layer only after its digest was checked.

What one project has fetched is no other project's: the name covers the project and the repository, so nobody gets to a layer by its digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from dsec.images.blobs import BlobDirectory
from dsec.images.flights import Flights
from dsec.images.limits import ImportLimits
from dsec.images.manifests import RemoteLayer
from dsec.images.registry import ATTEMPTS, Registry, pause
from dsec.images.streams import PIECE, WRITE_BATCH, write_all
from dsec.images.threads import Check, in_pieces, to_end
from libdsec.errors import ImageError

KEPT_S = 24 * 3600.0
"""How long after its last byte a partial download stays."""
RESTARTS = 1
"""How often a layer that was put together from several answers, and has the wrong digest, is fetched anew."""
ANSWERS = 200
"""Answers out of which one layer may be put together: a registry that gives a byte at a time is none."""


class Downloads:
    """The directory of partial downloads. One per image store."""

    def __init__(self, directory: Path, blobs: BlobDirectory, limits: ImportLimits) -> None:
        self._directory = directory
        self._blobs = blobs
        self._limits = limits
        self._flights = Flights()
        self._held: dict[str, int] = {}

    @asynccontextmanager
    async def scope(self) -> AsyncGenerator[Download, None]:
        """For one import: what it fetches stays until the scope ends. Fetched layers go when it ends well, and stay for the next attempt
        when it doesn't; what is too old or too much goes now."""
        await self.sweep()
        download = Download(self)
        try:
            yield download
        finally:
            for name in download.names:
                self._held[name] -= 1
                if not self._held[name]:
                    del self._held[name]
        await self._bury([self._directory / name for name in download.names if name not in self._held])

    def hold(self, name: str) -> None:
        """Keeps the sweep from a file."""
        self._held[name] = self._held.get(name, 0) + 1

    async def sweep(self) -> None:
        """Removes downloads that nobody went on with for a day, and the oldest ones beyond the size of one upload."""
        # Found and taken away in one step of the event loop: no import can begin to hold one in between.
        await self._bury(self._doomed(time.time()))

    async def _bury(self, doomed: Sequence[Path]) -> None:
        """Removes files that nobody holds. They are taken away at once; only deleting takes its time."""
        grave = self._blobs.make_workspace()
        for path in doomed:
            with contextlib.suppress(FileNotFoundError):
                path.rename(grave / path.name)
        # Who holds a file is about to make it: the directory has to stay.
        if not self._held:
            with contextlib.suppress(OSError):
                self._directory.rmdir()
        await to_end(lambda: self._blobs.remove_workspace(grave))

    def _doomed(self, now: float) -> list[Path]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self._directory.iterdir():
                # A fetch that begins anew takes its file away meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    found.append((path, path.stat()))
        total = 0
        doomed = []
        for path, status in sorted(found, key=lambda pair: -pair[1].st_mtime):
            total += status.st_size
            if path.name not in self._held and (now - status.st_mtime > KEPT_S or total > self._limits.upload):
                doomed.append(path)
        return doomed

    async def fetch(self, name: str, registry: Registry, layer: RemoteLayer, progress: Callable[[int], None]) -> Path:
        """The layer as a file. ``progress`` gets the bytes as they come (a negative number: some of them were for nothing).

        Raises ImageError for another digest or another size than promised, NoCapacity, Unavailable, and what the registry refuses with.
        """
        path = self._directory / name
        async with self._flights.of(name):
            await to_end(lambda: self._directory.mkdir(mode=0o700, exist_ok=True))
            for restart in range(RESTARTS + 1):
                content = await in_pieces(lambda check: _Content.read(path, layer.size, check))
                resumed = content.size > 0
                progress(content.size)
                resumed = await self._complete(path, content, registry, layer, progress) or resumed
                if content.digest == layer.digest:
                    return path
                await to_end(path.unlink)
                progress(-content.size)
                if not resumed or restart == RESTARTS:
                    break
        raise ImageError(f"the layer {layer.digest} has another digest: it is broken or forged")

    async def _complete(
        self, path: Path, content: _Content, registry: Registry, layer: RemoteLayer, progress: Callable[[int], None]
    ) -> bool:
        """Fetches what is missing of the layer. Returns whether it took more than one answer."""
        attempt = answers = 0
        furthest = content.size
        failure: Exception | None = None
        while content.size < layer.size:
            if attempt == ATTEMPTS or answers == ANSWERS:
                raise registry.unreachable(failure)
            await pause(attempt, failure)
            try:
                async with registry.blob(layer.digest, content.size) as (offset, stream):
                    answers += 1
                    if offset != content.size:
                        progress(-content.size)
                        await to_end(lambda: content.cut(path))
                    await self._append(path, content, stream.iter_any(), layer, progress)
                if content.size < layer.size:
                    raise ConnectionError(f"the layer {layer.digest} ends after {content.size} of {layer.size} bytes")
            except Exception as error:
                registry.check_failure(error)
                failure = error
                # One that begins again and breaks off at the same place each time gets nowhere.
                attempt = attempt + 1 if content.size <= furthest else 1
                furthest = max(furthest, content.size)
        if layer.size == 0:
            await to_end(path.touch)
        return answers > 1

    async def _append(
        self, path: Path, content: _Content, chunks: AsyncIterator[bytes], layer: RemoteLayer, progress: Callable[[int], None]
    ) -> None:
        """Appends what comes to the file. What is there when the connection breaks is kept."""
        batch = bytearray()

        async def flush() -> None:
            data = bytes(batch)
            batch.clear()
            self._blobs.check_room(len(data))
            await to_end(lambda: content.append(path, data))
            progress(len(data))

        try:
            async for chunk in chunks:
                if content.size + len(batch) + len(chunk) > layer.size:
                    batch.clear()
                    raise ImageError(f"the layer {layer.digest} is longer than the {layer.size} bytes that are promised")
                batch += chunk
                if len(batch) >= WRITE_BATCH:
                    await flush()
        finally:
            if batch:
                await flush()


class Download:
    """What one import fetches."""

    def __init__(self, downloads: Downloads) -> None:
        self._downloads = downloads
        self.names: set[str] = set()

    async def fetch(self, project: str, registry: Registry, layer: RemoteLayer, progress: Callable[[int], None]) -> Path:
        """See :meth:`Downloads.fetch`. ``project`` is whose import this is."""
        name = hashlib.sha256(f"{project}\n{registry.origin}\n{layer.digest}".encode()).hexdigest()
        if name not in self.names:
            self.names.add(name)
            self._downloads.hold(name)
        return await self._downloads.fetch(name, registry, layer, progress)


class _Content:
    """What a file holds so far, and the hash of it."""

    def __init__(self) -> None:
        self.size = 0
        self._hash = hashlib.sha256()

    @classmethod
    def read(cls, path: Path, limit: int, check: Check) -> _Content:
        """The content of the file; of one that is longer than it may get, or isn't there: nothing."""
        content = cls()
        if not path.exists():
            return content
        if path.stat().st_size > limit:
            path.unlink()
            return content
        with path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE):
                check()
                content._hash.update(piece)
                content.size += len(piece)
        return content

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def append(self, path: Path, data: bytes) -> None:
        with path.open("ab", buffering=0) as file:
            write_all(file, data)
        self._hash.update(data)
        self.size += len(data)

    def cut(self, path: Path) -> None:
        """Begins again."""
        path.unlink(missing_ok=True)
        self.size = 0
        self._hash = hashlib.sha256()
