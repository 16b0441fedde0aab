"""What the journal keeps of a sandbox, from its admission to 24 hours after its end."""

from __future__ import annotations

import msgspec

from libdsec.schema import Backend, ExitFigures, SandboxEvent, SandboxInfo, State


class LayerRef(msgspec.Struct, frozen=True, array_like=True):
    """A layer as the spawner mounts it: hex digests of the metadata file and of the data blob."""

    meta: str
    blob: str | None
    lazy: bool = False
    """Its data is read through blobfs."""


class Record(msgspec.Struct, kw_only=True, array_like=True):
    """One sandbox. Fields are stored by position: new ones go to the end, with a default. Times are Unix seconds, TTLs seconds."""

    id: str
    project: str
    state: State
    created_at: float
    key: str | None = None
    """Idempotency key, unique within the project."""
    fingerprint: bytes = b""
    """Of the arguments: a key that comes back with other arguments is a mistake of the caller."""
    live: bool = True
    """Whether kernel objects of it may exist. A failed sandbox that is kept for inspection is still live."""
    backend: Backend = "container"
    image: str = ""
    workspace: str | None = None
    toolkits: tuple[str, ...] = ()
    started_at: float | None = None
    ended_at: float | None = None
    reason: str | None = None
    memory_mb: int = 0
    cpu_cores: float = 0.0
    disk_mb: int = 0
    pids: int = 0
    ttl_idle: float | None = None
    ttl_total: float | None = None
    network: str = "aether"
    network_rules: dict[str, bool] | None = None
    init_user: str = "root"
    workdir: str = "/"
    labels: dict[str, str] = {}
    notices: tuple[str, ...] = ()
    exit: ExitFigures | None = None
    keep_on_failure: bool = False
    no_new_privs: bool = False
    cpu_class: str = "best_effort"
    env: dict[str, str] = {}
    """Environment of every command: the image's, and over it the create request's."""
    layers: tuple[LayerRef, ...] = ()
    """Top first."""
    extra_ids: tuple[int, ...] = ()
    slot: int = -1
    socket: str = ""
    events: tuple[SandboxEvent, ...] = ()
    """The last events of a sandbox that failed."""
    forked_from: str | None = None
    """The sandbox whose files it started with, as they were at ``forked_at``."""
    forked_at: float | None = None
    inherited: int = 0
    """Bytes of its files that it shares with that sandbox: its quota doesn't see them."""
    told: bool | None = None
    """Whether somebody was told of the sandbox, where that had to be written down (:mod:`dsec.edge.orphans`). None: yes if it ever ran."""

    def forget_workings(self) -> None:
        """Drops what only a living sandbox needs, so that 100,000 records stay small."""
        self.env = {}
        self.layers = ()
        self.extra_ids = ()
        self.slot = -1
        self.socket = ""
        self.live = False

    def info(self, edge: str, idle_s: float) -> SandboxInfo:
        """The record as callers see it."""
        return SandboxInfo(
            id=self.id,
            backend=self.backend,
            state=self.state,
            image=self.image,
            workspace=self.workspace,
            toolkits=self.toolkits,
            edge=edge,
            created_at=self.created_at,
            started_at=self.started_at,
            ended_at=self.ended_at,
            reason=self.reason,
            memory_limit_mb=self.memory_mb,
            cpu_cores_limit=self.cpu_cores,
            disk_limit_mb=self.disk_mb,
            pids_limit=self.pids,
            ttl_running_stop=self.ttl_idle,
            ttl_total=self.ttl_total,
            idle_s=idle_s,
            init_user=self.init_user,
            workdir=self.workdir,
            network=self.network,
            network_rules=self.network_rules,
            labels=self.labels,
            notices=self.notices,
            exit=self.exit,
            forked_from=self.forked_from,
            forked_at=self.forked_at,
        )
