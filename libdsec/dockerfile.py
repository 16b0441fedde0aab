"""Dockerfiles: built on this machine by the builder that is installed, and given away as an archive. Nothing of the build stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Literal

from libdsec.errors import ImageError, InvalidArgument

Archive = Literal["oci-archive", "docker-archive"]

FILE_NAMES = ("Containerfile", "Dockerfile")
"""In the order in which buildah looks."""
COMPLAINT = 4000
"""Characters of what a failed builder printed that its error shows."""
TERMINATE_S = 10.0
"""How long an interrupted builder may take to clean up."""


@contextlib.asynccontextmanager
async def build_archive(directory: Path, file: Path | None, arguments: Mapping[str, str]) -> AsyncGenerator[tuple[Path, Archive], None]:
    """Builds ``file`` (None: the directory's own) with ``directory`` as its context. Gives the archive, and what it is, until the block
    ends.

    Raises InvalidArgument where something is missing, ImageError when the build fails.
    """
    file = _dockerfile(directory, file)
    for name in arguments:
        if not name or "=" in name:
            raise InvalidArgument(f"{name!r} is no name of a build argument", field="build_args")
    builder = shutil.which("buildah") or shutil.which("docker")
    if builder is None:
        raise InvalidArgument("neither buildah nor docker is installed here: `apt-get install buildah`", field="directory")
    tag = f"localhost/dsec-build:{token_hex(8)}"
    options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    with tempfile.TemporaryDirectory(prefix="dsec-build-") as scratch:
        archive = Path(scratch) / "image.tar"
        kind: Archive
        if Path(builder).name == "buildah":
            kind = "oci-archive"
            build = [builder, "build-using-dockerfile", "--format=oci", f"--tag={tag}", f"--file={file}", *options, str(directory)]
            export = [builder, "push", "--quiet", tag, f"oci-archive:{archive}"]
            remove = [builder, "rmi", "--force", tag]
        else:
            kind = "docker-archive"
            build = [builder, "build", f"--tag={tag}", f"--file={file}", *options, str(directory)]
            export = [builder, "save", f"--output={archive}", tag]
            remove = [builder, "rmi", "--force", tag]
        try:
            await _run(build)
            await _run(export)
        finally:
            # Also after a failure: a build of several stages may have come as far as the tag. There may be nothing to remove.
            with contextlib.suppress(ImageError):
                await asyncio.shield(_run(remove))
        yield archive, kind


def _dockerfile(directory: Path, file: Path | None) -> Path:
    if not directory.is_dir():
        raise InvalidArgument(f"{str(directory)!r} is no directory here", field="directory")
    if file is None:
        file = next((directory / name for name in FILE_NAMES if (directory / name).is_file()), None)
        if file is None:
            raise InvalidArgument(f"{str(directory)!r} holds no {' and no '.join(FILE_NAMES)}: name the file", field="file")
    if not file.is_file():
        raise InvalidArgument(f"{str(file)!r} is no file here", field="file")
    return file.resolve()


async def _run(command: Sequence[str]) -> None:
    """Runs a builder to its end. Raises ImageError with what it printed last."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    printed = ""
    try:
        while chunk := await process.stdout.read(1 << 16):
            printed = (printed + chunk.decode(errors="replace"))[-COMPLAINT:]
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), TERMINATE_S)
            except TimeoutError:
                process.kill()
                await process.wait()
    if status != 0:
        raise ImageError(f"`{Path(command[0]).name} {command[1]}` failed (status {status}):\n{printed.strip()}")
