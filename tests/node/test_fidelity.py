"""What an image holds is what a sandbox sees: awkward images, compared with docker's export of the same ones, entry by entry.

Where docker itself can't carry something, the tar's own word counts; each such case is named in ``Expected``. Docker 20.10 writes whole
seconds into an export, no xattr but security.capability, and makes times before 1970 to 1970.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench import peer
from libdsec import DSecClient, DSecContainerRunArgs
from tests.conftest import Instance, require_root
from tests.unit.images_archives import OciImage, docker_archive, member, tar

READ_TREE = Path(__file__).with_name("read_tree.py")
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
"""cap_net_bind_service, permitted and effective (linux/capability.h, revision 2)."""
ROOT = "t"
"""The directory below which the trees are compared: docker adds files of its own to the top."""
Tree = dict[bytes, "Seen"]


@dataclass
class Seen:
    """One entry. ``links`` are all names of the same file, if it has several."""

    kind: int
    mode: int
    owner: tuple[int, int]
    mtime_s: int
    size: int = 0
    content: str = ""
    """Digest of a file, target of a symbolic link."""
    device: int = 0
    capability: str = ""
    links: tuple[bytes, ...] = ()


@dataclass
class Expected:
    """What docker's export can't say, by path below the root of the image."""

    mtime_ns: dict[bytes, int] = field(default_factory=dict)
    xattrs: dict[bytes, dict[str, bytes]] = field(default_factory=dict)
    gone: set[bytes] = field(default_factory=set)
    """What only docker shows, against the specification ("Whiteouts": they hide what is in the layers below): it forgets a whiteout when
    the same layer brings a directory of that name after it."""


# -- the two sides -------------------------------------------------------------------------------------------------------------------------


def exported(archive: Path) -> Tree:
    """The tree in an export of docker."""
    tree: Tree = {}
    groups: dict[bytes, list[bytes]] = {}
    with tarfile.open(archive, encoding="utf-8", errors="surrogateescape") as source:
        for info in source:
            name = os.fsencode(info.name.rstrip("/"))
            if name.split(b"/")[0] != os.fsencode(ROOT):
                continue
            if info.islnk():
                target = os.fsencode(info.linkname)
                groups.setdefault(target, [target]).append(name)
                tree[name] = tree[target]
                continue
            kinds = {tarfile.DIRTYPE: stat.S_IFDIR, tarfile.SYMTYPE: stat.S_IFLNK, tarfile.FIFOTYPE: stat.S_IFIFO}
            kinds |= {tarfile.CHRTYPE: stat.S_IFCHR, tarfile.BLKTYPE: stat.S_IFBLK}
            kind = kinds.get(info.type, stat.S_IFREG)
            seen = Seen(kind, info.mode & 0o7777, (info.uid, info.gid), int(info.mtime // 1))
            if kind == stat.S_IFREG:
                content = source.extractfile(info)
                assert content is not None
                seen.content, seen.size = hashlib.sha256(content.read()).hexdigest(), info.size
            elif kind == stat.S_IFLNK:
                seen.content = os.fsencode(info.linkname).hex()
            elif kind in (stat.S_IFCHR, stat.S_IFBLK):
                seen.device = os.makedev(info.devmajor, info.devminor)
            value = info.pax_headers.get("SCHILY.xattr.security.capability", "")
            seen.capability = os.fsencode(value).hex()
            tree[name] = seen
    for names in groups.values():
        tree[names[0]].links = tuple(sorted(names))
    return tree


async def in_sandbox(instance: Instance, client: DSecClient, image: str) -> dict[bytes, dict[str, object]]:
    """The tree that a process of a sandbox sees."""
    sandbox = await client.run_container(DSecContainerRunArgs(container_image=image, memory_limit_mb=256, disk_limit_mb=256), timeout=60)
    try:
        pid = instance.chronus_pids(sandbox.id)[0]
        command = [sys.executable, str(READ_TREE), str(pid), f"/{ROOT}"]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        output, complaint = await process.communicate()
        assert process.returncode == 0, complaint.decode()
    finally:
        await sandbox.stop()
    return {bytes.fromhex(name).removeprefix(b"/"): entry for name, entry in json.loads(output).items()}


def as_seen(found: dict[bytes, dict[str, Any]]) -> Tree:
    groups: dict[str, list[bytes]] = {}
    for name, entry in found.items():
        if "ino" in entry:
            groups.setdefault(str(entry["ino"]), []).append(name)
    tree = {}
    for name, entry in found.items():
        tree[name] = Seen(
            kind=entry["type"],
            mode=entry["mode"],
            owner=(entry["uid"], entry["gid"]),
            mtime_s=entry["mtime_ns"] // 10**9,
            size=entry.get("size", 0),
            content=str(entry.get("digest", entry.get("target", ""))),
            device=entry.get("device", 0),
            capability=entry["xattrs"].get("security.capability", ""),
            links=tuple(sorted(groups.get(str(entry.get("ino")), ()))),
        )
    return tree


def differences(ours: Tree, dockers: Tree) -> list[str]:
    names = sorted({*ours, *dockers})
    return [f"{name!r}: here {ours.get(name)}, docker {dockers.get(name)}" for name in names if ours.get(name) != dockers.get(name)]


async def compare(
    instance: Instance, client: DSecClient, docker: peer.Docker, name: str, archive: Path, for_docker: Path, tag: str, expected: Expected
) -> dict[bytes, dict[str, object]]:
    """Holds the sandbox's tree against docker's; returns the former, for more questions."""
    await client.images.import_(archive, name=name)
    found = await in_sandbox(instance, client, name)
    await docker.call("load", "--input", str(for_docker))
    container = name.replace(":", "-")
    await docker.call("create", "--network", "none", "--name", container, tag, "/none")
    await docker.call("export", "--output", str(archive.with_suffix(".export")), container)
    await docker.remove([container])
    ours, dockers = as_seen(found), exported(archive.with_suffix(".export"))
    assert len(ours) > 1
    for path, wanted in expected.mtime_ns.items():
        assert found[path]["mtime_ns"] == wanted, path
        ours[path].mtime_s = dockers[path].mtime_s
    for path in expected.gone:
        del dockers[path]
    different = differences(ours, dockers)
    assert not different, "\n".join(different)
    for path, entry in found.items():
        xattrs = entry["xattrs"]
        assert isinstance(xattrs, dict)
        others = {key: bytes.fromhex(value) for key, value in xattrs.items() if key != "security.capability"}
        assert others == expected.xattrs.get(path, {}), path
    return found


@pytest.fixture(scope="module")
def loop_runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def docker(base_tar: Path, loop_runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[peer.Docker]:
    """A dockerd of the tests' own."""
    require_root()
    running = peer.running(base_tar, tmp_path_factory.mktemp("docker"))
    yield loop_runner.run(running.__aenter__())
    loop_runner.run(running.__aexit__(None, None, None))


