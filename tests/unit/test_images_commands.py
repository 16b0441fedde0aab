"""``dsec image`` and ``dsec lock``, and the SDK below them, against real image routes of two nodes that share a store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from dsec.api.errors import ErrorBoundary
from dsec.api.listener import bind
from dsec.cli.output import size
from dsec.images.reads import BlobFigures
from libdsec import DSecClient, Lock
from libdsec.errors import ImageNotFound, InvalidArgument, PermissionDenied
from tests.unit.images_archives import files, flat_docker_archive
from tests.unit.images_nodes import Node, content, node


@dataclass
class Served:
    """A node whose image routes listen."""

    node: Node
    url: str = ""
    admin: bool = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.update({"dsec.project": "root", "dsec.admin": self.admin, "app": self})
        await Router(self.node.images.routes(), redirect_slashes=False)(scope, receive, send)

    async def dsec(self, *words: str, code: int = 0) -> str:
        """What a command prints."""
        environment = {**os.environ, "DSEC_URL": self.url, "DSEC_API_KEY": "k"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dsec.cli", *words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        output, complaint = await process.communicate()
        assert process.returncode == code, (output, complaint)
        return (output if code in (0, 1) and output else complaint).decode()


@asynccontextmanager
async def serving(made: Node) -> AsyncIterator[Served]:
    listening = bind("127.0.0.1", 0)
    listening.listen()
    served = Served(made, f"http://127.0.0.1:{listening.getsockname()[1]}")
    web = uvicorn.Server(uvicorn.Config(ErrorBoundary(served), log_level="warning", lifespan="off"))
    running = asyncio.create_task(web.serve(sockets=[listening]))
    try:
        yield served
    finally:
        web.should_exit = True
        await running


@pytest.fixture
async def a(tmp_path: Path) -> AsyncIterator[Served]:
    async with node(tmp_path / "a", str(tmp_path / "shared")) as made, serving(made) as served:
        yield served


@pytest.fixture
async def b(tmp_path: Path) -> AsyncIterator[Served]:
    async with node(tmp_path / "b", str(tmp_path / "shared")) as made, serving(made) as served:
        yield served


async def test_an_image_is_imported_here_and_pulled_there(a: Served, b: Served, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "data").write_bytes(content(1, 2 << 20))
    made = json.loads(await a.dsec("image", "import", str(tree), "--name", "team/x:1", "--json"))
    assert made["layers"][0]["index"].startswith("sha256:")
    assert json.loads(await b.dsec("image", "show", "team/x:1")) == made
    pulled = await b.dsec("image", "pull", "team/x:1", "--whole")
    assert pulled.startswith("team/x:1@1 base")
    assert made["layers"][0]["blob"][7:] in b.node.blobs()
    assert (await a.dsec("image", "push", "team/x:1")).startswith("team/x:1@1 base")
    assert "no image" in await b.dsec("image", "pull", "nothing", code=1)
    assert (await b.dsec("image", "tag", "team/x:1@1", "team/x:stable")).startswith("team/x:stable@1 base")
    assert json.loads(await a.dsec("image", "show", "team/x:stable"))["digest"] == made["digest"]


async def test_the_format_of_an_archive_can_be_said(a: Served, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(flat_docker_archive([files({"a": b"1"})], {"Env": ["A=1"]}))
    found_out = json.loads(await a.dsec("image", "import", str(tmp_path / "x.tar"), "--name", "x", "--json"))
    taken_as_tar = json.loads(await a.dsec("image", "import", str(tmp_path / "x.tar"), "--name", "x", "--format", "tar", "--json"))
    assert (found_out["config"]["env"], taken_as_tar["config"].get("env", {})) == ({"A": "1"}, {})
    assert "oci-layout" in await a.dsec("image", "import", str(tmp_path / "x.tar"), "--name", "x", "--format", "oci-archive", code=1)


@dataclass
class Shown:
    """What a command printed whose stderr is a terminal and whose stdout is a pipe."""

    printed: str
    on_terminal: str


async def on_terminal(served: Served, *words: str, code: int = 0) -> Shown:
    ours, theirs = os.openpty()
    environment = {**os.environ, "DSEC_URL": served.url, "DSEC_API_KEY": "k", "TERM": "xterm", "COLUMNS": "80"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dsec.cli", *words, env=environment, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    reading = asyncio.create_task(asyncio.to_thread(_read_terminal, ours))
    printed, _ = await process.communicate()
    shown = Shown(printed.decode(), (await reading).decode())
    assert process.returncode == code, shown
    return shown


def _read_terminal(ours: int) -> bytes:
    """All of it, until nobody has the other side open: then reading fails."""
    seen = bytearray()
    with os.fdopen(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
        while piece := terminal.read(4096):
            seen += piece
    return bytes(seen)


async def test_on_a_terminal_a_transfer_has_a_bar_and_its_size(a: Served, b: Served, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "data").write_bytes(content(1, 2 << 20))
    imported = await on_terminal(a, "image", "import", str(tmp_path / "tree"), "--name", "x")
    pulled = await on_terminal(b, "image", "pull", "x", "--whole", "--json")
    total = size(json.loads(pulled.printed)["layers"][0]["blob_bytes"])
    assert re.search(rf"fetching data: {total} of {total} .*━{{10}}", pulled.on_terminal)
    assert "publishing: " in imported.on_terminal and imported.printed.startswith("x@1 base")


async def test_what_is_printed_during_a_display_still_goes_to_stdout(a: Served, tmp_path: Path) -> None:
    made = await a.node.load("x", {"data": content(4, 1 << 20)})
    (tmp_path / "shared" / "blobs" / f"{(made.layers[0].blob or '')[7:]}.z").unlink()
    checked = await on_terminal(a, "image", "fsck", code=1)
    assert checked.printed.startswith("missing: store blobs/") and "checking" in checked.on_terminal


async def test_the_sdk_tells_the_steps_of_push_and_pull(a: Served, b: Served) -> None:
    made = await a.node.load("x", {"data": content(2, 2 << 20)})
    steps: list[str] = []
    async with DSecClient(a.url, "k") as client:
        assert await client.images.push("x", progress=lambda step, done: steps.append(step)) == made
        assert "publishing" in steps
        with pytest.raises(InvalidArgument) as refusal:
            await client.images.push("@")
        assert refusal.value.field == "reference"
    async with DSecClient(b.url, "k") as client:
        steps.clear()
        assert await client.images.pull("x", whole=True, progress=lambda step, done: steps.append(step)) == made
        assert steps[0] == "fetching metadata" and "fetching data" in steps
        with pytest.raises(ImageNotFound):
            await client.images.pull("y")


async def test_stats_say_what_fraction_was_read(a: Served) -> None:
    made = await a.node.load("x", {"data": content(3, 4 << 20)})
    assert "not measured: all of it is on this node" in await a.dsec("image", "stats", "x")
    assert json.loads(await a.dsec("image", "stats", "x", "--json"))["needed"] is None
    a.node.images.note_start(a.node.images.resolve("x", None, ()))
    await a.node.images.record_reads({made.layers[0].blob or "": BlobFigures(needed=1 << 20, fetched=2 << 20, from_cache=10)})
    told = await a.dsec("image", "stats", "x")
    assert "x@1" in told and "(25.0%)" in told and "2.0 MiB" in told
    assert json.loads(await a.dsec("image", "stats", "x", "--json"))["sandboxes"] == 1


async def test_a_diff_is_printed_a_path_a_line(a: Served) -> None:
    await a.node.load("x", {"a": b"1", "b": b"2"})
    await a.node.load("x", {"a": b"1", "b": b"2222", "c\nd": b"3"})
    assert (await a.dsec("image", "diff", "x@1", "x@2")).splitlines() == ["~ /b  1 B -> 4 B", "+ /c\\nd  1 B"]
    assert "no image" in await a.dsec("image", "diff", "x", "y", code=1)


async def test_fsck_ends_with_1_until_nothing_is_wrong(a: Served, tmp_path: Path) -> None:
    made = await a.node.load("x", {"data": content(4, 1 << 20)})
    assert await a.dsec("image", "fsck", "--deep") == "nothing is wrong\n"
    (tmp_path / "shared" / "blobs" / f"{(made.layers[0].blob or '')[7:]}.z").unlink()
    told = await a.dsec("image", "fsck", code=1)
    assert told.startswith("missing: store blobs/") and "of x@1" in told and told.endswith("1 found, 0 repaired\n")
    assert (await a.dsec("image", "fsck", "--repair")).endswith("1 found, 1 repaired\n")
    assert json.loads(await a.dsec("image", "fsck", "--json")) == []
    a.admin = False
    async with DSecClient(a.url, "k") as client:
        with pytest.raises(PermissionDenied):
            await client.images.fsck()


@pytest.mark.parametrize("suffix", ["toml", "json"])
async def test_a_lock_pins_what_names_mean_now(suffix: str, a: Served, b: Served, tmp_path: Path) -> None:
    base = await a.node.load("base", {"a": b"1"})
    repo = await a.node.load("repo", {"w": b"1"}, kind="workspace")
    tool = await a.node.load("tool", {"t": b"1"}, kind="toolkit")
    file = tmp_path / f"env.{suffix}"
    layers = ("--workspace", "repo", "--toolkit", "tool")
    await a.dsec("lock", str(file), "base", *layers, "--network", "none", "--allow", "a.org", "--deny", "b.org")
    lock = Lock.read(file)
    assert lock == Lock(
        image=f"base@{base.digest}",
        workspace=f"repo@{repo.digest}",
        toolkits=(f"tool@{tool.digest}",),
        network="none",
        network_rules={"a.org": True, "b.org": False},
    )
    for name, kind in (("base", "base"), ("repo", "workspace"), ("tool", "toolkit")):
        await a.node.load(name, {"changed": b"2"}, kind=kind)
    # Another node, where none of these names was ever heard.
    await b.node.images.locate(lock.image, lock.workspace, lock.toolkits)
    environment = b.node.images.resolve(lock.image, lock.workspace, lock.toolkits)
    assert [layer.digest for layer in environment.layers] == [info.layers[0].digest for info in (tool, repo, base)]
    assert "where a base is needed" in await a.dsec("lock", str(file), "repo", code=1)


async def test_create_takes_an_image_or_a_lock_and_not_both(a: Served, tmp_path: Path) -> None:
    assert "one of the two" in await a.dsec("create", code=2)
    assert "one of the two" in await a.dsec("create", "x", "--lock", str(tmp_path / "x.toml"), code=2)
    assert "beside" in await a.dsec("create", "--lock", str(tmp_path / "x.toml"), "--workspace", "w", code=2)
    (tmp_path / "x.toml").write_text("image = 1")
    assert "no lock file" in await a.dsec("create", "--lock", str(tmp_path / "x.toml"), code=1)
