"""Images as sandboxes see them: composed, configured, and held while they are in use."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.errors import Conflict, ImageNotFound, InvalidArgument
from tests.unit.images_archives import OciImage, files, member, tar


def args(image: str, **more: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=image, memory_limit_mb=256, disk_limit_mb=256, **more)  # type: ignore[arg-type]


async def test_workspace_and_toolkits_merge_into_the_base(client: DSecClient, base_image: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "src").mkdir(parents=True)
    (work / "src" / "main.py").write_text("print('from the workspace')\n")
    tool = tmp_path / "tool.tar"
    tool.write_bytes(tar([(member("bin/tool", mode=0o755), b"#!/bin/sh\necho from the toolkit\n")]))
    await client.images.import_(work, name="work:test", kind="workspace", at="/work")
    await client.images.import_(tool, name="tool:test", kind="toolkit", at="/opt/tool")
    sandbox = await client.run_container(args(base_image, workspace="work:test", toolkits=("tool:test",)))
    assert (await sandbox.exec("python3 /work/src/main.py")).stdout == "from the workspace\n"
    assert (await sandbox.exec(["/opt/tool/bin/tool"])).stdout == "from the toolkit\n"
    assert (
        await sandbox.exec("touch /work/src/__pycache__ /opt/tool/bin/new && rm /work/src/main.py && ls /work/src")
    ).stdout == "__pycache__\n"
    info = await sandbox.info()
    assert (info.workspace, info.toolkits) == ("work:test@1", ("tool:test@1",))
    await sandbox.stop()


async def test_a_workspace_leaves_the_directories_that_it_passes_through_as_they_are(
    client: DSecClient, base_tar: Path, tmp_path: Path
) -> None:
    home = tar(
        [
            member("home", tarfile.DIRTYPE, mode=0o711, mtime=1_600_000_000),
            member("home/agent", tarfile.DIRTYPE, mode=0o700, uid=1000, gid=1000, pax_headers={"SCHILY.xattr.user.note": "kept"}),
        ]
    )
    base, tool = tmp_path / "base.tar", tmp_path / "tool.tar"
    base.write_bytes(OciImage.of([base_tar.read_bytes(), home]).archive())
    tool.write_bytes(files({"home/agent/.tool/run": b"", "home/new/x": b""}))
    (tmp_path / "repo").mkdir()
    await client.images.import_(base, name="passed:base")
    await client.images.import_(tmp_path / "repo", name="passed:repo", kind="workspace", at="/home/agent/repo")
    await client.images.import_(tool, name="passed:tool", kind="toolkit")
    sandbox = await client.run_container(args("passed:base", workspace="passed:repo", toolkits=("passed:tool",)))
    xattrs = "import os; print(os.listxattr('/home/agent'))"
    look = f"stat -c '%n %a %u %g %Y' /home /home/agent; stat -c '%n %a' /home/new; python3 -c \"{xattrs}\""
    wanted = "/home 711 0 0 1600000000\n/home/agent 700 1000 1000 0\n/home/new 755\n['user.note']\n"
    assert (await sandbox.exec(look)).stdout == wanted
    assert (await sandbox.exec("touch ~/own && ls -A /home/agent", user="1000:1000", env={"HOME": "/home/agent"})).stdout.split() == [
        ".tool",
        "own",
        "repo",
    ]
    assert not [entry.path async for entry in sandbox.diff() if entry.path not in ("home", "home/agent", "home/agent/own")]
    # What is made of the sandbox shows the same, and so do those that start with its files.
    packed = await sandbox.pack_diff("passed:packed")
    [child] = await sandbox.fork(1)
    again = await client.run_container(args(packed.image.name))
    for other in (child, again):
        assert "/home/agent 700 1000 1000 " in (await other.exec(look)).stdout
        await other.stop()
    await sandbox.stop()


async def test_an_image_configuration_is_honoured(client: DSecClient, base_tar: Path, tmp_path: Path) -> None:
    run: dict[str, object] = {"Env": ["GREETING=hello", "PATH=/usr/bin:/bin"], "WorkingDir": "/srv/app", "Labels": {"k": "v"}}
    packed = two_layers(base_tar, run, tmp_path / "image.tar")
    image = await client.images.import_(packed, name="configured:test")
    assert image.config.labels == {"k": "v"}
    sandbox = await client.run_container(args("configured:test"))
    result = await sandbox.exec("pwd; echo $GREETING; echo $PATH; ls /etc/debian_version; stat -c %u f")
    assert result.stdout == "/srv/app\nhello\n/usr/bin:/bin\n1000\n"
    await sandbox.stop()


def two_layers(base_tar: Path, run: dict[str, object], path: Path) -> Path:
    """An OCI archive of the base root and a layer that takes a file away and adds one."""
    upper = tar([member("etc/.wh.debian_version"), (member("srv/app/f", uid=1000), b"x")])
    path.write_bytes(OciImage.of([base_tar.read_bytes(), upper], run=run).archive())
    return path


async def test_owners_capabilities_and_odd_names_arrive_in_the_sandbox(client: DSecClient, base_image: str, tmp_path: Path) -> None:
    archive = tmp_path / "odd.tar"
    entries = [
        (member("owned", uid=100_000, gid=70_000, mode=0o640), b""),
        (member("setuid", mode=0o4755), b""),
        (member(b"\xff name\n"), b""),
        (member("capable", pax_headers={"SCHILY.xattr.user.note": "hi"}), b""),
    ]
    archive.write_bytes(tar(entries))
    await client.images.import_(archive, name="odd:test", kind="workspace", at="/odd")
    sandbox = await client.run_container(args(base_image, workspace="odd:test"))
    script = (
        "import os; s = os.stat('/odd/owned'); print(s.st_uid, s.st_gid, oct(os.stat('/odd/setuid').st_mode),"
        " sorted(os.listdir(b'/odd'))[-1], os.getxattr('/odd/capable', 'user.note'))"
    )
    result = await sandbox.exec(["python3", "-c", script])
    assert result.stdout == "100000 70000 0o104755 b'\\xff name\\n' b'hi'\n", result.stderr
    await sandbox.stop()


async def test_an_image_stays_while_a_sandbox_runs_on_it(client: DSecClient, base_tar: Path, tmp_path: Path) -> None:
    image = await client.images.import_(own_root(base_tar, tmp_path / "held.tar"), name="held:test")
    sandbox = await client.run_container(args("held:test"))
    with pytest.raises(Conflict):
        await client.images.remove("held:test")
    await client.images.gc()
    assert (await sandbox.exec("cat /marker")).stdout == "held"
    await sandbox.stop()
    assert (await client.images.remove("held:test")).digest == image.digest
    assert await client.images.gc() >= image.size
    with pytest.raises(ImageNotFound):
        await client.run_container(args("held:test"))


def own_root(base_tar: Path, path: Path) -> Path:
    """The base root with one more file, so that it is a layer of its own."""
    marker = io.BytesIO(files({"marker": b"held"}))
    with (
        tarfile.open(base_tar) as source,
        tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as target,
        tarfile.open(fileobj=marker) as extra,
    ):
        for archive in (source, extra):
            for info in archive:
                target.addfile(info, archive.extractfile(info) if info.isreg() else None)
    return path


async def test_references_that_make_no_sandbox_are_told_by_field(client: DSecClient, base_image: str) -> None:
    for arguments, kind in ((args("missing:test"), ImageNotFound), (args(base_image, workspace=base_image), InvalidArgument)):
        with pytest.raises(kind):
            await client.run_container(arguments)
