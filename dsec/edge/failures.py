"""The one place where failures of the parts below become errors of the wire."""

from __future__ import annotations

import errno
import os
from typing import Protocol

import msgspec

from dsec.edge.blobfs import BlobfsError, BlobfsLost
from dsec.edge.channel import ChannelError, ChannelLost
from dsec.edge.journal import JournalError
from dsec.edge.spawner import SpawnerError, SpawnerLost
from dsec.http_errors import incident
from libdsec.errors import (
    BY_CODE,
    Conflict,
    DiskFull,
    DSecError,
    FileError,
    FileNotFound,
    ImageError,
    InvalidArgument,
    NoCapacity,
    PermissionDenied,
    SandboxFailed,
    Unavailable,
)

_BY_ERRNO: dict[int, type[DSecError]] = {
    errno.ENOENT: FileNotFound,
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
    errno.EROFS: PermissionDenied,
    errno.EEXIST: Conflict,
    errno.ENOTEMPTY: Conflict,
    errno.EBUSY: Conflict,
    errno.ENOTDIR: InvalidArgument,
    errno.EISDIR: InvalidArgument,
    errno.ENAMETOOLONG: InvalidArgument,
    errno.ELOOP: InvalidArgument,
    errno.EINVAL: InvalidArgument,
    errno.ENXIO: InvalidArgument,
    errno.ENOSPC: DiskFull,
    errno.EDQUOT: DiskFull,
}


class _Complaint(msgspec.Struct):
    """What a builtin writes to stderr when it fails."""

    errno: int = 0
    message: str = ""


_complaint = msgspec.msgpack.Decoder(_Complaint)


class BuiltinEnd(Protocol):
    """What is read of a builtin's EXIT."""

    @property
    def exit_code(self) -> int: ...
    @property
    def stderr(self) -> bytes: ...
    @property
    def start_error(self) -> str | None: ...


def as_error(failure: Exception) -> DSecError:
    """The wire's error for a failure of the spawner, a channel, the journal or a socket."""
    if isinstance(failure, DSecError):
        return failure
    if isinstance(failure, BlobfsLost):
        return Unavailable("blobfs, which shows images that are not whole on the node, can't be reached; try again", retry_after=1.0)
    if isinstance(failure, BlobfsError):
        return BY_CODE.get(failure.code, DSecError)(f"blobfs refused: {failure.message}")
    if isinstance(failure, SpawnerError):
        return _of_spawner(failure)
    if isinstance(failure, ChannelLost):
        return SandboxFailed(f"the sandbox's agent went away: {failure}", reason="its agent went away")
    if isinstance(failure, ChannelError):
        return BY_CODE.get(failure.code, DSecError)(failure.message, errno=failure.errno or None)
    if isinstance(failure, JournalError):
        return Unavailable(str(failure), retry_after=1.0)
    return Unavailable(f"{type(failure).__name__}: {failure}", retry_after=1.0)


def _of_spawner(failure: SpawnerError) -> DSecError:
    """Its own codes first, then those that it shares with the wire. What has none is its failure, not the caller's: it is logged."""
    if isinstance(failure, SpawnerLost):
        return Unavailable("the node's spawner is being restarted; try again", retry_after=1.0)
    if failure.code == "no_space":
        return NoCapacity(f"a disk of the node is full: {failure.message}", reason="disk")
    if failure.code == "timeout":
        return Unavailable(f"the node took too long: {failure.message}", retry_after=1.0)
    if failure.code in ("invalid_layer", "image_error"):
        return ImageError(f"not a layer that can be used: {failure.message}")
    known = BY_CODE.get(failure.code, DSecError)
    return incident(failure, "a call of the spawner") if known is DSecError else known(f"the spawner refused: {failure.message}")


def of_builtin(end: BuiltinEnd, what: str) -> DSecError:
    """The error of a file operation that failed."""
    if end.start_error is not None:
        return InvalidArgument(f"{what}: {end.start_error}", field="user")
    return of_complaint(end.stderr, what)


def of_complaint(stderr: bytes, what: str) -> DSecError:
    """The error that a failed file operation wrote to its stderr."""
    try:
        complaint = _complaint.decode(stderr)
    except msgspec.MsgspecError:
        return FileError(f"{what}: the operation was ended before it could answer")
    kind = _BY_ERRNO.get(complaint.errno, FileError)
    message = complaint.message or os.strerror(complaint.errno)
    return kind(f"{what}: {message}", field="path" if kind is InvalidArgument else None, errno=complaint.errno or None)