# -- images that are written by hand -------------------------------------------------------------------------------------------------------


def at(name: str | bytes) -> str:
    return f"{ROOT}/{os.fsdecode(name)}"


def with_time(info: tarfile.TarInfo, written: str) -> tarfile.TarInfo:
    info.pax_headers = {**info.pax_headers, "mtime": written}
    return info


def crafted(*, duplicates: bool) -> tuple[list[bytes], Expected]:
    """Layers with all that a tar can hold, and what docker can't tell of them. It refuses archives with ``duplicates``, of which the last
    one counts."""
    expected = Expected(gone={os.fsencode(at("whited/old"))})

    def plain(name: str | bytes, content: bytes = b"", **attributes: object) -> tuple[tarfile.TarInfo, bytes]:
        return member(at(name), mtime=1_500_000_000, **attributes), content

    def directory(name: str | bytes, **attributes: object) -> tarfile.TarInfo:
        return member(at(name), tarfile.DIRTYPE, mtime=1_400_000_000, **attributes)

    def link(name: str, target: str) -> tarfile.TarInfo:
        return member(at(name), tarfile.LNKTYPE, linkname=at(target))

    def symlink(name: str, target: str) -> tarfile.TarInfo:
        return member(at(name), tarfile.SYMTYPE, linkname=target, mtime=1_300_000_000, mode=0o777)

    odd = "d" * 90 + "/" + "e" * 200 + "/" + "f" * 255
    deep = [odd[: index or None] for index in (90, 291)]
    attributes = {
        "SCHILY.xattr.user.note": "from the image",
        "SCHILY.xattr.user.binary": os.fsdecode(b"\xff\x01"),
        "SCHILY.xattr.user.empty": "",
    }
    expected.xattrs[os.fsencode(at("xattrs"))] = {"user.note": b"from the image", "user.binary": b"\xff\x01", "user.empty": b""}
    expected.xattrs[os.fsencode(at("xattr-directory"))] = {"user.note": b"d"}
    for name, nanoseconds in (("negative", -1_500_000_000), ("fraction", 1_600_000_000_123_456_789), ("future", 9_999_999_999_500_000_000)):
        expected.mtime_ns[os.fsencode(at(f"time/{name}"))] = nanoseconds
    lower = tar(
        [
            directory(""),
            *(directory(name) for name in deep),
            plain(odd, b"far below"),
            plain(b"\xff\xfe\x01 name\n", b"no text"),
            plain("ünï", b"text"),
            *(plain(f"mode/{mode:o}", mode=mode) for mode in (0, 0o4755, 0o2755, 0o1644, 0o6711, 0o7777)),
            directory("mode", mode=0o1777),
            directory("setgid", mode=0o2775, uid=1, gid=50),
            *(plain(f"owner/{index}", uid=70_000 + index, gid=90_000 + index) for index in range(45)),
            plain("owner/last", uid=4_294_967_294, gid=65_535),
            directory("owner", uid=65_534, gid=65_536),
            plain("xattrs", b"x", pax_headers=attributes),
            directory("xattr-directory", pax_headers={"SCHILY.xattr.user.note": "d"}),
            plain("capable", b"#!", mode=0o755, pax_headers={"SCHILY.xattr.security.capability": os.fsdecode(CAPABILITY)}),
            member(at("null"), tarfile.CHRTYPE, mode=0o666, devmajor=1, devminor=3, mtime=5),
            member(at("disk"), tarfile.BLKTYPE, mode=0o660, gid=6, devmajor=259, devminor=70_000, mtime=5),
            member(at("fifo"), tarfile.FIFOTYPE, mode=0o622, mtime=5),
            symlink("loop-a", "loop-b"),
            symlink("loop-b", "loop-a"),
            symlink("self", "self"),
            symlink("nowhere", "/no/such/../place"),
            symlink("long", "/".join(["l" * 200] * 15)),
            symlink("up", "../../../../etc/passwd"),
            *(with_time(plain(f"time/{name}")[0], text) for name, text in (("negative", "-1.5"), ("fraction", "1600000000.123456789"))),
            with_time(plain("time/future")[0], "9999999999.5"),
            directory("time"),
            plain("hard/a", b"one file"),
            link("hard/b", "hard/a"),
            link("hard/c", "hard/b"),
            symlink("hard/soft", "a"),
            link("hard/soft-too", "hard/soft"),
            directory("hard"),
            *([plain("twice", b"first", mode=0o600)] if duplicates else []),
            plain("twice", b"second, and longer", mode=0o640),
            directory("was-directory"),
            plain("was-directory/x", b"1"),
            plain("was-file", b"2"),
            directory("was-link-target"),
            symlink("was-link", "was-link-target"),
            directory("opaque"),
            plain("opaque/old", b"3"),
            directory("opaque/deep"),
            plain("opaque/deep/old", b"4"),
            directory("whited"),
            plain("whited/old", b"5"),
            plain("gone", b"6"),
            directory("gone-directory"),
            plain("gone-directory/x"),
            plain("back", b"7", mode=0o600),
            directory("kept", mode=0o711, uid=7),
            plain("kept/x", b"8"),
            plain("cross/a", b"shared by layers"),
            directory("cross"),
        ]
    )
    middle = tar(
        [
            directory(""),
            plain("was-directory", b"now a file"),
            directory("was-file", mode=0o750),
            plain("was-file/x", b"9"),
            directory("was-link"),
            plain("was-link/in", b"10"),
            directory("opaque"),
            plain("opaque/new", b"11"),
            member(at("opaque/.wh..wh..opq")),
            member(at(".wh.whited")),
            directory("whited", mode=0o770),
            plain("whited/new", b"12"),
            member(at(".wh.gone")),
            member(at(".wh.gone-directory")),
            member(at(".wh.back")),
            directory("kept", mode=0o711, uid=7),
            plain("kept/y", b"13"),
            plain("cross/a", b"shared by layers"),
            link("cross/b", "cross/a"),
            directory("cross"),
        ]
    )
    empty = tar([])
    only_whiteouts = tar([directory(""), directory("kept", mode=0o711, uid=7), member(at("kept/.wh.x"))])
    upper = tar([directory(""), plain("back", b"14", mode=0o644, uid=9), directory("gone-directory"), plain("gone-directory/y", b"15")])
    return [lower, middle, empty, only_whiteouts, upper], expected


