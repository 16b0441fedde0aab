"""The one schema: what travels between SDK, apiserver and edge, and what the SDK hands to its callers.

Times are Unix seconds or seconds (float); sizes are bytes unless the name ends in ``_mb`` (1 MB here is 2**20 bytes). Bodies are JSON, or
msgpack where the client sends ``Accept: application/msgpack`` / ``Content-Type: application/msgpack``; in JSON, bytes are base64.
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec

from libdsec.errors import ErrorBody

MB = 1 << 20
MAX_OUTPUT_DEFAULT = 10 * MB
"""Bytes that a captured command keeps of each stream unless told otherwise."""
MAX_OUTPUT_LIMIT = 64 * MB
"""The most that ``max_output`` may ask for; more is read with ``start``."""
MAX_ARGS_BYTES = 3 * MB // 2
"""The most that argv and env of one command may take together. The kernel's own limit is a quarter of the stack's, 2 MB, pointers and the
sandbox's own variables included (execve(2))."""
MAX_ARG_BYTES = 128 << 10
"""What one string of them may take, its NUL included (MAX_ARG_STRLEN of execve(2)): an argument, a shell command, ``NAME=value``."""
MAX_BATCH = 32_000
"""Sandboxes in one create request."""

Backend = Literal["fncall", "container", "microvm", "fullvm"]
State = Literal["creating", "running", "pausing", "paused", "resuming", "stopping", "stopped", "failed", "lost"]


class ImageArgs(msgspec.Struct, forbid_unknown_fields=True):
    """The one argument that may be given without its name."""

    container_image: str
    """Base image: a name in the image store (``python:3.11``, ``python:3.11@3`` for a version) or a ``sha256:`` digest."""


class SandboxArgs(ImageArgs, kw_only=True, forbid_unknown_fields=True):
    """What a sandbox is made of, whatever the backend. Limits are limits, not reservations."""

    workspace: str | None = None
    toolkits: tuple[str, ...] = ()
    """Layers on top of the base, first one lowest."""
    memory_limit_mb: int = 2048
    cpu_cores_limit: float = 2.0
    disk_limit_mb: int = 10240
    pids_limit: int = 1024
    ttl_running_stop: float | None = None
    """Seconds without any use after which the sandbox is stopped; None: never."""
    ttl_total: float | None = None
    """Seconds from creation after which the sandbox is stopped whatever it does; None: never."""
    network: Literal["aether", "none", "bridged"] = "aether"
    network_rules: dict[str, bool] | None = None
    init_user: str = "root"
    """Who commands run as: a name, a uid, ``user:group`` or ``uid:gid`` of the image."""
    workdir: str | None = None
    env: dict[str, str] = {}
    labels: dict[str, str] = {}
    cpu_class: Literal["best_effort", "latency_sensitive"] = "best_effort"
    no_new_privs: bool = False
    keep_on_failure: bool = False
    idempotency_key: str | None = None


class DSecContainerRunArgs(SandboxArgs, kw_only=True, tag_field="backend", tag="container", forbid_unknown_fields=True):
    """A container: it shares the host's kernel."""


class DSecMicroVMRunArgs(SandboxArgs, kw_only=True, tag_field="backend", tag="microvm", forbid_unknown_fields=True):
    """A sandbox with a kernel of its own."""


class DSecFullVMRunArgs(msgspec.Struct, tag_field="backend", tag="fullvm"):
    """A machine with a disk of its own and any operating system. No node has this backend: whatever takes these raises Unsupported."""

    disk_image: str = ""
    profile: str = "linux"


RunArgs = DSecContainerRunArgs | DSecMicroVMRunArgs
AnyRunArgs = RunArgs | DSecFullVMRunArgs
"""What may be asked for, whether or not there is a node for it."""


class CreateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/sandboxes``: ``args`` and ``count``, or ``items``. Answered by one CreateItem a line (NDJSON), as each gets ready."""

    args: AnyRunArgs | None = None
    count: int = 1
    items: list[AnyRunArgs] | None = None
    timeout_s: float | None = None
    """Deadline of the request; what isn't ready by then is taken back and reported as ``deadline_exceeded``."""


class ExitFigures(msgspec.Struct, kw_only=True):
    """What a sandbox used over its life, as far as it could still be read when it ended."""

    cpu_s: float = 0.0
    memory_peak: int = 0
    disk_bytes: int = 0
    oom_kills: int = 0


