"""The routes below /v1/images, through a real server and the SDK."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import uvicorn
from aiohttp import web
from edge_fakes import eventually
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from dsec.api.errors import ErrorBoundary
from dsec.api.listener import bind
from dsec.images import ImageStore, ImportLimits
from dsec.store import Store
from libdsec import DSecClient, ImportLine
from libdsec.errors import Conflict, ImageError, ImageNotFound, InvalidArgument, PermissionDenied
from libdsec.images import pack_tree
from tests.unit import fake_registry
from tests.unit.images_archives import OciImage, digest, files

DEADLINE_S = 20.0


@dataclass
class Server:
    """The image routes alone, with an authentication that believes what it is told."""

    images: ImageStore
    root: Path
    url: str = ""
    project: str = "mine"
    admin: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.update({"dsec.project": self.project, "dsec.admin": self.admin, "app": self})
        await Router(self.images.routes(), redirect_slashes=False)(scope, receive, send)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.root.rglob("*") if path.is_file())

    async def nothing_left(self) -> None:
        """Waits until the store holds no file; what a client's disconnect leads to comes a moment after it."""
        end = time.monotonic() + DEADLINE_S
        while left := self.files():
            assert time.monotonic() < end, left
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(root: Path, *, limits: ImportLimits | None = None, converter: Path | None = None) -> AsyncIterator[Server]:
    """A server of an image store below ``root``."""
    store = await Store.open_file(root / "store.sqlite")
    images = ImageStore(root / "images", store, limits=limits or ImportLimits(disk_reserve=0), converter=converter)
    await images.open()
    made = Server(images, root / "images")
    listening = bind("127.0.0.1", 0)
    listening.listen()
    made.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    web = uvicorn.Server(uvicorn.Config(ErrorBoundary(made), log_level="warning", lifespan="off"))
    running = asyncio.create_task(web.serve(sockets=[listening]))
    try:
        yield made
    finally:
        web.should_exit = True
        await running
        await store.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path) as made:
        yield made


