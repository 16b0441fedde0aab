"""The seam ``Blobs``: named objects in a directory (local, NFS, a 3FS mount) or an S3 bucket, shared by all nodes.

Knows nothing of images. An object is whole or absent: a directory gets a staging file that is renamed (or, for :meth:`Blobs.put_new`,
linked) into place and synced before a put returns; S3 shows no object before its upload is complete.
"""

from __future__ import annotations

import asyncio
import builtins
import configparser
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import LocalStore, S3Store

from dsec.images.blobs import FULL
from dsec.images.threads import to_end
from libdsec.errors import ImageError, InvalidArgument, NoCapacity, NotFound, Unavailable

if TYPE_CHECKING:
    from obstore.store import S3Config

LIST_BATCH = 1000
"""Objects that come from a listing at a time; S3 gives no more."""
UNLINKS_AT_ONCE = 8
WALK_BATCH = 10_000
"""Files of a directory looked at by one hop to a thread: 50 ms."""
PART_BYTES = 16 << 20
"""Of an upload in parts. 10,000 of them, the most that S3 takes, hold 160 GB."""
PIECE = 4 << 20
"""Bytes of a file that are read at a time."""
PARTS_AT_ONCE = 4
"""With PART_BYTES the memory that one upload takes."""
DELETE_BATCH = 1000
DOCUMENT_LIMIT = 256 << 20
"""Bytes of an object that is read whole into memory (a chunk table of a 5 TB blob)."""

REQUEST_TIMEOUT_S = 60
"""For one request, its body included: a part of an upload at 270 KB/s."""
CONNECT_TIMEOUT_S = 5
RETRY_FOR_S = 20.0
"""The library repeats what failed in the network, or with a 5xx, for so long; after that the caller decides."""
RETRY_EVERY_S = 1
"""The longest pause before a repetition, of which a random part is waited."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_PARAMETERS = {"endpoint", "region", "credentials", "anonymous"}
_STAGING = re.compile(r"#[0-9]+\Z")


class BlobMissing(NotFound):
    """There is no object of that name."""


class BlobTooLarge(ImageError):
    """An object has more bytes than one of its kind can have: it is broken, or somebody else's."""


class BlobsDenied(Unavailable):
    """The store refuses: credentials or file modes are wrong. Trying again doesn't help before somebody acts."""

    retriable = False


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing."""

    key: str
    size: int
    modified: float
    """Unix seconds, by the store's clock."""


