"""Files in a real sandbox: content, names, trees, and what a hostile archive gets."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import tarfile
from pathlib import Path

import aiohttp
import pytest

from libdsec import DiskFull, DSecClient, DSecError, FileError, FileNotFound, InvalidArgument, PermissionDenied, Sandbox


async def test_bytes_and_text_come_back_as_written(sandbox: Sandbox) -> None:
    data = os.urandom(3_000_001)
    await sandbox.files.write("/tmp/deep/er/blob", data, mode=0o640)
    assert await sandbox.files.read("/tmp/deep/er/blob") == data
    info = await sandbox.files.stat("/tmp/deep/er/blob")
    assert (info.size, info.mode, info.uid, info.type) == (len(data), 0o640, 0, "file")
    await sandbox.files.write("/tmp/text", "grün\n")
    assert await sandbox.files.read_text("/tmp/text") == "grün\n"
    await sandbox.files.write("/tmp/empty", b"")
    assert await sandbox.files.read("/tmp/empty") == b""


async def test_streams_carry_any_size(sandbox: Sandbox) -> None:
    block = os.urandom(1 << 20)

    async def source():
        for _ in range(64):
            yield block

    await sandbox.files.write_stream("/tmp/big", source())
    total = 0
    async for chunk in sandbox.files.read_stream("/tmp/big"):
        total += len(chunk)
    assert total == 64 << 20


async def test_names_that_are_not_utf8(sandbox: Sandbox) -> None:
    name = b"/tmp/caf\xe9\xff \n?&#%"
    await sandbox.files.write(name, b"x")
    listed = await sandbox.files.list("/tmp")
    assert name in [entry.path_bytes for entry in listed]
    await sandbox.files.move(name, b"/tmp/\xfe2")
    assert await sandbox.files.read(b"/tmp/\xfe2") == b"x"


async def test_directory_operations(sandbox: Sandbox) -> None:
    files = sandbox.files
    await files.mkdir("/srv/a/b/c")
    await files.write("/srv/a/one", "1")
    await files.write("/srv/a/b/two", "2")
    names = sorted(entry.path for entry in await files.list("/srv/a", recursive=True))
    assert names == ["/srv/a/b", "/srv/a/b/c", "/srv/a/b/two", "/srv/a/one"]
    await files.chmod("/srv/a/one", 0o4755)
    await files.chown("/srv/a/one", "nobody")
    info = await files.stat("/srv/a/one")
    assert info.uid == 65534
    assert await files.exists("/srv/a/b/two")
    await files.remove("/srv/a", recursive=True)
    assert not await files.exists("/srv/a")


async def test_errors_have_classes_of_their_own(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFound):
        await sandbox.files.read("/tmp/nothing")
    with pytest.raises(InvalidArgument):
        await sandbox.files.read("/tmp")
    with pytest.raises(DSecError):
        await sandbox.files.remove("/etc")
    with pytest.raises(PermissionDenied):
        await sandbox.files.write("/proc/sys/kernel/hostname", b"x")


async def test_sockets_and_pipes_are_not_read_and_stay_out_of_a_download(sandbox: Sandbox, tmp_path: Path) -> None:
    make = "import os, socket; os.makedirs('/tmp/odd'); socket.socket(socket.AF_UNIX).bind('/tmp/odd/s'); os.mkfifo('/tmp/odd/p')"
    await sandbox.exec(["python3", "-c", make], check=True)
    await sandbox.files.write("/tmp/odd/f", "1")
    for name, number in (("s", errno.ENXIO), ("p", errno.EINVAL), ("", errno.EISDIR)):
        with pytest.raises(InvalidArgument) as caught:
            await sandbox.files.read(f"/tmp/odd/{name}")
        assert caught.value.errno == number
    await sandbox.files.download("/tmp/odd", tmp_path / "odd")
    assert os.listdir(tmp_path / "odd") == ["f"]


async def test_what_leads_nowhere_does_not_exist_and_names_come_back_clean(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir -p d && echo 1 > d/f && ln -s loop d/loop && ln -s d link", check=True)
    assert await sandbox.files.exists("d/f")
    for path in ("d/f/x", "d/loop", "d/" + "y" * 300):
        assert not await sandbox.files.exists(path)
    workdir = (await sandbox.exec("pwd")).stdout.strip().rstrip("/")
    for path in (".", "./", f"{workdir}/."):
        assert {f"{workdir}/d", f"{workdir}/link"} <= {entry.path for entry in await sandbox.files.list(path)}
    assert sorted(entry.path for entry in await sandbox.files.list("./link/.")) == [f"{workdir}/link/f", f"{workdir}/link/loop"]


async def test_a_directory_of_the_image_is_moved_by_copying_only(sandbox: Sandbox) -> None:
    with pytest.raises(FileError) as caught:
        await sandbox.files.move("/usr/share", "/usr/share2")
    assert caught.value.errno == errno.EXDEV


async def test_a_full_disk_is_reported_and_nothing_half_written_stays(sandbox: Sandbox) -> None:
    async def source():
        block = os.urandom(1 << 20)
        for _ in range(600):
            yield block

    with pytest.raises(DiskFull):
        await sandbox.files.write_stream("/tmp/toobig", source())
    assert not await sandbox.files.exists("/tmp/toobig")
    assert (await sandbox.exec(["true"])).exit_code == 0
    await sandbox.files.write("/tmp/small", b"works again")


async def test_directories_travel_both_ways(sandbox: Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "script").write_text("#!/bin/sh\necho hi\n")
    (tree / "sub" / "script").chmod(0o755)
    (tree / "link").symlink_to("sub/script")
    (tree / os.fsdecode(b"n\xff")).write_bytes(b"odd")
    await sandbox.files.upload(tree, "/srv/tree")
    assert (await sandbox.exec(["/srv/tree/link"])).stdout == "hi\n"
    await sandbox.files.download("/srv/tree", tmp_path / "back")
    assert (tmp_path / "back" / "sub" / "script").stat().st_mode & 0o777 == 0o755
    assert os.readlink(tmp_path / "back" / "link") == "sub/script"
    assert (tmp_path / "back" / os.fsdecode(b"n\xff")).read_bytes() == b"odd"


async def test_watch_tells_what_happens_below(sandbox: Sandbox) -> None:
    await sandbox.files.mkdir("/srv/w")
    seen: set[tuple[str, str]] = set()
    ready = asyncio.Event()

    async def look() -> None:
        async for event in sandbox.files.watch("/srv/w", recursive=True):
            ready.set()
            seen.add((event.type, event.path))
            if ("created", "/srv/w/file") in seen:
                return

    task = asyncio.create_task(look())

    async def poke() -> None:
        number = 0
        while not ready.is_set():
            await sandbox.files.write(f"/srv/w/poke{number}", b"")
            number += 1

    await asyncio.wait_for(poke(), 20)
    await sandbox.exec("touch /srv/w/file")
    await asyncio.wait_for(task, 20)


def _tar(*members: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member in members:
            info, data = member if isinstance(member, tuple) else (member, b"")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    "archive",
    [
        _tar((_entry("../escaped"), b"x")),
        _tar((_entry("a/../../escaped"), b"x")),
        _tar(_entry("out", tarfile.SYMTYPE, "/srv"), (_entry("out/escaped"), b"x")),
        _tar(_entry("out", tarfile.SYMTYPE, ".."), (_entry("out/escaped"), b"x")),
        _tar(_entry("hard", tarfile.LNKTYPE, "../../etc/passwd")),
        _tar(_entry("device", tarfile.CHRTYPE)),
        _tar((_entry("x"), b"data"))[:700],
    ],
    ids=["dotdot", "inner-dotdot", "absolute-symlink", "relative-symlink", "hardlink-out", "device", "truncated"],
)
async def test_hostile_archives_are_refused_and_nothing_leaves_the_directory(sandbox: Sandbox, client: DSecClient, archive: bytes) -> None:
    await sandbox.files.mkdir("/srv/in/side")
    url = f"{client.url}/v1/sandboxes/{sandbox.id}/files/tar?path=/srv/in/side"
    async with (
        aiohttp.ClientSession() as session,
        session.put(url, data=archive, headers={"Authorization": f"Bearer {client.api_key}"}) as reply,
    ):
        assert 400 <= reply.status < 500, await reply.text()
        assert (await reply.json())["error"]["message"]
    assert [entry.name for entry in await sandbox.files.list("/srv/in")] == ["side"]
    assert not await sandbox.files.exists("/srv/escaped")


async def test_whiteout_names_in_an_upload_are_plain_files(sandbox: Sandbox, client: DSecClient) -> None:
    await sandbox.files.write("/srv/up/kept", b"1")
    archive = _tar((_entry(".wh.kept"), b""))
    url = f"{client.url}/v1/sandboxes/{sandbox.id}/files/tar?path=/srv/up"
    async with (
        aiohttp.ClientSession() as session,
        session.put(url, data=archive, headers={"Authorization": f"Bearer {client.api_key}"}) as reply,
    ):
        assert reply.status == 200, await reply.text()
    assert {entry.name for entry in await sandbox.files.list("/srv/up")} == {"kept", ".wh.kept"}


async def test_a_file_that_its_user_may_not_write_stays_as_it_is(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir /srv/own && echo kept > /srv/own/f && chmod 444 /srv/own/f && chown -R nobody /srv/own")
    with pytest.raises(PermissionDenied):
        await sandbox.files.write("/srv/own/f", b"replaced", user="nobody")
    assert await sandbox.files.read_text("/srv/own/f") == "kept\n"
