"""Images of registries: what is taken, what is refused, what is gone on with, and to whom nothing is ever sent."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
import zstandard
from aiohttp import web
from yarl import URL

from dsec.images import ImageStore, ImportLimits, RegistryPolicy
from dsec.images import registry as registry_module
from dsec.images.catalog import Caller
from dsec.images.importing import ImportRequest, RegistrySource
from dsec.images.registry import Credentials, RegistryReference
from dsec.images.registry_access import Gate
from dsec.store import Store
from libdsec.errors import ImageError, ImageNotFound, InvalidArgument, PermissionDenied, Unavailable
from libdsec.registry_login import find_login
from libdsec.schema import ImageInfo, ImportLine
from tests.unit import fake_registry
from tests.unit.fake_registry import BASIC, PASSWORD, TOKEN, USER, FakeRegistry
from tests.unit.images_archives import OCI_LAYER, OCI_MANIFEST, OciImage, digest, docker_archive, files, member, tar
from tests.unit.test_images_import import ADMIN, chunks, request

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
LOGIN = Credentials(USER, PASSWORD)
HUB_NAMES = ("docker.io", "index.docker.io", "registry-1.docker.io", "Docker.io")


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    async with fake_registry.running() as made:
        yield made


@pytest.fixture
async def images(tmp_path: Path) -> AsyncIterator[ImageStore]:
    store = await Store.open_file(tmp_path / "store.sqlite")
    opened = ImageStore(tmp_path / "images", store, limits=ImportLimits(disk_reserve=0))
    await opened.open()
    yield opened
    await store.close()


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed requests are repeated at once."""
    monkeypatch.setattr(registry_module, "BACKOFF_S", (0.0,))


async def pull(
    images: ImageStore,
    source: str,
    *,
    name: str = "image",
    login: Credentials | None = None,
    caller: Caller = ADMIN,
    tell: Callable[[ImportLine], None] | None = None,
) -> ImageInfo:
    wanted: ImportRequest = request(name, caller=caller)
    place = RegistrySource(reference=RegistryReference.parse(source), credentials=login, insecure=False)
    return await images.import_registry(wanted, place, tell or (lambda line: None))


def partial(root: Path) -> list[int]:
    """Sizes of the downloads that are kept."""
    directory = root / "images" / "downloads"
    return sorted(path.stat().st_size for path in directory.iterdir()) if directory.exists() else []


def image(*, compress: bool = True) -> OciImage:
    layers = [files({f"f{index}": os.urandom(300_000), "shared": bytes([index])}) for index in range(3)]
    return OciImage.of(layers, compress=compress, run={"Env": ["A=1"], "WorkingDir": "/w"})


# -- what is taken -------------------------------------------------------------------------------------------------------------------------


async def test_an_image_of_a_registry_is_the_same_as_its_archive(images: ImageStore, registry: FakeRegistry, tmp_path: Path) -> None:
    made = image()
    registry.add(made)
    info = await pull(images, registry.reference())
    archive = await images.import_archive(request("archive"), chunks(made.archive()), lambda line: None)
    assert (info.digest, info.config.env, info.config.workdir) == (archive.digest, {"A": "1"}, "/w")
    assert partial(tmp_path) == []


@pytest.mark.parametrize(
    ("pack", "suffix"),
    [(lambda data: data, ""), (gzip.compress, "+gzip"), (zstandard.compress, "+zstd")],
    ids=["plain", "gzip", "zstd"],
)
@pytest.mark.parametrize("kind", ["oci", "docker"])
async def test_layers_of_every_compression_and_both_families_of_types(
    images: ImageStore, registry: FakeRegistry, pack: Callable[[bytes], bytes], suffix: str, kind: str
) -> None:
    layer = files({"a": b"x" * 100_000})
    made = OciImage.of([layer])
    made.layers = [pack(layer)]
    docker = "application/vnd.docker.image.rootfs.diff.tar" + suffix.replace("+", ".")
    made.media_types = [OCI_LAYER + suffix if kind == "oci" else docker]
    registry.add(made, media_type=OCI_MANIFEST if kind == "oci" else DOCKER_MANIFEST)
    info = await pull(images, registry.reference())
    plain = await images.import_archive(request("plain"), chunks(docker_archive([layer])), lambda line: None)
    assert info.layers == plain.layers


