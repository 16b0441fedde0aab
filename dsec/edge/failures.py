"""The one place where failures of the parts below become errors of the wire."""

from __future__ import annotations

import errno
import os
import re
import secrets
from typing import Protocol

import msgspec
import structlog

from dsec.edge.blobfs import BlobfsError, BlobfsLost
from dsec.edge.channel import ChannelError, ChannelLost
from dsec.edge.journal import JournalError
from dsec.edge.spawner import SpawnerError, SpawnerLost
from libdsec.errors import (
    BY_CODE,
    Conflict,
    DiskFull,
    DSecError,
    FileError,
    FileNotFound,
    InvalidArgument,
    PermissionDenied,
    SandboxFailed,
    Unavailable,
)

_log = structlog.get_logger("dsec.edge")

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
    errno.ENOSPC: DiskFull,
    errno.EDQUOT: DiskFull,
}

_MSGSPEC_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_MSGSPEC_FIELD = re.compile(r"field `([^`]+)`")


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
    if isinstance(failure, SpawnerLost):
        return Unavailable("the node's spawner is being restarted; try again", retry_after=1.0)
    if isinstance(failure, BlobfsLost):
        return Unavailable("blobfs, which shows images that are not whole on the node, can't be reached; try again", retry_after=1.0)
    if isinstance(failure, BlobfsError):
        return BY_CODE.get(failure.code, DSecError)(f"blobfs refused: {failure.message}")
    if isinstance(failure, SpawnerError):
        return BY_CODE.get(failure.code, DSecError)(f"the spawner refused: {failure.message}")
    if isinstance(failure, ChannelLost):
        return SandboxFailed(f"the sandbox's agent went away: {failure}", reason="its agent went away")
    if isinstance(failure, ChannelError):
        return BY_CODE.get(failure.code, DSecError)(failure.message, errno=failure.errno or None)
    if isinstance(failure, JournalError):
        return Unavailable(str(failure), retry_after=1.0)
    return Unavailable(f"{type(failure).__name__}: {failure}", retry_after=1.0)


def incident(failure: Exception, what: str) -> DSecError:
    """The error for something unforeseen: logged whole under an id, of which the caller gets only the id."""
    name = secrets.token_hex(6)
    _log.error("unforeseen failure", incident=name, what=what, exc_info=failure)
    return DSecError(f"something broke on our side; the edge's log tells more under incident {name}", reason=name)


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


def of_body(failure: msgspec.MsgspecError | UnicodeDecodeError) -> InvalidArgument:
    """The error for a request body that isn't what the schema says; it names the field."""
    text = str(failure)
    path, field = _MSGSPEC_PATH.search(text), _MSGSPEC_FIELD.search(text)
    names = [found[1] for found in (path, field) if found and found[1]]
    return InvalidArgument(f"the request body is not as it should be: {text}", field=".".join(names) or None)