class SandboxInfo(msgspec.Struct, kw_only=True):
    """A sandbox as ``get`` and ``list`` show it."""

    id: str
    backend: Backend
    state: State
    image: str
    workspace: str | None = None
    toolkits: tuple[str, ...] = ()
    edge: str = ""
    created_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    reason: str | None = None
    """Why it is stopping, stopped, failed or lost."""
    memory_limit_mb: int = 0
    cpu_cores_limit: float = 0.0
    disk_limit_mb: int = 0
    pids_limit: int = 0
    ttl_running_stop: float | None = None
    ttl_total: float | None = None
    idle_s: float = 0.0
    """Seconds since the last use, as the idle rule counts it."""
    init_user: str = "root"
    workdir: str = "/"
    network: str = "aether"
    network_rules: dict[str, bool] | None = None
    labels: dict[str, str] = {}
    notices: tuple[str, ...] = ()
    """What was changed of the request, in words (more cores than the node has, say)."""
    exit: ExitFigures | None = None
    forked_from: str | None = None
    """The sandbox whose files it started with; its processes don't come along. None: it started from its image."""
    forked_at: float | None = None
    """The moment whose files those are."""
    ports_url: str = ""
    """Origin at which ports inside a live sandbox are reached (`libdsec.signing`)."""
    ports_key: str = ""
    """Signs addresses of its ports. Whoever has it reaches them all; an address made with it reaches one."""


class CreateItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of the answer to a create request: exactly one of ``sandbox`` and ``error``. ``index`` counts from 0 in request order."""

    index: int
    sandbox: SandboxInfo | None = None
    error: ErrorBody | None = None


class SandboxPage(msgspec.Struct, kw_only=True):
    """``GET /v1/sandboxes``: at most ``limit`` (1,000) entries, oldest first; ``cursor`` gets the next page, None: that was all."""

    sandboxes: list[SandboxInfo]
    cursor: str | None = None


class PatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``PATCH /v1/sandboxes/{id}``: only what is given changes. A TTL of 0 removes it; labels are replaced whole."""

    ttl_running_stop: float | None = None
    ttl_total: float | None = None
    labels: dict[str, str] | None = None
    network_rules: dict[str, bool] | None = None


class PtySize(msgspec.Struct, array_like=True):
    """Terminal size in character cells."""

    rows: int
    cols: int


class ExecRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/sandboxes/{id}/exec``. Exactly one of ``argv`` and ``command`` (run by ``/bin/sh -c``).

    ``mode`` "wait" answers with a CommandResult when the command has ended, "start" with a ProcessInfo when it runs. A request whose
    ``exec_id`` is known already attaches to that command instead of running it again.
    """

    argv: list[str] | None = None
    command: str | None = None
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    stdin: bytes | None = None
    stdin_stream: bool = False
    """Standard input comes later by ``PUT /exec/{exec_id}/stdin`` or the WebSocket."""
    timeout_s: float | None = None
    max_output: int = MAX_OUTPUT_DEFAULT
    leftovers: Literal["kill", "keep"] = "kill"
    pty: PtySize | None = None
    exec_id: str | None = None
    mode: Literal["wait", "start"] = "wait"


class ShellRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/sandboxes/{id}/shell``: a command in a session that keeps cwd, variables and functions. Answered by a CommandResult."""

    command: str
    session: str = "default"
    timeout_s: float | None = None
    max_output: int = MAX_OUTPUT_DEFAULT
    cwd: str | None = None
    env: dict[str, str] | None = None
    user: str | None = None
    exec_id: str | None = None


class CommandResult(msgspec.Struct, kw_only=True):
    """How a command ended and what it wrote.

    ``exit_code`` is the leader's exit status, or 128 + signal when a signal ended it (then ``signal`` is set). 127 and 126 with
    ``start_error`` set mean that the program was not found or could not be run.
    """

    exit_code: int
    signal: int | None = None
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    stdout_total: int = 0
    """Bytes written to stdout, also those beyond ``max_output``."""
    stderr_total: int = 0
    truncated: bool = False
    timed_out: bool = False
    oom_killed: bool = False
    duration_s: float = 0.0
    exec_id: str = ""
    session_restarted: bool = False
    start_error: str | None = None

    @property
    def stdout(self) -> str:
        """Standard output as UTF-8; bytes that aren't are shown as U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Standard error as UTF-8; bytes that aren't are shown as U+FFFD."""
        return self.stderr_bytes.decode("utf-8", "replace")