class Blobs(Protocol):
    """What the image store needs of a shared store. Keys are relative paths of ``[A-Za-z0-9._=~-]`` and ``/``.

    Every call may raise Unavailable (the store can't be reached: try again), BlobsDenied, NoCapacity (a directory's disk is full).
    A put that failed may have happened.
    """

    url: str

    async def put(self, key: str, data: bytes) -> None:
        """Make or replace an object."""

    async def put_file(self, key: str, path: Path, told: Callable[[int], None] = lambda done: None) -> None:
        """Make or replace an object with a file's content, in bounded memory. ``told``: bytes that are on their way."""

    async def put_new(self, key: str, data: bytes) -> bool:
        """Make an object unless there is one of that name; whether it was made. Of several callers one gets True."""

    async def get(self, key: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        """An object's content. Raises BlobMissing, and BlobTooLarge for one that has more than ``limit`` bytes."""

    async def get_range(self, key: str, offset: int, length: int) -> memoryview:
        """Exactly ``length`` (1 or more) bytes. Raises BlobMissing, also where the object is shorter."""

    async def stat(self, key: str) -> Listed | None:
        """Size and time of an object; None: there is none."""

    def list(self, prefix: str, wanted: Callable[[str], bool] = lambda key: True) -> AsyncIterator[Sequence[Listed]]:
        """The objects below a directory whose keys are ``wanted``, in batches, in no order."""

    def names(self, prefix: str) -> AsyncIterator[Sequence[str]]:
        """The same, the keys alone: where sizes and times cost something, they aren't looked up."""

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that aren't there don't matter."""

    async def staging(self, prefix: str, older_than: float) -> Sequence[str]:
        """Names of files below a directory that a crash left half-written, last touched before that Unix time. (Parts of uploads to S3
        are for the bucket's lifecycle rule.)"""

    async def drop_staging(self, names: Sequence[str]) -> None:
        """Removes files that :meth:`staging` named."""


def open_blobs(url: str, *, retry_for_s: float = RETRY_FOR_S) -> Blobs:
    """The store at ``url``: an absolute directory, or ``s3://BUCKET/PREFIX?endpoint=URL&region=R&credentials=FILE``.

    ``credentials``: a file in the format of the AWS command line (section ``default``); without it the process's AWS_… variables count.
    ``anonymous=true``: requests aren't signed. ``retry_for_s``: how long a request to S3 that fails is repeated.
    Nothing is contacted yet. Raises InvalidArgument that says what is wrong.
    """
    check_url(url)
    return _open_s3(url, retry_for_s) if url.startswith("s3://") else DirectoryBlobs(Path(url))


def check_url(url: str) -> None:
    """Raises InvalidArgument for what :func:`open_blobs` wouldn't take; looks at nothing but the text."""
    if not url.startswith("s3://"):
        if "://" in url or not Path(url).is_absolute():
            raise InvalidArgument(f"a store is an absolute directory or s3://BUCKET/PREFIX, not {url!r}", field="store")
        return
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = set(options) - _PARAMETERS
    if unknown or parts.fragment:
        message = f"the store {url!r}: it takes {', '.join(sorted(_PARAMETERS))}, not {', '.join(sorted(unknown)) or 'a fragment'}"
        raise InvalidArgument(message, field="store")
    if not _BUCKET.match(parts.netloc):
        raise InvalidArgument(f"the store {url!r}: no bucket can be called {parts.netloc!r}", field="store")
    if not options.get("endpoint", "http://").startswith(("http://", "https://")):
        raise InvalidArgument(f"the store's endpoint {options['endpoint']!r} is no http:// or https:// URL", field="store")


def _open_s3(url: str, retry_for_s: float) -> Blobs:
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    endpoint = options.get("endpoint")
    config: S3Config = {
        "region": options.get("region", os.environ.get("AWS_REGION", "us-east-1")),
        "skip_signature": options.get("anonymous", "false") == "true",
        "virtual_hosted_style_request": endpoint is None,
    }
    if endpoint is not None:
        config["endpoint"] = endpoint
    if "credentials" in options:
        config.update(_credentials(Path(options["credentials"])))
    store = S3Store(
        parts.netloc,
        prefix=parts.path.strip("/") or None,
        config=config,
        client_options={
            "allow_http": endpoint is not None and endpoint.startswith("http://"),
            "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        },
        retry_config={
            "retry_timeout": timedelta(seconds=retry_for_s),
            # As many as fit into that time, however short the pauses turn out: alone this would end it after half a second.
            "max_retries": 1_000,
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=RETRY_EVERY_S), "base": 2},
        },
    )
    return ObjectBlobs(url, store)


def _credentials(path: Path) -> S3Config:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text())
        section = parser["default"]
        config: S3Config = {"access_key_id": section["aws_access_key_id"], "secret_access_key": section["aws_secret_access_key"]}
        if "aws_session_token" in section:
            config["session_token"] = section["aws_session_token"]
        return config
    except OSError as error:
        raise InvalidArgument(f"the store's credentials can't be read: {path}: {error.strerror}", field="store") from error
    except (configparser.Error, KeyError, UnicodeDecodeError) as error:
        message = f"{path} must have aws_access_key_id and aws_secret_access_key in a section [default]"
        raise InvalidArgument(message, field="store") from error


