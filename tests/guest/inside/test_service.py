"""The service on a host like this one: an old kernel, one tree of control groups. Runs in the guest, slowly.

One instance for all of them, and a root filesystem of a few programs: importing a whole Debian would take most of the time.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.cli.doctor import local_report
from dsec.demo import footprint
from dsec.demo.instance import Instance, running
from libdsec import DSecClient, DSecContainerRunArgs, DSecError, Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROGRAMS = ("sh", "cat", "dd", "head", "ls", "mkdir", "rm", "sleep", "stat", "sync", "tail", "true")
BASE, TOOLKIT, WORKSPACE = "base", "tool", "work"
SERVICE_UID = 60_100
"""Of both nodes, for they share a directory."""
DEADLINE_S = 60.0
CGROUPS = Path("/sys/fs/cgroup")


def small_root(root: Path) -> Path:
    """A root directory of a few programs of this machine and what they are linked to."""
    programs = [Path(found) for found in map(shutil.which, PROGRAMS) if found]
    assert len(programs) == len(PROGRAMS)
    linked = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=True).stdout
    (root / "usr/bin").mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for library in {word for word in linked.split() if word.startswith("/lib")}:
        target = root / "usr" / library[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    for program in programs:
        shutil.copy(program, root / "usr/bin")
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return root


@asynccontextmanager
async def node(name: str, store: Path) -> AsyncIterator[Instance]:
    """A service of its own. When it has ended nothing of it may be left."""
    async with running(name, scratch_mb=512, parent=Path("/var/tmp"), options=("--store", str(store)), service_uid=SERVICE_UID) as made:
        yield made
    left = footprint.take(made.marks).beyond(made.before)
    assert not left.total, left


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where nodes share images."""
    made = tmp_path_factory.mktemp("store")
    made.parent.chmod(0o755)
    made.chmod(0o755)
    os.chown(made, SERVICE_UID, SERVICE_UID)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def instance(store: Path) -> AsyncIterator[Instance]:
    async with node("first", store) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(instance: Instance, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DSecClient]:
    """Of an instance that has a base, a workspace and a toolkit."""
    home = tmp_path_factory.mktemp("images")
    tool, work = home / "tool", home / "work"
    tool.mkdir()
    (tool / "run").write_text("#!/bin/sh\necho the tool runs\n")
    (tool / "run").chmod(0o4755)
    work.mkdir()
    (work / "kept").write_text("from the workspace\n")
    (work / "removed").touch()
    async with DSecClient(instance.url, instance.api_key) as opened:
        await opened.images.import_(small_root(home / "base"), name=BASE)
        await opened.images.import_(tool, name=TOOLKIT, kind="toolkit", at="/opt/tool")
        await opened.images.import_(work, name=WORKSPACE, kind="workspace", at="/work")
        yield opened


def group(instance: Instance, sandbox: Sandbox) -> Path:
    """The sandbox's directory in the tree of control groups."""
    return CGROUPS / instance.marks.cgroup / sandbox.id


async def create(client: DSecClient, *, image: str = BASE, **more: object) -> Sandbox:
    limits = {"memory_limit_mb": 128, "disk_limit_mb": 64, "pids_limit": 64, "cpu_cores_limit": 0.5}
    return await client.run_container(DSecContainerRunArgs(container_image=image, **(limits | more)), timeout=DEADLINE_S)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sandbox(client: DSecClient) -> AsyncIterator[Sandbox]:
    """One for the tests that leave it as it was."""
    async with await create(client) as made:
        yield made


def kill(instance: Instance, *words: bytes) -> int:
    """kill -9 of the one process of the instance that was started with these words. Returns its pid."""
    commands = {pid: arguments(pid) for pid in footprint.owned_processes(instance.marks)}
    directory = os.fsencode(instance.marks.directory)
    # The other node's processes have the same user, and the supervisor's command line ends with the service's.
    own = {pid: {word.rsplit(b"/", 1)[-1] for word in command} for pid, command in commands.items() if directory in b" ".join(command)}
    pids = [pid for pid, names in own.items() if set(words) <= names and b"supervise" not in names]
    assert len(pids) == 1, (words, pids)
    os.kill(pids[0], signal.SIGKILL)
    return pids[0]


