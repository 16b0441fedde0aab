"""Files and directories: any name, any size, and nothing hostile gets out of a download."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from sdk_server import FakeServer

from libdsec import DSecError, FileError, FileNotFound, InvalidArgument, Sandbox, Unavailable
from libdsec.files import Files
from libdsec.tar import pack
from libdsec.transport import SEND_CHUNK


@pytest.fixture
async def files(sandbox: Sandbox) -> Files:
    return sandbox.files


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/a b/c?d&e=f#g%h", b"/a b/c?d&e=f#g%h"),
        ("/grün", "/grün".encode()),
        (b"/raw\xff\xfe", b"/raw\xff\xfe"),
        ("/raw\udcff", b"/raw\xff"),
        (PurePosixPath("/pure/path"), b"/pure/path"),
        ("relative/file", b"/home/me/relative/file"),
        ("./a/./b//c", b"/home/me/a/b/c"),
        (b"/link/../a", b"/link/../a"),
        ("/link/", b"/link/"),
        ("/link/.", b"/link/"),
        ("//", b"/"),
        (".", b"/home/me"),
    ],
)
async def test_names_arrive_as_the_bytes_that_they_are(
    server: FakeServer, files: Files, path: str | bytes | PurePosixPath, sent: bytes
) -> None:
    await files.write(path, b"content")
    assert server.last_query["path"] == sent
    assert await files.read(path) == b"content"
    assert server.files == {sent: b"content"}


@pytest.mark.parametrize("path", ["", b"", "a\0b"])
async def test_what_no_path_can_be_is_refused_here(files: Files, path: str | bytes) -> None:
    with pytest.raises(InvalidArgument):
        await files.read(path)


@pytest.mark.parametrize("size", [0, 1, SEND_CHUNK, SEND_CHUNK + 1, 5 << 20])
async def test_content_of_any_size_comes_back_as_it_was(files: Files, size: int) -> None:
    content = os.urandom(size)
    await files.write("/f", content)
    assert await files.read("/f") == content
    assert b"".join([chunk async for chunk in files.read_stream("/f")]) == content
    await files.write("/f", memoryview(content))
    assert await files.read("/f") == content


async def test_a_stream_of_pieces_of_any_size_comes_back_as_it_was(files: Files) -> None:
    pieces = [os.urandom(size) for size in (1, SEND_CHUNK, SEND_CHUNK + 1, 3 * SEND_CHUNK, 10)]

    async def source() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    await files.write_stream("/f", source())
    assert await files.read("/f") == b"".join(pieces)


async def test_text_mode_user_and_append_are_passed_on(server: FakeServer, files: Files) -> None:
    await files.write("/t", "grün", mode=0o640, user="nobody")
    assert (server.last_query["mode"], server.last_query["user"]) == (b"640", b"nobody")
    await files.write("/t", "\n", append=True)
    assert await files.read_text("/t") == "grün\n"


async def test_a_part_can_be_read(files: Files) -> None:
    await files.write("/t", b"0123456789")
    assert b"".join([chunk async for chunk in files.read_stream("/t", offset=3, length=4)]) == b"3456"


async def test_lost_answers_are_asked_for_again(server: FakeServer, files: Files) -> None:
    server.cut_after_act = 1
    await files.write("/t", b"x" * 3_000_000)
    server.cut_after_act = 1
    assert len(await files.read("/t")) == 3_000_000
    server.cut_after_act = 1
    await files.mkdir("/d")
    assert len(set(server.changes)) == 1 and len(server.changes) == 2


async def test_an_append_and_a_stream_are_not_sent_twice(server: FakeServer, files: Files) -> None:
    server.cut_after_act = 1
    with pytest.raises(Unavailable):
        await files.write("/t", b"once", append=True)
    assert server.files[b"/t"] == b"once"

    async def source() -> AsyncIterator[bytes]:
        yield b"streamed"

    server.cut_after_act = 1
    with pytest.raises(Unavailable):
        await files.write_stream("/s", source())


async def test_a_head_goes_out_before_the_content_is_there(server: FakeServer, files: Files) -> None:
    async def source() -> AsyncIterator[bytes]:
        async with asyncio.timeout(10):
            await server.write_begun.wait()
        yield b"hello"

    await files.write_stream("/late", source())
    assert server.files[b"/late"] == b"hello"


async def test_a_stream_of_nothing_makes_an_empty_file(server: FakeServer, files: Files) -> None:
    async def source() -> AsyncIterator[bytes]:
        for piece in (b"", b""):
            yield piece

    await files.write_stream("/empty", source())
    assert server.files[b"/empty"] == b""


async def test_a_source_that_fails_writes_nothing(server: FakeServer, files: Files) -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"x" * 100_000
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await files.write_stream("/half", source())
    assert b"/half" not in server.files


@pytest.mark.parametrize("failure", [FileNotFound("of another sandbox"), InvalidArgument("mine")], ids=repr)
async def test_a_source_that_fails_with_an_error_of_the_tree_is_heard(server: FakeServer, files: Files, failure: DSecError) -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"x" * 100_000
        raise failure

    with pytest.raises(type(failure)) as caught:
        await files.write_stream("/half", source())
    assert caught.value is failure and b"/half" not in server.files


async def test_a_source_of_text_is_the_callers_mistake(server: FakeServer, files: Files) -> None:
    async def source() -> AsyncIterator[Any]:
        yield "text"

    with pytest.raises(TypeError, match="yield bytes, not str"):
        await files.write_stream("/text", source())
    assert not server.files


@pytest.mark.parametrize("number", [errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL], ids=errno.errorcode.get)
async def test_what_leads_nowhere_does_not_exist(server: FakeServer, files: Files, number: int) -> None:
    server.stat_errno = number
    if number == errno.EINVAL:
        with pytest.raises(InvalidArgument):
            await files.exists("/f")
    else:
        assert not await files.exists("/f/x")


async def test_the_tree_calls_say_what_they_mean(server: FakeServer, files: Files) -> None:
    await files.move("/a", "b")
    assert server.last_query == {"path": b"/a", "to": b"/home/me/b"}
    await files.remove("/a", recursive=True)
    assert server.last_query == {"path": b"/a", "recursive": b"true"}
    await files.chmod("/a", 0o4755)
    assert server.last_query == {"path": b"/a", "mode": b"4755"}
    await files.chown("/a", 1000, 100)
    assert server.last_query == {"path": b"/a", "owner": b"1000:100"}
    await files.mkdir("/a", parents=False, mode=0o700)
    assert server.last_query == {"path": b"/a", "parents": b"false", "mode": b"700"}


async def test_exists_stat_and_list(files: Files) -> None:
    await files.write(b"/odd\xff", b"12")
    assert await files.exists(b"/odd\xff") and not await files.exists("/nothing")
    assert (await files.stat(b"/odd\xff")).size == 2
    [entry] = await files.list("/")
    assert (entry.path_bytes, entry.path, entry.name) == (b"/odd\xff", "/odd\udcff", "odd\udcff")
    with pytest.raises(FileNotFound):
        await files.stat("/nothing")


async def test_watch_iterates_with_and_without_entering(files: Files) -> None:
    assert [event.path_bytes async for event in files.watch("/w")] == [b"/w/\xff"]
    async with files.watch("/w", recursive=True) as events:
        assert [event.type async for event in events] == ["created"]


class TestTransfer:
    async def test_a_file_goes_up_and_down(self, server: FakeServer, files: Files, tmp_path: Path) -> None:
        (tmp_path / "in").write_bytes(os.urandom(9_000_000))
        (tmp_path / "in").chmod(0o750)
        server.cut_after_act = 1
        await files.upload(tmp_path / "in", "/f")
        assert server.last_query["mode"] == b"750"
        server.cut_after_act = 1
        await files.download("/f", tmp_path / "deep" / "out")
        out = tmp_path / "deep" / "out"
        assert out.read_bytes() == (tmp_path / "in").read_bytes()
        assert out.stat().st_mode & 0o7777 == 0o755
        assert os.listdir(out.parent) == ["out"]

    async def test_a_download_that_fails_leaves_the_old_file(self, server: FakeServer, files: Files, tmp_path: Path) -> None:
        (tmp_path / "out").write_text("old")
        with pytest.raises(FileNotFound):
            await files.download("/nothing", tmp_path / "out")
        assert (tmp_path / "out").read_text() == "old" and os.listdir(tmp_path) == ["out"]

    async def test_a_directory_goes_up_whole(self, server: FakeServer, files: Files, tmp_path: Path) -> None:
        source = tmp_path / "tree"
        (source / "sub" / "empty").mkdir(parents=True)
        (source / "big").write_bytes(os.urandom(2_500_000))
        (source / "run").write_text("#!/bin/sh\n")
        (source / "run").chmod(0o755)
        os.link(source / "big", source / "sub" / "same")
        (source / "link").symlink_to("sub/same")
        (source / os.fsdecode(b"odd\xff")).write_text("x")
        server.cut_after_act = 1
        await files.upload(source, "/t")
        assert server.tars_put[0] == server.tars_put[1]
        with tarfile.open(fileobj=io.BytesIO(server.tars_put[0])) as archive:
            members = {member.name: member for member in archive}
            assert set(members) == {"sub", "sub/empty", "sub/same", "big", "run", "link", "odd\udcff"}
            content = archive.extractfile("big")
            assert content is not None and content.read() == (source / "big").read_bytes()
        assert members["run"].mode & 0o777 == 0o755
        assert (members["sub/same"].islnk(), members["sub/same"].linkname) == (True, "big")
        assert members["link"].linkname == "sub/same"

    async def test_a_directory_comes_down_whole(self, server: FakeServer, files: Files, tmp_path: Path) -> None:
        source, target = tmp_path / "in", tmp_path / "out"
        (source / "sub").mkdir(parents=True)
        (source / "big").write_bytes(os.urandom(3_000_000))
        os.link(source / "big", source / "sub" / "same")
        (source / "sub" / "up").symlink_to("../big")
        (source / "sub" / "run").write_text("x")
        (source / "sub" / "run").chmod(0o4775)
        (source / "sub").chmod(0o555)
        server.tar, server.directories = b"".join(pack(source)), {b"/d"}
        for _ in range(2):
            await files.download("/d", target)
        assert (target / "big").read_bytes() == (source / "big").read_bytes()
        assert (target / "sub" / "same").stat().st_ino == (target / "big").stat().st_ino
        assert os.readlink(target / "sub" / "up") == "../big"
        assert (target / "sub" / "run").stat().st_mode & 0o7777 == 0o755
        assert (target / "big").stat().st_mtime == int((source / "big").stat().st_mtime)


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b"") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, len(content)
    return member, content


def archive_of(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for member, content in entries:
            archive.addfile(member, io.BytesIO(content))
    return raw.getvalue()


SYM, LNK = tarfile.SYMTYPE, tarfile.LNKTYPE
HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "an absolute name": lambda out: archive_of(entry(f"{out}/evil", content=b"x")),
    "a name with ..": lambda out: archive_of(entry("../evil", content=b"x")),
    "a name with .. inside": lambda out: archive_of(entry("a/../../evil", content=b"x")),
    "a file below a symlink": lambda out: archive_of(entry("s", SYM, ".."), entry("s/evil", content=b"x")),
    "a directory below a symlink": lambda out: archive_of(entry("s", SYM, str(out)), entry("s/evil", tarfile.DIRTYPE)),
    "an absolute symlink": lambda out: archive_of(entry("s", SYM, "/etc/passwd")),
    "a relative symlink to the outside": lambda out: archive_of(entry("d/s", SYM, "../../secret")),
    "symlinks that lead outside only together": lambda out: archive_of(
        entry("d/e", tarfile.DIRTYPE), entry("d/e/top", SYM, "../.."), entry("s", SYM, "d/e/top/../secret")
    ),
    "a hardlink to the outside": lambda out: archive_of(entry("h", LNK, "../secret")),
    "a hardlink to an absolute name": lambda out: archive_of(entry("h", LNK, f"{out}/secret")),
    "a hardlink through a symlink": lambda out: archive_of(entry("s", SYM, "../secret"), entry("h", LNK, "s")),
    "a device": lambda out: archive_of(entry("d", tarfile.CHRTYPE)),
    "a truncated archive": lambda out: archive_of(entry("f", content=b"x" * 5000))[:2000],
    "no archive at all": lambda out: b"nonsense" * 1000,
}


@pytest.mark.parametrize("what", sorted(HOSTILE))
async def test_a_hostile_archive_is_refused_and_touches_nothing_outside(
    server: FakeServer, files: Files, tmp_path: Path, what: str
) -> None:
    (tmp_path / "secret").write_text("secret")
    server.tar, server.directories = HOSTILE[what](tmp_path), {b"/d"}
    with pytest.raises(FileError):
        await files.download("/d", tmp_path / "target")
    assert sorted(os.listdir(tmp_path)) == ["secret", "target"]
    assert (tmp_path / "secret").read_text() == "secret" and (tmp_path / "secret").stat().st_nlink == 1
    assert all(path.resolve().is_relative_to(tmp_path / "target") for path in (tmp_path / "target").rglob("*"))


async def test_pipes_are_left_out_of_a_download(server: FakeServer, files: Files, tmp_path: Path) -> None:
    server.tar = archive_of(entry("p", tarfile.FIFOTYPE), entry("d/p", tarfile.FIFOTYPE), entry("f", content=b"x"))
    server.directories = {b"/d"}
    await files.download("/d", tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["d", "f"] and not os.listdir(tmp_path / "out" / "d")


async def test_links_to_the_outside_can_be_left_out_or_kept(server: FakeServer, files: Files, tmp_path: Path) -> None:
    server.directories = {b"/d"}
    server.tar = archive_of(entry("venv/python", SYM, "/usr/bin/python3"), entry("f", content=b"x"), entry("l", SYM, "f"))
    await files.download("/d", tmp_path / "skip", outside_links="skip")
    assert sorted(os.listdir(tmp_path / "skip")) == ["f", "l", "venv"] and not os.listdir(tmp_path / "skip" / "venv")
    await files.download("/d", tmp_path / "keep", outside_links="keep")
    assert os.readlink(tmp_path / "keep" / "venv" / "python") == "/usr/bin/python3"


async def test_a_symlink_that_stood_there_before_is_not_written_through(server: FakeServer, files: Files, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "target" / "f").symlink_to(tmp_path / "secret")
    server.tar, server.directories = archive_of(entry("f", content=b"new")), {b"/d"}
    await files.download("/d", tmp_path / "target")
    assert (tmp_path / "secret").read_text() == "secret" and (tmp_path / "target" / "f").read_text() == "new"
