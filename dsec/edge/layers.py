"""Which layers are mounted on the node, and which sandboxes use them. Each is mounted once, by the spawner."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

import msgspec

from dsec.edge.record import LayerRef
from dsec.edge.spawner import Spawner
from libdsec.schema import LayerInfo


def refer(layers: Iterable[LayerInfo]) -> tuple[LayerRef, ...]:
    """The layers as the spawner names them."""
    return tuple(LayerRef(_hex(layer.digest), None if layer.blob is None else _hex(layer.blob)) for layer in layers)


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


class _Mounted:
    __slots__ = ("blob", "idle_since", "lazy", "ready", "users")

    def __init__(self, ready: asyncio.Future[None], blob: str | None, lazy: bool) -> None:
        self.ready = ready
        self.blob = blob
        self.lazy = lazy
        self.users = 0
        self.idle_since = 0.0


class LayerMounts:
    """Counts the users of every layer. A layer without users stays mounted for a while: the next sandbox will probably want it."""

    def __init__(self, spawner: Spawner) -> None:
        self._spawner = spawner
        self._mounted: dict[str, _Mounted] = {}
        self._unmounting: dict[str, asyncio.Future[None]] = {}

    def missing(self, layers: Iterable[LayerRef]) -> bool:
        """Whether some of the layers have to be mounted first."""
        return any(layer.meta not in self._mounted for layer in layers)

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
                    mounted = self._mount(layer, layer.meta in lazy)
                mounted.users += 1
                taken.append(layer)
                if not mounted.ready.done():
                    await asyncio.shield(mounted.ready)
                else:
                    mounted.ready.result()
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
                ready = asyncio.get_running_loop().create_future()
                ready.set_result(None)
                mounted = self._mounted[layer.meta] = _Mounted(ready, layer.blob, layer.lazy)
            mounted.users += 1

    def release(self, layers: Iterable[LayerRef], now: float) -> None:
        """Counts one user less of each. ``now``: monotonic seconds."""
        for layer in layers:
            mounted = self._mounted.get(layer.meta)
            if mounted is not None:
                mounted.users -= 1
                mounted.idle_since = now

    def in_use(self) -> set[str]:
        """Digests (hex) of metadata and data of the layers that sandboxes use."""
        used = {meta: mounted.blob for meta, mounted in self._mounted.items() if mounted.users > 0}
        return used.keys() | {blob for blob in used.values() if blob is not None}

    async def unmount_idle(self, before: float) -> None:
        """Unmounts layers that no sandbox has used since ``before`` (monotonic seconds). Raises SpawnerError."""
        for meta in [m for m, mounted in self._mounted.items() if mounted.users == 0 and mounted.idle_since < before]:
            mounted = self._mounted.get(meta)
            if mounted is None or mounted.users > 0:
                continue
            # Out of the table first: whoever wants it from here on mounts it anew, after this.
            del self._mounted[meta]
            unmount = self._unmounting[meta] = asyncio.ensure_future(self._spawner.layer_unmount(meta))
            try:
                await unmount
            finally:
                del self._unmounting[meta]

    async def forget_unmounted(self) -> None:
        """After the spawner came back: forgets layers that it no longer has, so that the next user mounts them again."""
        present = set(await self._spawner.layers())
        for meta, mounted in list(self._mounted.items()):
            if meta not in present and mounted.users == 0:
                del self._mounted[meta]

    def _mount(self, layer: LayerRef, lazy: bool) -> _Mounted:
        ready = asyncio.ensure_future(self._mount_in_turn(layer, lazy))
        mounted = self._mounted[layer.meta] = _Mounted(ready, layer.blob, lazy)
        ready.add_done_callback(lambda done: self._mount_ended(layer.meta, mounted, done))
        return mounted

    async def _mount_in_turn(self, layer: LayerRef, lazy: bool) -> None:
        unmounting = self._unmounting.get(layer.meta)
        if unmounting is not None:
            await asyncio.wait([unmounting])
        await self._spawner.layer_mount(layer.meta, layer.blob, lazy=lazy)

    def _mount_ended(self, meta: str, mounted: _Mounted, done: asyncio.Future[None]) -> None:
        # A mount that failed is tried again by the next sandbox.
        if (done.cancelled() or done.exception() is not None) and self._mounted.get(meta) is mounted:
            del self._mounted[meta]