class ProcessInfo(msgspec.Struct, kw_only=True):
    """A command started in the sandbox: ``GET /exec`` lists them, ``GET /exec/{exec_id}`` shows one."""

    exec_id: str
    argv: list[str] = []
    pid: int = 0
    """Inside the sandbox."""
    running: bool = True
    started_at: float = 0.0
    stdout_total: int = 0
    stderr_total: int = 0
    exit_code: int | None = None


class CommandEntry(msgspec.Struct, kw_only=True):
    """One of a sandbox's last commands as its edge remembers it: ``GET /v1/sandboxes/{id}/commands``, which a failed sandbox answers too.
    ``exit_code`` and ``duration_s`` are None while it runs."""

    exec_id: str
    command: str
    """Its command line, shortened."""
    started_at: float
    exit_code: int | None = None
    duration_s: float | None = None
    timed_out: bool = False
    oom_killed: bool = False


class SignalRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /exec/{exec_id}/signal``. ``tree`` reaches every process of the command instead of its leader's group; only KILL takes it."""

    signal: str | int
    tree: bool = False


class FileInfo(msgspec.Struct, kw_only=True):
    """One file, not following a final symlink. Names are bytes on Linux; ``path`` shows the undecodable ones by surrogate escapes."""

    path_bytes: bytes
    type: Literal["file", "directory", "symlink", "fifo", "socket", "char", "block"]
    size: int
    mode: int
    """Permission bits, 0o7777."""
    uid: int
    gid: int
    mtime: float
    nlink: int = 1
    target_bytes: bytes | None = None
    """Where a symlink points to."""

    @property
    def path(self) -> str:
        return os.fsdecode(self.path_bytes)

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


class FileEvent(msgspec.Struct, kw_only=True):
    """One change under a watched path. ``overflow`` means that events were lost: look again."""

    type: Literal["created", "modified", "removed", "moved_from", "moved_to", "attributes", "overflow"]
    path_bytes: bytes = b""

    @property
    def path(self) -> str:
        return os.fsdecode(self.path_bytes)


class ProcessEntry(msgspec.Struct, kw_only=True):
    """One process inside the sandbox, as its own /proc shows it."""

    pid: int
    ppid: int
    uid: int
    state: str
    rss: int
    """Resident bytes."""
    cpu_s: float
    argv: list[str]


class LayerReads(msgspec.Struct, kw_only=True):
    """What a sandbox has read of layers that are loaded on demand, in bytes, since the node's blobfs was started."""

    needed: int = 0
    """What it asked for; what the kernel had in memory already is not in it."""
    fetched: int = 0
    """What came from the store, compressed, because it was the first to ask for it."""
    from_cache: int = 0
    """Of what it asked for, what was on the node."""


class Metrics(msgspec.Struct, kw_only=True):
    """What a sandbox uses now; of one that failed and is kept, what it used."""

    at: float
    cpu_s: float
    memory: int
    memory_peak: int
    memory_limit: int
    pids: int
    pids_limit: int
    disk: int
    disk_limit: int
    oom_kills: int
    reads: LayerReads | None = None
    """None: none of its layers is loaded on demand, or it can't be told now."""


class SandboxEvent(msgspec.Struct, kw_only=True):
    """Something that happened to a sandbox: a state change, a denied call, a memory kill, a failure."""

    at: float
    type: str
    message: str
    exec_id: str | None = None


class LayerInfo(msgspec.Struct, kw_only=True):
    """One read-only layer: an EROFS metadata file and its data blob, both by sha256."""

    digest: str
    """Digest of the metadata file: it names the layer, and covers the data by the blob's digest in its device slot."""
    blob: str | None
    """Digest of the data blob; None for a layer without file data."""
    meta_bytes: int
    blob_bytes: int
    extra_ids: tuple[int, ...] = ()
    """Owner ids above 65,535 that files of the layer carry."""
    unnamed: int = 0
    """Directories that are only passed through: no entry of what the layer was made of named them, so a lower layer's attributes count."""
    index: str | None = None
    """Digest of the data blob's chunk table; None: not in a chunked store (or no blob)."""
    diff: bool = False
    """What a sandbox changed of the layers below it, made by packing that sandbox."""


class ImageConfig(msgspec.Struct, kw_only=True):
    """What is honoured of an OCI image configuration; Entrypoint and Cmd are kept as data."""

    env: dict[str, str] = {}
    user: str | None = None
    workdir: str | None = None
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    labels: dict[str, str] = {}


