"""This node's side of the shared store: what it publishes, finds, holds and collects there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from dsec.images.blobs import BlobDirectory
from dsec.images.catalog import Caller, Catalog, Entry
from dsec.images.flights import Flights
from dsec.images.importing import Tell
from dsec.images.leases import Lease, keep_refreshed
from dsec.images.names import ByDigest, ByName, Reference
from dsec.images.publishing import Publisher
from dsec.images.shared import Blobs
from dsec.images.shared_catalog import ManifestBroken, SharedCatalog, held_by, manifest_key
from dsec.images.store_gc import StoreGc
from libdsec.errors import Conflict, ImageError, ImageNotFound, NoCapacity, PermissionDenied, Unavailable
from libdsec.schema import ImageInfo

NAME_FRESH_S = 10.0
"""A name that is known here is looked up in the shared store again after so long: another node may have made a newer version."""
LOOK_S = 3.0
"""For a name that is known here a slow store is waited for no longer."""
PUSH_RETRY_S = 60.0
"""Between two attempts to push what couldn't be pushed when it was made."""

_log = structlog.get_logger("dsec.images")


def node_name(path: Path) -> str:
    """The node's name in the shared store: made up once, kept in ``path``."""
    with contextlib.suppress(FileNotFoundError):
        # An empty one is what a full disk or a power cut left of it.
        if name := path.read_text().strip():
            return name
    host = "".join(letter for letter in socket.gethostname() if letter.isascii() and (letter.isalnum() or letter == "-"))
    name = f"{host[:40] or 'node'}-{secrets.token_hex(4)}"
    partial = path.with_name(f"{path.name}.part")
    with partial.open("w") as file:
        file.write(name + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return name


class Sharing:
    """The parts that work on one shared store, and what they do in the background between :meth:`open` and :meth:`close`."""

    def __init__(self, blobs: Blobs, local: BlobDirectory, needed: Callable[[], set[str]]) -> None:
        """``needed``: digests (hexadecimal) of metadata and data that live sandboxes and calls in progress need."""
        self.blobs = blobs
        self._needed = needed
        self.catalog = SharedCatalog(blobs)
        self.lease = Lease(blobs, lambda: needed() | self.publisher.digests() | self._unpushed_digests())
        self.publisher = Publisher(local, blobs, self.catalog, self.lease)
        self.gc = StoreGc(blobs, self.catalog, self.lease)
        self._flights = Flights()
        self._looked: dict[str, float] = {}
        """Name to the monotonic time at which it was last looked up."""
        self._tasks: list[asyncio.Task[None]] = []
        self._made = asyncio.Event()
        """Set to have pushed what isn't, before its time."""
        self._broken: set[tuple[str, int]] = set()
        """Images that can't be sent as they are here: it isn't tried again until somebody asks for it, or this process begins anew."""

    def open(self, node: str, local: Catalog) -> None:
        """``node``: this node's name in the store."""
        self.lease.node = node
        self._local = local

    def start(self) -> None:
        """Begins to keep the lease, and to push what is still to be pushed. Not before ``needed`` can tell: a lease replaces the one that
        an earlier process of this node wrote."""
        self._tasks = [asyncio.create_task(keep_refreshed(self.lease, _not_renewed)), asyncio.create_task(self._push_what_is_left())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    # -- version numbers (Catalog's ``Numbers``)

    async def next_version(self, name: str, above: int, caller: Caller) -> int:
        """A number that no node has had. Raises PermissionDenied where the newest image of the name is another project's."""
        await self.check_owner(name, caller)
        return await self.catalog.take_version(name, above, self.lease.node)

    async def check_owner(self, name: str, caller: Caller) -> None:
        """Raises PermissionDenied where the name belongs to another project, Unavailable."""
        newest = await self.catalog.find(name, None)
        if newest is not None and not caller.may_change(newest.project):
            raise PermissionDenied(f"the image name {name} belongs to another project: choose another name")

    # -- pushing

    async def push(self, entry: Entry, tell: Tell) -> ImageInfo:
        """Pushes one image and remembers it. Raises what Publisher.push raises, ImageNotFound also where it was removed meanwhile."""
        name, version = entry.info.name, entry.info.version
        self._broken.discard((name, version))
        async with self._flights.of(manifest_key(name, version)):
            if self._local.find(ByName(name, version)) is None:
                raise ImageNotFound(f"{name}@{version} was removed before it was pushed")
            pushed = await self.publisher.push(entry.info, entry.project, tell)
            await self._local.pushed(pushed)
        await self.let_go()
        return pushed

    def known(self, key: str) -> Entry | None:
        """The image that the store has, or had, under this key of a manifest, if it is known here."""
        shared = (entry for entry in self._local.entries() if self._local.is_shared(entry.info.name, entry.info.version))
        return next((entry for entry in shared if manifest_key(entry.info.name, entry.info.version) == key), None)

    async def restore(self, key: str) -> None:
        """Writes a manifest that can't be read again, from what this node knows. Raises ImageNotFound where it doesn't know the image (any
        more), and what Publisher.restore raises."""
        async with self._flights.of(key):
            entry = self.known(key)
            if entry is None:
                raise ImageNotFound("this node doesn't know the image")
            await self._local.pushed(await self.publisher.restore(entry.info, entry.project))
        await self.let_go()

    async def let_go(self) -> None:
        """After a call that held something: its manifest protects it now, and left in the lease it couldn't be removed elsewhere for a
        minute."""
        with contextlib.suppress(Unavailable, NoCapacity):
            await self.lease.refresh()

    def push_soon(self) -> None:
        """To be called when an image was made that nobody waits for to be pushed: it is pushed in the background."""
        self._made.set()

    def _unpushed_digests(self) -> set[str]:
        """Digests (hexadecimal) of images that no manifest protects yet: another node may remove the images that they rest on."""
        held = [held_by(entry.info.layers) for entry in self._local.unpushed()]
        return set[str]().union(*(each.metas | each.blobs for each in held))

    async def _push_what_is_left(self) -> None:
        """Images that were packed, and those whose push broke off, with the process or with the network."""
        while True:
            self._made.clear()
            for entry in self._local.unpushed():
                name, version = entry.info.name, entry.info.version
                if (name, version) in self._broken:
                    continue
                if self._flights.busy(manifest_key(name, version)):
                    # Whoever made it is pushing it, and others don't wait for that.
                    continue
                try:
                    await self.push(entry, lambda line: None)
                except Exception as failure:
                    # Whatever it is, the others and the next attempt don't suffer for it.
                    _log.warning("an image can't be pushed yet", image=name, version=version, error=str(failure))
                    if isinstance(failure, ImageError):
                        self._broken.add((name, version))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._made.wait(), PUSH_RETRY_S)

    # -- finding

    async def locate(self, reference: Reference | None, *, fresh: bool = False) -> None:
        """Sees to it that the local catalog knows what the reference means, if any node made it. ``fresh``: as it is in the store now, also
        where it is known and was looked up a moment ago, or is one version; known ones do where the store doesn't answer within LOOK_S.
        Raises Unavailable where only the store could tell, ImageError for a broken manifest."""
        name = None if reference is None else reference.name
        if reference is None or name is None:
            return
        known = self._local.find(reference) is not None
        fixed = isinstance(reference, ByDigest) or reference.version is not None
        since = time.monotonic() - (0 if fresh else NAME_FRESH_S)
        if known and not fresh and (fixed or self._is_looked_up(name, since)):
            return
        try:
            async with asyncio.timeout(LOOK_S if known else None), self._flights.of(f"look {name}"):
                if fixed:
                    if known:
                        await self._forget_removed(name)
                    if self._local.find(reference) is None:
                        await self._look(reference, name)
                elif not known or not self._is_looked_up(name, since):
                    began = time.monotonic()
                    await self._look(reference, name)
                    await self._forget_removed(name)
                    # Names that nobody has are asked for again each time: they would only fill the memory.
                    if self._local.versions(name):
                        self._looked[name] = began
        except (TimeoutError, Unavailable):
            if not known:
                raise
            self._looked[name] = time.monotonic()

    def _is_looked_up(self, name: str, since: float) -> bool:
        """Whether a look for the newest version began at that monotonic time or later."""
        return self._looked.get(name, float("-inf")) > since

    async def _look(self, reference: Reference, name: str) -> None:
        """Takes over what the store has under the reference, if anything."""
        if isinstance(reference, ByDigest):
            manifest = await self.catalog.find_digest(name, reference.digest)
        else:
            manifest = await self.catalog.find(name, reference.version)
        if manifest is not None:
            await self._local.adopt(manifest.info(), manifest.project)

    async def locate_all(self, name: str) -> None:
        """Sees to it that the local catalog knows every version of a name, and none that is gone. Raises Unavailable, ImageError."""
        for version in await self.catalog.versions(name):
            await self.locate(ByName(name, version))
        async with self._flights.of(f"look {name}"):
            await self._forget_removed(name)

    async def _forget_removed(self, name: str) -> None:
        """Versions that another node has removed from the store go from here too, once nothing here uses them."""
        await self._forget([entry.info for entry in self._local.versions(name)], name)

    async def forget_all_removed(self) -> None:
        """The same for every image, also for one that nobody asks for by its name any more. Raises Unavailable."""
        by_name: dict[str, list[ImageInfo]] = {}
        for info in await self._forgettable([entry.info for entry in self._local.entries()], None):
            by_name.setdefault(info.name, []).append(info)
        for name, images in by_name.items():
            async with self._flights.of(f"look {name}"):
                await self._forget(images, name)

    async def _forget(self, images: Sequence[ImageInfo], name: str) -> None:
        gone = await self._forgettable(images, name)
        if gone:
            await self._local.remove(gone)

    async def _forgettable(self, images: Sequence[ImageInfo], name: str | None) -> list[ImageInfo]:
        """Those of ``images``, all of one name if that is given, that the store had, and that were removed from it."""
        # Taken before the store is asked: one that is pushed meanwhile would seem to be gone.
        shared = [info for info in images if self._local.is_shared(info.name, info.version)]
        if not shared:
            return []
        # Of another store, or one that was emptied, nothing follows: what is here may be all there is.
        removed = await self.catalog.removed(name)
        needed = self._needed()
        return [
            info for info in shared if manifest_key(info.name, info.version) in removed and held_by(info.layers).metas.isdisjoint(needed)
        ]

    # -- removing

    async def remove(self, images: Sequence[ImageInfo], caller: Caller, check: Callable[[], None]) -> None:
        """Takes images of one name out of the store and the local catalog. What the store has under their versions goes only where it is
        these images. ``check`` is called right before anything goes, and raises where nothing may.

        Raises Conflict where another node's sandboxes use one or one is being pushed, PermissionDenied where the store's is another
        project's, Unavailable.
        """
        keys = [manifest_key(info.name, info.version) for info in images]
        for info, key in zip(images, keys, strict=True):
            if self._flights.busy(key):
                raise Conflict(f"{info.name}@{info.version} is just being pushed or removed: try again after that", reason="busy")
        async with contextlib.AsyncExitStack() as stack:
            # Nobody pushes one, nor takes one over from the store, until it is gone in both places.
            for key in (*keys, *{f"look {info.name}" for info in images}):
                await stack.enter_async_context(self._flights.of(key))
            there = [info for info in images if await self._is_in_store(info, caller)]
            others = await self.lease.others() if there else set[str]()
            for info in there:
                if held_by(info.layers).metas <= others:
                    layers = "stop the sandboxes that run on it, or on an image made of it"
                    message = f"{info.name}@{info.version} is in use on another node: {layers}"
                    raise Conflict(message, reason="in_use")
            check()
            for info in there:
                await self.catalog.remove(info.name, info.version)
            await self._local.remove(images)
        if len(there) < len(images):
            # What one that was never pushed rests on is in the lease.
            await self.let_go()

    async def remove_broken(self, name: str, version: int) -> None:
        """Takes a version whose manifest can't be read out of the store. Those that run on its layers keep them: leases name layers.

        Raises Conflict where it can be read by now, or is just being written, ImageNotFound where it is gone, Unavailable.
        """
        key = manifest_key(name, version)
        if self._flights.busy(key):
            raise Conflict(f"{name}@{version} is just being pushed or removed: try again after that", reason="busy")
        async with self._flights.of(key), self._flights.of(f"look {name}"):
            try:
                mended = await self.catalog.find(name, version)
            except ManifestBroken:
                await self.catalog.remove(name, version)
                return
        if mended is None:
            raise ImageNotFound(f"{name}@{version} was removed meanwhile")
        raise Conflict(f"{name}@{version} was repaired meanwhile: look at it, and remove it again if need be", reason="busy")

    async def _is_in_store(self, info: ImageInfo, caller: Caller) -> bool:
        """Whether the store has this very image: before a node shared a store it gave numbers of its own. Raises PermissionDenied."""
        try:
            manifest = await self.catalog.find(info.name, info.version)
        except ImageError:
            # A broken one goes with the image that was seen there.
            return self._local.is_shared(info.name, info.version)
        if manifest is None or manifest.digest != info.digest:
            return False
        if not caller.may_change(manifest.project):
            raise PermissionDenied(f"{info.name}@{info.version} belongs to another project in the shared store")
        return True

    async def collect_garbage(self) -> int:
        """Deletes what nobody needs in the store; the bytes. Raises what StoreGc.collect raises."""
        shared = (entry.info for entry in self._local.entries() if self._local.is_shared(entry.info.name, entry.info.version))
        return await self.gc.collect({manifest_key(info.name, info.version): held_by(info.layers) for info in shared})


def _not_renewed(failure: Exception) -> None:
    _log.warning("the lease in the shared store can't be renewed", error=str(failure))
