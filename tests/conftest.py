"""A real instance for the tests that need one: started as a user starts it, watched from outside, and proven to leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dsec.demo import uids
from dsec.images.debian import debian_root_tar
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

ROOT = Path(__file__).resolve().parent.parent
BASE_PACKAGES = ("python3", "procps", "adduser", "passwd")
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 60.0
MAX_SANDBOXES = 500
"""Of an instance of the tests: sixteen of them have room for their uids."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def uid_options(sandboxes: int = MAX_SANDBOXES) -> tuple[str, ...]:
    """Options that give an instance uids which no other has."""
    own = uids.unused(uids.OF_TESTS, sandboxes)
    assert own is not None, "too many instances of tests run at once"
    return ("--uid-base", str(own.start), "--max-sandboxes", str(sandboxes))


@dataclass
class Instance:
    """One running `dsec up`, with everything that it may own on this machine found by name."""

    home: Path
    run_dir: Path
    cgroup: str
    url: str
    api_key: str
    process: subprocess.Popen[bytes]
    environment: dict[str, str] = field(default_factory=dict)

    def cgroup_dirs(self) -> list[Path]:
        """The sandboxes' cgroups in every hierarchy, as the kernel has them."""
        roots = [root for root in (Path("/sys/fs/cgroup") / self.cgroup, *Path("/sys/fs/cgroup").glob(f"*/{self.cgroup}")) if root.is_dir()]
        return sorted(child for root in roots for child in root.iterdir() if child.is_dir() and child.name.startswith("sb-"))

    def sockets(self) -> list[Path]:
        directory = self.run_dir / "c"
        return sorted(directory.iterdir()) if directory.is_dir() else []

    def pids(self, name: str) -> list[int]:
        """Processes of this instance by their command's name (they carry the run directory in their arguments or environment)."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().split(b"\0")
                if str(self.run_dir).encode() in b" ".join(command) and any(name.encode() in word for word in command):
                    found.append(int(entry.name))
        return sorted(found)

    def chronus_pids(self, sandbox: str) -> list[int]:
        """The sandbox's processes outside any command: its first one."""
        groups = [path for path in self.cgroup_dirs() if path.name == sandbox and "pids" in str(path)]
        return sorted({int(line) for path in groups for line in (path / "cgroup.procs").read_text().split()})

    def leftovers(self) -> list[str]:
        """What sandboxes of this instance still hold in the kernel; empty when none lives."""
        return [str(path) for path in self.cgroup_dirs() + self.sockets()]

    async def wait_clean(self, deadline_s: float = 20.0) -> None:
        """Waits until no sandbox object is left, or fails naming what is."""
        end = time.monotonic() + deadline_s
        while left := self.leftovers():
            if time.monotonic() > end:
                raise AssertionError(f"still there after {deadline_s} s: {left[:10]} ({len(left)} in all)")
            await asyncio.sleep(0.05)


def start_instance(home: Path, *, scratch_mb: int = 8192, extra: tuple[str, ...] = ()) -> Instance:
    """Runs `dsec up` on directories, ports and cgroups of its own; returns when it is ready."""
    run_dir, cgroup = home / "run", f"dsec-test-{os.getpid()}-{home.name[-8:]}".lower().replace("_", "-")
    config = home / "local.json"
    # Once more in the same place: sandboxes that wait there keep their uids.
    uids_file = home / "uids"
    if not uids_file.exists():
        uids_file.write_text(" ".join(uid_options()))
    own_uids = uids_file.read_text().split()
    port = free_port()
    environment = {**os.environ, "DSEC_CONFIG": str(config)}
    for name in ("DSEC_URL", "DSEC_API_KEY", "DSEC_PROJECT"):
        environment.pop(name, None)
    log = (home / "up.log").open("wb")
    command = [sys.executable, "-m", "dsec.cli", "up", "--state-dir", str(home / "state"), "--run-dir", str(run_dir), "--port", str(port)]
    command += ["--ports-port", str(free_port()), "--cgroup", cgroup, "--scratch-mb", str(scratch_mb), *own_uids, *extra]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    end = time.monotonic() + START_DEADLINE_S
    while not config.exists():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise RuntimeError(f"dsec up did not come up (exit {process.poll()}):\n{(home / 'up.log').read_text()[-4000:]}")
        time.sleep(0.05)
    local = json.loads(config.read_text())
    return Instance(home, run_dir, cgroup, local["url"], local["api_key"], process, environment)


