"""The image store as the SDK reaches it: archives, directories, Debian suites, Dockerfiles or images of registries go in; images are listed
and removed."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import secrets
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import parse_qs, quote

import msgspec

from libdsec.dockerfile import build_archive
from libdsec.errors import ImageError, ImageNotFound, InvalidArgument, Unavailable, from_body
from libdsec.locks import Lock
from libdsec.registry_login import find_login
from libdsec.schema import RECEIVING, FsckLine, ImageChange, ImageFinding, ImageInfo, ImagePage, ImageReads, ImportLine, RegistryImport
from libdsec.tar import CHUNK, file_chunks, in_thread, write_archive
from libdsec.transport import Answer, encode

if TYPE_CHECKING:
    from libdsec.client import DSecClient

Kind = Literal["base", "workspace", "toolkit"]
Format = Literal["auto", "tar", "docker-archive", "oci-archive"]
Progress = Callable[[str, int], None]
Told = Callable[[ImportLine], None]

DEBIAN = "mmdebstrap:"
"""What sources begin with that are made by mmdebstrap: ``mmdebstrap:bookworm?include=git,python3``."""
REGISTRY = "docker://"
"""What sources begin with that the server fetches from a registry: ``docker://HOST[:PORT]/REPOSITORY[:TAG][@sha256:…]``."""
COMPLAINT = 2000
"""Characters of what a failed mmdebstrap printed that its error shows."""
_VARIANTS = ("extract", "custom", "essential", "apt", "minbase", "buildd", "important", "standard")


class _RemovedBytes(msgspec.Struct):
    removed_bytes: int


_image = Answer(ImageInfo)
_page = Answer(ImagePage)
_import_line = Answer(ImportLine)
_removed = Answer(_RemovedBytes)
_reads = Answer(ImageReads)
_change = Answer(ImageChange)
_fsck_line = Answer(FsckLine)