def arguments(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


async def test_doctor_finds_every_kernel_feature_that_nothing_starts_without(instance: Instance) -> None:
    findings = {finding.feature: finding for finding in local_report().findings}
    assert not [finding for finding in findings.values() if finding.state == "missing"]
    assert "v2" in findings["cgroup v2 tree"].detail and "(v2)" in findings["cgroup controllers"].detail
    older = ("EROFS from a file", "overlay layers by descriptor", "btrfs simple quotas", "idmapped tmpfs")
    assert {findings[feature].state for feature in older} == {"degraded"}


async def test_a_command_gives_its_output_and_exit_code(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")


async def test_limits_stand_in_the_sandboxs_group(instance: Instance, sandbox: Sandbox) -> None:
    files = {
        name: (group(instance, sandbox) / name).read_text().strip() for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")
    }
    assert files == {"memory.max": str(128 << 20), "memory.swap.max": "0", "pids.max": "64", "cpu.max": "50000 100000"}


async def test_a_processor_hog_is_held_to_its_share(instance: Instance, sandbox: Sandbox) -> None:
    await sandbox.exec("while :; do :; done", timeout=2)
    throttled = re.search(r"^nr_throttled (\d+)$", (group(instance, sandbox) / "cpu.stat").read_text(), re.MULTILINE)
    assert throttled and int(throttled[1]) > 0


async def test_memory_limit_kills_the_hog_and_says_so(client: DSecClient) -> None:
    async with await create(client, memory_limit_mb=64, cpu_cores_limit=2) as small:
        # The last command of a pipe gives the status of the whole.
        result = await small.exec("head -c 200m /dev/zero | tail", timeout=DEADLINE_S)
        assert result.exit_code == 137 and result.oom_killed
        assert (await small.metrics()).oom_kills > 0
        assert (await small.exec(["true"])).exit_code == 0


async def test_processes_are_counted(sandbox: Sandbox) -> None:
    bomb = await sandbox.exec("i=0; while [ $i -lt 100 ]; do sleep 1000 & i=$((i+1)); done", timeout=DEADLINE_S)
    assert bomb.exit_code != 0 and "fork" in bomb.stderr.lower(), bomb
    assert (await sandbox.exec(["true"])).exit_code == 0, "what it left was killed with it"


async def test_a_timeout_ends_the_whole_group_of_a_command(instance: Instance, sandbox: Sandbox) -> None:
    result = await sandbox.exec("(sleep 1000 &) ; sleep 1000 & echo started; wait", timeout=2)
    assert result.timed_out and result.stdout == "started\n"
    assert not [entry for entry in await sandbox.processes() if "sleep" in entry.argv]


async def test_a_full_quota_group_answers_edquot(sandbox: Sandbox) -> None:
    full = await sandbox.exec("dd if=/dev/zero of=/big bs=1M count=100", timeout=DEADLINE_S)
    assert full.exit_code != 0 and "quota exceeded" in full.stderr.lower(), full
    held = (await sandbox.metrics()).disk
    assert 48 << 20 < held <= 64 << 20, held
    await sandbox.exec("rm /big && echo small > /small && sync", check=True, timeout=DEADLINE_S)


async def test_layers_stack_from_loop_devices(instance: Instance, client: DSecClient) -> None:
    async with await create(client, workspace=WORKSPACE, toolkits=(TOOLKIT,)) as layered:
        said = await layered.exec("/opt/tool/run && stat -c '%u %a' /opt/tool/run && cat /work/kept && rm /work/removed && ls /work")
        assert said.stdout == "the tool runs\n0 4755\nfrom the workspace\nkept\n", said
        mounts = (await layered.exec(["cat", "/proc/self/mountinfo"])).stdout
        assert str(instance.marks.directory) not in mounts, mounts
    assert instance.footprint().loop_devices > 1


async def test_a_packed_and_a_forked_sandbox_hold_what_it_wrote(instance: Instance, client: DSecClient) -> None:
    async with await create(client) as source:
        await source.exec("echo written > /file && rm /etc/passwd", check=True)
        packed = await source.pack_diff("packed")
        assert packed.freeze_ms < 2000
        made = await source.fork(1, timeout=DEADLINE_S)
        copies = [await create(client, image="packed"), *made]
        for copy in copies:
            async with copy:
                assert (await copy.exec("cat /file; ls /etc")).stdout == "written\n"
        assert (group(instance, source) / "cgroup.freeze").read_text() == "0\n"
        assert (await source.exec("echo on")).stdout == "on\n"


async def test_a_forks_disk_limit_covers_what_it_shares_once(client: DSecClient) -> None:
    async with await create(client) as source:
        await source.exec("head -c 20000000 /dev/zero > /shared && sync", check=True, timeout=DEADLINE_S)
        (fork,) = await source.fork(1, timeout=DEADLINE_S)
        async with fork:
            await fork.exec("head -c 30000000 /dev/zero > /own && sync", check=True, timeout=DEADLINE_S)
            held = (await fork.metrics()).disk
            assert 50_000_000 <= held < 55_000_000, held
            full = await fork.exec("head -c 20000000 /dev/zero > /more", timeout=DEADLINE_S)
            assert full.exit_code != 0 and "quota exceeded" in full.stderr.lower(), full


async def test_a_killed_service_and_a_killed_spawner_leave_sandboxes_running(instance: Instance, client: DSecClient) -> None:
    async with await create(client) as survivor:
        await survivor.run_shell("x=kept")
        process = await survivor.start("echo begun; sleep 1000")
        kill(instance, b"dsec.serve")
        await answering(client)
        kill(instance, b"dsec-spawner", b"serve")
        assert (await survivor.run_shell("echo $x")).stdout == "kept\n"
        assert await anext(aiter((await survivor.process(process.exec_id)).stdout)) == b"begun\n"
        async with await create(client) as after:
            assert (await after.exec("echo new")).stdout == "new\n"
    # By a spawner that found it again.
    await gone(group(instance, survivor))


async def gone(directory: Path) -> None:
    """Waits for the end of a control group: the spawner removes it when endings pause."""
    end = time.monotonic() + DEADLINE_S
    while directory.exists():
        assert time.monotonic() < end, f"{directory} stayed"
        await asyncio.sleep(0.1)


async def answering(client: DSecClient) -> None:
    """Waits until the service takes requests again."""
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            [info async for info in client.list(page_size=1)]
            return
        except DSecError:
            assert time.monotonic() < end, "the service did not come back"
            await asyncio.sleep(0.2)


async def test_a_layer_is_read_on_demand_and_the_death_of_who_serves_it_costs_a_wait(client: DSecClient, store: Path) -> None:
    async with node("second", store) as other, DSecClient(other.url, other.api_key) as its_client:
        async with await create(its_client) as sandbox:
            assert (await sandbox.exec("echo lazy && ls /etc")).stdout == "lazy\npasswd\n"
        cache = other.marks.directory / "state" / "blobfs"
        assert list(cache.glob("*.idx")), "nothing came through blobfs"
        kill(other, b"dsec-blobfs")
        end = time.monotonic() + 3 * DEADLINE_S
        while True:
            try:
                async with await create(its_client) as after:
                    assert (await after.exec("cat /etc/passwd", timeout=DEADLINE_S)).stdout.startswith("root:")
                break
            except DSecError:
                assert time.monotonic() < end, other.log.read_text()
                await asyncio.sleep(0.5)


async def test_an_ended_sandbox_tells_what_it_used_and_leaves_nothing(instance: Instance, client: DSecClient) -> None:
    ended = await create(client)
    await ended.exec("head -c 20000000 /dev/zero > /data && sync", check=True, timeout=DEADLINE_S)
    record = await ended.stop()
    assert record.state == "stopped" and record.exit is not None
    assert record.exit.cpu_s > 0 and record.exit.memory_peak > 1 << 20 and record.exit.disk_bytes >= 20_000_000, record.exit
    await gone(group(instance, ended))
    assert footprint.sandbox_agents(instance.marks) == 1, "only the one that the tests share"