class ObjectBlobs:
    """Any store of the library, S3 first of all."""

    def __init__(self, url: str, store: S3Store | LocalStore) -> None:
        self.url = url
        self._store = store

    async def put(self, key: str, data: bytes) -> None:
        await self._put(key, data)

    async def put_file(self, key: str, path: Path, told: Callable[[int], None] = lambda done: None) -> None:
        if (await asyncio.to_thread(path.stat)).st_size <= PART_BYTES:
            await self._put(key, await asyncio.to_thread(path.read_bytes))
        else:
            await self._put(key, _pieces(path, told))

    async def _put(self, key: str, content: bytes | AsyncIterator[bytes]) -> None:
        try:
            await obstore.put_async(self._store, key, content, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)
        except Exception as failure:
            raise self._translated(failure, f"writing {key}") from failure

    async def put_new(self, key: str, data: bytes) -> bool:
        try:
            await obstore.put_async(self._store, key, data, mode="create")
        except (AlreadyExistsError, PreconditionError):
            return False
        except Exception as failure:
            raise self._translated(failure, f"writing {key}") from failure
        return True

    async def get(self, key: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        try:
            found = await obstore.get_async(self._store, key)
            if found.meta["size"] > limit:
                raise BlobTooLarge(f"{key} in the store has {found.meta['size']} bytes, at most {limit} can be right")
            return bytes(await found.bytes_async())
        except BlobTooLarge:
            raise
        except Exception as failure:
            raise self._translated(failure, f"reading {key}") from failure

    async def get_range(self, key: str, offset: int, length: int) -> memoryview:
        try:
            data = memoryview(await obstore.get_range_async(self._store, key, start=offset, length=length))
        except Exception as failure:
            error = self._translated(failure, f"reading {key}")
            # A range behind the end is an error without a class of its own.
            if isinstance(error, Unavailable) and not isinstance(error, BlobsDenied):
                listed = await self.stat(key)
                if listed is not None and listed.size < offset + length:
                    error = _too_short(key, listed.size, offset, length)
            raise error from failure
        if len(data) != length:
            raise _too_short(key, offset + len(data), offset, length)
        return data

    async def stat(self, key: str) -> Listed | None:
        try:
            meta = await obstore.head_async(self._store, key)
        except FileNotFoundError:
            return None
        except Exception as failure:
            raise self._translated(failure, f"looking for {key}") from failure
        return Listed(key, meta["size"], meta["last_modified"].timestamp())

    async def list(self, prefix: str, wanted: Callable[[str], bool] = lambda key: True) -> AsyncIterator[Sequence[Listed]]:
        try:
            async for batch in obstore.list(self._store, prefix, chunk_size=LIST_BATCH):
                yield [Listed(each["path"], each["size"], each["last_modified"].timestamp()) for each in batch if wanted(each["path"])]
        except FileNotFoundError:
            return
        except Exception as failure:
            raise self._translated(failure, f"listing {prefix}") from failure

    async def names(self, prefix: str) -> AsyncIterator[Sequence[str]]:
        async for batch in self.list(prefix):
            yield [each.key for each in batch]

    async def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), DELETE_BATCH):
            try:
                await obstore.delete_async(self._store, list(keys[start : start + DELETE_BATCH]))
            except Exception as failure:
                raise self._translated(failure, "deleting") from failure

    async def staging(self, prefix: str, older_than: float) -> Sequence[str]:
        return ()

    async def drop_staging(self, names: Sequence[str]) -> None:
        return

    def _translated(self, failure: Exception, doing: str) -> Exception:
        # The library's messages go on with a dump of its own structures.
        first_line = str(failure).partition("\n")[0]
        what = f"the shared store {self.url}: {doing}: {first_line}"
        match failure:
            case FileNotFoundError():
                return BlobMissing(what)
            case PermissionDeniedError() | UnauthenticatedError() | PermissionError() | InvalidPathError():
                return BlobsDenied(what)
            case OSError(errno=number) if number in FULL:
                return NoCapacity(what, reason="disk")
            case _ if "os error 28" in first_line or "os error 122" in first_line:
                return NoCapacity(what, reason="disk")
            case BaseError() | OSError() | TimeoutError():
                return Unavailable(what)
            case _:
                return failure


def _is_staging(name: str) -> bool:
    """Whether the library calls a file so that is to become an object; a crash leaves it, listings don't show it."""
    return "#" in name and _STAGING.search(name) is not None


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def _pieces(path: Path, told: Callable[[int], None]) -> AsyncIterator[bytes]:
    done = 0
    with path.open("rb") as file:
        while piece := await to_end(lambda: file.read(PIECE)):
            yield piece
            done += len(piece)
            told(done)


def _too_short(key: str, size: int, offset: int, length: int) -> BlobMissing:
    return BlobMissing(f"{key} in the store has {size} bytes, {length} at {offset} are wanted: it was cut")


