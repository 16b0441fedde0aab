"""Directories as tar streams, in bounded memory: packing what is on this machine, and unpacking what comes out of a sandbox.

What comes out of a sandbox is hostile until shown otherwise: nothing of it may be written, or point, outside the directory it is unpacked
into.
"""

from __future__ import annotations

import asyncio
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from io import RawIOBase
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal, TypeVar, cast

from libdsec.errors import FileError

CHUNK = 1 << 20
"""Bytes read, sent and written at a time."""
READ_AHEAD = 32 << 10
"""Bytes that tarfile holds while it unpacks. It moves what is left of them for every header, so that more is slower with small files."""
BLOCK = 512
"""Tar's unit: headers and contents are padded to it."""
END = b"\0" * (2 * BLOCK)
"""Two empty blocks end an archive."""

OutsideLinks = Literal["refuse", "skip", "keep"]
"""What becomes of a symlink in a download that leads out of the downloaded directory."""

T = TypeVar("T")


async def in_thread(items: Iterator[T]) -> AsyncIterator[T]:
    """``items`` made one by one in a worker thread, so that slow disks don't stall the event loop."""
    done = object()
    while True:
        item = await asyncio.to_thread(next, items, done)
        if item is done:
            return
        yield item  # type: ignore[misc]  # not the sentinel


def file_chunks(path: Path) -> Iterator[bytes]:
    """A file's content."""
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            yield chunk


def pack(root: Path) -> Iterator[bytes]:
    """The content of directory ``root`` as an archive for a sandbox's directory: modes, times in whole seconds, hardlinks, symlinks as they
    are. Owners, devices and sockets stay out."""
    return write_archive(root, _for_sandbox)


def _for_sandbox(member: tarfile.TarInfo, path: bytes, status: os.stat_result) -> tarfile.TarInfo | None:
    if member.name == "." or member.type in (tarfile.CHRTYPE, tarfile.BLKTYPE):
        return None
    # A fraction would need a second header for every entry.
    member.mtime = int(status.st_mtime)
    return member


def write_archive(root: Path, complete: Callable[[tarfile.TarInfo, bytes, os.stat_result], tarfile.TarInfo | None]) -> Iterator[bytes]:
    """The directory ``root`` and what is below it as an archive (PAX), parents first, sorted. Sockets are left out. Memory doesn't grow
    with the tree but by what hardlinks there are.

    ``complete`` gets each entry with its name (the root's is ``.``), type, mode, size and target, and adds what else is kept of the file at
    that path; None leaves it out. A file that shrinks while it is read is filled up with zeros; one that grows is cut: headers go first.
    """
    seen: dict[tuple[int, int], bytes] = {}
    pending = bytearray()
    for path, name in _walk(os.fsencode(root)):
        status = os.lstat(path)
        described = _member(path, name, status, seen)
        member = None if described is None else complete(described, path, status)
        if member is None:
            continue
        pending += member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if member.size:
            with open(path, "rb", buffering=0) as file:
                for chunk in _exactly(file, member.size):
                    pending += chunk
                    if len(pending) >= CHUNK:
                        yield bytes(pending)
                        pending.clear()
            pending += bytes(-member.size % BLOCK)
        if len(pending) >= CHUNK:
            yield bytes(pending)
            pending.clear()
    yield bytes(pending) + END


