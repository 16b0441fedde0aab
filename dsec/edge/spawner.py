"""The client of the spawner, the root daemon that does every privileged act: see docs/wire.md, "Spawner verbs"."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, Protocol

import msgspec

from dsec.edge.verbs import Peer, Verbs
from libdsec.schema import DiffEntry


class SpawnerError(Exception):
    """The spawner refused a call or failed at it. ``code`` is a code of :mod:`libdsec.errors`, ``message`` says what is wrong."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class SpawnerLost(SpawnerError):
    """The spawner went away during the call, which may or may not have been carried out, or could not be reached at all."""

    def __init__(self, message: str) -> None:
        super().__init__("unavailable", message)


class SandboxSpec(msgspec.Struct, kw_only=True):
    """What a container sandbox is made of: the arguments of ``create``."""

    sandbox: str
    layers: list[str]
    """Metadata digests (sha256 hex), top first; each must be mounted."""
    hostname: str
    memory: int
    """Bytes."""
    cpu_millis: int
    """Thousandths of a core; 0: no quota."""
    pids: int
    disk: int
    """Bytes of the writable layer."""
    extra_ids: list[int]
    """Owner ids above 65,535 that the layers' files carry."""
    history: int
    """Bytes that chronus keeps of each output stream."""
    origin: str | None = None
    """The snapshot that the writable layer begins with (``from`` on the wire); None: an empty one."""


class Spawned(msgspec.Struct, kw_only=True):
    """A sandbox that runs: its chronus listens on ``socket``."""

    pid: int
    slot: int
    socket: str
    timings: dict[str, int] = {}
    """Microseconds that each step of the creation took."""


class KillFigures(msgspec.Struct, kw_only=True):
    """What a sandbox used over its life; 0 where it could no longer be read."""

    cpu_us: int = 0
    memory_peak: int = 0
    oom_kills: int = 0
    disk: int = 0


class KernelSandbox(msgspec.Struct, kw_only=True):
    """What the kernel has under the name of a sandbox, perhaps only the rest of one."""

    sandbox: str
    slot: int = -1
    """-1: not known."""
    pid: int = 0
    alive: bool = False
    socket: str = ""
    scratch: bool = False
    """Whether it has a writable layer."""


class NodeFacts(msgspec.Struct, kw_only=True):
    """The machine as the spawner sees it. Sizes in bytes."""

    version: str
    kernel: str
    cores: int
    memory: int
    cgroup: str
    """``v1``, ``v2`` or ``hybrid``."""
    features: dict[str, str] = {}
    """Kernel feature to "yes", or what its lack costs."""
    scratch: int = 0
    scratch_used: int = 0
    uid_base: int = 0
    quotas: Literal["simple", "full"] = "simple"
    """Whom the scratch filesystem charges for data that several sandboxes share: who wrote it, or each of them."""


class Taken(msgspec.Struct, kw_only=True):
    """A snapshot was taken: how long its parts took, in microseconds."""

    sync_us: int
    freeze_us: int


class PackOrder(msgspec.Struct, kw_only=True):
    """What a layer is to be made of: the arguments of ``snapshot_pack``."""

    snapshot: str
    exclude: tuple[str, ...]
    """Globs, as dsec-mklayer takes them."""
    max_entries: int
    max_bytes: int
    max_meta: int


class _Packed(msgspec.Struct):
    report: str


class _Snapshots(msgspec.Struct):
    snapshots: list[str]


class _Nothing(msgspec.Struct):
    pass


class _Layers(msgspec.Struct):
    layers: dict[str, bool]


class _Usage(msgspec.Struct):
    disk: dict[str, int]


class _Listing(msgspec.Struct):
    sandboxes: list[KernelSandbox]


class _DiffEntry(msgspec.Struct):
    path: bytes
    kind: Literal["written", "removed", "directory"]
    size: int = 0


class _Diff(msgspec.Struct):
    entries: list[_DiffEntry]
    more: bool


class _Exited(msgspec.Struct):
    sandbox: str
    status: int


class Denial(msgspec.Struct):
    """A system call that a sandbox's filter refused. ``last``: the last one that is reported of it."""

    sandbox: str
    call: str
    pid: int
    """On the host."""
    last: bool


_exited = msgspec.msgpack.Decoder(_Exited)
_denial = msgspec.msgpack.Decoder(Denial)


class Listener(Protocol):
    """Who is told what the spawner tells unasked."""

    def on_exited(self, sandbox: str, status: int, /) -> None:
        """A sandbox's chronus has died, with this wait status."""

    def on_denied(self, denial: Denial, /) -> None:
        """A sandbox's filter refused a call."""

    def on_blobs_aborted(self) -> None:
        """No blobfs served the node for so long that reads of lazily mounted layers give errors from now on."""


