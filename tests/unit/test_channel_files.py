"""The file builtins of a real chronus."""

from __future__ import annotations

import asyncio
import io
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chronus_process import DEADLINE_S, MB, ChronusProcess, in_time, read_all, running_chronus

from dsec.edge.channel import MODE_STREAM, STDIN_INLINE, STDIN_STREAM, Channel, ChannelError, Exit, Start

IS_ROOT = os.geteuid() == 0


@pytest.fixture
def chronus() -> Iterator[ChronusProcess]:
    with running_chronus() as process:
        yield process


@pytest.fixture
async def channel(chronus: ChronusProcess) -> AsyncIterator[Channel]:
    opened = await Channel.connect(chronus.path, on_lost=lambda lost: None)
    yield opened
    opened.close()


class Failed(Exception):
    """A builtin that failed: its errno and message."""

    def __init__(self, errno: int, message: str) -> None:
        super().__init__(message)
        self.errno = errno


def answer(exit: Exit) -> bytes:
    if exit.exit_code != 0:
        failure = msgspec.msgpack.decode(exit.stderr)
        raise Failed(failure["errno"], failure["message"])
    return exit.stdout


def sequence(data: bytes) -> list[dict[str, Any]]:
    """Msgpack maps one after the other."""
    found, position = [], 0
    while position < len(data):
        for end in range(position + 1, len(data) + 1):
            try:
                found.append(msgspec.msgpack.decode(data[position:end]))
            except msgspec.DecodeError:
                continue
            position = end
            break
    return found