async def test_of_several_platforms_this_machines_is_taken(images: ImageStore, registry: FakeRegistry) -> None:
    wanted, other = image(), image()
    mine = registry.add(wanted, tag="mine")
    foreign = registry.add(other, tag="foreign")
    here = wanted.config["architecture"]

    def entry(name: str, architecture: object, system: str = "linux") -> dict[str, object]:
        size = len(registry.manifests[name][0])
        return {"mediaType": OCI_MANIFEST, "digest": name, "size": size, "platform": {"os": system, "architecture": architecture}}

    signature = {"mediaType": "application/vnd.example.signature", "digest": digest(b"s"), "size": 1}
    attestation = entry(foreign, "unknown", "unknown")
    index = {"schemaVersion": 2, "manifests": [signature, attestation, entry(foreign, "mips"), entry(mine, here), entry(foreign, here)]}
    registry.put("multi", json.dumps(index).encode(), OCI_INDEX)
    info = await pull(images, registry.reference("multi"))
    assert info.digest == (await pull(images, registry.reference("mine"))).digest
    none = {"schemaVersion": 2, "manifests": [entry(foreign, "mips")]}
    registry.put("none", json.dumps(none).encode(), OCI_INDEX)
    with pytest.raises(ImageError, match="no image for linux"):
        await pull(images, registry.reference("none"))


async def test_an_image_that_is_known_is_not_fetched_again(images: ImageStore, registry: FakeRegistry) -> None:
    registry.add(image())
    first = await pull(images, registry.reference())
    blobs = len(registry.asked_for("/blobs/"))
    second = await pull(images, registry.reference())
    assert (second.layers, second.version) == (first.layers, 2)
    assert len(registry.asked_for("/blobs/")) == blobs + 1, "only the configuration"
    await images.remove("image", ADMIN)
    await images.collect_garbage()
    assert (await pull(images, registry.reference())).layers == first.layers


async def test_layers_of_a_registry_are_collapsed_up_to_the_limit(tmp_path: Path, registry: FakeRegistry) -> None:
    layers = [files({f"f{index}": bytes([index]) * 20_000}) for index in range(5)]
    registry.add(OciImage.of(layers))
    store = await Store.open_file(tmp_path / "store.sqlite")
    images = ImageStore(tmp_path / "images", store, limits=ImportLimits(disk_reserve=0, collapse=2 * len(layers[0]), conversions=1))
    await images.open()
    info = await pull(images, registry.reference())
    assert len(info.layers) == 3
    blobs = len(registry.asked_for("/blobs/"))
    assert (await pull(images, registry.reference())).layers == info.layers
    assert len(registry.asked_for("/blobs/")) == blobs + 1
    await store.close()


async def test_layers_are_fetched_side_by_side_but_not_all_at_once(images: ImageStore, registry: FakeRegistry) -> None:
    made = OciImage.of([files({f"f{index}": b"x"}) for index in range(9)])
    registry.add(made)
    at_once = most = 0
    full = asyncio.Event()

    async def counted(asked: web.Request) -> web.StreamResponse:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once == images.limits.connections:
            full.set()
        await asyncio.wait_for(full.wait(), 20)
        name = asked.path.rsplit("/", 1)[-1]
        answer = await registry.serve(asked, name, registry.blobs[name])
        at_once -= 1
        return answer

    registry.instead = {f"/v2/team/app/blobs/{digest(layer)}": counted for layer in made.layers}
    await pull(images, registry.reference())
    assert most == images.limits.connections


# -- who is asked --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auth", ["basic", "bearer"])
async def test_credentials_open_a_closed_registry(images: ImageStore, registry: FakeRegistry, auth: str) -> None:
    registry.add(image())
    registry.auth = auth
    with pytest.raises(PermissionDenied, match="credentials"):
        await pull(images, registry.reference())
    with pytest.raises(PermissionDenied, match="refuses the credentials"):
        await pull(images, registry.reference(), login=Credentials(USER, "wrong"))
    await pull(images, registry.reference(), login=LOGIN)
    if auth == "bearer":
        passwords = [each for each in registry.asked if each.authorization == BASIC]
        assert [each.path for each in passwords] == ["/token"], "the password goes to the token server alone, once"


async def test_a_token_that_expires_on_the_way_is_renewed(images: ImageStore, registry: FakeRegistry) -> None:
    made = image()
    registry.add(made)
    registry.auth = "bearer"
    path = f"/v2/team/app/blobs/{digest(made.layers[1])}"

    async def expired(asked: web.Request) -> web.StreamResponse:
        del registry.instead[path]
        challenge = f'Bearer realm="http://{registry.host}/token",service="the registry"'
        return web.Response(status=401, headers={"WWW-Authenticate": challenge})

    registry.instead[path] = expired
    await pull(images, registry.reference(), login=LOGIN)
    assert len(registry.asked_for("/token")) == 2


