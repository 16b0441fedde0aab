"""The error tree: one table from wire code to HTTP status to class.

Every failure that the platform reports travels as an :class:`ErrorBody` and is raised by the SDK as the class registered here for its code.
A command that fails, is killed or times out is *not* an error: it is a :class:`libdsec.CommandResult` (unless ``check=True`` was given).
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """What the ``error`` member of an HTTP error (or of a failed item of a batch) holds."""

    code: str
    message: str
    field: str | None = None
    """The request field that is wrong, for ``invalid_argument``."""
    retry_after: float | None = None
    """Seconds to wait before a retry makes sense."""
    errno: int | None = None
    """The kernel's error number, where a file operation failed."""
    reason: str | None = None
    """Why a sandbox is gone or failed, or why there is no capacity, in one stable word or phrase."""
    at: float | None = None
    """When it happened, Unix seconds."""


class ErrorEnvelope(msgspec.Struct):
    """The body of every HTTP error response."""

    error: ErrorBody


class DSecError(Exception):
    """Root of everything that libdsec raises.

    ``code`` is the wire code, ``retry_after`` the seconds to wait before trying again (or None), ``retriable`` whether the same call may be
    repeated unchanged with hope of success.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retriable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_after: float | None = None,
        errno: int | None = None,
        reason: str | None = None,
        at: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after
        self.errno = errno
        self.reason = reason
        self.at = at

    def body(self) -> ErrorBody:
        """The wire form of this error."""
        return ErrorBody(self.code, self.message, self.field, self.retry_after, self.errno, self.reason, self.at)


class InvalidArgument(DSecError):
    """The request can't be carried out as written; ``field`` names the argument."""

    code = "invalid_argument"
    status = 400


class AuthenticationError(DSecError):
    """No key, an unknown key, an expired or a revoked one."""

    code = "authentication"
    status = 401


class PermissionDenied(DSecError):
    """The key may not do this, or the sandbox's user may not touch that file."""

    code = "permission_denied"
    status = 403


class NotFound(DSecError):
    """What was named doesn't exist, or belongs to somebody else."""

    code = "not_found"
    status = 404


class SandboxNotFound(NotFound):
    code = "sandbox_not_found"


class ImageNotFound(NotFound):
    code = "image_not_found"


class FileNotFound(NotFound):
    code = "file_not_found"


class ProcessNotFound(NotFound):
    code = "process_not_found"


class Conflict(DSecError):
    """The thing exists already, is in use, or is in a state that doesn't take this call."""

    code = "conflict"
    status = 409


class QuotaExceeded(DSecError):
    """A limit of the project or the key is reached."""

    code = "quota_exceeded"
    status = 429


class NoCapacity(DSecError):
    """No node takes the sandbox now; ``reason`` says which resource is short."""

    code = "no_capacity"
    status = 503
    retriable = True


class SandboxGone(DSecError):
    """The sandbox was stopped or expired; ``at`` and ``reason`` tell when and why."""

    code = "sandbox_gone"
    status = 410


class SandboxFailed(DSecError):
    """The sandbox broke (its agent died, its layers can't be read); ``reason`` says how."""

    code = "sandbox_failed"
    status = 424


class Unsupported(DSecError):
    """This backend, or this node, can't do it."""

    code = "unsupported"
    status = 501


class DeadlineExceeded(DSecError):
    """The request's own deadline passed. The act may or may not have happened; the idempotency key tells."""

    code = "deadline_exceeded"
    status = 504


UNREACHABLE = "unreachable"
"""The reason of an Unavailable that the SDK itself found: the server didn't answer. Without it the server says so of a part behind it."""


class Unavailable(DSecError):
    """A part of the platform can't be reached now; ``reason`` is ``unreachable`` where the server is it. Safe to retry: every mutating
    call carries an idempotency key."""

    code = "unavailable"
    status = 503
    retriable = True


class ImageError(DSecError):
    """The image is broken, hostile, or of a kind that can't be converted."""

    code = "image_error"
    status = 422


class FileError(DSecError):
    """A file operation inside the sandbox failed; ``errno`` is the kernel's number."""

    code = "file_error"
    status = 422


class DiskFull(FileError):
    """The sandbox's disk limit is reached (EDQUOT or ENOSPC inside it)."""

    code = "disk_full"
    status = 507


class OffsetGone(FileError):
    """The bytes asked for have left the window that is kept of a stream; the message names the first one still there."""

    code = "offset_gone"
    status = 416


class TrajectoryDivergence(DSecError):
    """A replayed call doesn't match the recorded one."""

    code = "trajectory_divergence"
    status = 412


class CommandFailed(DSecError):
    """Raised by ``check=True`` for a command that didn't end with exit code 0; ``result`` is the whole CommandResult."""

    code = "command_failed"
    status = 200

    def __init__(self, message: str, *, result: Any = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.result = result


def _tree(root: type[DSecError]) -> dict[str, type[DSecError]]:
    table = {root.code: root}
    for child in root.__subclasses__():
        table.update(_tree(child))
    return table


BY_CODE: dict[str, type[DSecError]] = _tree(DSecError)
"""Wire code to class, for the whole tree."""


def from_body(body: ErrorBody) -> DSecError:
    """The exception for a wire error; a code that this version doesn't know becomes a plain DSecError."""
    cls = BY_CODE.get(body.code, DSecError)
    return cls(body.message, field=body.field, retry_after=body.retry_after, errno=body.errno, reason=body.reason, at=body.at)
