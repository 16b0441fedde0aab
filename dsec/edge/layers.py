"""Which layers are mounted on the node, and which sandboxes use them. Each is mounted once, by the spawner."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

import msgspec

from dsec.edge.record import LayerRef
from dsec.edge.spawner import Spawner, SpawnerError
from dsec.images.blobs import hex_of
from libdsec.schema import LayerInfo


def refer(layers: Iterable[LayerInfo]) -> tuple[LayerRef, ...]:
    """The layers as the spawner names them."""
    return tuple(LayerRef(hex_of(layer.digest), None if layer.blob is None else hex_of(layer.blob)) for layer in layers)


class _Mounted:
    __slots__ = ("blob", "idle_since", "lazy", "ready", "users")

    def __init__(self) -> None:
        self.ready: asyncio.Future[None] | None = None
        """Done when it is mounted. None: its next user has it mounted."""
        self.blob: str | None = None
        """Hex digest of its data, as far as its users have told."""
        self.lazy = False
        self.users = 0
        self.idle_since = 0.0


class LayerMounts:
    """Counts the users of every layer. A layer without users stays mounted for a while: the next sandbox will probably want it.

    The spawner may mount less than is known here (it drops lazy layers that nobody serves) and more (what an earlier edge had mounted, what
    it failed to unmount): :meth:`compare` takes over what it has.
    """

    def __init__(self, spawner: Spawner) -> None:
        self._spawner = spawner
        self._mounted: dict[str, _Mounted] = {}
        self._unmounting: dict[str, asyncio.Future[None]] = {}
        self._unmounts = 0
        """How many were begun."""
        self.aborts = 0
        """How often the spawner has given up what lazy layers are read from: sandboxes made of them before can't be read on."""

    def missing(self, layers: Iterable[LayerRef]) -> bool:
        """Whether some of the layers have to be mounted first."""
        return any((mounted := self._mounted.get(layer.meta)) is None or mounted.ready is None for layer in layers)

    def lazy(self, layers: Iterable[LayerRef]) -> bool:
        """Whether some of the layers are mounted with data that isn't whole on the node."""
        return any(layer.meta in self._mounted and self._mounted[layer.meta].lazy for layer in layers)

    async def acquire(self, layers: Iterable[LayerRef], lazy: Collection[str] = ()) -> None:
        """Mounts what isn't mounted yet and counts one more user of each. ``lazy``: metadata digests of the layers whose data isn't whole
        on the node. Raises SpawnerError; then nothing is counted."""
        taken: list[LayerRef] = []
        try:
            for layer in layers:
                mounted = self._mounted.get(layer.meta)
                if mounted is None:
                    mounted = self._mounted[layer.meta] = _Mounted()
                ready = self._mount(layer, mounted, layer.meta in lazy) if mounted.ready is None else mounted.ready
                mounted.blob = layer.blob
                mounted.users += 1
                taken.append(layer)
                if not ready.done():
                    await asyncio.shield(ready)
                else:
                    ready.result()
        except BaseException:
            self.release(taken, 0.0)
            raise

    def as_mounted(self, layers: Iterable[LayerRef]) -> tuple[LayerRef, ...]:
        """The layers with how they are mounted."""
        return tuple(
            msgspec.structs.replace(layer, lazy=layer.meta in self._mounted and self._mounted[layer.meta].lazy) for layer in layers
        )

    def adopt(self, layers: Iterable[LayerRef]) -> None:
        """Counts one more user of layers that are mounted already: those of a live sandbox found after a restart."""
        for layer in layers:
            mounted = self._mounted.get(layer.meta)
            if mounted is None:
                mounted = self._add_mounted(layer.meta, layer.lazy)
            mounted.blob = layer.blob
            mounted.users += 1

    def release(self, layers: Iterable[LayerRef], now: float) -> None:
        """Counts one user less of each. ``now``: monotonic seconds."""
        for layer in layers:
            mounted = self._mounted.get(layer.meta)
            if mounted is not None:
                mounted.users -= 1
                mounted.idle_since = now
                self._forget_if_gone(layer.meta, mounted)

    def in_use(self) -> set[str]:
        """Digests (hex) of metadata and data of the layers that sandboxes use."""
        used = {meta: mounted.blob for meta, mounted in self._mounted.items() if mounted.users > 0}
        return used.keys() | {blob for blob in used.values() if blob is not None}

    async def unmount_idle(self, before: float) -> None:
        """Unmounts layers that no sandbox has used since ``before`` (monotonic seconds). Raises SpawnerError in the end if one couldn't be:
        :meth:`compare` finds it."""
        failure: SpawnerError | None = None
        for meta in [meta for meta, mounted in self._mounted.items() if _is_idle(mounted, before)]:
            mounted = self._mounted.get(meta)
            if mounted is None or not _is_idle(mounted, before):
                continue
            # Out of the table first: whoever wants it from here on mounts it anew, after this.
            del self._mounted[meta]
            self._unmounts += 1
            unmount = self._unmounting[meta] = asyncio.ensure_future(self._spawner.layer_unmount(meta))
            try:
                await unmount
            except SpawnerError as error:
                failure = error
            finally:
                del self._unmounting[meta]
        if failure is not None:
            raise failure

    async def compare(self, now: float) -> None:
        """Takes over what the spawner has mounted: layers that aren't known here are idle from ``now`` (monotonic seconds) on, those that
        are gone are mounted anew for their next user. Raises SpawnerError."""
        known = {meta: mounted.ready for meta, mounted in self._mounted.items() if mounted.ready is not None and mounted.ready.done()}
        unmounts, quiet = self._unmounts, not self._unmounting
        present = await self._spawner.layers()
        for meta, ready in known.items():
            mounted = self._mounted.get(meta)
            if mounted is None or mounted.ready is not ready:
                continue
            if meta in present:
                mounted.lazy = present[meta]
            else:
                self._lose(meta, mounted)
        # What was unmounted meanwhile may be in the answer; the next one tells.
        if quiet and unmounts == self._unmounts:
            for meta in present.keys() - self._mounted.keys():
                self._add_mounted(meta, present[meta]).idle_since = now

    def lose_lazy(self) -> None:
        """The spawner says that it has dropped the lazy layers."""
        self.aborts += 1
        for meta, mounted in list(self._mounted.items()):
            if mounted.lazy and mounted.ready is not None and mounted.ready.done():
                self._lose(meta, mounted)

    def _add_mounted(self, meta: str, lazy: bool) -> _Mounted:
        mounted = self._mounted[meta] = _Mounted()
        mounted.ready, mounted.lazy = asyncio.get_running_loop().create_future(), lazy
        mounted.ready.set_result(None)
        return mounted

    def _lose(self, meta: str, mounted: _Mounted) -> None:
        """Whoever uses it is still counted: sandboxes keep a mount of their own."""
        mounted.ready = None
        self._forget_if_gone(meta, mounted)

    def _forget_if_gone(self, meta: str, mounted: _Mounted) -> None:
        if mounted.ready is None and mounted.users == 0 and self._mounted.get(meta) is mounted:
            del self._mounted[meta]

    def _mount(self, layer: LayerRef, mounted: _Mounted, lazy: bool) -> asyncio.Future[None]:
        mounted.ready, mounted.lazy = asyncio.ensure_future(self._mount_in_turn(layer, lazy)), lazy
        mounted.ready.add_done_callback(lambda done: self._mount_ended(layer.meta, mounted, done))
        return mounted.ready

    async def _mount_in_turn(self, layer: LayerRef, lazy: bool) -> None:
        unmounting = self._unmounting.get(layer.meta)
        if unmounting is not None:
            await asyncio.wait([unmounting])
        await self._spawner.layer_mount(layer.meta, layer.blob, lazy=lazy)

    def _mount_ended(self, meta: str, mounted: _Mounted, done: asyncio.Future[None]) -> None:
        # A mount that failed is tried again by the next sandbox.
        if (done.cancelled() or done.exception() is not None) and mounted.ready is done:
            self._lose(meta, mounted)


def _is_idle(mounted: _Mounted, before: float) -> bool:
    return mounted.users == 0 and mounted.idle_since < before and mounted.ready is not None and mounted.ready.done()
