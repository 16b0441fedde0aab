"""The image store of an instance: imports, references, removal, garbage; and what goes to the store that nodes share, and comes from it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.routing import BaseRoute

from dsec.images.blobs import BlobDirectory, digest_of, hex_of
from dsec.images.catalog import Caller, Catalog, Entry, digests
from dsec.images.checking import Checker, Found
from dsec.images.converter import Converter
from dsec.images.differences import Placed, changes, tree
from dsec.images.environments import LOWER_LAYERS_MAX, Environment, compose
from dsec.images.flights import Flights
from dsec.images.importing import Importer, ImportRequest, RegistrySource, Tell, draft
from dsec.images.leases import HOLD_S
from dsec.images.limits import ImportLimits
from dsec.images.names import ByDigest, ByName, Reference, exact, parse_reference
from dsec.images.packing import Packing
from dsec.images.pulling import LayerState, Puller, pull
from dsec.images.reads import BlobFigures, Reads
from dsec.images.registry_access import RegistryPolicy
from dsec.images.retiring import CACHE_BYTES, Retiring
from dsec.images.routes import ImageRoutes
from dsec.images.shared import Blobs
from dsec.images.shared_catalog import ManifestBroken
from dsec.images.sharing import LOOK_S, Sharing, node_name
from dsec.images.threads import to_end
from dsec.images.traces import Touch, Traces
from dsec.store import Store
from libdsec.errors import Conflict, ImageError, ImageNotFound, InvalidArgument, NoCapacity, PermissionDenied, Unavailable
from libdsec.schema import ImageChange, ImageConfig, ImageInfo, ImageReads, LayerInfo

RETIRED_AT_ONCE = 500
"""Blobs that gc takes out of the store between two looks at anything else: some milliseconds."""
ENVIRONMENTS_KEPT = 10_000
"""Composed environments kept in memory; beyond it they are composed anew, which takes some microseconds more."""


def _nobody() -> set[str]:
    return set()


async def _nothing_to_count() -> None:
    pass


class ImageStore:
    """Images by name, version and digest, and their layers as files.

    ``in_use`` is set by whoever runs sandboxes: the digests (with or without ``sha256:``) of metadata and data of the layers that live
    ones hold. What is in use is neither removed nor collected, whatever becomes of the image that it came with. So is ``count_reads``: it
    is called to have :meth:`record_reads` called with what was read until now, and returns soon, whether or not that could be had.
    """

    def __init__(
        self,
        root: Path,
        store: Store,
        *,
        shared: Blobs | None = None,
        limits: ImportLimits | None = None,
        converter: Path | None = None,
        registries: RegistryPolicy | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """``root`` will hold the blobs; ``shared`` is the store that this node shares with others; ``converter`` is the path of
        dsec-mklayer, looked for in its usual places if not given; ``registries``: which ones the keys of projects may import from, none if
        not given; ``cache_bytes``: what whole blobs may take that the shared store has too."""
        self.limits = limits or ImportLimits()
        self.registries = registries or RegistryPolicy()
        self.in_use: Callable[[], set[str]] = _nobody
        self.count_reads: Callable[[], Awaitable[None]] = _nothing_to_count
        self._root = root
        self._blobs = BlobDirectory(root, disk_reserve=self.limits.disk_reserve)
        self._sharing = None if shared is None else Sharing(shared, self._blobs, self._needed)
        self._catalog = Catalog(store, self._sharing)
        made_by = self._converter = Converter(converter, self._blobs, self.limits)
        self._importer = Importer(self._catalog, self._blobs, made_by, self.limits)
        self._puller = Puller(self._blobs, shared, self.limits, made_by)
        self._retiring = Retiring(self._blobs, self._catalog, self._puller, self._kept, cache_bytes, changed=self._note_retired)
        self._reads = Reads(store)
        self._traces = Traces(root / "traces", shared)
        self._collecting = asyncio.Lock()
        self._environments: dict[tuple[str, str | None, tuple[str, ...]], Environment] = {}
        self._pinned_digests: dict[str, int] = {}
        self._covers: dict[str, _Cover] = {}
        """What settled environments lack, by the digests of their layers."""
        self._covering = Flights()
        self.packing = Packing(
            self._catalog, self._blobs, made_by, self._puller, self._importer.pins, self.limits, changed=self._note_packed
        )

    async def open(self) -> None:
        """Loads the catalog and removes what a crash left: half-made files, and blobs that no image names. Raises OSError, and what the
        database raises."""
        await asyncio.to_thread(self._blobs.open)
        await self._catalog.open()
        await self._reads.open()
        await self._collect_local()
        if self._sharing is not None:
            self._sharing.open(node_name(self._root / "node"), self._catalog)

    def start(self) -> None:
        """Begins what goes on in the background, once ``in_use`` can tell what lives."""
        if self._sharing is not None:
            self._sharing.start()
            self._retiring.start()

    async def close(self) -> None:
        """Ends what goes on in the background, and saves what was counted."""
        await self._reads.save()
        await self._retiring.close()
        if self._sharing is not None:
            await self._sharing.close()

    def routes(self) -> list[BaseRoute]:
        """The routes below ``/v1/images``, to be mounted behind authentication."""
        return ImageRoutes(self).routes()

    # -- what a sandbox starts from

    async def locate(self, image: str, workspace: str | None, toolkits: Sequence[str]) -> None:
        """Before :meth:`resolve`: images that only other nodes made are looked for in the shared store, and so is a newer version of a name
        that was last looked up 10 s ago or more. Without a shared store it does nothing. Raises Unavailable, ImageError."""
        await self._locate([image, *([] if workspace is None else [workspace]), *toolkits], fresh=False)

    async def _locate(self, references: Sequence[str], *, fresh: bool) -> None:
        if self._sharing is None:
            return
        before = self._catalog.changes
        try:
            for reference in references:
                await self._sharing.locate(parse_reference(reference), fresh=fresh)
        finally:
            if self._catalog.changes != before:
                self._environments.clear()

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

    async def settle(self, environment: Environment) -> Environment:
        """The environment with what it lacks to be shown as it is meant: a directory that a workspace or toolkit only passes through
        (``/home`` of ``/home/agent/repo``) is what the layers below say. Where that takes a layer more it comes on top, and isn't collected
        as long as it is known here. From memory where it was settled before.

        Raises ImageError, also where the layers are too many with it, Unavailable, NoCapacity.
        """
        if not any(layer.unnamed for layer in environment.layers[:-1]):
            return environment
        key = "\n".join(layer.digest for layer in environment.layers)
        cover = self._known_cover(key)
        if cover is None:
            async with self._covering.of(key):
                cover = self._known_cover(key)
                if cover is None:
                    cover = _Cover(await self._cover(environment))
                    if len(self._covers) >= ENVIRONMENTS_KEPT:
                        self._covers.clear()
                    self._covers[key] = cover
        if cover.layer is None:
            return environment
        if len(environment.layers) == LOWER_LAYERS_MAX:
            raise ImageError(f"{LOWER_LAYERS_MAX + 1} layers together, a sandbox takes {LOWER_LAYERS_MAX}")
        return msgspec.structs.replace(environment, layers=(cover.layer, *environment.layers))

    def _known_cover(self, key: str) -> _Cover | None:
        cover = self._covers.get(key)
        is_there = cover is None or cover.layer is None or self._blobs.has(cover.layer.digest)
        return cover if is_there else None

    async def _cover(self, environment: Environment) -> LayerInfo | None:
        with self._pinned(_digests_of(environment)), self._importer.pins.scope() as pin:
            await self._puller.metas(environment.layers)
            workspace = self._blobs.make_workspace()
            try:
                return await self._converter.cover(list(reversed(environment.layers)), workspace, pin)
            finally:
                await to_end(lambda: self._blobs.remove_workspace(workspace))

    async def ensure(self, environment: Environment) -> list[LayerState]:
        """What the node has of each layer, in the environment's order: metadata is here when this returns, data is either whole here or to
        be fetched as it is read, by the chunk table in the answer. No other node removes the layers from here on, provided that ``in_use``
        names them within two minutes.

        Raises ImageError for a layer that is broken or gone, Unavailable where the shared store is needed and can't be reached, NoCapacity.
        """
        digests = _digests_of(environment)
        with self._pinned(digests):
            news = False
            if self._sharing is not None:
                try:
                    news = await self._sharing.lease.hold(digests, HOLD_S)
                except (Unavailable, NoCapacity):
                    # Where everything is here, what others do to the store doesn't matter to this sandbox.
                    if not self._puller.here(environment.layers):
                        raise
            states = await self._puller.states(environment.layers)
            if news:
                await self._puller.check_frames(states)
            self._retiring.note_use(_data_of(environment))
            return states

    async def hold(self, environment: Environment) -> None:
        """In place of :meth:`ensure` for layers that are mounted already: no other node removes them from here on, provided that ``in_use``
        names them within two minutes. From memory where they were held before. Raises ImageError where their data is gone.

        While the shared store can't be reached the start goes on: what it needs may be in blobfs' cache.
        """
        if self._sharing is None:
            return
        digests = _digests_of(environment)
        with self._pinned(digests), contextlib.suppress(Unavailable, NoCapacity):
            if await self._sharing.lease.hold(digests, HOLD_S, within_s=LOOK_S):
                await self._puller.check_frames(await self._puller.states(environment.layers))

    def hold_blob(self, file: Path) -> Path:
        """Gives a file on the same filesystem a second name, under which it is no blob yet. Blocks. Raises OSError."""
        return self._blobs.hold(file)

    def adopt_blob(self, blob: str, held: Path) -> None:
        """Makes a held file, whose every chunk was checked by its table, the whole blob of that digest. Blocks. Raises OSError."""
        self._blobs.adopt(held, digest_of(hex_of(blob)))
        self._retiring.soon()

    def release_blob(self, held: Path) -> None:
        """Removes the second name, unless it has become a blob. Blocks."""
        self._blobs.remove_workspace(held.parent)

    def note_start(self, environment: Environment) -> None:
        """Counts a sandbox that starts from the environment, for :meth:`stats`. Its data counts as used."""
        self._retiring.note_use(_data_of(environment))
        self._reads.started([name for name in (environment.image, environment.workspace, *environment.toolkits) if name is not None])

    async def record_reads(self, figures: Mapping[str, BlobFigures]) -> None:
        """Takes what blobfs has counted so far, by blob (hexadecimal), for :meth:`stats`. Called every now and then, and at the end."""
        await self._reads.record({hex_of(blob): each for blob, each in figures.items()})

    async def save_trace(self, image: ImageInfo, touches: Sequence[Touch]) -> None:
        """Keeps which chunks a sandbox of the image touched first, also for other nodes. Raises InvalidArgument, Unavailable."""
        await self._traces.save(image, touches)

    async def trace(self, image: ImageInfo) -> list[Touch] | None:
        """The trace of an image that was recorded here or on another node; None: there is none, or it can't be had now."""
        return await self._traces.of(image)

    # -- images

    async def find(self, reference: str) -> ImageInfo:
        """The image that is referred to, on this node or in the shared store, which is asked each time. Raises ImageNotFound,
        Unavailable."""
        await self._locate([reference], fresh=True)
        return self.get(reference)

    def get(self, reference: str) -> ImageInfo:
        """The image that is referred to, as far as this node knows. Raises ImageNotFound."""
        return self._entry(reference).info

    def page(self, after: tuple[str, int] | None, limit: int) -> list[ImageInfo]:
        """Up to ``limit`` images in the order of name and version, beginning after that one."""
        return self._catalog.page(after, limit)

    def made_by(self, idempotency_key: str) -> ImageInfo | None:
        """The image that an earlier import with this key made, if any."""
        entry = self._catalog.made_by(idempotency_key)
        return None if entry is None else entry.info

    async def import_archive(self, request: ImportRequest, body: AsyncIterator[bytes], tell: Tell) -> ImageInfo:
        """Imports an archive as the next version of its name, and pushes it where a store is shared.

        Raises ImageError, NoCapacity, PermissionDenied; then nothing of it stays. Raises Unavailable when the shared store can't be
        reached; if the image was made by then, it is pushed as soon as that can be.
        """
        return await self._made(request.name, request.caller, self._importer.run(request, body, tell), tell)

    async def import_registry(self, request: ImportRequest, source: RegistrySource, tell: Tell) -> ImageInfo:
        """Imports an image from a registry, which the caller may name. Raises what :meth:`import_archive` raises, ImageNotFound,
        Unavailable; then what was fetched of it stays for a day, for the next attempt."""
        return await self._made(request.name, request.caller, self._importer.run_registry(request, source, tell), tell)

    async def tag(self, reference: str, name: str, caller: Caller, idempotency_key: str | None, tell: Tell) -> ImageInfo:
        """Makes what an image is the next version of another name, or of its own again: nothing is copied, and the digest is the same.

        Raises ImageNotFound (also for what another project packed from a sandbox), PermissionDenied, and what :meth:`push` raises.
        """
        info = await self._readable(reference, caller)
        with self._pinned({hex_of(digest) for layer in info.layers for digest in digests(layer)}):
            adding = self._catalog.add(draft(name, info.kind, info.layers, info.config), caller, idempotency_key)
            tagged = await self._made(name, caller, adding, tell)
        if self._sharing is not None:
            await self._sharing.let_go()
        return tagged

    async def _made(self, name: str, caller: Caller, making: Coroutine[None, None, ImageInfo], tell: Tell) -> ImageInfo:
        """What ``making`` makes under ``name``, pushed where a store is shared."""
        try:
            if self._sharing is not None:
                await self._sharing.check_owner(name, caller)
        except BaseException:
            making.close()
            raise
        image = await making
        self._environments.clear()
        if self._sharing is None:
            return image
        try:
            return await self.push(exact(image.name, image.version), caller, tell)
        except (Unavailable, NoCapacity) as error:
            message = f"{exact(image.name, image.version)} is made on this node, but not yet in the shared store; that is tried again"
            raise type(error)(f"{message}: {error.message}", reason=error.reason, retry_after=error.retry_after) from error

    async def push(self, reference: str, caller: Caller, tell: Tell) -> ImageInfo:
        """Makes an image of this node visible to all that share its store. Repeatable; goes on where it broke off.

        Raises ImageNotFound (also where a layer isn't whole here), PermissionDenied, Conflict where the store has another image under that
        version, InvalidArgument where no store is shared, Unavailable, NoCapacity.
        """
        sharing = self._shared()
        entry = self._own_entry(reference, caller)
        await sharing.check_owner(entry.info.name, caller)
        pushed = await sharing.push(entry, tell)
        self._environments.clear()
        return pushed

    async def pull(self, reference: str, whole: bool, tell: Tell) -> ImageInfo:
        """Fetches an image's metadata, with ``whole`` its data too. Raises ImageNotFound, ImageError, Unavailable, NoCapacity."""
        info = await self.find(reference)
        digests = {hex_of(digest) for layer in info.layers for digest in (layer.digest, layer.blob, layer.index) if digest is not None}
        with self._pinned(digests):
            if self._sharing is not None:
                await self._sharing.lease.hold(digests)
            await pull(self._puller, info.layers, whole, tell)
        if self._sharing is not None:
            await self._sharing.let_go()
        return info

    async def stats(self, reference: str) -> ImageReads:
        """What was read of an image on this node until now. Raises ImageNotFound, Unavailable."""
        info = await self.find(reference)
        await self.count_reads()
        figures = self._reads.of(info.layers)
        data = [layer.blob for layer in info.layers if layer.blob is not None]
        # What is whole here is mounted without blobfs, which then sees no read.
        unseen = bool(data) and all(map(self._blobs.has, data)) and not self._reads.measured(info.layers)
        return ImageReads(
            image=exact(info.name, info.version),
            size=sum({layer.blob: layer.blob_bytes for layer in info.layers if layer.blob is not None}.values()),
            needed=None if unseen else figures.needed,
            fetched=figures.fetched,
            from_cache=figures.from_cache,
            sandboxes=self._reads.starts_of(exact(info.name, info.version)),
            traced=await self._traces.of(info) is not None,
        )

    async def diff(self, before: str, after: str, caller: Caller) -> Sequence[ImageChange]:
        """Paths that two images don't have alike, sorted; see :mod:`dsec.images.differences` for what counts. Their metadata is fetched if
        need be. Raises ImageNotFound (also for what another project packed from a sandbox), ImageError, Unavailable."""
        pair = [await self._readable(reference, caller) for reference in (before, after)]
        layers = [layer for info in pair for layer in info.layers]
        with self._pinned({hex_of(layer.digest) for layer in layers}):
            await self._puller.metas(layers)
            return await to_end(lambda: self._diff(*pair))

    async def _readable(self, reference: str, caller: Caller) -> ImageInfo:
        """An image whose contents the caller may see, looked up as :meth:`find` does. Raises ImageNotFound, Unavailable."""
        await self._locate([reference], fresh=True)
        entry = self._entry(reference)
        if any(layer.diff for layer in entry.info.layers) and not caller.may_change(entry.project):
            # As if it weren't there: a project learns nothing of what was written in another one's sandboxes.
            raise _no_image(reference)
        return entry.info

    def _diff(self, before: ImageInfo, after: ImageInfo) -> list[ImageChange]:
        def tree_of(info: ImageInfo) -> dict[bytes, Placed]:
            return tree([(self._blobs.path(layer.digest).read_bytes(), layer.blob) for layer in info.layers])

        return list(changes(tree_of(before), tree_of(after)))

    async def fsck(self, found: Found, *, deep: bool, repair: bool) -> None:
        """Looks for what is missing, wrong, half made or in nobody's use, on this node and in the shared store; ``deep`` reads everything
        and compares digests, ``repair`` mends what can be, and removes what is broken here and only an import can make again. Raises
        Unavailable, NoCapacity."""
        checker = Checker(self._blobs, self._puller, self._counted_on, found, deep=deep, repair=repair)
        entries = list(self._catalog.entries())
        named = [
            (exact(entry.info.name, entry.info.version), layer, self._catalog.is_shared(entry.info.name, entry.info.version))
            for entry in entries
            for layer in entry.info.layers
        ]
        async with self._retiring.changing:
            await checker.node(named, self._is_needed)
        if self._sharing is not None:
            await checker.store(self._sharing)

    async def remove(self, reference: str, caller: Caller) -> ImageInfo:
        """Removes an image: ``name@n`` and a digest one version, a plain name all versions. Returns the (newest) one removed.

        Its layers stay on the disk until :meth:`collect_garbage`. Raises ImageNotFound, PermissionDenied, Conflict while sandboxes hold all
        of its layers, here or on another node, and while it is pushed; Unavailable where the shared store can't be asked. An admin
        removes ``name@n`` also where its manifest in the shared store can't be read: of what this node doesn't know the answer is then
        empty but for name and version.
        """
        parsed = parse_reference(reference)
        whole = parsed.name if isinstance(parsed, ByName) and parsed.version is None else None
        try:
            if self._sharing is None or whole is None:
                try:
                    await self.locate(reference, None, ())
                except ManifestBroken as broken:
                    return await self._remove_broken(parsed, caller, broken)
            else:
                await self._sharing.locate_all(whole)
            entry = self._own_entry(reference, caller)
            doomed = [entry.info] if whole is None else [each.info for each in self._catalog.versions(whole)]
            self._check_unused(doomed)
            if self._sharing is None:
                await self._catalog.remove(doomed)
            else:
                await self._sharing.remove(doomed, caller, lambda: self._check_unused(doomed))
        finally:
            self._environments.clear()
        return entry.info

    async def _remove_broken(self, reference: Reference | None, caller: Caller, broken: ManifestBroken) -> ImageInfo:
        """Removes a version that can't be read, so that nobody knows whose it is. Raises ``broken`` where none is named, PermissionDenied,
        and what Sharing.remove_broken raises."""
        if not isinstance(reference, ByName) or reference.version is None:
            raise broken
        if not caller.admin:
            raise PermissionDenied(f"{broken.message}; only an admin may remove it: nobody can say whose it is")
        name, version = reference.name, reference.version
        await self._shared().remove_broken(name, version)
        return ImageInfo(name=name, version=version, kind="base", digest="", layers=[], config=ImageConfig(), created_at=0, size=0)

    async def collect_garbage(self) -> int:
        """Deletes what no image, no live sandbox and no import or push in progress needs, here and in the shared store; returns the bytes.
        Partial downloads that nobody went on with go, too, uncounted.

        Raises Conflict while another node's gc works, Unavailable, ImageError for something unreadable in the shared store.
        """
        if self._sharing is not None:
            await self._sharing.forget_all_removed()
            self._environments.clear()
        removed = await self._collect_local()
        if self._sharing is not None:
            removed += await self._sharing.collect_garbage()
        return removed

    async def _collect_local(self) -> int:
        async with self._collecting:
            await self._importer.downloads.sweep()
            retired = []
            unneeded = await asyncio.to_thread(self._blobs.unneeded, self._is_needed())
            for start in range(0, len(unneeded), RETIRED_AT_ONCE):
                # Asked again: meanwhile an import or a start may have come to count on it. Nobody comes between this and its going.
                needed = self._is_needed()
                retired += self._blobs.retire([each for each in unneeded[start : start + RETIRED_AT_ONCE] if not needed(each.name)])
                await asyncio.sleep(0)
            gone = [key for key, layer in self._catalog.conversions().items() if not self._blobs.has(layer.digest)]
            await self._catalog.forget_conversions(gone)
            return await asyncio.to_thread(self._blobs.delete, retired)

    # -- within

    def _note_packed(self) -> None:
        self._environments.clear()
        if self._sharing is not None:
            self._sharing.push_soon()

    def _shared(self) -> Sharing:
        if self._sharing is None:
            raise InvalidArgument("no store is shared by this node: start it with `dsec up --store URL`")
        return self._sharing

    def _is_needed(self) -> Callable[[str], bool]:
        """Tells whether an image, a live sandbox or a call in progress needs a file of this node, by its digest (hexadecimal)."""
        used = self._used() | {hex_of(cover.layer.digest) for cover in self._covers.values() if cover.layer is not None}

        def needed(name: str) -> bool:
            digest = digest_of(name)
            if name in used or self._catalog.names(digest):
                return True
            return name in self._pinned_digests or digest in self._importer.pins.digests()

        return needed

    def _needed(self) -> set[str]:
        """Digests (hexadecimal) that live sandboxes and calls in progress need of the shared store."""
        return self._used() | set(self._pinned_digests)

    def _counted_on(self) -> set[str]:
        """Digests (hexadecimal) of files of this node that live sandboxes and calls in progress need."""
        pushing = set[str]() if self._sharing is None else self._sharing.publisher.digests()
        return self._needed() | pushing | {hex_of(digest) for digest in self._importer.pins.digests()}

    def _kept(self) -> set[str]:
        """Digests (hexadecimal) of what mustn't be retired: live sandboxes, calls in progress and images that aren't pushed need it."""
        unpushed = (hex_of(layer.blob) for entry in self._catalog.unpushed() for layer in entry.info.layers if layer.blob is not None)
        return self._counted_on().union(unpushed)

    def _note_retired(self) -> None:
        # Those composed before their images were pushed don't know the chunk tables.
        self._environments.clear()

    def _used(self) -> set[str]:
        """Digests (hexadecimal) of metadata and data that live sandboxes hold."""
        return {hex_of(digest) for digest in self.in_use()}

    def _check_unused(self, images: Sequence[ImageInfo]) -> None:
        """Raises Conflict while something here needs one of the images."""
        needed = self._needed()
        for info in images:
            # Who runs on an image holds all of its layers; some of them are also held by who runs on its base.
            if all(hex_of(layer.digest) in needed for layer in info.layers):
                layers = "stop the sandboxes that run on it, or on an image made of it"
                raise Conflict(f"{exact(info.name, info.version)} is in use: {layers}", reason="in_use")

    @contextlib.contextmanager
    def _pinned(self, digests: set[str]) -> Iterator[None]:
        """Neither gc takes these digests (hexadecimal) while the body runs."""
        for digest in digests:
            self._pinned_digests[digest] = self._pinned_digests.get(digest, 0) + 1
        try:
            yield
        finally:
            for digest in digests:
                self._pinned_digests[digest] -= 1
                if not self._pinned_digests[digest]:
                    del self._pinned_digests[digest]

    def _own_entry(self, reference: str, caller: Caller) -> Entry:
        """An image that the caller may change. Several may have a digest: a name beside it means that name's alone, and of several the
        caller's count. Raises ImageNotFound, PermissionDenied."""
        parsed = parse_reference(reference)
        if isinstance(parsed, ByDigest):
            entries = self._catalog.with_digest(parsed.digest)
            if parsed.name is not None:
                entries = [entry for entry in entries if entry.info.name == parsed.name]
            entries = [entry for entry in entries if caller.may_change(entry.project)] or entries
            if not entries:
                raise _no_image(reference)
            entry = entries[-1]
        else:
            entry = self._entry(reference)
        if not caller.may_change(entry.project):
            raise PermissionDenied(f"the image {reference} belongs to another project")
        return entry

    def _entry(self, reference: str) -> Entry:
        entry = self._catalog.find(parse_reference(reference))
        if entry is None:
            raise _no_image(reference)
        return entry


@dataclass(frozen=True, slots=True)
class _Cover:
    """A layer that an environment lacks; None: it lacks none."""

    layer: LayerInfo | None


def _digests_of(environment: Environment) -> set[str]:
    """In hexadecimal, of metadata and data."""
    return {hex_of(digest) for layer in environment.layers for digest in (layer.digest, layer.blob) if digest is not None}


def _data_of(environment: Environment) -> list[str]:
    """Digests of data, in hexadecimal."""
    return [hex_of(layer.blob) for layer in environment.layers if layer.blob is not None]


def _no_image(reference: str) -> ImageNotFound:
    return ImageNotFound(f"there is no image {reference!r}")