class Images:
    """The server's images, reached as ``client.images``.

    A reference is a name (its newest version), ``name@3`` (that version, for ever), an image's digest, or ``name@sha256:…`` (the same,
    found by any node that shares the store). Where nodes share a store, it is asked each time what a reference means now, and a node that
    can't reach it answers with what it knows; only starts of sandboxes may take a name for what it meant up to 10 s ago.
    """

    def __init__(self, client: DSecClient) -> None:
        self._transport = client.transport

    async def import_(
        self,
        source: str | os.PathLike[str],
        *,
        name: str,
        kind: Kind = "base",
        at: str = "/",
        format: Format = "auto",
        credentials: tuple[str, str] | None = None,
        insecure: bool = False,
        progress: Progress | None = None,
        told: Told | None = None,
    ) -> ImageInfo:
        """Import ``source`` as the next version of ``name``.

        ``source``: a directory, or an OCI layout in one; a tar, ``docker save`` or OCI archive, also compressed (gzip, zstd, xz);
        ``docker://HOST[:PORT]/REPOSITORY[:TAG][@sha256:…]``, an image that the server fetches from a registry; or
        ``mmdebstrap:SUITE?include=a,b&variant=minbase&mirror=URL``, a Debian made on this machine from its own apt sources unless a mirror
        is given. ``kind``: what it will be used as. ``at``: where in the sandbox the content of a directory or plain tar appears.
        ``credentials``: user and password for the registry; None: what ``docker login`` or ``skopeo login`` left on this machine for it.
        ``insecure``: the registry is spoken to by plain HTTP. ``progress``: called with what is being done and the bytes that have been
        received. ``told``: called with the same as an ImportLine, which has the total too where that is known.

        Directories keep owners (as numbers), modes, times, hardlinks, devices and the xattrs ``user.*`` and ``security.capability``; holes
        are sent as zeros. Raises ImageError for an archive that is broken, hostile or of an unknown kind, InvalidArgument for a name or an
        argument that can't be, PermissionDenied for a name of another project, NoCapacity when the store's disk is full, OSError for a
        source that can't be read, Unavailable when the connection breaks: then, as after any error, nothing stays. For an image of a
        registry also ImageNotFound, PermissionDenied where the registry or the server's rules refuse (an admin's key may name any
        registry), Unavailable where it can't be reached; a later import of it goes on with the layers that came. Where the server shares a
        store, that gives the version: while it can't be reached, or written, Unavailable or NoCapacity is raised and nothing is made. Once
        it gave one, Conflict, NoCapacity and Unavailable of the store leave the image on the server's node, where :meth:`get` finds it and
        sending it is tried again (the message of Unavailable says so). Calling it again after success makes another version.
        """
        source = os.fspath(source)
        if source.startswith(REGISTRY):
            if at != "/" or format != "auto":
                raise InvalidArgument("at and format are for archives: an image of a registry says itself what it is", field="source")
            return await self._import_registry(source, name, kind, credentials, insecure=insecure, tell=_teller(progress, told))
        if credentials is not None or insecure:
            raise InvalidArgument(f"credentials and insecure are for sources that begin with {REGISTRY}", field="source")
        stream, format, size = _open_source(source, format)
        return await self._upload(stream, size, {"name": name, "kind": kind, "at": at, "format": format}, _teller(progress, told))

    async def build(
        self,
        directory: str | os.PathLike[str],
        *,
        name: str,
        file: str | os.PathLike[str] | None = None,
        kind: Kind = "base",
        build_args: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        told: Told | None = None,
    ) -> ImageInfo:
        """Build a Dockerfile on this machine and import the result as the next version of ``name``.

        buildah does it, or docker where only that is installed; both as they are configured here. ``directory``: the build's context.
        ``file``: the Dockerfile; None: ``Dockerfile`` or ``Containerfile`` in the directory. ``build_args``: values for its ARGs.
        ``progress`` and ``told`` as for :meth:`import_`.

        Raises InvalidArgument when there is nothing to build, or nothing to build it with, ImageError with what the builder printed last
        when it fails, and what :meth:`import_` raises.
        """
        tell = _teller(progress, told)
        tell(ImportLine(step="building"))
        arguments = dict(build_args or {})
        async with build_archive(Path(directory), None if file is None else Path(file), arguments) as (archive, format):
            query = {"name": name, "kind": kind, "at": "/", "format": format}
            return await self._upload(in_thread(file_chunks(archive)), archive.stat().st_size, query, tell)

    async def _import_registry(
        self, source: str, name: str, kind: Kind, credentials: tuple[str, str] | None, *, insecure: bool, tell: Told
    ) -> ImageInfo:
        if credentials is None:
            host, _, rest = source.removeprefix(REGISTRY).partition("/")
            repository = rest.partition("@")[0].partition(":")[0]
            credentials = await asyncio.to_thread(find_login, host, repository)
        username, password = credentials or (None, None)
        body = RegistryImport(source=source, name=name, kind=kind, username=username, password=password, insecure=insecure)
        headers = {"Idempotency-Key": secrets.token_hex(12)}
        url = self._transport.at("/v1/images/from-registry")
        return await _outcome(self._transport.lines("POST", url, _import_line, body=encode(body), headers=headers), tell)

    async def _upload(self, stream: AsyncIterator[bytes], size: int | None, query: Mapping[str, str], tell: Told) -> ImageInfo:
        headers = {"Idempotency-Key": secrets.token_hex(12)}
        upload = _Upload(stream)
        lines = self._transport.lines("POST", self._transport.at("/v1/images", query), _import_line, data=upload.chunks(), headers=headers)
        outcome = asyncio.create_task(_outcome(lines, lambda line: tell(_sized(line, size))))
        try:
            await asyncio.wait([outcome, upload.broken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Closes the connection if it is still open, by which the server learns that this import is over.
            outcome.cancel()
            await asyncio.gather(outcome, return_exceptions=True)
        if upload.broken.done():
            return upload.broken.result()
        return outcome.result()

    async def list(self) -> builtins.list[ImageInfo]:
        """All images and versions, in the order of their names. Safe to repeat."""
        images: builtins.list[ImageInfo] = []
        cursor: str | None = None
        while True:
            page = await self._transport.call("GET", self._transport.at("/v1/images", {"cursor": cursor}), _page)
            images += page.images
            cursor = page.cursor
            if cursor is None:
                return images

    async def get(self, reference: str) -> ImageInfo:
        """The image that is referred to, also where another node made it a moment ago. Raises ImageNotFound, ImageError for what is broken
        in the shared store. Safe to repeat."""
        return await self._transport.call("GET", self._transport.at(_path(reference)), _image)

    async def remove(self, reference: str) -> ImageInfo:
        """Remove one version (``name@3``, a digest) or, by a plain name, all versions of it; returns the newest one removed.

        Disk space comes back with :meth:`gc`. Raises ImageNotFound, Conflict while sandboxes run on it, or on an image made
        of it, here or on another node that shares the store, and while it is sent there, PermissionDenied, and at once Unavailable when
        the connection breaks: the SDK doesn't repeat it, for a repetition of what was done raises ImageNotFound.

        Raises ImageError where the shared store's manifest can't be read (:meth:`fsck` repairs it); only ``name@3`` with an admin's key
        removes it then, and of an image that the server's node doesn't know just name and version are returned.
        """
        async with self._transport.request("DELETE", self._transport.at(_path(reference))) as response:
            return _image.decode(response.headers.get("Content-Type", ""), await response.read())

    async def push(self, reference: str, *, progress: Progress | None = None, told: Told | None = None) -> ImageInfo:
        """Send an image that the server's node has to the store that it shares with others. Imports do so by themselves; this is for images
        from before, for what broke off, and to have what :meth:`Sandbox.pack_diff` made there for certain: that is sent by itself too, but
        after the pack has returned. ``progress`` and ``told`` as for :meth:`import_`.

        Raises ImageNotFound (also where its data isn't whole on that node), PermissionDenied, Conflict where the store has another image
        under that version, InvalidArgument where the server shares no store, ImageError where the image must be imported again, NoCapacity,
        Unavailable. Safe to repeat: what is there isn't sent again.
        """
        return await self._told("push", {"reference": reference}, _teller(progress, told))

    async def pull(self, reference: str, *, whole: bool = False, progress: Progress | None = None, told: Told | None = None) -> ImageInfo:
        """Fetch an image's metadata from the shared store, with ``whole`` its data too; sandboxes start without that and fetch what they
        read. ``progress`` and ``told`` as for :meth:`import_`.

        Raises ImageNotFound, ImageError for what is broken in the store, NoCapacity, Unavailable. Safe to repeat: it goes on where it was.
        """
        return await self._told("pull", {"reference": reference, "whole": "true" if whole else "false"}, _teller(progress, told))

    async def tag(self, reference: str, name: str, *, progress: Progress | None = None, told: Told | None = None) -> ImageInfo:
        """Make what ``reference`` means now the next version of ``name``, which may be its own: so a name leads back to an earlier version.
        Nothing is copied, and the digest stays. ``progress`` and ``told`` as for :meth:`import_`.

        Raises ImageNotFound, InvalidArgument for a name that can't be, PermissionDenied for one of another project; where the server shares
        a store also what :meth:`push` raises. Calling it again after success makes another version.
        """
        headers = {"Idempotency-Key": secrets.token_hex(12)}
        return await self._told("tag", {"reference": reference, "name": name}, _teller(progress, told), headers)

    async def _told(self, verb: str, query: dict[str, str], tell: Told, headers: Mapping[str, str] | None = None) -> ImageInfo:
        url = self._transport.at(f"/v1/images/{verb}", query)
        return await _outcome(self._transport.lines("POST", url, _import_line, headers=headers), tell)

    async def stats(self, reference: str) -> ImageReads:
        """What sandboxes have read of an image on the server's node: how much of it, and where it came from. What is read of data that
        is whole on the node isn't measured. Raises ImageNotFound, Unavailable. Safe to repeat."""
        return await self._transport.call("GET", self._transport.at("/v1/image-stats", {"reference": reference}), _reads)

    async def diff(self, before: str, after: str) -> builtins.list[ImageChange]:
        """The paths that two images don't have alike, sorted. Metadata is compared, no data read: a file counts as changed if its type,
        mode, owner, size, xattrs or target differ, or both its place in the store and its time. Raises ImageNotFound, ImageError,
        Unavailable. Safe to repeat."""
        url = self._transport.at("/v1/image-diff", {"before": before, "after": after})
        return [change async for change in self._transport.lines("GET", url, _change)]

    async def fsck(
        self, *, deep: bool = False, repair: bool = False, found: Callable[[ImageFinding], None] | None = None
    ) -> builtins.list[ImageFinding]:
        """Check the images of the server's node and the store that it shares: what is missing, wrong, half-made or in nobody's use.
        ``deep`` reads everything and compares digests; ``repair`` mends what can be (a manifest in the shared store on a node that knows
        its image), and each finding says whether it was. A broken file that no store has and no sandbox uses it removes, so that the next
        import of the same content makes it again. ``found`` is told each finding at once. Raises PermissionDenied unless the key is an
        admin's, NoCapacity, Unavailable. Safe to repeat."""
        query = {"deep": "true" if deep else "false", "repair": "true" if repair else "false"}
        findings: builtins.list[ImageFinding] = []
        async with contextlib.aclosing(self._transport.lines("POST", self._transport.at("/v1/images/fsck", query), _fsck_line)) as lines:
            async for line in lines:
                if line.error is not None:
                    raise from_body(line.error)
                if line.done:
                    return findings
                if line.finding is not None:
                    findings.append(line.finding)
                    if found is not None:
                        found(line.finding)
        raise Unavailable("the server ended the check without a result")

    async def lock(
        self,
        image: str,
        *,
        workspace: str | None = None,
        toolkits: Sequence[str] = (),
        network: Literal["aether", "none", "bridged"] = "aether",
        network_rules: Mapping[str, bool] | None = None,
    ) -> Lock:
        """The exact layers that these references mean now, to be written to a file (:meth:`Lock.write`) and started from
        (``Sandbox.create(lock=…)``). Raises what :meth:`get` raises, InvalidArgument for an image of the wrong kind. Safe to repeat."""
        return Lock(
            image=await self._pinned(image, "base"),
            workspace=None if workspace is None else await self._pinned(workspace, "workspace"),
            toolkits=tuple([await self._pinned(toolkit, "toolkit") for toolkit in toolkits]),
            network=network,
            network_rules=None if network_rules is None else dict(network_rules),
        )

    async def _pinned(self, reference: str, kind: str) -> str:
        info = await self.get(reference)
        if info.kind != kind:
            raise InvalidArgument(f"{reference!r} is a {info.kind}, where a {kind} is needed")
        return f"{info.name}@{info.digest}"

    async def gc(self) -> int:
        """Delete layers that no image and no sandbox needs any more, on the server's node and in the store that it shares (there, what is
        an hour old and needed by no node); returns the bytes. Raises PermissionDenied unless the key is an admin's, Conflict while another
        node collects in the shared store, ImageError for what is unreadable there. Safe to repeat."""
        return (await self._transport.call("POST", self._transport.at("/v1/images/gc"), _removed)).removed_bytes


class _Upload:
    """A stream on its way to the server. When it breaks on our side the HTTP client only waits: ``broken`` ends with the reason."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self.broken: asyncio.Future[ImageInfo] = asyncio.get_running_loop().create_future()
        """Never has a result."""

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        try:
            async for chunk in self._stream:
                yield chunk
        except Exception as failure:
            self.broken.set_exception(failure)
            raise


def _teller(progress: Progress | None, told: Told | None) -> Told:
    """Tells the caller of a line in the ways that it asked for."""

    def tell(line: ImportLine) -> None:
        if progress is not None and line.step is not None:
            progress(line.step, line.done_bytes)
        if told is not None:
            told(line)

    return tell


def _sized(line: ImportLine, size: int | None) -> ImportLine:
    """A line of an upload of ``size`` bytes, if that is known: the server, to which it is a stream, doesn't know it."""
    return msgspec.structs.replace(line, total_bytes=size) if line.step == RECEIVING else line


async def _outcome(lines: AsyncGenerator[ImportLine, None], tell: Told) -> ImageInfo:
    """What the lines of an import end in. Raises the error that they report."""
    async with contextlib.aclosing(lines):
        async for line in lines:
            if line.error is not None:
                raise from_body(line.error)
            if line.image is not None:
                return line.image
            tell(line)
    raise Unavailable("the server ended the import without a result")


def _path(reference: str) -> str:
    """Raises ImageNotFound for what can't be a reference, and as a path would lead to another route."""
    if not {"", ".", ".."}.isdisjoint(reference.split("/")):
        raise ImageNotFound(f"there is no image {reference!r}: that can't be a reference")
    return f"/v1/images/{quote(reference, safe='/:@')}"


def _open_source(source: str, format: Format) -> tuple[AsyncIterator[bytes], Format, int | None]:
    """The archive to send, what it is, and its bytes if they are known before. Raises InvalidArgument."""
    if source.startswith(DEBIAN):
        return _process_output(debian_command(source)), "tar", None
    path = Path(source)
    if path.is_dir():
        is_layout = (path / "oci-layout").is_file() and (path / "index.json").is_file()
        chosen: Format = format if format != "auto" else "oci-archive" if is_layout else "tar"
        return in_thread(pack_tree(path)), chosen, None
    if path.is_file():
        return in_thread(file_chunks(path)), format, path.stat().st_size
    raise InvalidArgument(f"{source!r} is neither a file nor a directory here", field="source")


def debian_command(source: str) -> list[str]:
    """The command that writes the tar of ``mmdebstrap:SUITE?include=…&variant=…&mirror=…`` to its output. Raises InvalidArgument."""
    suite, _, query = source.removeprefix(DEBIAN).partition("?")
    options = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
    variant = options.pop("variant", "minbase")
    include = options.pop("include", "")
    mirror = options.pop("mirror", None)
    if options:
        raise InvalidArgument(f"mmdebstrap: takes include, variant and mirror, not {', '.join(sorted(options))}", field="source")
    if mirror is not None and "://" not in mirror:
        raise InvalidArgument(f"the mirror {mirror!r} is no URL", field="source")
    if not suite or suite.startswith("-") or variant not in _VARIANTS:
        raise InvalidArgument(f"{source!r}: a suite is needed, and a variant of {', '.join(_VARIANTS)}", field="source")
    command = ["mmdebstrap", "--format=tar", f"--mode={'root' if os.geteuid() == 0 else 'unshare'}", f"--variant={variant}"]
    if include:
        command.append(f"--include={include}")
    command.append('--customize-hook=rm -rf "$1"/var/cache/apt/archives/*.deb "$1"/etc/hostname "$1"/etc/resolv.conf')
    return [*command, suite] if mirror is None else [*command, suite, "-", mirror]


async def _process_output(command: builtins.list[str]) -> AsyncGenerator[bytes, None]:
    """What a command writes. Raises InvalidArgument if it isn't installed, ImageError if it fails; ends with it."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=CHUNK
        )
    except FileNotFoundError:
        raise InvalidArgument(f"{command[0]} is not installed here: `apt-get install {command[0]}`", field="source") from None
    assert process.stdout is not None and process.stderr is not None
    complaint = asyncio.create_task(process.stderr.read())
    try:
        while chunk := await process.stdout.read(CHUNK):
            yield chunk
        if await process.wait() != 0:
            printed = (await complaint).decode(errors="replace")
            raise ImageError(f"{command[0]} failed: {printed[-COMPLAINT:]}")
    finally:
        complaint.cancel()
        if process.returncode is None:
            process.terminate()
            await process.wait()


def pack_tree(root: Path) -> Iterator[bytes]:
    """The content of directory ``root`` as a PAX archive with everything that a layer keeps: numeric owners, modes, times in nanoseconds,
    hardlinks, devices, xattrs."""
    return write_archive(root, _for_layer)


def _for_layer(member: tarfile.TarInfo, path: bytes, status: os.stat_result) -> tarfile.TarInfo:
    member.uid, member.gid = status.st_uid, status.st_gid
    member.pax_headers = {"mtime": _timestamp(status.st_mtime_ns), **_xattrs(path)}
    return member


def _timestamp(nanoseconds: int) -> str:
    """Nanoseconds since 1970 as PAX writes a time: a decimal fraction with its sign in front."""
    seconds, fraction = divmod(abs(nanoseconds), 10**9)
    return f"{'-' if nanoseconds < 0 else ''}{seconds}.{fraction:09}"


def _xattrs(path: bytes) -> dict[str, str]:
    """The xattrs of a file as PAX attributes, as GNU tar names them. Values are bytes in surrogate escapes. Those that the store drops
    anyway, and those that can't be read, are left out."""
    attributes = {}
    try:
        for name in os.listxattr(path, follow_symlinks=False):
            if name.startswith("user.") or name == "security.capability":
                value = os.getxattr(path, name, follow_symlinks=False)
                key = name.replace("%", "%25").replace("=", "%3D")
                attributes[f"SCHILY.xattr.{key}"] = value.decode("utf-8", "surrogateescape")
    except OSError:
        # A filesystem without xattrs, or one that vanished while we looked.
        pass
    return attributes