class DirectoryBlobs(ObjectBlobs):
    """A directory. The library renames what is whole into place but doesn't sync: after a power cut a name without content would count as
    an object, so that is done here."""

    def __init__(self, root: Path) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            super().__init__(str(root), LocalStore(root))
            if not os.access(root, os.W_OK | os.X_OK):
                raise PermissionError(f"the service runs with the uid {os.getuid()}, which may not write there")
        except (OSError, BaseError) as error:
            raise InvalidArgument(f"the store {root} can't be opened: {str(error).partition(chr(10))[0]}", field="store") from error
        self._root = root

    async def _put(self, key: str, content: bytes | AsyncIterator[bytes]) -> None:
        await super()._put(key, content)
        await to_end(lambda: self._sync(key))

    async def put_new(self, key: str, data: bytes) -> bool:
        made = await super().put_new(key, data)
        if made:
            await to_end(lambda: self._sync(key))
        return made

    def _sync(self, key: str) -> None:
        path = self._root / key
        with self._translating(f"writing {key}"):
            # Whoever has taken it away again needs it on the disk no longer.
            with contextlib.suppress(FileNotFoundError):
                _sync_file(path)
            _sync_file(path.parent)

    @contextlib.contextmanager
    def _translating(self, doing: str) -> Iterator[None]:
        """What goes wrong with files in the body is told as every other failure of the store is."""
        try:
            yield
        except OSError as error:
            raise self._translated(error, doing) from error

    async def list(self, prefix: str, wanted: Callable[[str], bool] = lambda key: True) -> AsyncIterator[Sequence[Listed]]:
        # The library takes 18 us for an object, this 4, and a store has millions.
        listing = self._batches(prefix, wanted)
        while (batch := await asyncio.to_thread(next, listing, None)) is not None:
            yield batch

    def _batches(self, prefix: str, wanted: Callable[[str], bool]) -> Iterator[Sequence[Listed]]:
        walk = self._walk(prefix)
        while part := tuple(islice(walk, WALK_BATCH)):
            batch = []
            with self._translating(f"listing {prefix}"):
                for entry, key in part:
                    with contextlib.suppress(FileNotFoundError):
                        if not _is_staging(entry.name) and wanted(key):
                            status = entry.stat()
                            batch.append(Listed(key, status.st_size, status.st_mtime))
            yield batch

    async def names(self, prefix: str) -> AsyncIterator[Sequence[str]]:
        walk = self._walk(prefix)
        while part := await asyncio.to_thread(lambda: tuple(islice(walk, WALK_BATCH))):
            yield [key for entry, key in part if not _is_staging(entry.name)]

    def _walk(self, prefix: str) -> Iterator[tuple[os.DirEntry[str], str]]:
        """The files below a directory, and their paths from the root."""
        pending = [prefix]
        while pending:
            directory = pending.pop()
            # What doesn't exist has nothing below it.
            with (
                self._translating(f"listing {directory}"),
                contextlib.suppress(FileNotFoundError),
                os.scandir(self._root / directory) as entries,
            ):
                for entry in entries:
                    key = f"{directory}/{entry.name}" if directory else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(key)
                    else:
                        yield entry, key

    async def delete(self, keys: Sequence[str]) -> None:
        # Side by side: on NFS, and on a disk whose inodes aren't in memory, each one waits.
        # All are waited for, also where one fails or the call is cancelled: what is told of as ended deletes nothing more.
        unlinks = (to_end(partial(self._unlink, keys[start::UNLINKS_AT_ONCE])) for start in range(UNLINKS_AT_ONCE))
        for outcome in await asyncio.gather(*unlinks, return_exceptions=True):
            if outcome is not None:
                raise outcome

    def _unlink(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._translating(f"deleting {key}"):
                (self._root / key).unlink(missing_ok=True)

    async def staging(self, prefix: str, older_than: float) -> Sequence[str]:
        return await asyncio.to_thread(self._staging, prefix, older_than)

    def _staging(self, prefix: str, older_than: float) -> builtins.list[str]:
        found = []
        with self._translating(f"listing {prefix}"):
            for entry, key in self._walk(prefix):
                with contextlib.suppress(FileNotFoundError):
                    if _is_staging(entry.name) and entry.stat().st_mtime < older_than:
                        found.append(key)
        return found

    async def drop_staging(self, names: Sequence[str]) -> None:
        await to_end(lambda: self._unlink([name for name in names if _is_staging(name) and ".." not in name]))