class ImageInfo(msgspec.Struct, kw_only=True):
    """A named image: a base, a workspace or a toolkit. ``layers`` is lowest first."""

    name: str
    version: int
    kind: Literal["base", "workspace", "toolkit"]
    digest: str
    layers: list[LayerInfo]
    config: ImageConfig
    created_at: float
    size: int
    """Bytes of metadata and data, all layers together."""


class ImagePage(msgspec.Struct, kw_only=True):
    images: list[ImageInfo]
    cursor: str | None = None


RECEIVING = "receiving"
"""The step of an ImportLine that tells how much of an upload has come."""


class ImportLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line (NDJSON) of the answer to an import: progress, and at the end exactly one of ``image`` and ``error``."""

    step: str | None = None
    done_bytes: int = 0
    total_bytes: int | None = None
    """What ``done_bytes`` grows to in this step; None: it isn't known."""
    image: ImageInfo | None = None
    error: ErrorBody | None = None


class ImageFinding(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Something that ``POST /v1/images/fsck`` found wrong."""

    where: Literal["node", "store"]
    """On the disk of the node that was asked, or in the store that nodes share."""
    problem: Literal["missing", "corrupt", "half-made", "orphan"]
    object: str
    """A blob's digest in hexadecimal, or a key of the store."""
    detail: str
    image: str | None = None
    """One that needs it, as ``name@version``."""
    repaired: bool = False


class FsckLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line (NDJSON) of the answer to a check: a finding, and at the end either ``done`` or ``error``."""

    finding: ImageFinding | None = None
    done: bool = False
    error: ErrorBody | None = None


class ImageReads(msgspec.Struct, kw_only=True):
    """``GET /v1/image-stats``: what sandboxes have read of an image's data on the node that was asked, in bytes. Layers shared with other
    images count with what was read through those too."""

    image: str
    """``name@version``."""
    size: int
    """Of the data, all layers together."""
    needed: int | None
    """Distinct bytes that were ever read, of layers that weren't whole on the node then. None: not measured, as all of the image's data is
    on the node and nothing of it was ever loaded on demand."""
    fetched: int
    """From the shared store, all in all, as it came: compressed. So it may be less than ``needed``."""
    from_cache: int
    """Answered by what had been fetched before."""
    sandboxes: int
    """Started from the image."""
    traced: bool = False
    """Whether it is known what a first sandbox reads, so that nodes fetch that ahead."""

    @property
    def fraction(self) -> float | None:
        """Of the image that was ever read, 0 to 1; None where ``needed`` is."""
        if self.needed is None:
            return None
        return self.needed / self.size if self.size else 0.0

    @property
    def fetched_per_sandbox(self) -> float:
        """Bytes."""
        return self.fetched / self.sandboxes if self.sandboxes else 0.0


class ImageChange(msgspec.Struct, kw_only=True):
    """One line (NDJSON) of ``GET /v1/image-diff``: a path that two images don't have alike."""

    path_bytes: bytes
    kind: Literal["added", "removed", "changed"]
    size: int = 0
    """In the second image; of a removed path in the first."""
    size_before: int = 0
    """In the first image; 0 for an added path."""

    @property
    def path(self) -> str:
        return os.fsdecode(self.path_bytes)


class RegistryImport(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/images/from-registry``: an image that the service itself fetches. Answered like an upload, by ImportLines."""

    source: str
    """``docker://HOST[:PORT]/REPOSITORY[:TAG][@sha256:…]``."""
    name: str
    kind: Literal["base", "workspace", "toolkit"] = "base"
    username: str | None = None
    password: str | None = None
    insecure: bool = False
    """Plain HTTP; a registry on the service's own machine is always spoken to like that."""

    def __repr__(self) -> str:
        return f"RegistryImport(source={self.source!r}, name={self.name!r}, kind={self.kind!r}, insecure={self.insecure!r})"


class PackRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/sandboxes/{id}/pack``: what the sandbox wrote becomes a layer, and that on top of the sandbox's own layers a new image.
    Answered by PackLines (NDJSON)."""

    name: str
    """Of the image; the same name again makes its next version."""
    exclude: tuple[str, ...] = ()
    """Globs of paths that stay out: ``*`` and ``?`` within a name, ``**`` over directories, ``[…]``, ``{a,b}``; ``~/`` is every home
    directory; without a leading slash at any depth. A directory takes along what is in it."""
    leftovers: Literal["remove", "keep"] = "remove"
    """Whether shell histories and the caches of package managers stay out as well (the globs are those of ``dsec.edge.leftovers``)."""
    labels: dict[str, str] = {}
    """Set over the labels of the image that the sandbox runs on."""


class Leftover(msgspec.Struct, kw_only=True):
    """What one glob kept out of a packed layer. The sandbox keeps it."""

    glob: str
    entries: int
    bytes: int
    """That its files take on the disk."""


class PackResult(msgspec.Struct, kw_only=True):
    """A packed sandbox."""

    image: ImageInfo
    bytes: int
    """Of the new layer: metadata and data."""
    entries: int
    """Paths in what the sandbox had written, those that stayed out included."""
    removed: tuple[Leftover, ...] = ()
    freeze_ms: float = 0.0
    """How long the sandbox stood still."""
    merged_layers: int = 0
    """Diff layers that were made to one, for the image would have had too many. 0: none."""


class PackLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line (NDJSON) of the answer to a pack: what is being done, and at the end exactly one of ``result`` and ``error``."""

    step: str | None = None
    result: PackResult | None = None
    error: ErrorBody | None = None


class ForkRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/sandboxes/{id}/fork``: ``count`` sandboxes that start with this one's files of one moment. What isn't given is as it is
    there. Answered by one CreateItem a line (NDJSON), as each gets ready."""

    count: int = 1
    memory_limit_mb: int | None = None
    cpu_cores_limit: float | None = None
    disk_limit_mb: int | None = None
    """What the files of the other sandbox take counts against it."""
    pids_limit: int | None = None
    ttl_running_stop: float | None = None
    ttl_total: float | None = None
    env: dict[str, str] | None = None
    """Set over the environment of the other sandbox."""
    labels: dict[str, str] | None = None
    """Instead of its labels."""
    timeout_s: float | None = None
    """As in CreateRequest."""
    idempotency_key: str | None = None
    """Item i has the key ``<key>/<i>``."""


class KeyInfo(msgspec.Struct, kw_only=True):
    """An API key as it is listed: never the key itself."""

    id: str
    name: str
    prefix: str
    """The first characters, to recognize it by."""
    project: str
    admin: bool
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


class KeyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/keys`` (admin). Without ``project`` the key gets a project of its own: sandboxes are seen within their project only."""

    name: str
    project: str | None = None
    admin: bool = False
    expires_in_s: float | None = None


class NewKey(msgspec.Struct, kw_only=True):
    """The answer to a KeyRequest: the only time that ``key`` is shown."""

    key: str
    info: KeyInfo


class NodeInfo(msgspec.Struct, kw_only=True):
    """One edge and its machine."""

    edge: str
    kernel: str
    cores: int
    memory: int
    memory_available: int
    scratch: int
    scratch_used: int
    sandboxes: dict[str, int]
    """Sandboxes by state."""
    features: dict[str, str]
    """Kernel feature to "yes", or what its lack costs."""


class Finding(msgspec.Struct, kw_only=True):
    """One line of ``dsec doctor``: a feature that a node has, or lacks and what that means."""

    feature: str
    state: Literal["ok", "degraded", "missing", "unknown"]
    """``degraded`` works with less, or slower; ``missing`` keeps sandboxes from starting; ``unknown``: not tried, which needs root."""
    detail: str = ""
    """What was found: a version, a figure."""
    cost: str = ""
    """What its lack costs."""
    todo: str = ""
    """What to do about it."""


class DoctorReport(msgspec.Struct, kw_only=True):
    """``GET /v1/doctor``: one node's features and limits, the worst first."""

    edge: str
    findings: list[Finding]


class Health(msgspec.Struct, kw_only=True):
    """``GET /healthz``: ``stopping`` (with status 503) means that the service finishes what it has and takes nothing new."""

    status: Literal["ok", "stopping"]


class DiffEntry(msgspec.Struct, kw_only=True):
    """One path of a sandbox's writable layer."""

    path_bytes: bytes
    kind: Literal["written", "added", "changed", "removed", "directory"]
    """``written``: it has content of its own here; whether the image has it too (``changed``) or not (``added``) wasn't looked up."""
    size: int = 0

    @property
    def path(self) -> str:
        return os.fsdecode(self.path_bytes)


class PortUrl(msgspec.Struct, kw_only=True):
    """``GET /v1/sandboxes/{id}/url/{port}``."""

    url: str


class TarSummary(msgspec.Struct, kw_only=True):
    """``PUT /v1/sandboxes/{id}/files/tar``: what was unpacked."""

    entries: int
    bytes: int
