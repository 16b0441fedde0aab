"""Sandboxes that become images, and the start of other sandboxes: what is seen there is what was seen here."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, DSecError, PackResult, Sandbox
from libdsec.errors import ImageError, InvalidArgument, SandboxGone
from libdsec.schema import PackLine, PackRequest
from libdsec.transport import Answer, encode
from tests.chaos.test_kills import kill, serving
from tests.conftest import Instance, own_instance

DIFFS_MAX = 8
"""Diff layers that an image has at most (dsec.images.packing)."""

LOOK = textwrap.dedent(
    """
    import hashlib, json, os, stat, sys
    groups, found = {}, []
    skip = {b"/proc", b"/sys", b"/dev"}
    def look(path):
        info = os.lstat(path)
        kind = stat.S_IFMT(info.st_mode)
        entry = {"path": path.hex(), "name": repr(path), "kind": oct(kind), "mode": oct(info.st_mode & 0o7777), "uid": info.st_uid,
                 "gid": info.st_gid, "mtime": info.st_mtime_ns}
        if kind == stat.S_IFREG:
            with open(path if info.st_size < 1 << 32 else os.devnull, "rb") as file:
                entry["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
            entry["size"], entry["links"] = info.st_size, info.st_nlink
            entry["same as"] = groups.setdefault((info.st_dev, info.st_ino), path.hex())
        elif kind == stat.S_IFLNK:
            entry["target"] = os.readlink(path).hex()
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            entry["device"] = info.st_rdev
        if kind in (stat.S_IFREG, stat.S_IFDIR):
            entry["xattrs"] = {name: os.getxattr(path, name).hex() for name in sorted(os.listxattr(path))}
        found.append(entry)
        if kind == stat.S_IFDIR:
            for name in sorted(os.listdir(path)):
                child = path.rstrip(b"/") + b"/" + name
                if child not in skip:
                    look(child)
    look(sys.argv[1].encode())
    # The top of every sandbox is a directory of its own.
    print(json.dumps(found[1:] if sys.argv[1] == "/" else found))
    """
)

AWKWARD = textwrap.dedent(
    r"""
    import os, shutil, socket, stat, subprocess
    os.makedirs("/odd/deep/" + "/".join("d%d" % level for level in range(60)))
    os.chdir("/odd")
    def write(path, data=b"x", mode=0o644):
        with open(path, "wb") as file:
            file.write(data)
        os.chmod(path, mode)
    for number, mode in enumerate((0o000, 0o4755, 0o2711, 0o1644, 0o777)):
        write("mode%d" % number, b"m" * number, mode)
    os.mkdir("sticky", 0o700); os.chmod("sticky", 0o3770)
    write("owned"); os.chown("owned", 1000, 65535); write("odd-owner"); os.chown("odd-owner", 12345, 54321)
    write("linked", b"one content"); os.link("linked", "also"); os.link("linked", "sticky/too")
    os.symlink("/nowhere/" + "n" * 300, "dangling"); os.symlink("linked", "pointing")
    os.mkfifo("pipe", 0o640)
    socket.socket(socket.AF_UNIX).bind("/odd/sock")
    write("noted"); os.setxattr("noted", "user.note", b"\0\xff value"); os.setxattr(".", "user.directory", b"d" * 2000)
    write("capable", mode=0o755); os.setxattr("capable", "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))
    write(b"\xff\xfe not utf-8 \n\t", b"odd"); write("n" * 255); write(".wh.looks-like-a-whiteout"); write("-rf"); write("with space")
    write("empty", b"")
    with open("sparse", "wb") as file:
        file.truncate(300 << 20)
        for offset in (0, 5 << 20, (299 << 20) + 7):
            file.seek(offset); file.write(b"data" * 2000)
    with open("hole", "wb") as file:
        file.truncate((1 << 40) + 3)
    os.mkdir("many")
    for number in range(2000):
        write("many/%04d" % number, b"%d" % number)
    os.utime("noted", ns=(1, -1_500_000_001)); os.utime("owned", ns=(1, 4_102_444_800_123_456_789)); os.utime("many", ns=(5, 7))
    # What the image brought: removed, replaced by another kind, made again.
    os.remove("/etc/debian_version")
    os.remove("/etc/issue"); os.mkdir("/etc/issue"); write("/etc/issue/inside")
    shutil.rmtree("/usr/share/doc"); write("/usr/share/doc", b"a file now")
    shutil.rmtree("/usr/share/man"); os.mkdir("/usr/share/man"); write("/usr/share/man/new")
    os.remove("/etc/issue.net"); write("/etc/issue.net", b"made again"); shutil.move("/etc/skel", "/etc/skeleton")
    os.chmod("/etc/passwd", 0o600); os.chown("/etc/shadow", 0, 0)
    os.mkdir("/var/new"); shutil.rmtree("/usr/share/locale", ignore_errors=True)
    with open("/etc/hosts.allow", "a") as file:
        file.write("appended\n")
    """
)


async def look(sandbox: Sandbox, top: str = "/") -> list[dict[str, object]]:
    """Everything that a program in the sandbox can tell about its files."""
    result = await sandbox.exec(["python3", "-c", LOOK, top], check=True, max_output=64 << 20, timeout=120)
    found: list[dict[str, object]] = json.loads(result.stdout)
    return found


def differences(one: list[dict[str, object]], other: list[dict[str, object]], *, but: str = "") -> list[str]:
    """What isn't alike, leaving out the property ``but``."""
    one, other = ([{name: value for name, value in entry.items() if name != but} for entry in entries] for entries in (one, other))
    by_path = {str(entry["path"]): entry for entry in other}
    wrong = [f"{entry} is {by_path.get(str(entry['path']))}" for entry in one if by_path.get(str(entry["path"])) != entry]
    known = {str(entry["path"]) for entry in one}
    return wrong + [f"{entry} is new" for entry in other if str(entry["path"]) not in known]


def args(image: str, **more: Any) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=image, **{"memory_limit_mb": 512, "disk_limit_mb": 1024, **more})


def snapshots(instance: Instance) -> list[str]:
    """What is left of snapshots: subvolumes, and layers that were being made of them."""
    script = (
        "import ctypes, json, os, sys\n"
        "ns = os.open(sys.argv[1], os.O_RDONLY)\n"
        "assert ctypes.CDLL(None, use_errno=True).setns(ns, 0x00020000) == 0\n"
        "print(json.dumps([name for name in os.listdir('/scratch') if name.startswith('sn-')]))"
    )
    command = [sys.executable, "-c", script, str(instance.run_dir / "layers.ns")]
    volumes: list[str] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return volumes + os.listdir(instance.home / "state" / "packs")


async def nothing_left(instance: Instance, deadline_s: float = 20.0) -> None:
    """Waits until no snapshot is left, and checks that no sandbox stands still."""
    end = time.monotonic() + deadline_s
    while left := snapshots(instance):
        assert time.monotonic() < end, left
        await asyncio.sleep(0.05)
    frozen = [
        path for path in instance.cgroup_dirs() if (path / "cgroup.freeze").exists() and (path / "cgroup.freeze").read_text() != "0\n"
    ]
    assert not frozen


def diffs(result: PackResult) -> int:
    return sum(layer.diff for layer in result.image.layers)


# -- what is packed


async def test_a_packed_sandbox_looks_like_the_one_it_was(instance: Instance, client: DSecClient, base_image: str) -> None:
    source = await client.run_container(args(base_image))
    await source.exec(["python3", "-c", AWKWARD], check=True, timeout=120)
    before = await look(source)
    result = await source.pack_diff("packed:awkward", leftovers="keep")
    assert result.image.kind == "base" and diffs(result) == 1 and not result.removed
    copy = await client.run_container(args("packed:awkward"))
    assert not differences(before, await look(copy))
    assert (await source.exec("stat -c %b /odd/sparse")).stdout != "0\n"
    apparent = result.bytes
    assert apparent < 40 << 20, "holes are no data"
    # One more time, over itself: the copy's changes on top of those.
    await copy.exec("rm -r /etc/issue /odd/deep /usr/share/doc && mkdir /usr/share/doc && echo back > /etc/debian_version", check=True)
    await copy.exec("mv /odd/also /odd/moved && echo more >> /odd/linked", check=True)
    again = await copy.pack_diff("packed:awkward", leftovers="keep")
    assert (again.image.version, diffs(again)) == (2, 2)
    second = await client.run_container(args("packed:awkward"))
    assert not differences(await look(copy), await look(second))
    await nothing_left(instance)


async def test_workspace_and_toolkits_become_part_of_the_image(client: DSecClient, base_image: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("from the workspace\n")
    await client.images.import_(tmp_path, name="pack:workspace", kind="workspace", at="/work")
    source = await client.run_container(args(base_image, workspace="pack:workspace"))
    await source.exec("cp /work/f /work/g && rm /work/f", check=True)
    result = await source.pack_diff("packed:composed", labels={"from": "test"})
    assert len(result.image.layers) == 3 and result.image.config.labels == {"from": "test"}
    copy = await client.run_container(args("packed:composed"))
    assert (await copy.exec("ls /work; cat /work/g")).stdout == "g\nfrom the workspace\n"


async def test_leftovers_stay_out_and_are_listed_and_kept(client: DSecClient, base_image: str) -> None:
    source = await client.run_container(args(base_image))
    script = """
        set -e
        mkdir -p /root/.cache/pip/x /home/a /work/__pycache__ /work/build/keep /var/cache/apt/archives
        echo ls > /root/.bash_history; echo ls > /home/a/.python_history
        head -c 100000 /dev/zero | tr '\\0' x > /root/.cache/pip/x/wheel
        echo p > /var/cache/apt/archives/p.deb; echo c > /work/__pycache__/m.pyc; echo o > /work/build/m.o
        echo s > /work/build/keep/source; echo t > /work/text; rm /etc/debian_version
    """
    await source.exec(script, check=True)
    result = await source.pack_diff("packed:clean", exclude=["__pycache__", "/work/**/*.o", "/etc/debian_version", "/nothing/*"])
    told = {leftover.glob: leftover.entries for leftover in result.removed}
    assert told == {
        "__pycache__": 2,
        "/work/**/*.o": 1,
        "~/.*_history": 2,
        "~/.cache/pip": 3,
        "/var/cache/apt/archives/**": told["/var/cache/apt/archives/**"],
    }
    assert next(leftover.bytes for leftover in result.removed if leftover.glob == "~/.cache/pip") >= 100_000
    copy = await client.run_container(args("packed:clean"))
    there = (
        "cd /; ls -d root/.bash_history home/a/.python_history root/.cache/pip work/__pycache__ work/build/m.o 2>/dev/null; cat work/text"
    )
    assert (await copy.exec(there)).stdout == "t\n"
    assert (await copy.exec("cat /work/build/keep/source; ls /etc/debian_version")).stdout == "s\n", "what was deleted stays deleted"
    assert (await source.exec("cat /root/.bash_history /work/build/m.o")).stdout == "ls\no\n"
    whole = await source.pack_diff("packed:whole", leftovers="keep")
    assert not whole.removed and whole.bytes > result.bytes + 90_000


async def test_bad_names_and_globs_are_told_by_field(instance: Instance, sandbox: Sandbox) -> None:
    for name, exclude, field in (("", (), "name"), ("a b", (), "name"), ("ok", ("[",), "exclude"), ("ok", ("",), "exclude")):
        with pytest.raises(InvalidArgument) as caught:
            await sandbox.pack_diff(name, exclude=exclude)
        assert caught.value.field == field
    await nothing_left(instance)


async def test_a_tree_that_no_layer_can_hold_is_refused_and_nothing_stays(instance: Instance, client: DSecClient, sandbox: Sandbox) -> None:
    deep = "import os\nfor _ in range(1100):\n os.mkdir('d')\n os.chdir('d')"
    await sandbox.exec(["python3", "-c", deep], cwd="/tmp", check=True)
    with pytest.raises(ImageError, match="directories below each other"):
        await sandbox.pack_diff("packed:deep")
    await nothing_left(instance)
    assert not [image for image in await client.images.list() if image.name == "packed:deep"]
    assert (await sandbox.exec("echo on")).stdout == "on\n"
    assert (await sandbox.pack_diff("packed:deep", exclude=["/tmp/d"])).image.version == 1


# -- while it happens


async def test_a_writer_goes_on_and_one_moment_is_packed(instance: Instance, client: DSecClient, base_image: str) -> None:
    source = await client.run_container(args(base_image))
    # Each round writes a, then b: at any moment they are equal, or a is one ahead.
    script = (
        "import os\nn = 0\nwhile True:\n n += 1\n for name in 'ab':\n  open(name + '+', 'w').write(str(n))\n  os.rename(name + '+', name)"
    )
    await source.exec("mkdir /w", check=True)
    writer = await source.start(["python3", "-c", script], cwd="/w")
    await _until(source, "test -e /w/b")
    for _ in range(3):
        result = await source.pack_diff("packed:moment")
        copy = await client.run_container(args("packed:moment"))
        first, second = (await copy.exec("cat a; echo; cat b", cwd="/w", check=True)).stdout.split()
        assert int(first) - int(second) in (0, 1)
        assert result.freeze_ms < 2000
        await copy.stop()
    at = int((await source.exec("cat /w/b")).stdout)
    await _until(source, f"test $(cat /w/b) -gt {at}")
    await writer.kill()
    await nothing_left(instance)


async def _until(sandbox: Sandbox, test: str) -> None:
    await sandbox.exec(f"until {test} 2>/dev/null; do sleep 0.01; done", check=True, timeout=30)


async def test_a_sandbox_that_is_stopped_meanwhile_is_packed_all_the_same(instance: Instance, client: DSecClient, base_image: str) -> None:
    source = await client.run_container(args(base_image))
    await source.exec("head -c 200000000 /dev/urandom > /big; sha256sum /big > /sum", check=True)
    begun = asyncio.Event()
    packing = asyncio.create_task(source.pack_diff("packed:stopped", progress=lambda step: begun.set() if "layer" in step else None))
    await begun.wait()
    await source.stop()
    await packing
    copy = await client.run_container(args("packed:stopped"))
    assert (await copy.exec("sha256sum -c /sum")).stdout == "/big: OK\n"
    await nothing_left(instance)
    with pytest.raises(SandboxGone):
        await source.pack_diff("packed:stopped")


async def test_the_same_key_makes_one_image(client: DSecClient, sandbox: Sandbox) -> None:
    url = client.transport.at(f"/v1/sandboxes/{sandbox.id}/pack")

    async def pack(key: str) -> PackResult:
        lines = client.transport.lines(
            "POST", url, Answer(PackLine), body=encode(PackRequest(name="packed:once")), headers={"Idempotency-Key": key}
        )
        last = [line async for line in lines][-1]
        assert last.result is not None
        return last.result

    one, same = await asyncio.gather(pack("k1"), pack("k1"))
    later, other = await pack("k1"), await pack("k2")
    assert one.image.version == same.image.version == later.image.version == 1
    assert later == one and other.image.version == 2


async def test_a_full_sandbox_can_be_packed(client: DSecClient, base_image: str) -> None:
    source = await client.run_container(args(base_image, disk_limit_mb=64))
    filled = await source.exec("head -c 100000000 /dev/urandom > /big")
    assert "quota" in filled.stderr.lower()
    result = await source.pack_diff("packed:full")
    assert result.bytes > 50 << 20
    copy = await client.run_container(args("packed:full", disk_limit_mb=64))
    assert (await copy.exec("head -c 30000000 /dev/urandom > /more && cmp -n 1000 /big /big && stat -c %s /more")).stdout == "30000000\n"


async def test_what_reads_the_tree_can_do_little_else(instance: Instance, client: DSecClient, base_image: str) -> None:
    source = await client.run_container(args(base_image))
    await source.exec("head -c 200000000 /dev/urandom > /big", check=True)
    packing = asyncio.create_task(source.pack_diff("packed:watched"))
    seen: set[tuple[str, ...]] = set()
    while not packing.done():
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                if not (status.parent / "cmdline").read_bytes().startswith(b"dsec-mklayer\0--directory-fd"):
                    continue
                fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
                root = os.readlink(status.parent / "root")
            except OSError:
                continue
            if fields["PPid"] in map(str, instance.pids("dsec-spawner")):
                names = ("Uid", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
                seen.add((*(" ".join(fields[name].split()) for name in names), root.rsplit("/", 1)[-1]))
        await asyncio.sleep(0.001)
    await packing
    service = os.stat(instance.home / "state" / "images").st_uid
    reader = "0000000000200004"
    # SYS_ADMIN and DAC_READ_SEARCH are all it has and can have; before it has confined itself it has read nothing.
    confined = (f"{service} {service} {service} {service}", reader, reader, reader, "1", "2", "u")
    assert confined in seen and {(*entry[:5], "2", entry[6]) for entry in seen} == {confined}


# -- chains


async def test_a_chain_of_packs_is_made_shorter_and_shows_the_same(instance: Instance, client: DSecClient, base_image: str) -> None:
    image = base_image
    merges = 0
    for step in range(12):
        source = await client.run_container(args(image))
        script = f"""
            set -e
            [ -d /chain/{step % 3} ] || rm -f /chain/{step % 3}
            mkdir -p /chain/{step % 3} /chain/kept; echo {step} > /chain/{step % 3}/{step}; echo {step} > /chain/same
            rm -rf /chain/{(step + 1) % 3}/{step - 2}
            if [ $(({step} % 4)) = 3 ]; then rm -r /chain/{(step + 1) % 3}; echo file > /chain/{(step + 1) % 3}; fi
            if [ $(({step} % 4)) = 0 ]; then rm -rf /chain/turns; mkdir /chain/turns; echo {step} > /chain/turns/{step}; fi
            if [ $(({step} % 4)) = 2 ]; then rm -rf /chain/turns; ln -s same /chain/turns; fi
            ln /chain/same /chain/kept/{step}; chmod 0{700 + step % 8} /chain/kept
        """
        await source.exec(script, check=True)
        before = await look(source)
        result = await source.pack_diff("packed:chain")
        merges += bool(result.merged_layers)
        assert diffs(result) <= DIFFS_MAX
        copy = await client.run_container(args("packed:chain"))
        # Of a file in a lower layer overlayfs counts also the names that upper layers hide; in a merged layer there is no such name.
        assert not differences(before, await look(copy), but="links"), f"step {step}"
        await source.stop()
        await copy.stop()
        image = f"packed:chain@{result.image.version}"
    assert merges >= 1
    await nothing_left(instance)


# -- forks


async def test_twenty_forks_start_alike_and_are_independent(instance: Instance, client: DSecClient, base_image: str) -> None:
    source = await client.run_container(args(base_image, labels={"k": "v"}, env={"A": "1"}, workdir="/w"))
    await source.exec("echo 0123456789abcdef0123456789abcdef > /etc/machine-id; sleep 1000 & echo shared > /w/f; rm /etc/issue", check=True)
    before = [entry for entry in await look(source) if entry["name"] not in ("b'/etc'", "b'/etc/machine-id'")]
    children = await source.fork(20, env={"B": "2"})
    assert len({child.id for child in children}) == 20
    for child in (children[0], children[-1]):
        entries = [entry for entry in await look(child) if entry["name"] not in ("b'/etc'", "b'/etc/machine-id'")]
        assert not differences(before, entries)
    seen = await asyncio.gather(
        *(child.exec("hostname; cat /etc/machine-id; cat f; echo $A$B; echo own > f; ps -e | wc -l") for child in children)
    )
    for child, result in zip(children, seen, strict=True):
        hostname, _, content, variables, _ = result.stdout.split("\n", 4)
        assert (hostname, content, variables) == (child.id, "shared", "12")
        info = await child.info()
        assert (info.forked_from, info.labels, info.memory_limit_mb) == (source.id, {"k": "v"}, 512)
    machines = {result.stdout.split("\n")[1] for result in seen}
    assert len(machines) == 20 and all(len(machine) == 32 for machine in machines)
    assert (await source.exec("cat f; cat /etc/machine-id")).stdout == "shared\n0123456789abcdef0123456789abcdef\n"
    await source.stop()
    assert (await children[3].exec("cat f")).stdout == "own\n"
    grandchild = (await children[3].fork(labels={}))[0]
    info = await grandchild.info()
    assert (await grandchild.exec("cat f")).stdout == "own\n" and (info.forked_from, info.labels) == (children[3].id, {})
    await nothing_left(instance)


async def test_what_a_fork_inherits_counts_against_its_disk_limit(client: DSecClient, base_image: str) -> None:
    source = await client.run_container(args(base_image, disk_limit_mb=64))
    await source.exec("head -c 40000000 /dev/urandom > /big && sync", check=True)
    with pytest.raises(InvalidArgument, match="disk_limit_mb"):
        await source.fork(disk_limit_mb=30)
    child, roomy = (await source.fork())[0], (await source.fork(disk_limit_mb=256))[0]
    assert (await child.metrics()).disk >= 38 << 20
    over = "head -c 40000000 /dev/urandom > /more"
    assert "quota" in (await child.exec(over)).stderr.lower()
    assert (await roomy.exec(over)).exit_code == 0


async def test_a_fork_that_is_asked_for_again_makes_nothing_twice(client: DSecClient, sandbox: Sandbox) -> None:
    first = await sandbox.fork(3, idempotency_key="again")
    second = await sandbox.fork(3, idempotency_key="again")
    assert [child.id for child in first] == [child.id for child in second]
    await first[0].stop()
    with pytest.raises(DSecError):
        await sandbox.fork(3, idempotency_key="again")


# -- what dies meanwhile


@pytest.fixture(scope="module")
def shaken(base_tar: Path) -> Iterator[Instance]:
    """An instance of this module's own: its parts get killed."""
    with own_instance(base_tar, "base", scratch_mb=4096) as running:
        yield running


@pytest.fixture
async def shaken_client(shaken: Instance) -> AsyncIterator[DSecClient]:
    async with DSecClient(shaken.url, shaken.api_key) as client:
        yield client
        async for info in client.list():
            if info.state not in ("stopped", "lost"):
                await (await client.attach(info.id)).stop()
        await shaken.wait_clean()


@pytest.mark.parametrize("part", ["dsec-spawner", "dsec.serve"])
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05, 0.3])
async def test_a_kill_in_the_middle_leaves_nothing_frozen_and_no_snapshot(
    shaken: Instance, shaken_client: DSecClient, part: str, delay_s: float
) -> None:
    source = await shaken_client.run_container(args("base"))
    await source.exec("head -c 150000000 /dev/urandom > /big; sha256sum /big > /sum", check=True)
    packing = asyncio.create_task(source.pack_diff(f"packed:{part}"))
    await asyncio.sleep(delay_s)
    kill(shaken, part)
    result = await packing
    await serving(shaken_client)
    assert (await source.exec("echo on", timeout=20)).stdout == "on\n"
    await nothing_left(shaken)
    images = [image for image in await shaken_client.images.list() if image.name == f"packed:{part}"]
    assert images[-1] == result.image, "one image came of it"
    copy = await shaken_client.run_container(args(f"packed:{part}"))
    assert (await copy.exec("sha256sum -c /sum")).stdout == "/big: OK\n"
    await shaken_client.images.gc()
    assert (await copy.exec("sha256sum -c /sum")).stdout == "/big: OK\n"
    assert await shaken_client.images.fsck(deep=True) == []


async def test_a_sandbox_found_frozen_goes_on_when_the_spawner_is_back(shaken: Instance, shaken_client: DSecClient) -> None:
    sandbox = await shaken_client.run_container(args("base"))
    [group] = [path for path in shaken.cgroup_dirs() if path.name == sandbox.id and (path / "cgroup.freeze").exists()]
    (group / "cgroup.freeze").write_text("1")
    kill(shaken, "dsec-spawner")
    assert (await sandbox.exec("echo on", timeout=20)).stdout == "on\n"
    assert (group / "cgroup.freeze").read_text() == "0\n"


async def test_forks_survive_kills(shaken: Instance, shaken_client: DSecClient) -> None:
    source = await shaken_client.run_container(args("base"))
    await source.exec("echo files > /f", check=True)
    for part in ("dsec-spawner", "dsec.serve"):
        forking = asyncio.create_task(source.fork(8))
        await asyncio.sleep(0.02)
        kill(shaken, part)
        children = await forking
        assert {(await child.exec("cat /f")).stdout for child in children} == {"files\n"}
        await asyncio.gather(*(child.stop() for child in children))
        await nothing_left(shaken)