def _walk(root: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Path and archive name of ``root`` and everything below it."""
    yield root, b"."
    directories = [(root, b"")]
    while directories:
        directory, prefix = directories.pop()
        below = []
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            name = prefix + entry.name
            yield entry.path, name
            if entry.is_dir(follow_symlinks=False):
                below.append((entry.path, name + b"/"))
        directories += reversed(below)


def _member(path: bytes, name: bytes, status: os.stat_result, seen: dict[tuple[int, int], bytes]) -> tarfile.TarInfo | None:
    """An entry without owner and time; None for a socket."""
    member = tarfile.TarInfo(os.fsdecode(name))
    member.mode = stat.S_IMODE(status.st_mode)
    match stat.S_IFMT(status.st_mode):
        case stat.S_IFREG:
            first = seen.setdefault((status.st_dev, status.st_ino), name) if status.st_nlink > 1 else name
            if first == name:
                member.size = status.st_size
            else:
                member.type, member.linkname = tarfile.LNKTYPE, os.fsdecode(first)
        case stat.S_IFDIR:
            member.type = tarfile.DIRTYPE
        case stat.S_IFLNK:
            member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(os.readlink(path))
        case stat.S_IFIFO:
            member.type = tarfile.FIFOTYPE
        case stat.S_IFCHR | stat.S_IFBLK:
            member.type = tarfile.CHRTYPE if stat.S_ISCHR(status.st_mode) else tarfile.BLKTYPE
            member.devmajor, member.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
        case _:
            return None
    return member


def _exactly(file: RawIOBase, size: int) -> Iterator[bytes]:
    left = size
    while left:
        chunk = file.read(min(CHUNK, left)) or bytes(min(CHUNK, left))
        left -= len(chunk)
        yield chunk


class _Pulled:
    """A chunk source as the blocking file that tarfile reads from."""

    def __init__(self, pull: Callable[[], bytes]) -> None:
        self._pull = pull
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        if not self._rest:
            self._rest = memoryview(self._pull())
        piece, self._rest = self._rest[:size], self._rest[size:]
        return bytes(piece)


async def unpack(chunks: AsyncIterator[bytes], root: Path, outside_links: OutsideLinks) -> None:
    """Unpack an archive into directory ``root``, which is made if missing; what stands there and has the same name is replaced.

    Raises FileError for an entry that leads outside (absolute names, ``..``, below a symlink, a hardlink or, with
    ``outside_links="refuse"``, a symlink to the outside), for devices, and for a damaged archive. What was unpacked until then stays.
    """
    loop = asyncio.get_running_loop()

    async def next_chunk() -> bytes:
        return await anext(chunks, b"")

    def pull() -> bytes:
        return asyncio.run_coroutine_threadsafe(next_chunk(), loop).result()

    await asyncio.to_thread(_Unpacking(root, outside_links).run, _Pulled(pull))


class _Unpacking:
    """One archive on its way into one directory.

    Symlinks are made last, so that nothing can be written through one, and are judged when all are there: what one of them means may depend
    on the others.
    """

    def __init__(self, root: Path, outside_links: OutsideLinks) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root.resolve()
        self._outside_links = outside_links
        self._symlinks: dict[Path, str] = {}
        self._directories: list[tuple[Path, tarfile.TarInfo]] = []

    def run(self, source: _Pulled) -> None:
        try:
            with tarfile.open(fileobj=cast(BinaryIO, source), mode="r|", bufsize=READ_AHEAD, errorlevel=2) as archive:
                for member in archive:
                    self._take(archive, member)
        except tarfile.TarError as error:
            raise FileError(f"the archive is damaged: {error}") from error
        self._make_symlinks()
        for path, member in reversed(self._directories):
            path.chmod(member.mode & 0o755 | 0o700)
            os.utime(path, (member.mtime, member.mtime))

    def _take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = self._place(member.name)
        if member.isfifo():
            # Like a socket, which the sandbox doesn't even send: it means nothing without the processes around it.
            return
        if member.isdir():
            if not path.is_dir() or path.is_symlink():
                path.unlink(missing_ok=True)
                path.mkdir()
            if path != self._root:
                self._directories.append((path, member))
            return
        self._clear(path)
        if member.issym():
            self._symlinks[path] = member.linkname
        elif member.islnk():
            self._hardlink(path, member)
        elif member.isreg():
            self._write(archive, member, path)
        else:
            raise FileError(f"refused: {member.name!r} is a device")

    def _place(self, name: str) -> Path:
        """Where an entry goes; its parents are made. Raises FileError when that is not below the root."""
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts:
            raise FileError(f"refused: {name!r} leads outside")
        path = self._root
        for part in parts[:-1]:
            path = path / part
            if path in self._symlinks or path.is_symlink():
                raise FileError(f"refused: {name!r} lies below a symlink")
            path.mkdir(exist_ok=True)
        return path / parts[-1] if parts else path

    def _clear(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            raise FileError(f"{path} is a directory here and something else in the archive")
        path.unlink(missing_ok=True)
        self._symlinks.pop(path, None)

    def _hardlink(self, path: Path, member: tarfile.TarInfo) -> None:
        target = self._place(member.linkname)
        if target.is_symlink() or not target.is_file():
            raise FileError(f"refused: {member.name!r} is a hardlink to {member.linkname!r}, which is no file of this archive")
        os.link(target, path, follow_symlinks=False)

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        content = archive.extractfile(member)
        assert content is not None
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb", buffering=0) as file:
            while chunk := content.read(CHUNK):
                file.write(chunk)
            os.fchmod(file.fileno(), member.mode & 0o755 | 0o600)
        os.utime(path, (member.mtime, member.mtime))

    def _make_symlinks(self) -> None:
        for path, target in self._symlinks.items():
            path.symlink_to(target)
        if self._outside_links == "keep":
            return
        while outside := [path for path in self._symlinks if self._leads_outside(path)]:
            for path in outside:
                path.unlink()
            if self._outside_links == "refuse":
                path = outside[0]
                raise FileError(f"refused: {path.relative_to(self._root)} is a symlink to {self._symlinks[path]!r}, outside the directory")
            for path in outside:
                del self._symlinks[path]

    def _leads_outside(self, path: Path) -> bool:
        real = os.path.realpath(path)
        return real != str(self._root) and not real.startswith(f"{self._root}/")