async def test_what_a_tar_can_hold_is_what_docker_makes_of_it(
    instance: Instance, client: DSecClient, docker: peer.Docker, tmp_path: Path
) -> None:
    layers, expected = crafted(duplicates=True)
    archive, for_docker = tmp_path / "image.tar", tmp_path / "docker.tar"
    archive.write_bytes(OciImage.of(layers, compress=True).archive())
    for_docker.write_bytes(docker_archive(crafted(duplicates=False)[0]))
    await compare(instance, client, docker, "crafted:test", archive, for_docker, "x:latest", expected)


# -- images that buildah makes -------------------------------------------------------------------------------------------------------------


class Buildah:
    """Images from nothing: no network, a storage of its own."""

    def __init__(self, directory: Path) -> None:
        # The slow driver, which needs nothing of the filesystem below it.
        self._options = ["--storage-driver=vfs", f"--root={directory}/storage", f"--runroot={directory}/run"]
        (directory / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        self._policy = f"--signature-policy={directory}/policy.json"

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(["buildah", *self._options, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def layer(self, below: str, tag: str, change: Callable[[Path], None]) -> str:
        """Commits what ``change`` does to the mounted tree as a layer on ``below``."""
        container = self("from", "--pull-never", below)
        change(Path(self("mount", container)))
        self("umount", container)
        self("commit", self._policy, "--rm", "--format=oci", container, tag)
        return tag

    def export(self, tag: str, target: str) -> None:
        self("push", self._policy, tag, target)


def first(root: Path) -> None:
    top = root / ROOT
    for name in ("d", "emptied", "replaced", "kept"):
        (top / name).mkdir(parents=True)
        (top / name / "x").write_bytes(name.encode())
    (top / "file").write_bytes(b"a file")
    os.link(top / "file", top / "d" / "same")
    with (top / "sparse").open("wb") as sparse:
        sparse.truncate(40 << 20)
        sparse.seek(20 << 20)
        sparse.write(b"in the middle")
    (top / "program").write_bytes(b"#!")
    os.chown(top / "program", 100_000, 100_001)
    os.chmod(top / "program", 0o6755)
    os.setxattr(top / "program", "security.capability", CAPABILITY)
    os.mknod(top / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    os.mkfifo(top / "fifo")
    os.symlink("loop", top / "loop")
    os.close(os.open(os.fsencode(top) + b"/\xc3\x28 no utf-8 \xff", os.O_CREAT | os.O_WRONLY, 0o600))
    (top / ("n" * 255)).write_bytes(b"")
    deep = top
    for _ in range(12):
        deep = deep / ("p" * 60)
        deep.mkdir()
    (deep / "leaf").write_bytes(b"beyond every old limit")
    os.chmod(top / "kept", 0o1777)
    for path in (top / "file", top / "kept", top):
        os.utime(path, (1_234_567_890, 1_234_567_890))


def second(root: Path) -> None:
    top = root / ROOT
    (top / "emptied" / "x").unlink()
    shutil.rmtree(top / "replaced")
    (top / "replaced").write_bytes(b"a file now")
    (top / "file").unlink()
    (top / "file").mkdir()
    (top / "file" / "in").write_bytes(b"a directory now")
    shutil.rmtree(top / "d")
    os.link(top / "program", top / "program-too")


def third(root: Path) -> None:
    top = root / ROOT
    (top / "d").mkdir(mode=0o700)
    (top / "d" / "again").write_bytes(b"the path is back")
    (top / "replaced").unlink()


async def test_what_buildah_makes_is_what_docker_makes_of_it(
    instance: Instance, client: DSecClient, docker: peer.Docker, tmp_path: Path
) -> None:
    buildah = Buildah(tmp_path)
    tag = buildah.layer("scratch", "localhost/one:1", first)
    tag = buildah.layer(tag, "localhost/two:1", second)
    tag = buildah.layer(tag, "localhost/three:1", lambda root: None)
    tag = buildah.layer(tag, "localhost/four:1", third)
    archive, for_docker = tmp_path / "image.tar", tmp_path / "docker.tar"
    buildah.export(tag, f"oci-archive:{archive}")
    buildah.export(tag, f"docker-archive:{for_docker}:{tag}")
    await compare(instance, client, docker, "buildah:test", archive, for_docker, tag, Expected())


async def test_where_only_docker_is_installed_it_builds(
    client: DSecClient, docker: peer.Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, programs = tmp_path / "context", tmp_path / "bin"
    context.mkdir()
    programs.mkdir()
    (programs / "docker").symlink_to("/usr/bin/docker")
    (context / "hello").write_text("hello")
    (context / "other.dockerfile").write_text("FROM scratch\nCOPY hello /hello\nENV A=1\n")
    for name, value in docker.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(programs))
    info = await client.images.build(context, name="docker-built:test", file=context / "other.dockerfile")
    assert info.config.env["A"] == "1"