class Spawner:
    """All verbs of the spawner. Every call raises SpawnerError if the spawner refuses, and SpawnerLost if it goes away during the call or
    can't be reached for 10 s before it. Cancelling a call doesn't take it back."""

    def __init__(self, verbs: Verbs) -> None:
        """Use :meth:`connect`."""
        self._verbs = verbs

    @classmethod
    async def connect(cls, path: str, *, listener: Listener, on_reconnected: Callable[[], None]) -> Spawner:
        """Connect to the socket at ``path``; raises SpawnerLost if nobody answers there for 10 s.

        ``listener`` is told of events; ``on_reconnected()`` is called after each later connection: what happened meanwhile was not
        reported.
        """

        def tell(event: str, frame: bytes) -> None:
            if event == "exited":
                exited = _exited.decode(frame)
                listener.on_exited(exited.sandbox, exited.status)
            elif event == "denied":
                listener.on_denied(_denial.decode(frame))
            elif event == "blobs_aborted":
                listener.on_blobs_aborted()

        peer = Peer("the spawner", path, refused=SpawnerError, lost=SpawnerLost, on_event=tell, on_reconnected=on_reconnected)
        return cls(await Verbs.connect(peer))

    async def hello(self) -> NodeFacts:
        """The machine, its kernel's features and how full the scratch disk is."""
        return await self._verbs.call("hello", {}, NodeFacts)

    async def layer_mount(self, meta: str, blob: str | None, *, lazy: bool = False) -> None:
        """Mount a layer, named by the sha256 (hex) of its metadata file; nothing happens if it is mounted. ``blob``: its data's sha256.

        ``lazy``: the data is read through blobfs, where it must be registered. Code ``unavailable`` where no blobfs serves the node.
        """
        await self._verbs.call("layer_mount", {"meta": meta, "blob": blob, "lazy": lazy}, _Nothing)

    async def layer_unmount(self, meta: str) -> None:
        """Unmount a layer. Sandboxes that use it keep it. Repeatable."""
        await self._verbs.call("layer_unmount", {"meta": meta}, _Nothing)

    async def layers(self) -> dict[str, bool]:
        """Metadata digests (hex) of the layers that are mounted, each with whether its data is read through blobfs."""
        return (await self._verbs.call("layers", {}, _Layers)).layers

    async def create(self, spec: SandboxSpec) -> Spawned:
        """Make a sandbox and start its chronus. After SpawnerLost, :meth:`kill` removes what may have been made."""
        arguments = msgspec.structs.asdict(spec)
        origin = arguments.pop("origin")
        if origin is not None:
            arguments["from"] = origin
        return await self._verbs.call("create", arguments, Spawned)

    async def kill(self, sandbox: str, *, keep_scratch: bool = False) -> KillFigures:
        """End a sandbox; returns when nothing of it is left in the kernel but empty control groups, which go within 10 s, and its writable
        layer if ``keep_scratch``. Repeatable: of a
        sandbox that isn't there, any leftovers are removed."""
        return await self._verbs.call("kill", {"sandbox": sandbox, "keep_scratch": keep_scratch}, KillFigures)

    async def usage(self, sandboxes: Iterable[str]) -> dict[str, int]:
        """Bytes that each sandbox's writable layer takes; one that isn't there is left out."""
        return (await self._verbs.call("usage", {"sandboxes": list(sandboxes)}, _Usage)).disk

    async def diff(self, sandbox: str, limit: int, after: bytes = b"") -> tuple[list[DiffEntry], bool]:
        """What the sandbox's writable layer changes of its image, in the order of the paths: at most ``limit`` entries behind the path
        ``after``, fewer if their paths are long; and whether others follow."""
        found = await self._verbs.call("diff", {"sandbox": sandbox, "limit": limit, "after": after}, _Diff)
        return [DiffEntry(path_bytes=entry.path, kind=entry.kind, size=entry.size) for entry in found.entries], found.more

    async def snapshot(self, sandbox: str, snapshot: str) -> Taken:
        """Keep the writable layer of a running sandbox as it is at one moment, in which it stands still, under a name that the caller
        chooses (``sn-…``). Codes ``not_found`` (no such sandbox), ``timeout`` (it doesn't stand still; it runs on)."""
        return await self._verbs.call("snapshot", {"sandbox": sandbox, "snapshot": snapshot}, Taken)

    async def snapshot_pack(self, order: PackOrder) -> str:
        """Make a layer of a snapshot: files ``meta`` and ``blob`` in ``<state>/packs/<snapshot>``, the caller's to take. Returns
        dsec-mklayer's report. Codes ``image_error`` (it can't be a layer), ``no_space``, ``invalid_argument`` (a glob)."""
        return (await self._verbs.call("snapshot_pack", msgspec.structs.asdict(order), _Packed)).report

    async def snapshot_remove(self, snapshot: str) -> None:
        """Remove a snapshot and what was made of it. Repeatable; one that isn't there is fine. Sandboxes made of it live on."""
        await self._verbs.call("snapshot_remove", {"snapshot": snapshot}, _Nothing)

    async def snapshots(self) -> list[str]:
        """Every snapshot of which anything is there."""
        return (await self._verbs.call("snapshots", {}, _Snapshots)).snapshots

    async def list(self) -> list[KernelSandbox]:
        """Every sandbox of which the kernel has anything, also those made by an earlier spawner."""
        return (await self._verbs.call("list", {}, _Listing)).sandboxes

    def close(self) -> None:
        """Disconnect, for good: calls in flight and later ones raise SpawnerLost. Sandboxes live on. Repeatable."""
        self._verbs.close()
