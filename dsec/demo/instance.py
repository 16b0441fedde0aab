"""A service of one's own: started by ``dsec up`` in its own directories, with its own ports, cgroup and uids, gone afterwards."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dsec.demo import footprint, lifetime, uids
from libdsec.config import LocalConfig

START_DEADLINE_S = 120.0
"""For the first answer of the service: making the scratch filesystem is the longest part of it."""
STOP_DEADLINE_S = 90.0
"""For an orderly end with thousands of sandboxes still live."""
POLL_S = 0.02
MAX_SANDBOXES = 4_000
"""So many have uids of their own."""
SERVICE_UIDS = range(60_100, 60_900)
"""Service users of such instances: numbers that Debian leaves unassigned."""


class InstanceError(Exception):
    """The service didn't start or ended by itself."""


@dataclass
class Instance:
    """A running service."""

    url: str
    api_key: str
    nearest: str
    """The address that clients on this machine find by themselves: of a Unix socket."""
    marks: footprint.Marks
    before: footprint.Footprint
    """What bore its marks before it was started."""
    log: Path
    process: asyncio.subprocess.Process

    @property
    def service_pid(self) -> int:
        """The process that holds apiserver and edge: the biggest one that runs as the service user."""
        own = [pid for pid in footprint.owned_processes(self.marks) if footprint.effective_uid(pid) == self.marks.service_uid]
        return max(own, key=footprint.resident)

    def footprint(self) -> footprint.Footprint:
        """What it holds in the kernel now."""
        return footprint.take(self.marks)


@asynccontextmanager
async def running(
    name: str, *, scratch_mb: int, parent: Path | None = None, options: Sequence[str] = (), service_uid: int | None = None
) -> AsyncIterator[Instance]:
    """Starts an instance and ends it when the block is left, however that happens. Needs root.

    ``name`` (short, ``[a-z0-9-]``) goes into its directory's and its cgroup's name; ``scratch_mb`` is allocated for writable layers;
    ``parent`` is where its directory is made (the system's temporary directory); ``options`` are further ones of ``dsec up``;
    ``service_uid`` is given where several share a directory as their store, else each has a service user of its own. Raises
    InstanceError if it doesn't answer in time. What is raised within the block gets the end of the service's log as a note.
    """
    with lifetime.directory("instance", name, parent, _end_left) as base:
        os.chmod(base, 0o711)  # the service user passes through to what is its own
        token = secrets.token_hex(3)
        own_uids = uids.unused(uids.OWN, MAX_SANDBOXES)
        if own_uids is None:
            raise InstanceError("too many such instances run already; each needs a uid range of its own")
        service = SERVICE_UIDS[secrets.randbelow(len(SERVICE_UIDS))] if service_uid is None else service_uid
        marks = footprint.Marks(base, f"dsec-{name}-{token}", own_uids, service)
        before = footprint.take(marks)
        process = await _start(marks, scratch_mb, options)
        try:
            config = await _answering(process, base)
            yield Instance(config.url, config.api_key or "", config.nearest, marks, before, base / "log", process)
        except Exception as error:
            error.add_note(f"the end of the service's log:\n{_end_of(base / 'log')}")
            raise
        finally:
            await asyncio.shield(_stop(process))


async def _start(marks: footprint.Marks, scratch_mb: int, options: Sequence[str]) -> asyncio.subprocess.Process:
    base = marks.directory
    arguments = {
        "--state-dir": base / "state",
        "--run-dir": base / "run",
        "--cgroup": marks.cgroup,
        "--uid-base": marks.uids.start,
        "--max-sandboxes": MAX_SANDBOXES,
        "--service-uid": marks.service_uid,
        "--scratch-mb": scratch_mb,
        "--port": _free_port(),
        "--ports-port": _free_port(),
    }
    with (base / "log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *lifetime.with_parent("INT", sys.executable, "-m", "dsec.cli", "up"),
            *(str(word) for pair in arguments.items() for word in pair),
            *options,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "DSEC_CONFIG": str(base / "local.json")},
            start_new_session=True,  # Ctrl-C in the terminal reaches us alone; we end it in order
        )


async def _answering(process: asyncio.subprocess.Process, base: Path) -> LocalConfig:
    """Waits until the service has told its address and key and takes connections."""
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if process.returncode is not None:
            raise InstanceError(f"`dsec up` ended with status {process.returncode}")
        try:
            config = msgspec.json.decode((base / "local.json").read_bytes(), type=LocalConfig)
            host, _, port = config.url.removeprefix("http://").rstrip("/").rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
        except (OSError, msgspec.DecodeError):
            await asyncio.sleep(POLL_S)
            continue
        writer.close()
        return config
    raise InstanceError(f"`dsec up` didn't answer within {START_DEADLINE_S:.0f} s")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        await asyncio.wait_for(process.wait(), STOP_DEADLINE_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _end_left(base: Path) -> None:
    """Ends the instance of a run that was killed, and sweeps what it had."""
    if (base / "run").exists():
        command = [sys.executable, "-m", "dsec.cli", "down", "--run-dir", str(base / "run"), "--state-dir", str(base / "state")]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_of(log: Path, size: int = 4_000) -> str:
    return log.read_bytes()[-size:].decode("utf-8", "replace")
