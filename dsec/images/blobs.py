"""The directory of blobs: files named by the sha256 of their content, complete or absent, and never changed.

Knows nothing of images. Everything that is being made lies in ``tmp`` until it is whole; the next start empties that. A download, which may
go on after a restart, lies in ``partial``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from libdsec.errors import NoCapacity

BLOB_MODE = 0o444
"""The spawner (root) reads blobs; nobody writes them."""


def digest_of(hexadecimal: str) -> str:
    """A digest as it stands in the API."""
    return f"sha256:{hexadecimal}"


def hex_of(digest: str) -> str:
    """A digest as it stands in file names and in the spawner's verbs."""
    return digest.removeprefix("sha256:")


FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a write to a full disk, or beyond a quota, fails with."""


@contextlib.contextmanager
def full_disk_told() -> Iterator[None]:
    """A disk that gets full while the body runs is NoCapacity; other failures of the disk stay what they are."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise NoCapacity(f"the disk of the image store is full: {error}", reason="disk") from error
        raise


def write_synced(path: Path, content: bytes) -> Path:
    """A new file, on the disk when this returns; its path. Raises NoCapacity, OSError."""
    with full_disk_told(), path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return path


@dataclass(frozen=True, slots=True)
class BlobFile:
    """A blob as it lies on the disk."""

    name: str
    """Its digest, in hexadecimal."""
    size: int
    used_at: float
    """When it was made or last used, Unix seconds: the time of the file."""
    links: int
    """Names that the file has."""


class BlobDirectory:
    """``<root>/blobs/<hex>``, ``<root>/partial/<hex>`` and ``<root>/tmp``. Calls block on the disk."""

    def __init__(self, root: Path, *, disk_reserve: int) -> None:
        self._root = root
        self._blobs = root / "blobs"
        self._tmp = root / "tmp"
        self._partial = root / "partial"
        self.downloads = root / "downloads"
        """For downloads from registries that outlive a restart; made by whoever has one."""
        self._disk_reserve = disk_reserve

    def open(self) -> None:
        """Makes the directories that are missing and removes what an earlier process left half made."""
        for directory in (self._root, self._blobs):
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        shutil.rmtree(self._tmp, ignore_errors=True)
        self._tmp.mkdir(mode=0o700, exist_ok=True)

    def make_workspace(self) -> Path:
        """An empty directory on the blobs' filesystem. Raises NoCapacity."""
        with full_disk_told():
            return Path(tempfile.mkdtemp(prefix="import-", dir=self._tmp))

    def remove_workspace(self, path: Path) -> None:
        """Removes it and what is in it. What can't be removed now goes with the next start."""
        shutil.rmtree(path, ignore_errors=True)

    def path(self, digest: str) -> Path:
        """Where the blob is, if it is there."""
        return self._blobs / hex_of(digest)

    def partial(self, digest: str) -> Path:
        """Where a blob lies that is being fetched. Makes the directory."""
        self._partial.mkdir(mode=0o700, exist_ok=True)
        return self._partial / hex_of(digest)

    def names(self) -> list[str]:
        """The digests, in hexadecimal, of all blobs."""
        return [entry.name for entry in os.scandir(self._blobs)]

    def files(self, wanted: Callable[[str], bool]) -> list[BlobFile]:
        """The blobs whose digests (hexadecimal) are wanted."""
        found = []
        for entry in os.scandir(self._blobs):
            if wanted(entry.name):
                # One that gc takes just now isn't there any more.
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append(BlobFile(entry.name, status.st_size, status.st_mtime, status.st_nlink))
        return found

    def touch(self, file: BlobFile, at: float) -> BlobFile:
        """Keeps on the disk that the blob was used at that time (Unix seconds)."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._blobs / file.name, (at, at))
        return replace(file, used_at=at)

    def has(self, digest: str) -> bool:
        return self.path(digest).exists()

    def commit(self, files: Iterable[tuple[Path, str]]) -> None:
        """Makes finished files, whose content is on the disk already, to blobs: all of them, before this returns. Raises OSError."""
        for file, digest in files:
            if self.has(digest):
                # The same bytes; a mounted file is better not replaced.
                file.unlink()
                continue
            file.chmod(BLOB_MODE)
            file.rename(self.path(digest))
        self._sync()

    def keep(self, content: bytes, digest: str) -> None:
        """Makes ``content``, whose digest that is, a blob. Raises NoCapacity, OSError."""
        workspace = self.make_workspace()
        try:
            self.commit([(write_synced(workspace / hex_of(digest), content), digest)])
        finally:
            self.remove_workspace(workspace)

    def _sync(self) -> None:
        directory = os.open(self._blobs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def unneeded(self, needed: Callable[[str], bool]) -> list[Path]:
        """The blobs, and the beginnings of blobs, whose digests (hexadecimal) aren't needed."""
        directories = [directory for directory in (self._blobs, self._partial) if directory.exists()]
        return [Path(entry.path) for directory in directories for entry in os.scandir(directory) if not needed(entry.name)]

    def retire(self, files: Sequence[Path]) -> list[Path]:
        """Takes blobs out of the store: from here on they count as absent. Returns the files, which the caller deletes (that can take a
        while, this doesn't)."""
        retired = []
        if files:
            grave = Path(tempfile.mkdtemp(prefix="retired-", dir=self._tmp))
            for file in files:
                target = grave / f"{file.parent.name}-{file.name}"
                os.rename(file, target)
                retired.append(target)
        return retired

    def hold(self, file: Path) -> Path:
        """Gives a file on the same filesystem a second name, in a workspace of its own. Raises OSError."""
        workspace = self.make_workspace()
        try:
            os.link(file, workspace / file.name)
        except OSError:
            workspace.rmdir()
            raise
        return workspace / file.name

    def adopt(self, held: Path, digest: str) -> None:
        """Makes a held file a blob; its first name stays. Raises OSError."""
        if self.has(digest):
            return
        held.rename(self.path(digest))
        self._sync()

    def delete(self, retired: Iterable[Path]) -> int:
        """Deletes retired files; returns their bytes."""
        removed = 0
        parents = set()
        for path in retired:
            removed += path.stat().st_size
            path.unlink()
            parents.add(path.parent)
        for parent in parents:
            parent.rmdir()
        return removed

    def check_room(self, wanted: int = 0) -> None:
        """Raises NoCapacity when the disk would have less than the reserve left after ``wanted`` more bytes."""
        free = self._free()
        if free - wanted < self._disk_reserve:
            raise NoCapacity(
                f"the disk of the image store has {free >> 20} MB free, and {self._disk_reserve >> 20} MB of them must stay so",
                reason="disk",
            )

    def shortage(self) -> int:
        """Bytes that the disk has free less than the reserve; 0: none."""
        return max(0, self._disk_reserve - self._free())

    def _free(self) -> int:
        statistics = os.statvfs(self._root)
        return statistics.f_bavail * statistics.f_frsize