class Files:
    """Builtins, called."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    async def __call__(self, builtin: str, path: Path | bytes, data: bytes | None = None, user: str = "", **args: object) -> bytes:
        start = Start(builtin=builtin, args={"path": os.fsencode(path), **args}, user=user)
        if data is not None:
            start.stdin, start.stdin_data = STDIN_INLINE, data
        return answer(await in_time(self.channel.run(start)))

    async def map(self, builtin: str, path: Path | bytes, data: bytes | None = None, **args: object) -> dict[str, object]:
        decoded: dict[str, object] = msgspec.msgpack.decode(await self(builtin, path, data, **args))
        return decoded

    async def errno(self, builtin: str, path: Path | bytes, data: bytes | None = None, **args: object) -> int:
        with pytest.raises(Failed) as failed:
            await self(builtin, path, data, **args)
        return failed.value.errno


@pytest.fixture
def files(channel: Channel) -> Files:
    return Files(channel)


async def test_what_was_written_is_read_again(files: Files, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "file"
    assert await files.map("write", target, b"a\0\xff") == {"size": 3}
    assert await files("read", target) == b"a\0\xff"
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert await files("read", target, offset=1, length=1) == b"\0"
    assert await files("read", target, offset=50) == b""
    assert os.listdir(target.parent) == ["file"]


async def test_a_replaced_file_keeps_its_mode_and_a_mode_that_is_given_counts(files: Files, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.touch()
    target.chmod(0o640)
    await files("write", target, b"new")
    assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (b"new", 0o640)
    await files("write", target, b"", mode=0o4711)
    assert stat.S_IMODE(target.stat().st_mode) == 0o4711


async def test_a_write_goes_through_a_final_symlink(files: Files, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    await files("write", tmp_path / "link", b"1")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"1"
    (tmp_path / "loop").symlink_to("loop")
    assert await files.errno("write", tmp_path / "loop", b"") == 40


async def test_append_exclusive_and_missing_parents(files: Files, tmp_path: Path) -> None:
    target = tmp_path / "file"
    await files("write", target, b"one", append=True)
    assert await files.map("write", target, b"two", append=True) == {"size": 6}
    assert target.read_bytes() == b"onetwo"
    assert await files.errno("write", target, b"x", exclusive=True) == 17
    assert await files.errno("write", tmp_path / "no" / "file", b"", parents=False) == 2
    await files("write", tmp_path / "fresh", b"x", exclusive=True)


async def test_only_regular_files_are_read_and_written(files: Files, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert await files.errno("read", tmp_path) == 21
    assert await files.errno("read", tmp_path / "fifo") == 22
    assert await files.errno("write", tmp_path, b"") == 21
    assert await files.errno("write", tmp_path / "fifo", b"") == 22
    assert await files.errno("read", tmp_path / "nothing") == 2
    assert (await files("read", b"/proc/self/stat")).split()[1] == b"(chronus)"


@pytest.mark.skipif(not IS_ROOT, reason="needs root to become somebody else")
async def test_files_are_touched_as_the_user(files: Files, tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents):
        if parent.owner() == "root" and str(parent) != "/":
            parent.chmod(parent.stat().st_mode | 0o011)
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o600)
    assert await files.errno("read", tmp_path / "secret", user="65534") == 13
    assert await files.errno("write", tmp_path / "new", b"", user="65534") == 13
    (tmp_path / "open").write_text("long content")
    (tmp_path / "open").chmod(0o666)
    # The directory is not the user's, so the file is overwritten in its place.
    assert await files("write", tmp_path / "open", b"short", user="65534")
    assert (tmp_path / "open").read_text() == "short"
    await files("write", tmp_path / "given", b"", user="")
    os.chown(tmp_path / "given", 65534, 12)
    await files("write", tmp_path / "given", b"new")
    assert ((tmp_path / "given").stat().st_uid, (tmp_path / "given").stat().st_gid) == (65534, 12)


async def test_large_files_stream_both_ways(channel: Channel, tmp_path: Path) -> None:
    data = os.urandom(1 << 16) * 400
    target = os.fsencode(tmp_path / "large")
    writing = await channel.start(Start(builtin="write", args={"path": target}, mode=MODE_STREAM, stdin=STDIN_STREAM), follow=True)
    await asyncio.wait_for(writing.write(data), DEADLINE_S)
    await writing.write_eof()
    assert (await read_all(writing))[2].exit_code == 0
    reading = await channel.start(Start(builtin="read", args={"path": target}, mode=MODE_STREAM), follow=True)
    assert (await read_all(reading))[0] == data


async def test_stat_and_list_tell_what_is_there(files: Files, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("dir/file")
    os.mkfifo(tmp_path / "pipe")
    odd = os.fsencode(tmp_path) + b"/\xff\n"
    os.close(os.open(odd, os.O_CREAT))
    file = await files.map("stat", tmp_path / "dir" / "file")
    assert (file["type"], file["size"], file["nlink"], file["target"]) == ("file", 3, 1, None)
    assert file["mtime"] == pytest.approx((tmp_path / "dir" / "file").stat().st_mtime)
    link = await files.map("stat", tmp_path / "link")
    assert (link["type"], link["target"]) == ("symlink", b"dir/file")
    assert (await files.map("stat", tmp_path / "link", follow=True))["type"] == "file"
    flat = sequence(await files("list", tmp_path))
    names = [os.path.basename(entry["path"]) for entry in flat]
    assert list(zip(names, [entry["type"] for entry in flat], strict=True)) == [
        (b"dir", "directory"),
        (b"link", "symlink"),
        (b"pipe", "fifo"),
        (b"\xff\n", "file"),
    ]
    deep = sequence(await files("list", tmp_path, recursive=True))
    assert [entry["path"] for entry in deep][:2] == [os.fsencode(tmp_path / "dir"), os.fsencode(tmp_path / "dir" / "file")]
    assert len(sequence(await files("list", tmp_path, limit=2))) == 2
    assert await files.errno("list", tmp_path / "link") == 20


async def test_mkdir_move_and_remove(files: Files, tmp_path: Path) -> None:
    await files("mkdir", tmp_path / "a" / "b", mode=0o750)
    await files("mkdir", tmp_path / "a" / "b")
    assert await files.errno("mkdir", tmp_path / "a" / "b", parents=False) == 17
    await files("move", tmp_path / "a" / "b", to=os.fsencode(tmp_path / "c"))
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o750
    (tmp_path / "c" / "file").touch()
    (tmp_path / "c" / "out").symlink_to(tmp_path / "a")
    assert await files.errno("remove", tmp_path / "c") == 39
    await files("remove", tmp_path / "c", recursive=True)
    assert sorted(os.listdir(tmp_path)) == ["a"]
    await files("remove", tmp_path / "a")
    assert await files.errno("remove", tmp_path / "a") == 2


@pytest.mark.skipif(not IS_ROOT, reason="needs root to give files away")
async def test_chmod_and_chown(files: Files, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.touch()
    await files("chmod", target, mode=0o4755)
    assert stat.S_IMODE(target.stat().st_mode) == 0o4755
    await files("chown", target, uid=5, gid=-1)
    assert (target.stat().st_uid, target.stat().st_gid) == (5, 0)
    await files("chown", target, owner="7:8")
    assert (target.stat().st_uid, target.stat().st_gid) == (7, 8)
    (tmp_path / "link").symlink_to("file")
    await files("chown", tmp_path / "link", uid=9)
    assert (target.stat().st_uid, (tmp_path / "link").lstat().st_uid) == (7, 9)
    assert await files.errno("chown", target, owner="no-such-user") == 22
    assert await files.errno("chmod", target) == 22


async def test_watch_tells_what_changes_also_in_new_directories(channel: Channel, tmp_path: Path) -> None:
    stream = await channel.start(
        Start(builtin="watch", args={"path": os.fsencode(tmp_path), "recursive": True}, mode=MODE_STREAM), follow=True
    )
    seen: set[tuple[object, object]] = set()
    data = b""

    async def see(*wanted: tuple[str, bytes]) -> None:
        nonlocal data, seen
        async with asyncio.timeout(DEADLINE_S):
            while not set(wanted) <= seen:
                piece = await stream.read()
                assert piece is not None
                data += piece[2]
                seen = {(event["type"], event["path"].removeprefix(os.fsencode(tmp_path) + b"/")) for event in sequence(data)}

    # Right after the start: it is announced only when it watches.
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "file").write_text("x")
    await see(("created", b"dir"), ("created", b"dir/file"))
    (tmp_path / "dir" / "file").rename(tmp_path / "moved")
    (tmp_path / "moved").unlink()
    await see(("moved_from", b"dir/file"), ("moved_to", b"moved"), ("removed", b"moved"))
    stream.detach()


async def test_watching_what_is_not_there_fails(files: Files, tmp_path: Path) -> None:
    assert await files.errno("watch", tmp_path / "nothing") == 2


async def test_processes_are_listed_without_the_lister(files: Files, channel: Channel) -> None:
    stream = await channel.start(Start(exec_id="s", argv=[b"sleep", b"1000"], mode=MODE_STREAM))
    async with asyncio.timeout(10):
        while True:
            found = {entry["pid"]: entry for entry in sequence(answer(await channel.run(Start(builtin="processes"))))}
            # Started is what was born: until it has executed it has no command line, or that of whoever bore it.
            if found[stream.pid]["argv"] == [b"sleep", b"1000"]:
                break
    assert found[stream.pid]["uid"] == os.geteuid() and found[stream.pid]["state"] in "SRD"


async def test_unknown_builtins_are_refused(channel: Channel) -> None:
    with pytest.raises(ChannelError) as error:
        await channel.run(Start(builtin="format"))
    assert error.value.code == "invalid_argument"


def packed(*entries: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as archive:
        for info, data in entries:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, **more: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mtime = kind, 1_500_000_000
    for key, value in more.items():
        setattr(info, key, value)
    return info


async def test_a_tree_survives_the_way_out_and_in(files: Files, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    (source / "dir").mkdir(parents=True)
    (source / "dir" / ("long" * 60)).write_bytes(b"x" * 1000)
    (source / "dir" / "script").write_text("#!")
    (source / "dir" / "script").chmod(0o4755)
    (source / "link").symlink_to("/etc/passwd")
    os.link(source / "dir" / "script", source / "same")
    os.close(os.open(os.fsencode(source) + b"/\xff\xfe", os.O_CREAT))
    os.utime(source / "dir" / "script", ns=(10**18, 10**18 + 123_456_789))
    (source / "dir").chmod(0o500)
    os.utime(source / "dir", ns=(10**18, 10**18))
    archive = await files("tar_out", source)
    with tarfile.open(fileobj=io.BytesIO(archive), errors="surrogateescape") as read:
        assert "dir/script" in read.getnames()
    summary = await files.map("tar_in", target, archive)
    assert summary == {"entries": 6, "bytes": 1002}
    assert (target / "dir" / ("long" * 60)).read_bytes() == b"x" * 1000
    assert os.readlink(target / "link") == "/etc/passwd"
    script = (target / "dir" / "script").stat()
    assert (stat.S_IMODE(script.st_mode), script.st_mtime_ns) == (0o4755, 10**18 + 123_456_789)
    assert (target / "same").stat().st_ino == script.st_ino
    assert b"\xff\xfe" in os.listdir(os.fsencode(target))
    directory = (target / "dir").stat()
    assert (stat.S_IMODE(directory.st_mode), directory.st_mtime_ns) == (0o500, 10**18)
    for top in (source, target):
        (top / "dir").chmod(0o700)


async def test_tar_out_names_below_a_prefix_and_single_files(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with tarfile.open(fileobj=io.BytesIO(await files("tar_out", tmp_path, name=b"top"))) as read:
        assert read.getnames() == ["top", "top/file"]
    with tarfile.open(fileobj=io.BytesIO(await files("tar_out", tmp_path / "file"))) as read:
        assert read.getnames() == ["file"]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
async def test_every_usual_tar_format_is_read(files: Files, tmp_path: Path, form: int) -> None:
    long = "/".join(["directory" * 3] * 4) + "/file"
    await files("tar_in", tmp_path, packed((member(long), b"data"), (member("link", tarfile.SYMTYPE, linkname="x" * 90), b""), form=form))
    assert (tmp_path / long).read_bytes() == b"data"
    assert (tmp_path / long).stat().st_mtime == 1_500_000_000


@pytest.mark.parametrize("name", ["../out", "/tmp/dsec-a-out", "a/../../out", "a/.."])
async def test_names_that_lead_out_are_refused(files: Files, tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    assert await files.errno("tar_in", inside, packed((member(name), b"x"))) == 22
    assert os.listdir(tmp_path) == ["inside"] and "dsec-a-out" not in os.listdir("/tmp")


async def test_symlinks_are_never_followed(files: Files, tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("safe")
    through = packed((member("link", tarfile.SYMTYPE, linkname=str(outside)), b""), (member("link/victim"), b"overwritten"))
    assert await files.errno("tar_in", inside, through) == 40
    (inside / "victim").symlink_to(outside / "victim")
    await files("tar_in", inside, packed((member("victim"), b"replaced")))
    assert (inside / "victim").read_text() == "replaced" and not (inside / "victim").is_symlink()
    as_directory = packed((member("link", tarfile.DIRTYPE), b""), (member("link/victim"), b"overwritten"))
    assert await files.errno("tar_in", inside, as_directory) == 40
    hardlink = packed((member("hard", tarfile.LNKTYPE, linkname="link/victim"), b""))
    assert await files.errno("tar_in", inside, hardlink) == 40
    absolute = packed((member("hard", tarfile.LNKTYPE, linkname=str(outside / "victim")), b""))
    assert await files.errno("tar_in", inside, absolute) == 22
    assert (outside / "victim").read_text() == "safe"


async def test_devices_are_refused_by_name(files: Files, tmp_path: Path) -> None:
    with pytest.raises(Failed, match="null"):
        await files("tar_in", tmp_path, packed((member("dev/null", tarfile.CHRTYPE, devmajor=1, devminor=3), b"")))
    assert await files.errno("tar_in", tmp_path, packed((member("sda", tarfile.BLKTYPE), b""))) == 1


async def test_what_is_no_archive_or_cut_off_is_refused(files: Files, tmp_path: Path) -> None:
    archive = packed((member("file"), b"x" * 10_000))
    assert await files.errno("tar_in", tmp_path, b"x" * 5000) == 22
    for end in (0, 100, 512, 5000, 512 + 10_240):
        assert await files.errno("tar_in", tmp_path, archive[:end]) == 22


@pytest.mark.skipif(not IS_ROOT, reason="needs root to give files away")
async def test_owners_of_an_archive_count_for_root_only(files: Files, tmp_path: Path) -> None:
    archive = packed((member("file", uid=123, gid=456), b"x"))
    await files("tar_in", tmp_path / "root", archive)
    assert ((tmp_path / "root" / "file").stat().st_uid, (tmp_path / "root" / "file").stat().st_gid) == (123, 456)


async def test_a_hundred_thousand_bytes_of_stdin_after_the_end_are_taken(files: Files, tmp_path: Path) -> None:
    await files("tar_in", tmp_path, packed((member("file"), b"x")) + b"\0" * 100_000)
    assert (tmp_path / "file").exists()


async def test_a_tar_upload_streams(channel: Channel, tmp_path: Path) -> None:
    archive = packed(*((member(f"dir/{number}"), os.urandom(1000)) for number in range(2000)))
    start = Start(builtin="tar_in", args={"path": os.fsencode(tmp_path)}, mode=MODE_STREAM, stdin=STDIN_STREAM)
    stream = await channel.start(start, follow=True)
    await asyncio.wait_for(stream.write(archive), DEADLINE_S)
    await stream.write_eof()
    stdout, _, exit = await read_all(stream)
    assert (exit.exit_code, msgspec.msgpack.decode(stdout)) == (0, {"entries": 2000, "bytes": 2_000_000})
    assert len(archive) > 2 * MB
