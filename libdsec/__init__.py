"""libdsec: sandboxes for training agents, from Python.

    async with DSecClient() as client:
        sandbox = await client.run_container(DSecContainerRunArgs(container_image="python:3.11"))
        result = await sandbox.run_shell("echo hello world")
        await sandbox.stop()

Async first; :mod:`libdsec.sync` has the same names without ``await``. Times are seconds, sizes bytes unless a name ends in ``_mb``.
Failures are :class:`DSecError` and below, see :mod:`libdsec.errors`; a command that fails, is killed or times out is a result.
"""

from libdsec.client import DSecClient, RunItem
from libdsec.errors import (
    AuthenticationError,
    CommandFailed,
    Conflict,
    DeadlineExceeded,
    DiskFull,
    DSecError,
    FileError,
    FileNotFound,
    ImageError,
    ImageNotFound,
    InvalidArgument,
    NoCapacity,
    NotFound,
    OffsetGone,
    PermissionDenied,
    ProcessNotFound,
    QuotaExceeded,
    SandboxFailed,
    SandboxGone,
    SandboxNotFound,
    TrajectoryDivergence,
    Unavailable,
    Unsupported,
)
from libdsec.files import Files, FileWatch
from libdsec.images import Images
from libdsec.keys import Keys
from libdsec.locks import Lock
from libdsec.nodes import Nodes
from libdsec.process import OutputStream, Process
from libdsec.sandbox import Sandbox, SandboxCreation
from libdsec.schema import (
    CommandResult,
    DiffEntry,
    DoctorReport,
    DSecContainerRunArgs,
    DSecFullVMRunArgs,
    DSecMicroVMRunArgs,
    FileEvent,
    FileInfo,
    ImageChange,
    ImageFinding,
    ImageInfo,
    ImageReads,
    KeyInfo,
    Leftover,
    Metrics,
    NewKey,
    NodeInfo,
    PackResult,
    ProcessEntry,
    ProcessInfo,
    PtySize,
    RunArgs,
    SandboxEvent,
    SandboxInfo,
)

__all__ = [
    "AuthenticationError",
    "CommandFailed",
    "CommandResult",
    "Conflict",
    "DSecClient",
    "DSecContainerRunArgs",
    "DSecError",
    "DSecFullVMRunArgs",
    "DSecMicroVMRunArgs",
    "DeadlineExceeded",
    "DiffEntry",
    "DiskFull",
    "DoctorReport",
    "FileError",
    "FileEvent",
    "FileInfo",
    "FileNotFound",
    "FileWatch",
    "Files",
    "ImageChange",
    "ImageError",
    "ImageFinding",
    "ImageInfo",
    "ImageNotFound",
    "ImageReads",
    "Images",
    "InvalidArgument",
    "KeyInfo",
    "Keys",
    "Leftover",
    "Lock",
    "Metrics",
    "NewKey",
    "NoCapacity",
    "NodeInfo",
    "Nodes",
    "NotFound",
    "OffsetGone",
    "OutputStream",
    "PackResult",
    "PermissionDenied",
    "Process",
    "ProcessEntry",
    "ProcessInfo",
    "ProcessNotFound",
    "PtySize",
    "QuotaExceeded",
    "RunArgs",
    "RunItem",
    "Sandbox",
    "SandboxCreation",
    "SandboxEvent",
    "SandboxFailed",
    "SandboxGone",
    "SandboxInfo",
    "SandboxNotFound",
    "TrajectoryDivergence",
    "Unavailable",
    "Unsupported",
]