@pytest.mark.parametrize("auth", ["basic", "bearer"])
async def test_no_other_host_ever_gets_the_authorization(images: ImageStore, registry: FakeRegistry, auth: str) -> None:
    made = image()
    registry.add(made)
    registry.auth = auth
    async with fake_registry.running("localhost") as store:
        for layer in made.layers:
            store.blobs[digest(layer)] = layer

            async def away(asked: web.Request) -> web.StreamResponse:
                if asked.headers.get("Authorization") not in (BASIC, f"Bearer {TOKEN}"):
                    return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})
                raise web.HTTPTemporaryRedirect(f"http://{store.host}{asked.path}?signature=1")

            registry.instead[f"/v2/team/app/blobs/{digest(layer)}"] = away
        await pull(images, registry.reference(), login=LOGIN)
        assert len(store.asked) == len(made.layers)
        assert {each.authorization for each in store.asked} == {None}


async def test_a_redirect_may_not_leave_http_nor_run_in_circles(images: ImageStore, registry: FakeRegistry) -> None:
    made = image()
    registry.add(made)
    path = f"/v2/team/app/blobs/{digest(made.layers[0])}"
    for location, why in (
        ("file:///etc/passwd", "redirects to"),
        ("", "redirects to"),
        (f"http://user:word@{registry.host}/x", "redirects to"),
        (path, "HTTP 307"),
    ):

        async def away(asked: web.Request, location: str = location) -> web.StreamResponse:
            return web.Response(status=307, headers={"Location": location})

        registry.instead[path] = away
        with pytest.raises(ImageError, match=why):
            await pull(images, registry.reference())