@pytest.fixture
async def client(server: Server) -> AsyncIterator[DSecClient]:
    async with DSecClient(server.url, api_key="dsec_any") as opened:
        yield opened


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small directory to import."""
    root = tmp_path / "tree"
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "hostname").write_text("box\n")
    return root


async def test_an_image_goes_in_and_is_found_listed_and_removed(client: DSecClient, tree: Path) -> None:
    name = "registry.../sphinx-9658:official"
    steps: list[tuple[str, int]] = []
    info = await client.images.import_(tree, name=name, progress=lambda step, size: steps.append((step, size)))
    assert (info.name, info.version, info.kind) == (name, 1, "base")
    assert {step for step, _ in steps} >= {"converting", "storing"}
    assert await client.images.get(name) == info
    assert await client.images.get(f"{name}@1") == info
    assert await client.images.get(info.digest) == info
    assert await client.images.list() == [info]
    assert await client.images.remove(name) == info
    assert await client.images.list() == []
    with pytest.raises(ImageNotFound):
        await client.images.get(name)
    with pytest.raises(ImageNotFound):
        await client.images.remove(name)


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "directory"])
async def test_an_upload_tells_its_size_where_that_is_known(client: DSecClient, tree: Path, tmp_path: Path, as_file: bool) -> None:
    (tree / "large").write_bytes(os.urandom(9_000_000))
    packed = tmp_path / "packed.tar"
    packed.write_bytes(b"".join(pack_tree(tree)))
    lines: list[ImportLine] = []
    await client.images.import_(packed if as_file else tree, name="x", told=lines.append)
    received = [line for line in lines if line.step == "receiving"]
    assert {line.total_bytes for line in received} == {packed.stat().st_size if as_file else None}
    assert {line.total_bytes for line in lines if line not in received} == {None}


async def test_directories_layouts_and_archives_are_told_apart(client: DSecClient, tree: Path, tmp_path: Path) -> None:
    archive = OciImage.of([files({"etc/hostname": b"box\n"})], run={"Env": ["A=1"]}).archive()
    packed = tmp_path / "image.tar"
    packed.write_bytes(archive)
    layout = tmp_path / "layout"
    await unpack(packed, layout)
    from_archive = await client.images.import_(packed, name="archive")
    from_layout = await client.images.import_(layout, name="layout")
    assert from_archive.layers == from_layout.layers
    assert from_archive.config.env == {"A": "1"}
    assert (await client.images.import_(tree, name="tree")).config.env == {}


async def unpack(archive: Path, target: Path) -> None:
    process = await asyncio.create_subprocess_exec("tar", "-xf", archive, f"--one-top-level={target}")
    assert await process.wait() == 0


async def test_a_refused_archive_raises_and_leaves_nothing(client: DSecClient, server: Server, tmp_path: Path) -> None:
    bad = tmp_path / "bad.tar"
    bad.write_bytes(b"no archive " * 100_000)
    with pytest.raises(ImageError):
        await client.images.import_(bad, name="bad")
    assert server.files() == []


async def test_an_upload_that_is_too_large_is_told_so_while_it_is_sent(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(os.urandom(1 << 20) * 30)
    async with (
        serving(tmp_path, limits=ImportLimits(disk_reserve=0, upload=1_000_000)) as server,
        DSecClient(server.url, api_key="k") as client,
    ):
        with pytest.raises(ImageError, match="exceeds"):
            await client.images.import_(big, name="big")
        assert server.files() == []


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"name": "a b"}, "name"),
        ({"name": "a@1"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "x", "kind": "other"}, "kind"),
        ({"name": "x", "format": "zip"}, "format"),
        ({"name": "x", "at": "relative"}, "at"),
        ({"name": "x", "at": "/a/../b"}, "at"),
        ({"name": "x", "at": "/a\nb"}, "at"),
        ({"name": "x", "at": "/.wh.a"}, "at"),
    ],
)
async def test_wrong_arguments_are_refused_by_field(client: DSecClient, tree: Path, arguments: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        await client.images.import_(tree, **arguments)  # type: ignore[arg-type]
    assert refusal.value.field == field


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=-1", "cursor=nonsense", "cursor=bnVsbA=="])
async def test_a_malformed_list_request_names_its_field(server: Server, query: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/v1/images?{query}") as response:
        assert response.status == 400
        assert (await response.json())["error"]["field"] == query.split("=")[0]


async def test_a_list_comes_in_pages(client: DSecClient, server: Server, tree: Path) -> None:
    for name in ("a", "b", "c"):
        await client.images.import_(tree, name=name)
    seen, cursor = [], ""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{server.url}/v1/images?limit=2{cursor}") as response:
                page = await response.json()
            seen += [image["name"] for image in page["images"]]
            if page["cursor"] is None:
                break
            cursor = f"&cursor={page['cursor']}"
    assert seen == ["a", "b", "c"]


async def test_the_same_idempotency_key_makes_one_version(server: Server) -> None:
    versions = []
    async with aiohttp.ClientSession(headers={"Idempotency-Key": "k1"}) as session:
        for _ in range(2):
            async with session.post(f"{server.url}/v1/images?name=x", data=files({"a": b"1"})) as response:
                versions.append(json.loads((await response.text()).splitlines()[-1])["image"]["version"])
    assert versions == [1, 1]


async def test_a_tag_is_another_name_of_the_same_content(client: DSecClient, server: Server, tree: Path) -> None:
    first = await client.images.import_(tree, name="python:3.11")
    (tree / "newer").write_text("newer")
    second = await client.images.import_(tree, name="python:3.11")
    before = server.files()
    stable = await client.images.tag("python:3.11@1", "python:stable")
    assert (stable.name, stable.version, stable.digest, stable.layers) == ("python:stable", 1, first.digest, first.layers)
    # The way back: what was the first version is the newest one again.
    back = await client.images.tag("python:3.11@1", "python:3.11")
    assert (back.version, back.digest) == (3, first.digest)
    assert (await client.images.get("python:3.11")).digest == first.digest != second.digest
    assert (await client.images.get(f"python:stable@{first.digest}")).name == "python:stable"
    assert server.files() == before
    await client.images.remove("python:3.11")
    server.admin = True
    await client.images.gc()
    assert (await client.images.get("python:stable")).digest == first.digest
    assert set(server.files()) == {digest.removeprefix("sha256:") for layer in first.layers for digest in (layer.digest, layer.blob)}


async def test_a_digest_with_several_names_means_the_callers(client: DSecClient, server: Server, tree: Path) -> None:
    made = await client.images.import_(tree, name="x")
    server.project = "theirs"
    await client.images.tag("x", "y")
    with pytest.raises(PermissionDenied):
        await client.images.remove(f"x@{made.digest}")
    server.project = "mine"
    assert (await client.images.remove(made.digest)).name == "x", "and not the newest one, which is another project's"
    with pytest.raises(ImageNotFound):
        await client.images.remove(f"x@{made.digest}")
    with pytest.raises(PermissionDenied):
        await client.images.remove(made.digest)


async def test_a_tag_keeps_to_the_rules_of_names(client: DSecClient, server: Server, tree: Path) -> None:
    await client.images.import_(tree, name="x")
    with pytest.raises(InvalidArgument):
        await client.images.tag("x", "y@1")
    with pytest.raises(ImageNotFound):
        await client.images.tag("nothing", "y")
    server.project = "theirs"
    with pytest.raises(PermissionDenied):
        await client.images.tag("x", "x")
    assert (await client.images.tag("x", "mine")).version == 1
    server.project = "others"
    with pytest.raises(PermissionDenied):
        await client.images.tag("x", "mine")


async def test_another_project_can_neither_take_a_name_nor_remove_it(client: DSecClient, server: Server, tree: Path) -> None:
    await client.images.import_(tree, name="x")
    server.project = "theirs"
    with pytest.raises(PermissionDenied):
        await client.images.import_(tree, name="x")
    with pytest.raises(PermissionDenied):
        await client.images.remove("x")
    with pytest.raises(PermissionDenied):
        await client.images.gc()
    server.admin = True
    await client.images.remove("x")
    assert await client.images.gc() > 0
    assert server.files() == []


@pytest.mark.parametrize("key", ["", "k" * 129])
async def test_an_idempotency_key_that_would_be_cut_is_refused(server: Server, key: str) -> None:
    async with (
        aiohttp.ClientSession(headers={"Idempotency-Key": key}) as session,
        session.post(f"{server.url}/v1/images?name=x", data=files({"a": b"1"})) as answer,
    ):
        assert answer.status == 400
        assert (await answer.json())["error"]["field"] == "idempotency_key"


async def test_a_body_that_is_nested_without_end_is_refused(server: Server) -> None:
    body = b'{"x": ' + b"[" * 50_000
    async with (
        aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session,
        session.post(f"{server.url}/v1/images/from-registry", data=body) as answer,
    ):
        assert answer.status == 400


async def test_an_image_in_use_is_not_removed(client: DSecClient, server: Server, tree: Path) -> None:
    info = await client.images.import_(tree, name="x")
    server.images.in_use = lambda: {info.layers[0].digest.removeprefix("sha256:")}
    with pytest.raises(Conflict):
        await client.images.remove("x")


async def test_a_client_that_disconnects_while_it_sends_leaves_nothing(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/images?name=x HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n" + bytes(9_000_000))
    await writer.drain()
    # The first line of progress: the import has begun.
    async with asyncio.timeout(DEADLINE_S):
        await reader.readuntil(b"receiving")
    assert server.files() != []
    writer.close()
    await server.nothing_left()
    assert server.images.page(None, 10) == []


async def test_a_client_that_disconnects_while_it_waits_leaves_nothing(tmp_path: Path) -> None:
    stuck = tmp_path / "stuck-mklayer"
    stuck.write_text("#!/bin/sh\nexec sleep 1000\n")
    stuck.chmod(0o755)
    body = files({"a": b"1"})
    async with serving(tmp_path, converter=stuck) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /v1/images?name=x HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(DEADLINE_S):
            await reader.readuntil(b"converting")
        writer.close()
        await server.nothing_left()


async def test_an_image_of_a_registry_goes_in_with_an_admins_key(client: DSecClient, server: Server, tmp_path: Path) -> None:
    made = OciImage.of([files({"a": os.urandom(9_000_000)})], run={"Env": ["A=1"]})
    async with fake_registry.running() as registry:
        registry.add(made)
        registry.auth = "bearer"
        with pytest.raises(PermissionDenied, match="--allow-registry"):
            await client.images.import_(registry.reference(), name="x")
        assert registry.asked == []
        server.admin = True
        with pytest.raises(PermissionDenied, match="refuses the credentials"):
            await client.images.import_(registry.reference(), name="x", credentials=("somebody", "wrong"))
        steps: list[tuple[str, int]] = []
        login = (fake_registry.USER, fake_registry.PASSWORD)
        info = await client.images.import_(
            registry.reference(), name="x", credentials=login, progress=lambda step, size: steps.append((step, size))
        )
    assert info.config.env == {"A": "1"}
    assert {step.split()[0] for step, _ in steps} >= {"asking", "fetching", "converting", "storing"}
    assert ("fetching" in steps[1][0]) and steps[1][1] > 8_000_000


async def test_a_client_that_goes_away_ends_the_fetching(client: DSecClient, server: Server) -> None:
    server.admin = True
    made = OciImage.of([files({"a": b"1"})])
    asked, gone = asyncio.Event(), asyncio.Event()

    async def stall(request: web.Request) -> web.StreamResponse:
        asked.set()
        await eventually(lambda: request.transport is None or request.transport.is_closing(), within_s=30)
        gone.set()
        return web.Response()

    async with fake_registry.running() as registry:
        registry.add(made)
        registry.instead[f"/v2/team/app/blobs/{digest(made.layers[0])}"] = stall
        importing = asyncio.create_task(client.images.import_(registry.reference(), name="x"))
        async with asyncio.timeout(DEADLINE_S):
            await asked.wait()
            importing.cancel()
            await gone.wait()
    await server.nothing_left()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"source": "docker://python:3.11", "name": "x"}, "source"),
        ({"source": "docker://127.0.0.1:1/a", "name": "x y"}, "name"),
        ({"source": "docker://127.0.0.1:1/a", "name": "x", "username": "u"}, "password"),
        ({"source": "docker://127.0.0.1:1/a", "name": "x", "username": "u\r\n", "password": "p"}, "username"),
        ({"source": "docker://127.0.0.1:1/a", "name": "x", "username": "u:v", "password": "p"}, "username"),
        ({"source": "docker://127.0.0.1:1/a", "name": "x", "kind": "other"}, None),
        ({"source": "docker://127.0.0.1:1/a", "name": "x", "more": 1}, None),
    ],
)
async def test_a_malformed_request_for_a_registry_is_refused(server: Server, body: dict[str, object], field: str | None) -> None:
    server.admin = True
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/v1/images/from-registry", json=body) as response:
        assert response.status == 400
        assert (await response.json())["error"].get("field") == field


async def test_a_debian_is_streamed_from_mmdebstrap(client: DSecClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root.tar").write_bytes(files({"etc/debian_version": b"12\n", "big": os.urandom(3_000_000)}))
    stand_in(tmp_path, f"exec /bin/cat {tmp_path}/root.tar", monkeypatch)
    info = await client.images.import_("mmdebstrap:bookworm", name="debian")
    assert info.layers == (await client.images.import_(tmp_path / "root.tar", name="same")).layers


async def test_a_failing_mmdebstrap_is_reported_in_its_own_words(
    client: DSecClient, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, "/bin/head -c 3000000 /dev/zero; echo 'E: no such suite' >&2; exit 25", monkeypatch)
    with pytest.raises(ImageError, match="no such suite"):
        await client.images.import_("mmdebstrap:nonsense", name="x")
    await server.nothing_left()
    (tmp_path / "bin" / "mmdebstrap").unlink()
    with pytest.raises(InvalidArgument, match="apt-get install mmdebstrap"):
        await client.images.import_("mmdebstrap:bookworm", name="x")
    await server.nothing_left()


def stand_in(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a shell script in the place of mmdebstrap."""
    program = directory / "bin" / "mmdebstrap"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))


async def test_a_missing_source_is_refused_before_anything_is_sent(client: DSecClient) -> None:
    for source in ("/no/such/file", "mmdebstrap:", "mmdebstrap:bookworm?colour=red", "mmdebstrap:bookworm?variant=huge", "mmdebstrap:-x"):
        with pytest.raises(InvalidArgument) as refusal:
            await client.images.import_(source, name="x")
        assert refusal.value.field == "source"
