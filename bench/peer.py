"""The peer: a dockerd of the benchmark's own, on the same root filesystem, with ``--network none``."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.claim import WrongAnswer
from dsec.demo import lifetime

IMAGE = "bench:root"
RUN_MS = 207.0
"""What one ``docker run --network none --rm IMAGE true`` is known to take on the reference machine (2 cores, Linux 6.18, Docker 20.10)."""
EXEC_MS = 64.0
"""What one ``docker exec CONTAINER true`` is known to take there."""
PARALLEL_RUNS_PER_S = 9.4
"""How many ``docker run -d`` a second it is known to reach there, eight at a time."""
PARALLEL = 8
"""Docker clients at once when its rate is measured: more make it slower."""
TOLERANCE = 2.0
"""A peer slower or faster than its known figure by more than this factor makes the run worthless: a busy machine, or not the real peer."""
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 30.0


def strange(what: str, measured: float, known: float) -> list[str]:
    """A complaint if the peer's figure is outside half to twice the known one, else nothing."""
    if known / TOLERANCE <= measured <= known * TOLERANCE:
        return []
    return [f"the peer's {what} is {measured:.1f}, outside half to twice its known {known:.1f}"]


@dataclass(frozen=True)
class Docker:
    """A running dockerd with the image loaded."""

    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "DOCKER_HOST": f"unix://{self.directory}/socket", "DOCKER_CONFIG": f"{self.directory}/client"}

    async def call(self, *arguments: str) -> float:
        """Runs the docker client to its end, output dropped; seconds that it took. Raises WrongAnswer if it fails."""
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            _client(),
            *arguments,
            env=self.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, complaint = await process.communicate()
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        if process.returncode != 0:
            raise WrongAnswer(f"docker {' '.join(arguments)}: {complaint.decode('utf-8', 'replace').strip()}")
        return time.perf_counter() - started

    async def run_true(self) -> float:
        """One whole container: made, ``true`` run in it, removed. Seconds."""
        return await self.call("run", "--rm", "--network", "none", IMAGE, "true")

    async def start(self, name: str) -> float:
        """Starts a container that stays. Seconds."""
        return await self.call("run", "-d", "--name", name, "--network", "none", IMAGE, "sleep", "infinity")

    async def exec_true(self, name: str) -> float:
        """``true`` in a live container. Seconds."""
        return await self.call("exec", name, "true")

    async def build(self, context: Path, dockerfile: str, tag: str) -> float:
        """``docker build`` of a directory. Seconds."""
        with tempfile.NamedTemporaryFile("w", suffix=".Dockerfile") as file:
            file.write(dockerfile)
            file.flush()
            return await self.call("build", "--network", "none", "-q", "-f", file.name, "-t", tag, str(context))

    async def remove(self, names: Sequence[str]) -> None:
        if names:
            await self.call("rm", "-f", *names)

    async def remove_all(self) -> None:
        """Removes every container there is."""
        output = await _output(_client(), "ps", "-aq", environment=self.environment)
        await self.remove(output.split())


@asynccontextmanager
async def running(root_tar: Path, parent: Path) -> AsyncIterator[Docker]:
    """A :func:`daemon` with the root filesystem loaded."""
    async with daemon(parent) as docker:
        await docker.call("import", str(root_tar), IMAGE)
        await docker.run_true()  # the first run pays for the image's first use
        yield docker


@asynccontextmanager
async def daemon(parent: Path, *, registry: str | None = None) -> AsyncIterator[Docker]:
    """Starts dockerd (and its containerd) below ``parent``, empty; removes every trace when the block is left. ``registry``: the address of
    one that it may use without TLS."""
    with lifetime.directory("docker", "docker", parent, _remove_cgroups) as directory:
        docker = Docker(directory)
        try:
            process = await _start(directory, () if registry is None else ("--insecure-registry", registry))
            try:
                await _answering(process, docker)
                yield docker
            finally:
                await asyncio.shield(_stop(process, docker))
        finally:
            _remove_cgroups(directory)


def _client() -> str:
    """Debian's client beside Debian's daemon, where there are several."""
    return "/usr/bin/docker" if os.access("/usr/bin/docker", os.X_OK) else "docker"


async def _start(directory: Path, options: Sequence[str]) -> asyncio.subprocess.Process:
    (directory / "client").mkdir()
    (directory / "daemon.json").write_text("{}")
    with (directory / "log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *lifetime.with_parent("TERM", "dockerd"),
            *("--config-file", directory / "daemon.json"),
            *("--data-root", directory / "data"),
            *("--exec-root", directory / "exec"),
            *("--pidfile", directory / "pid"),
            *("--host", f"unix://{directory}/socket"),
            *("--exec-opt", "native.cgroupdriver=cgroupfs"),
            *("--cgroup-parent", f"/{directory.name}"),
            "--bridge=none",
            "--iptables=false",
            "--ip6tables=false",
            *options,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal reaches us alone; we end it in order
        )


async def _answering(daemon: asyncio.subprocess.Process, docker: Docker) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            await docker.call("version")
            return
        except WrongAnswer as error:
            if daemon.returncode is not None or time.monotonic() > deadline:
                log = (docker.directory / "log").read_bytes()[-4_000:].decode("utf-8", "replace")
                raise WrongAnswer(f"dockerd doesn't answer ({error}):\n{log}") from error
            await asyncio.sleep(0.1)


async def _stop(daemon: asyncio.subprocess.Process, docker: Docker) -> None:
    if daemon.returncode is not None:
        return
    with suppress(WrongAnswer):
        await docker.remove_all()
    daemon.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(daemon.wait(), STOP_DEADLINE_S)
    except TimeoutError:
        daemon.kill()
        await daemon.wait()


def _remove_cgroups(directory: Path) -> None:
    """Removes the parent cgroup, which dockerd leaves in every hierarchy."""
    for hierarchy in Path("/sys/fs/cgroup").glob(f"*/{directory.name}"):
        for group, _, _ in os.walk(hierarchy, topdown=False):
            with suppress(OSError):
                os.rmdir(group)
    with suppress(OSError):
        os.rmdir(f"/sys/fs/cgroup/{directory.name}")


async def _output(*command: str, environment: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await process.communicate()
    return output.decode()