async def test_over_https_only_a_trusted_certificate_counts_and_nothing_leads_down_to_http(
    images: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x"]
    files_of = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "certificate.pem")]
    subprocess.run([*command, *files_of], check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    monkeypatch.setattr(RegistryReference, "is_loopback", False)
    async with fake_registry.running(tls=tls) as registry, fake_registry.running() as plain:
        made = image()
        registry.add(made)
        with pytest.raises(Unavailable, match="no certificate that is trusted"):
            await pull(images, registry.reference())
        assert registry.asked == []
        trusting = ssl.create_default_context(cafile=str(tmp_path / "certificate.pem"))
        monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", trusting)
        await pull(images, registry.reference())

        async def down(asked: web.Request) -> web.StreamResponse:
            raise web.HTTPTemporaryRedirect(f"http://{plain.host}{asked.path}")

        registry.instead["/v2/team/app/manifests/1"] = down
        with pytest.raises(ImageError, match="nothing is fetched from"):
            await pull(images, registry.reference())
        registry.instead.clear()
        registry.auth, registry.realm = "bearer", f"http://{plain.host}/token"
        with pytest.raises(ImageError, match="nothing is fetched from"):
            await pull(images, registry.reference(), login=LOGIN)
        assert plain.asked == []


@pytest.mark.parametrize(
    ("address", "direct", "behind_private"),
    [
        ("127.0.0.1", True, True),
        ("10.1.2.3", True, True),
        ("192.168.0.9", True, True),
        ("::1", True, True),
        ("fd00::1", True, True),
        ("::ffff:10.0.0.1", True, True),
        ("100.64.0.1", True, True),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("fe80::1%eth0", False, False),
        ("0.0.0.0", False, False),
        ("224.0.0.1", False, False),
    ],
)
def test_where_a_registry_may_lead_us(address: str, direct: bool, behind_private: bool) -> None:
    """Named by an admin; by a redirect of a private registry; and never by a redirect of a public one."""
    assert (Gate(direct=True).problem(address) is None) == direct
    assert (Gate(direct=False, private_allowed=True).problem(address) is None) == behind_private
    assert Gate(direct=False).problem(address) is not None
    for gate in (Gate(direct=True), Gate(direct=False)):
        assert gate.problem("198.41.0.4") is None and gate.problem("2001:503:ba3e::2:30") is None
        assert not gate.saw_private


async def test_the_gate_stands_where_sockets_are_made(registry: FakeRegistry) -> None:
    gate = Gate(direct=False)
    async with registry_module._session(gate) as session:
        for host in (registry.host, registry.host.replace("127.0.0.1", "localhost")):
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get(f"http://{host}/v2/")
    assert len(gate.refused) >= 2 and registry.asked == []


async def test_a_public_registry_leads_to_no_private_address(
    images: ImageStore, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = image()
    registry.add(made)
    monkeypatch.setattr(Gate, "saw_private", property(lambda self: False, lambda self, value: None), raising=False)
    async with fake_registry.running("localhost") as inside:

        async def away(asked: web.Request) -> web.StreamResponse:
            raise web.HTTPTemporaryRedirect(f"http://{inside.host}/admin")

        registry.instead[f"/v2/team/app/blobs/{digest(made.layers[0])}"] = away
        with pytest.raises(PermissionDenied, match="not a public address"):
            await pull(images, registry.reference())
        registry.instead.clear()
        registry.auth, registry.realm = "bearer", f"http://{inside.host}/token"
        with pytest.raises(PermissionDenied, match="not a public address"):
            await pull(images, registry.reference(), login=LOGIN)
        assert inside.asked == []


def test_a_projects_key_names_listed_registries_only() -> None:
    policy = RegistryPolicy.of(["registry.example", "Mirror.example:5000"])
    policy.check("registry.example", admin=False)
    policy.check("mirror.example:5000", admin=False)
    policy.check("10.0.0.1:5000", admin=True)
    for host in ("registry.example:5000", "mirror.example", "localhost:5000", "sub.registry.example"):
        with pytest.raises(PermissionDenied, match="--allow-registry"):
            policy.check(host, admin=False)


@pytest.mark.parametrize("listed", HUB_NAMES)
def test_docker_hub_is_allowed_by_any_of_its_names(listed: str) -> None:
    policy = RegistryPolicy.of([listed])
    for host in HUB_NAMES:
        policy.check(host, admin=False)
    for host in ("docker.io:5000", "sub.docker.io", "hub.docker.com"):
        with pytest.raises(PermissionDenied, match="--allow-registry"):
            policy.check(host, admin=False)


# -- what is refused -----------------------------------------------------------------------------------------------------------------------


async def test_what_a_registry_lacks_is_not_found_and_its_words_are_not_repeated(images: ImageStore, registry: FakeRegistry) -> None:
    with pytest.raises(ImageNotFound, match="MANIFEST_UNKNOWN") as missing:
        await pull(images, registry.reference("nothing"))
    assert "outside" not in missing.value.message


def lie(change: Callable[[dict[str, object]], object]) -> Callable[[FakeRegistry, OciImage], None]:
    def bend(registry: FakeRegistry, made: OciImage) -> None:
        manifest = json.loads(registry.manifests["1"][0])
        change(manifest)
        registry.put("1", json.dumps(manifest).encode(), manifest.get("mediaType", OCI_MANIFEST))

    return bend


def forged_layer(registry: FakeRegistry, made: OciImage) -> None:
    registry.blobs[digest(made.layers[0])] = bytes(len(made.layers[0]))


def longer_layer(registry: FakeRegistry, made: OciImage) -> None:
    registry.blobs[digest(made.layers[0])] += b"more"


def forged_configuration(registry: FakeRegistry, made: OciImage) -> None:
    name = digest(json.dumps(made.config).encode())
    registry.blobs[name] = registry.blobs[name].replace(b"A=1", b"A=2")


def forged_manifest(registry: FakeRegistry, made: OciImage) -> None:
    data, kind = registry.manifests["1"]

    async def other(asked: web.Request) -> web.StreamResponse:
        return web.Response(body=data + b" ", headers={"Content-Type": kind, "Docker-Content-Digest": digest(data)})

    registry.instead["/v2/team/app/manifests/1"] = other


def endless_manifest(registry: FakeRegistry, made: OciImage) -> None:
    async def endless(asked: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": OCI_MANIFEST})
        await response.prepare(asked)
        while True:
            await response.write(b" " * 65_536)

    registry.instead["/v2/team/app/manifests/1"] = endless


LIES = {
    "forged layer": (forged_layer, "another digest"),
    "longer layer": (longer_layer, "longer than"),
    "forged configuration": (forged_configuration, "another digest"),
    "forged manifest": (forged_manifest, "broken or forged"),
    "endless manifest": (endless_manifest, "more than"),
    "size of a layer": (lie(lambda m: m["layers"][0].update(size=10)), "longer than"),
    "negative size": (lie(lambda m: m["layers"][0].update(size=-1)), "said to have"),
    "enormous size": (lie(lambda m: m["layers"][0].update(size=1 << 50)), "at most"),
    "huge configuration": (lie(lambda m: m["config"].update(size=1 << 40)), "at most"),
    "size of the configuration": (lie(lambda m: m["config"].update(size=3)), "are promised"),
    "digest that leads elsewhere": (lie(lambda m: m["layers"][0].update(digest="sha256:../../../../etc/passwd")), "isn't supported"),
    "too few layers": (lie(lambda m: m["layers"].pop()), "lists 2 layers"),
    "too many layers": (lie(lambda m: m.update(layers=m["layers"] * 200)), "lists 600 layers"),
    "index and manifest at once": (lie(lambda m: m.update(manifests=[])), "at the same time"),
    "another type than announced": (lie(lambda m: m.update(mediaType="text/html")), "isn't supported"),
    "layer of an unknown type": (lie(lambda m: m["layers"][0].update(mediaType="application/x")), "isn't supported"),
    "chart": (lie(lambda m: m["config"].update(mediaType="application/vnd.cncf.helm.config.v1+json")), "isn't supported"),
    "schema 1": (lambda registry, made: registry.put("1", b'{"schemaVersion": 1}', SCHEMA_1), "current tool"),
    "no JSON": (lambda registry, made: registry.put("1", b"<html>", OCI_MANIFEST), "not what it should be"),
}


@pytest.mark.parametrize("case", LIES)
async def test_a_registry_that_lies_is_refused_whole(images: ImageStore, registry: FakeRegistry, tmp_path: Path, case: str) -> None:
    bend, why = LIES[case]
    made = image()
    registry.add(made)
    bend(registry, made)
    with pytest.raises(ImageError, match=why):
        await pull(images, registry.reference())
    assert list((tmp_path / "images" / "tmp").iterdir()) == [] == list((tmp_path / "images" / "blobs").iterdir())
    assert images.page(None, 10) == []


async def test_a_manifest_asked_for_by_digest_has_that_digest(images: ImageStore, registry: FakeRegistry) -> None:
    name = registry.add(image())
    reference = f"docker://{registry.host}/team/app@{name}"
    await pull(images, reference)
    registry.manifests[name] = registry.manifests[registry.add(image(), tag="2")]
    with pytest.raises(ImageError, match="broken or forged"):
        await pull(images, reference)


async def test_what_comes_compressed_is_not_decompressed_by_the_http_client(images: ImageStore, registry: FakeRegistry) -> None:
    made = image(compress=False)
    registry.add(made)
    layer = made.layers[0]

    async def encoded(asked: web.Request) -> web.StreamResponse:
        return web.Response(body=gzip.compress(layer), headers={"Content-Encoding": "gzip"})

    registry.instead[f"/v2/team/app/blobs/{digest(layer)}"] = encoded
    with pytest.raises((ImageError, Unavailable), match=r"another digest|longer than|ends after"):
        await pull(images, registry.reference())


# -- broken connections --------------------------------------------------------------------------------------------------------------------


async def test_a_broken_connection_goes_on_where_it_stopped(images: ImageStore, registry: FakeRegistry) -> None:
    made = image()
    registry.add(made)
    layer = made.layers[1]
    registry.cuts[digest(layer)] = [100_000, 50_000, 1]
    told: list[int] = []
    await pull(images, registry.reference(), tell=lambda line: told.append(line.done_bytes))
    ranges = [each.range for each in registry.asked_for(digest(layer))]
    assert ranges == [None, "bytes=100000-", "bytes=150000-", "bytes=150001-"]


async def test_fetching_tells_how_much_there_is_to_fetch(images: ImageStore, registry: FakeRegistry) -> None:
    made = OciImage.of([files({"a": os.urandom(9_000_000)}), files({"b": os.urandom(9_000_000)})])
    registry.add(made)
    lines: list[ImportLine] = []
    await pull(images, registry.reference(), tell=lines.append)
    total = sum(map(len, made.layers))
    fetching = [line for line in lines if line.step == "fetching 2 layers"]
    assert {line.total_bytes for line in fetching} == {total} and all(0 < line.done_bytes <= total for line in fetching)
    assert {line.total_bytes for line in lines if line not in fetching} == {None}


async def test_a_registry_without_ranges_begins_again(images: ImageStore, registry: FakeRegistry) -> None:
    made = image()
    registry.add(made)
    registry.ranges = False
    registry.cuts[digest(made.layers[1])] = [100_000, 200_000]
    await pull(images, registry.reference())


async def test_a_registry_that_always_breaks_off_at_the_same_place_is_given_up(images: ImageStore, registry: FakeRegistry) -> None:
    made = image()
    registry.add(made)
    registry.ranges = False
    registry.cuts[digest(made.layers[1])] = [1000] * 100
    with pytest.raises(Unavailable):
        await pull(images, registry.reference())
    assert len(registry.asked_for(digest(made.layers[1]))) <= 2 * registry_module.ATTEMPTS


async def test_the_next_import_goes_on_with_what_came(images: ImageStore, registry: FakeRegistry, tmp_path: Path) -> None:
    made = image()
    registry.add(made)
    layer = made.layers[2]
    registry.cuts[digest(layer)] = [120_000, *([0] * registry_module.ATTEMPTS)]
    with pytest.raises(Unavailable):
        await pull(images, registry.reference())
    assert 120_000 in partial(tmp_path)
    assert list((tmp_path / "images" / "tmp").iterdir()) == []
    registry.cuts.clear()
    registry.asked.clear()
    await images.open()
    await pull(images, registry.reference())
    assert [each.range for each in registry.asked_for(digest(layer))] == ["bytes=120000-"]
    assert partial(tmp_path) == []


async def test_a_spoilt_download_is_fetched_anew_once(images: ImageStore, registry: FakeRegistry, tmp_path: Path) -> None:
    made = image()
    registry.add(made)
    registry.cuts[digest(made.layers[2])] = [120_000, *([0] * registry_module.ATTEMPTS)]
    with pytest.raises(Unavailable):
        await pull(images, registry.reference())
    for path in (tmp_path / "images" / "downloads").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    registry.cuts.clear()
    await pull(images, registry.reference())


async def test_another_project_gets_nothing_by_knowing_a_digest(images: ImageStore, registry: FakeRegistry, tmp_path: Path) -> None:
    made = image()
    registry.add(made)
    registry.cuts[digest(made.layers[2])] = [120_000, *([0] * registry_module.ATTEMPTS)]
    with pytest.raises(Unavailable):
        await pull(images, registry.reference())
    for layer in made.layers:
        del registry.blobs[digest(layer)]
    with pytest.raises(ImageNotFound):
        await pull(images, registry.reference(), name="theirs", caller=Caller(project="theirs", admin=True))


async def test_old_downloads_are_swept(images: ImageStore, registry: FakeRegistry, tmp_path: Path) -> None:
    made = image()
    registry.add(made)
    registry.cuts[digest(made.layers[2])] = [120_000, *([0] * registry_module.ATTEMPTS)]
    with pytest.raises(Unavailable):
        await pull(images, registry.reference())
    await images.collect_garbage()
    assert 120_000 in partial(tmp_path)
    for path in (tmp_path / "images" / "downloads").iterdir():
        os.utime(path, (0, 0))
    await images.collect_garbage()
    assert partial(tmp_path) == []


async def test_downloads_beyond_the_size_of_an_upload_go_oldest_first(images: ImageStore, registry: FakeRegistry, tmp_path: Path) -> None:
    made = OciImage.of([files({"f": os.urandom(100_000)}) for _ in range(3)])
    registry.add(made)
    registry.cuts = {digest(layer): [50_000 + index, *([0] * registry_module.ATTEMPTS)] for index, layer in enumerate(made.layers)}
    with pytest.raises(Unavailable):
        await pull(images, registry.reference())
    kept = partial(tmp_path)
    assert len(kept) == 3
    for path in (tmp_path / "images" / "downloads").iterdir():
        age = path.stat().st_size - 50_000
        os.utime(path, (time.time() - age * 60, time.time() - age * 60))
    store = await Store.open_file(tmp_path / "other.sqlite")
    small = ImageStore(tmp_path / "images", store, limits=ImportLimits(disk_reserve=0, upload=110_000))
    await small.open()
    assert partial(tmp_path) == kept[:2]
    await store.close()


async def test_a_layer_that_stands_in_the_manifest_twice_is_fetched_once(images: ImageStore, registry: FakeRegistry) -> None:
    layer, other = files({"a": b"1"}), tar([member(".wh.a")])
    made = OciImage.of([layer, other, layer])
    registry.add(made)
    await pull(images, registry.reference())
    assert len(registry.asked_for(digest(layer))) == 1


async def test_a_busy_registry_is_asked_again(images: ImageStore, registry: FakeRegistry) -> None:
    registry.add(image())
    path = "/v2/team/app/manifests/1"

    async def busy(asked: web.Request) -> web.StreamResponse:
        if len(registry.asked) >= 3:
            del registry.instead[path]
        return web.Response(status=429 if len(registry.asked) == 1 else 503, headers={"Retry-After": "0"})

    registry.instead[path] = busy
    await pull(images, registry.reference())
    assert len(registry.asked_for("/manifests/")) == 4


async def test_a_registry_that_is_away_is_unavailable(images: ImageStore) -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 can't be reached"):
        await pull(images, "docker://127.0.0.1:1/team/app:1")


async def test_a_cancelled_import_keeps_whole_pieces_only(images: ImageStore, registry: FakeRegistry, tmp_path: Path) -> None:
    made = image()
    registry.add(made)
    stuck = asyncio.Event()

    async def stall(asked: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(made.layers[0]))})
        await response.prepare(asked)
        await response.write(made.layers[0][:1000])
        stuck.set()
        await asyncio.sleep(60)
        return response

    registry.instead[f"/v2/team/app/blobs/{digest(made.layers[0])}"] = stall
    importing = asyncio.create_task(pull(images, registry.reference()))
    await asyncio.wait_for(stuck.wait(), 20)
    importing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await importing
    registry.instead.clear()
    await pull(images, registry.reference())


# -- references and logins -----------------------------------------------------------------------------------------------------------------


def test_references_are_read_as_registries_write_them() -> None:
    parsed = RegistryReference.parse(f"docker://Registry.example:5000/team/sub/app_1:v1.0@{digest(b'')}")
    assert (parsed.host, parsed.repository, parsed.tag, parsed.digest) == ("registry.example:5000", "team/sub/app_1", "v1.0", digest(b""))
    assert RegistryReference.parse("docker://localhost/app").tag == "latest"
    for text, scheme in (
        ("docker://localhost:5000/a", "http"),
        ("docker://127.0.0.9/a", "http"),
        ("docker://[::1]:5000/a", "http"),
        ("docker://registry.example/a", "https"),
        ("docker://10.0.0.1/a", "https"),
    ):
        assert RegistryReference.parse(text).origin(insecure=False).scheme == scheme
    assert str(RegistryReference.parse("docker://registry.example/a").origin(insecure=True)) == "http://registry.example"


@pytest.mark.parametrize(
    "text",
    [
        "registry.example/a",
        "docker://",
        "docker://python:3.11",
        "docker://registry.example",
        "docker://registry.example/",
        "docker://-/a",
        "docker://registry.example/UPPER",
        "docker://registry.example/a/../b",
        "docker://registry.example/a:",
        "docker://registry.example/a:b:c",
        "docker://registry.example/a@md5:00",
        "docker://registry.example/a@",
        "docker://user@registry.example/a",
        "docker://registry.example/a?x=1",
        "docker://registry.example:99999999/a",
        "docker://registry.example/" + "a" * 300,
        "docker://registry.example/a:" + "t" * 200,
    ],
)
def test_references_that_lead_nowhere_are_refused_by_field(text: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        RegistryReference.parse(text)
    assert refusal.value.field == "source"


@pytest.mark.parametrize("host", HUB_NAMES)
def test_docker_hub_is_known_by_its_names(host: str) -> None:
    for written, repository in (("debian", "library/debian"), ("library/debian", "library/debian"), ("team/app/x", "team/app/x")):
        parsed = RegistryReference.parse(f"docker://{host}/{written}:12")
        assert (parsed.host, parsed.repository, parsed.tag) == ("registry-1.docker.io", repository, "12")
        assert str(parsed.origin(insecure=False)) == "https://registry-1.docker.io"
    for elsewhere in ("docker.io:5000", "sub.docker.io"):
        parsed = RegistryReference.parse(f"docker://{elsewhere}/debian")
        assert (parsed.host, parsed.repository) == (elsewhere, "debian")


async def test_requests_and_the_scope_of_the_token_name_the_whole_repository(
    images: ImageStore, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RegistryReference, "origin", lambda self, insecure: URL(f"http://{registry.host}"))
    registry.auth = "bearer"
    scopes: list[str] = []

    async def token(asked: web.Request) -> web.StreamResponse:
        scopes.append(asked.query["scope"])
        return web.json_response({"token": TOKEN})

    registry.instead["/token"] = token
    with pytest.raises(ImageNotFound, match=r"registry-1\.docker\.io has no registry-1\.docker\.io/library/debian:12"):
        await pull(images, "docker://docker.io/debian:12")
    assert scopes == ["repository:library/debian:pull"]
    manifest = "/v2/library/debian/manifests/12"
    asked = [(each.path, each.authorization) for each in registry.asked]
    assert asked == [(manifest, None), ("/token", None), (manifest, f"Bearer {TOKEN}")]


def encoded(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def test_logins_are_found_where_docker_and_skopeo_leave_them(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".docker").mkdir(parents=True)
    (home / ".config" / "containers").mkdir(parents=True)
    auths = {"registry.example": encoded("d", "1"), "https://old.example/v2/": encoded("o", "2"), "broken.example": {"auth": "%%"}}
    (home / ".docker" / "config.json").write_text(json.dumps({"auths": auths, "credsStore": "none-such"}))
    environment = {"HOME": str(home), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    assert find_login("registry.example", "team/app", environment) == ("d", "1")
    assert find_login("old.example", "team/app", environment) == ("o", "2")
    assert find_login("broken.example", "team/app", environment) is None
    assert find_login("other.example", "team/app", environment) is None
    newer = {"registry.example": encoded("c", "3"), "registry.example/team": encoded("t", "with:colon")}
    (home / ".config" / "containers" / "auth.json").write_text(json.dumps({"auths": newer}))
    assert find_login("registry.example", "team/app", environment) == ("t", "with:colon")
    assert find_login("registry.example", "else", environment) == ("c", "3")
    (tmp_path / "named.json").write_text("no json")
    assert find_login("registry.example", "else", environment | {"REGISTRY_AUTH_FILE": str(tmp_path / "named.json")}) == ("c", "3")


def docker_environment(directory: Path, content: object) -> dict[str, str]:
    """Where ``content`` is docker's configuration, and the helper ``test`` answers with the key that it is asked for."""
    helper = directory / "docker-credential-test"
    helper.write_text('#!/bin/sh\nread key\necho "{\\"Username\\": \\"u\\", \\"Secret\\": \\"for $key\\"}"\n')
    helper.chmod(0o755)
    (directory / "config.json").write_text(json.dumps(content))
    elsewhere = {"HOME": "/nonexistent", "XDG_RUNTIME_DIR": "/nonexistent"}
    return {**elsewhere, "DOCKER_CONFIG": str(directory), "PATH": f"{directory}:/usr/bin:/bin"}


def test_a_credential_helper_is_asked(tmp_path: Path) -> None:
    environment = docker_environment(tmp_path, {"credHelpers": {"registry.example": "test"}})
    assert find_login("registry.example", "a", environment) == ("u", "for registry.example")
    assert find_login("other.example", "a", environment) is None


def found_on_docker_hub(tmp_path: Path, content: object) -> list[tuple[str, str] | None]:
    """What a configuration of docker gives for each of Docker Hub's names."""
    environment = docker_environment(tmp_path, content)
    return [find_login(host, "debian", environment) for host in HUB_NAMES]


def test_a_login_to_docker_hub_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    for key in ("https://index.docker.io/v1/", "docker.io", "docker.io/library", "index.docker.io/library/debian"):
        assert found_on_docker_hub(tmp_path, {"auths": {key: encoded("d", "1")}}) == [("d", "1")] * 4, key
    for key in ("docker.io/team", "https://hub.docker.com", "docker.io:5000"):
        assert found_on_docker_hub(tmp_path, {"auths": {key: encoded("d", "1")}}) == [None] * 4, key


def test_a_helper_is_asked_for_docker_hub_by_the_key_that_it_knows(tmp_path: Path) -> None:
    key = "https://index.docker.io/v1/"
    by_docker = [("u", f"for {key}")] * 4
    # Docker leaves an empty entry in the file for what its helper keeps.
    assert found_on_docker_hub(tmp_path, {"auths": {key: {}}, "credsStore": "test"}) == by_docker
    assert found_on_docker_hub(tmp_path, {"credHelpers": {key: "test"}, "credsStore": "none-such"}) == by_docker
    assert found_on_docker_hub(tmp_path, {"credHelpers": {"docker.io": "test"}}) == [("u", "for docker.io")] * 4
