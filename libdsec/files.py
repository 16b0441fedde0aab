"""The files of a sandbox."""

from __future__ import annotations

import asyncio
import builtins
import errno
import os
import posixpath
import secrets
import stat
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

from yarl import URL

from libdsec.errors import FileNotFound, InvalidArgument
from libdsec.paths import SandboxPath, path_bytes
from libdsec.schema import FileEvent, FileInfo, TarSummary
from libdsec.streams import body_of
from libdsec.tar import OutsideLinks, file_chunks, in_thread, pack, unpack
from libdsec.transport import OCTETS, Answer, QueryValue, Transport

WRITE_BATCH = 4 << 20
"""Bytes of a download that are written to the local disk at a time, in a thread, while the next ones arrive."""

_file_info = Answer(FileInfo)
_file_event = Answer(FileEvent)
_tar_summary = Answer(TarSummary)
_octets = {"Content-Type": OCTETS}
_LEADS_NOWHERE = frozenset({errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""Errors of a path that can't lead to anything, beside ENOENT."""


class Files:
    """A sandbox's files, reached as ``sandbox.files``.

    Paths are str, bytes or pure paths; relative ones count from the sandbox's working directory. Everything is done with the rights of the
    sandbox's user. Any call may raise FileNotFound, PermissionDenied, Conflict (it exists, it isn't empty, it is busy), InvalidArgument (a
    directory where a file is needed, say), DiskFull and FileError, all with the kernel's ``errno``, and what every call of a sandbox
    raises.

    A call whose answer is lost is repeated by the SDK and recognized by the platform, so that it is carried out once. Only a restart of the
    service in between makes it a new call: :meth:`move` and :meth:`remove` may then raise FileNotFound, :meth:`mkdir` without ``parents``
    Conflict, for what they have done.
    """

    def __init__(self, transport: Transport, sandbox_path: str, workdir: str) -> None:
        self._transport = transport
        self._path = f"{sandbox_path}/files"
        self._workdir = path_bytes(workdir)

    def _absolute(self, path: SandboxPath, field: str = "path") -> bytes:
        """The path without ``.`` and doubled slashes, so that the names of entries below it come back clean. ``..`` stays, for what it
        means depends on symlinks, and so does a final slash, which looks through one."""
        raw = path_bytes(path, field)
        parts = [part for part in posixpath.join(self._workdir, raw).split(b"/") if part not in (b"", b".")]
        if parts and raw.endswith((b"/", b"/.")):
            parts.append(b"")
        return b"/" + b"/".join(parts)

    # -- content --------------------------------------------------------------------------------------------------------------------------

    async def read(self, path: SandboxPath) -> bytes:
        """The whole content of a regular file. Raises InvalidArgument (``errno`` EISDIR, ENXIO for a socket, EINVAL) for anything else.
        Safe to repeat."""

        async def attempt() -> bytes:
            url = self._transport.at(self._path, {"path": self._absolute(path)})
            async with self._transport.request("GET", url) as response:
                return await response.read()

        return await self._transport.repeat(attempt)

    async def read_text(self, path: SandboxPath, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The content as text. Raises UnicodeDecodeError on top of what :meth:`read` raises. Safe to repeat."""
        return (await self.read(path)).decode(encoding, errors)

    async def read_stream(self, path: SandboxPath, *, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        """The content in pieces as they arrive, from byte ``offset``, at most ``length`` bytes.

        Raises what :meth:`read` raises, and Unavailable when the connection breaks: go on with ``offset`` if the file is sure not to
        change.
        """
        url = self._transport.at(self._path, {"path": self._absolute(path), "offset": offset or None, "length": length})
        async with self._transport.request("GET", url) as response:
            async for chunk in response.content.iter_any():
                yield chunk

    async def write(
        self,
        path: SandboxPath,
        data: bytes | bytearray | memoryview | str,
        *,
        mode: int | None = None,
        user: str | None = None,
        append: bool = False,
    ) -> FileInfo:
        """Write a file; text is written as UTF-8. Missing parent directories are made.

        The file appears whole or not at all: it is written beside its place and renamed. ``mode``: permission bits; None keeps those of an
        existing file, else 0o644. ``user``: who writes, and owns what is new; default the sandbox's user. ``append=True`` adds to the end,
        and is then neither atomic nor safe to repeat; without it a repetition is safe.
        """
        if append:
            return await self._put(path, body_of(data), mode, user, append)
        return await self._transport.repeat(lambda: self._put(path, body_of(data), mode, user, append))

    async def write_stream(
        self, path: SandboxPath, source: AsyncIterable[bytes], *, mode: int | None = None, user: str | None = None, append: bool = False
    ) -> FileInfo:
        """:meth:`write` from an async iterable of bytes, of any length. When the connection breaks the old content stays and Unavailable is
        raised: the source can't be read twice by the SDK."""
        return await self._put(path, source, mode, user, append)

    async def _put(
        self, path: SandboxPath, data: bytes | AsyncIterable[bytes | memoryview], mode: int | None, user: str | None, append: bool
    ) -> FileInfo:
        octal = None if mode is None else f"{mode:o}"
        url = self._transport.at(self._path, {"path": self._absolute(path), "mode": octal, "user": user, "append": append or None})
        async with self._transport.request("PUT", url, data=data, headers=_octets) as response:
            return _file_info.decode(response.headers.get("Content-Type", ""), await response.read())

    # -- the tree -------------------------------------------------------------------------------------------------------------------------

    async def stat(self, path: SandboxPath, *, follow: bool = False) -> FileInfo:
        """One file's type, size, mode, owner and times; ``follow=True`` looks through a final symlink. Safe to repeat."""
        url = self._transport.at(f"{self._path}/stat", {"path": self._absolute(path), "follow": follow or None})
        return await self._transport.call("GET", url, _file_info)

    async def exists(self, path: SandboxPath) -> bool:
        """Whether the path leads to something (a symlink to nothing doesn't). Safe to repeat."""
        try:
            await self.stat(path, follow=True)
        except FileNotFound:
            return False
        except InvalidArgument as error:
            if error.errno in _LEADS_NOWHERE:
                return False
            raise
        return True

    async def list(self, path: SandboxPath = ".", *, recursive: bool = False) -> builtins.list[FileInfo]:
        """A directory's entries, or with ``recursive=True`` everything below it. Symlinks are not followed. Safe to repeat."""

        async def attempt() -> builtins.list[FileInfo]:
            url = self._transport.at(f"{self._path}/list", {"path": self._absolute(path), "recursive": recursive or None})
            return [entry async for entry in self._transport.lines("GET", url, _file_info)]

        return await self._transport.repeat(attempt)

    async def mkdir(self, path: SandboxPath, *, parents: bool = True, mode: int | None = None) -> None:
        """Make a directory. With ``parents`` also what is missing above it, and one that exists already is no error. ``mode``: permission
        bits, 0o755 unless told. Safe to repeat with ``parents``; without it your own repetition raises Conflict."""
        await self._change("mkdir", path=self._absolute(path), parents=parents, mode=None if mode is None else f"{mode:o}")

    async def move(self, path: SandboxPath, to: SandboxPath) -> None:
        """Rename within a filesystem, replacing an existing file; a directory of the image raises FileError (``errno`` EXDEV). Your own
        repetition raises FileNotFound."""
        await self._change("move", path=self._absolute(path), to=self._absolute(to, "to"))

    async def remove(self, path: SandboxPath, *, recursive: bool = False) -> None:
        """Remove a file or an empty directory; with ``recursive=True`` a whole tree, without following symlinks. Your own repetition raises
        FileNotFound."""
        await self._change("remove", path=self._absolute(path), recursive=recursive or None)

    async def chmod(self, path: SandboxPath, mode: int) -> None:
        """Set the permission bits (0o7777). Safe to repeat."""
        await self._change("chmod", path=self._absolute(path), mode=f"{mode:o}")

    async def chown(self, path: SandboxPath, owner: str | int, group: str | int | None = None) -> None:
        """Set the owner: a name or uid of the sandbox, ``owner:group`` in one, or ``group`` apart; without a group that stays.
        Safe to repeat."""
        await self._change("chown", path=self._absolute(path), owner=str(owner) if group is None else f"{owner}:{group}")

    async def _change(self, verb: str, **query: QueryValue) -> None:
        headers = {"Idempotency-Key": secrets.token_hex(12)}
        await self._transport.send("POST", self._transport.at(f"{self._path}/{verb}", query), headers=headers)

    def watch(self, path: SandboxPath, *, recursive: bool = False) -> FileWatch:
        """Changes below a path, as they happen: ``async for event in sandbox.files.watch(path)``. To be sure that the watch stands before
        something is changed: ``async with sandbox.files.watch(path) as events``.

        An event of type ``overflow`` means that some were lost. Raises Unavailable when the connection breaks; watch again and look.
        """
        url = self._transport.at(f"{self._path}/watch", {"path": self._absolute(path), "recursive": recursive or None})
        return FileWatch(self._transport, url)

    # -- whole files and directories ------------------------------------------------------------------------------------------------------

    async def upload(self, local: str | os.PathLike[str], remote: SandboxPath) -> None:
        """Copy a local file to the path ``remote``, or the content of a local directory into the directory ``remote`` (made if missing).

        Permission bits are kept, owners are not: everything belongs to the sandbox's user. Hardlinks within a directory and symlinks stay
        what they are. Raises OSError for what can't be read here. Safe to repeat.
        """
        source = Path(local)
        status = await asyncio.to_thread(source.stat)
        if stat.S_ISDIR(status.st_mode):
            url = self._transport.at(f"{self._path}/tar", {"path": self._absolute(remote, "remote")})
            await self._transport.repeat(lambda: self._put_tar(url, source))
            return
        mode = stat.S_IMODE(status.st_mode) & 0o777
        await self._transport.repeat(lambda: self._put(remote, in_thread(file_chunks(source)), mode, None, False))

    async def _put_tar(self, url: URL, source: Path) -> None:
        async with self._transport.request("PUT", url, data=in_thread(pack(source)), headers=_octets) as response:
            await response.read()

    async def download(self, remote: SandboxPath, local: str | os.PathLike[str], *, outside_links: OutsideLinks = "refuse") -> None:
        """Copy a file to the local path ``local``, or a directory's content into the local directory ``local`` (made if missing).

        A file appears whole or not at all. Of a directory nothing is written outside ``local``, whatever the sandbox sends: entries that
        try are refused (FileError), and so are devices. A symlink that leads out of the directory is refused too, since whoever opens it
        here reads this machine's files; ``outside_links="skip"`` leaves such links out, "keep" makes them as they are. Setuid bits and
        write permission for others are dropped, sockets and named pipes left out. Raises OSError for what can't be written here. Safe to
        repeat.
        """
        target = Path(local)
        info = await self.stat(remote, follow=True)
        if info.type == "directory":
            await self._transport.repeat(lambda: self._get_tar(remote, target, outside_links))
        else:
            await self._transport.repeat(lambda: self._get_file(remote, target, info.mode))

    async def _get_tar(self, remote: SandboxPath, target: Path, outside_links: OutsideLinks) -> None:
        url = self._transport.at(f"{self._path}/tar", {"path": self._absolute(remote, "remote")})
        async with self._transport.request("GET", url) as response:
            await unpack(response.content.iter_any(), target, outside_links)

    async def _get_file(self, remote: SandboxPath, target: Path, mode: int) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try:
                await _write_all(descriptor, self.read_stream(remote))
                os.fchmod(descriptor, mode & 0o755 | 0o600)
            finally:
                os.close(descriptor)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


class FileWatch:
    """The changes below a path: an async iterable of :class:`FileEvent`, and an async context manager that is entered when the watch
    stands."""

    def __init__(self, transport: Transport, url: URL) -> None:
        self._transport = transport
        self._url = url
        self._connection = AsyncExitStack()
        self._events: AsyncIterator[FileEvent] | None = None

    async def __aenter__(self) -> FileWatch:
        self._events = await self._connection.enter_async_context(self._transport.open_lines("GET", self._url, _file_event))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._events = None
        await self._connection.__aexit__(kind, error, trace)

    def __aiter__(self) -> AsyncIterator[FileEvent]:
        return self._events if self._events is not None else self._transport.lines("GET", self._url, _file_event)


async def _write_all(descriptor: int, chunks: AsyncIterator[bytes]) -> None:
    """Write to the disk in a thread, one batch behind what arrives."""
    loop = asyncio.get_running_loop()
    writing: asyncio.Future[None] | None = None
    batch: list[bytes] = []
    size = 0
    try:
        async for chunk in chunks:
            batch.append(chunk)
            size += len(chunk)
            if size >= WRITE_BATCH:
                if writing is not None:
                    await writing
                writing = loop.run_in_executor(None, _write_batch, descriptor, batch)
                batch, size = [], 0
    finally:
        if writing is not None:
            await writing
    await loop.run_in_executor(None, _write_batch, descriptor, batch)


def _write_batch(descriptor: int, batch: list[bytes]) -> None:
    for chunk in batch:
        view = memoryview(chunk)
        while view:
            view = view[os.write(descriptor, view) :]
