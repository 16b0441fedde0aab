"""Tar to layer: runs ``dsec-mklayer``, the only maker of what the kernel mounts, and the judge of what other nodes' are said to have made.

The program confines itself before it reads a byte; here it gets its limits and a working directory.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dsec.images.blobs import BlobDirectory, digest_of
from dsec.images.limits import ImportLimits
from dsec.images.threads import to_end
from libdsec.errors import DSecError, ImageError, NoCapacity, Unavailable
from libdsec.schema import LayerInfo

PROGRAM = "dsec-mklayer"
CONVERTER_VERSION = 4
"""Part of the key under which a conversion is remembered. Raise it when the same archive gives another layer than before."""
STDERR_LIMIT = 4096
"""Bytes of the program's complaint that are kept."""
_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Nothing of ours. Huge pages, which glibc 2.35 and later know how to ask for, save a tenth of the time: a tree is many small pieces."""
_META, _BLOB = "layer.meta", "layer.blob"
"""What the program makes in a workspace."""
_REFUSED, _SYSTEM = 1, 3
"""Exit codes of the program: the archive's fault, the machine's fault."""


class Report(msgspec.Struct, kw_only=True):
    """What the program prints: digests in hexadecimal, sizes in bytes."""

    meta: str
    meta_bytes: int
    blob: str | None
    blob_bytes: int
    entries: int
    extra_ids: tuple[int, ...]
    unnamed: int = 0
    dropped_xattrs: int
    removed: tuple[tuple[int, int], ...] = ()
    """Of a directory: entries and bytes that each glob kept out."""


@dataclass(frozen=True)
class Converter:
    """Makes layers of archives that lie in a workspace, and blobs of layers."""

    program: Path | None
    """None: looked for when it is needed first."""
    blobs: BlobDirectory
    limits: ImportLimits

    async def convert(
        self, archives: Sequence[Path], at: str, workspace: Path, pin: Callable[[LayerInfo], None], below: Sequence[LayerInfo] = ()
    ) -> LayerInfo:
        """One layer of ``archives`` (lowest first), everything below ``at``. Its blobs are in the store when this returns, and ``pin`` was
        called before they got there. ``below``: layers under it, lowest first, whose blobs are whole in the store; the archives may have
        hard links to their files and names that lead through their symbolic links.

        Raises ImageError for what the archive is to blame for, NoCapacity when the disk is full. Cancelled, it ends the program and leaves
        nothing.
        """
        return await self._make(["--at", at, *self._files("--below", below), *map(str, archives)], workspace, pin)

    async def merge(self, layers: Sequence[LayerInfo], workspace: Path, pin: Callable[[LayerInfo], None]) -> LayerInfo:
        """One layer with what an overlay of ``layers`` (lowest first), whose blobs are whole in the store, shows. Raises and leaves what
        :meth:`convert` does."""
        return await self._make(self._files("--layer", layers), workspace, pin)

    async def cover(self, layers: Sequence[LayerInfo], workspace: Path, pin: Callable[[LayerInfo], None]) -> LayerInfo | None:
        """A layer of directories alone, which on top of ``layers`` (lowest first; their metadata is in the store) gives those that upper
        layers only pass through the owner, mode, time and xattrs that lower ones say. None: that isn't needed. Raises and leaves what
        :meth:`convert` does."""
        paths = [word for layer in layers for word in ("--cover", str(self.blobs.path(layer.digest)))]
        report = await self._report(paths, workspace)
        return None if report.entries == 0 else await self._commit(report, workspace, pin)

    async def check(self, meta: Path, layer: LayerInfo) -> None:
        """Sees to it that a metadata file which came from elsewhere is, byte by byte, what the program writes for some tree, and that it is
        this layer's, by its digest and by what its manifest says of it: only then may the kernel see it. Raises ImageError. Cancelled, it
        ends the program."""
        try:
            found = layer_of(await self._run(["--check", str(meta)], meta.parent))
        except (ImageError, _Died) as error:
            raise ImageError(f"the metadata of {layer.digest} is broken or forged: {error.message}") from error
        if found.digest != layer.digest:
            raise ImageError(f"the metadata of {layer.digest} has another digest: it is broken or forged")
        if found != msgspec.structs.replace(layer, index=None, diff=False):
            raise ImageError(f"the metadata of {layer.digest} is refused: its manifest says something else of it than it does itself")

    def _files(self, option: str, layers: Sequence[LayerInfo]) -> list[str]:
        arguments: list[str] = []
        for layer in layers:
            arguments += [option, str(self.blobs.path(layer.digest))]
            if layer.blob is not None:
                arguments += ["--data", str(self.blobs.path(layer.blob))]
        return arguments

    async def _make(self, sources: Sequence[str], workspace: Path, pin: Callable[[LayerInfo], None]) -> LayerInfo:
        return await self._commit(await self._report(sources, workspace), workspace, pin)

    async def _report(self, sources: Sequence[str], workspace: Path) -> Report:
        """Makes the two files in the workspace."""
        meta, blob = workspace / _META, workspace / _BLOB
        for leftover in (meta, blob):
            leftover.unlink(missing_ok=True)
        return await self._run(["--meta", str(meta), "--blob", str(blob), *sources], workspace)

    async def _commit(self, report: Report, workspace: Path, pin: Callable[[LayerInfo], None]) -> LayerInfo:
        layer = layer_of(report)
        pin(layer)
        # The metadata comes last: where it is, its data is.
        files = [] if layer.blob is None else [(workspace / _BLOB, layer.blob)]
        await to_end(lambda: self.blobs.commit([*files, (workspace / _META, layer.digest)]))
        return layer

    async def _run(self, work: Sequence[str], workspace: Path) -> Report:
        limits = [
            *("--max-entries", str(self.limits.entries)),
            *("--max-bytes", str(self.limits.unpacked)),
            *("--max-meta", str(self.limits.metadata)),
        ]
        process = await asyncio.create_subprocess_exec(
            self.program or find_program(),
            *limits,
            *work,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_ENVIRONMENT,
            cwd=workspace,
        )
        try:
            output, complaint = await process.communicate()
        except BaseException:
            if process.returncode is None:
                process.kill()
                await process.wait()
            raise
        if process.returncode != 0:
            raise _failure(process.returncode, complaint[:STDERR_LIMIT].decode("utf-8", "replace").strip())
        return msgspec.json.decode(output, type=Report)


def layer_of(report: Report) -> LayerInfo:
    """The layer that was reported."""
    return LayerInfo(
        digest=digest_of(report.meta),
        blob=None if report.blob is None else digest_of(report.blob),
        meta_bytes=report.meta_bytes,
        blob_bytes=report.blob_bytes,
        extra_ids=report.extra_ids,
        unnamed=report.unnamed,
    )


class _Died(DSecError):
    """A signal ended the program: it went beyond its limits, or it is at fault."""


def _failure(status: int | None, complaint: str) -> DSecError:
    if status == _REFUSED:
        return ImageError(complaint)
    if status == _SYSTEM and os.strerror(28) in complaint:
        return NoCapacity(f"the disk of the image store is full: {complaint}", reason="disk")
    kind = _Died if status is not None and status < 0 else DSecError
    return kind(f"{PROGRAM} failed (status {status}): {complaint or 'it said nothing'}")


def find_program() -> Path:
    """The converter: in ``DSEC_BIN``, beside the package, or on the path. Raises Unavailable that says how to get it."""
    checkout = Path(__file__).resolve().parents[2]
    directories = [Path(path) for path in (os.environ.get("DSEC_BIN"), str(checkout / ".cache/native/bin")) if path]
    for directory in directories:
        if os.access(directory / PROGRAM, os.X_OK):
            return directory / PROGRAM
    found = shutil.which(PROGRAM)
    if found is None:
        raise Unavailable(f"{PROGRAM} is neither in {directories[0]} nor on the path: build it with `./run setup`")
    return Path(found)