def stop_instance(instance: Instance) -> list[str]:
    """Ctrl-C, as a user would; returns what is left of the instance on the machine, in words."""
    instance.process.send_signal(signal.SIGINT)
    try:
        instance.process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(instance.process.pid, signal.SIGKILL)
        return [f"dsec up did not end within {STOP_DEADLINE_S} s of Ctrl-C"]
    left = instance.leftovers()
    left += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(instance.home) in line]
    left += [f"pid {pid}" for pid in instance.pids("")]
    left += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{instance.cgroup}")]
    loops = subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout
    left += [line for line in loops.splitlines() if str(instance.home) in line]
    return left


@contextlib.contextmanager
def node_at(home: Path, *options: str) -> Iterator[Instance]:
    """An instance in a directory that is made for it, with more options for `dsec up`. At the end nothing of it may be left."""
    home.mkdir(mode=0o755)
    running = start_instance(home, scratch_mb=2048, extra=options)
    try:
        yield running
    finally:
        left = stop_instance(running)
        if left:
            print((home / "up.log").read_text()[-4000:])
    assert not left, left


@contextlib.contextmanager
def own_instance(tar: Path, image: str, *, scratch_mb: int = 8192) -> Iterator[Instance]:
    """An instance that nobody else uses, whose parts may be killed, with ``tar`` imported as ``image``. At the end nothing of it may be
    left."""
    require_root()
    with tempfile.TemporaryDirectory(prefix="dsec-own-", ignore_cleanup_errors=True) as home:
        os.chmod(home, 0o755)
        running = start_instance(Path(home), scratch_mb=scratch_mb)
        try:
            asyncio.run(load_base(running, tar, image))
            yield running
        finally:
            left = stop_instance(running)
            if left:
                print((Path(home) / "up.log").read_text()[-6000:])
        assert not left, left


async def load_base(instance: Instance, tar: Path, image: str) -> None:
    """Imports a base image."""
    async with DSecClient(instance.url, instance.api_key) as client:
        await client.images.import_(tar, name=image, kind="base")


def require_root() -> None:
    if os.geteuid() != 0:
        pytest.fail("these tests make real namespaces, mounts and cgroups: run them as root")


@pytest.fixture(scope="session")
def instance() -> Iterator[Instance]:
    """The instance that the tests share. At the end nothing of it may be left."""
    require_root()
    with tempfile.TemporaryDirectory(prefix="dsec-test-", ignore_cleanup_errors=True) as home:
        os.chmod(home, 0o755)
        running = start_instance(Path(home))
        try:
            yield running
        finally:
            left = stop_instance(running)
            log = (Path(home) / "up.log").read_text()
            if left:
                print(log[-4000:])
        assert not left, left


@pytest.fixture
async def client(instance: Instance) -> AsyncIterator[DSecClient]:
    """A client of the shared instance; after the test its sandboxes are stopped and the kernel is looked at."""
    async with DSecClient(instance.url, instance.api_key) as opened:
        yield opened
        for state in ("creating", "running", "failed"):
            async for info in opened.list(state=state):
                await (await opened.attach(info.id)).stop()
        await instance.wait_clean()


@pytest.fixture(scope="session")
def base_tar() -> Path:
    """A minimal Debian root with python3, cached under .cache."""
    return debian_root_tar(BASE_PACKAGES, cache=ROOT / ".cache" / "roots")


@pytest.fixture(scope="session")
def base_image(instance: Instance, base_tar: Path) -> str:
    """The name of a base image in the shared instance."""

    async def load() -> str:
        async with DSecClient(instance.url, instance.api_key) as opened:
            await opened.images.import_(base_tar, name="debian:test", kind="base")
        return "debian:test"

    return asyncio.run(load())


@pytest.fixture
async def sandbox(client: DSecClient, base_image: str) -> AsyncIterator[Sandbox]:
    """One running sandbox of the base image."""
    made = await client.run_container(DSecContainerRunArgs(container_image=base_image, memory_limit_mb=512, disk_limit_mb=512), timeout=60)
    yield made
    await made.stop()
