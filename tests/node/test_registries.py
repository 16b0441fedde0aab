"""Real registries, images pushed by real tools: docker-registry with passwords and with tokens, skopeo at the other end."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.errors import ImageError, ImageNotFound, InvalidArgument, PermissionDenied
from tests.conftest import Instance, free_port, require_root, start_instance, stop_instance
from tests.unit.images_archives import ARCHITECTURE, OciImage, files

USER, PASSWORD = "reader", "a pass:word"
ISSUER, SERVICE = "the token server", "the registry"
START_DEADLINE_S = 30.0


def tool(*command: str, stdin: str | None = None) -> str:
    """What a program prints. Fails with its complaint."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, input=stdin)
    assert done.returncode == 0, f"{command[0]}: {done.stderr}"
    return done.stdout


@contextmanager
def registry(directory: Path, auth: dict[str, object]) -> Iterator[str]:
    """A docker-registry on this machine, as ``host:port``."""
    require_root()
    port = free_port()
    directory.mkdir(parents=True)
    settings = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(directory / "data")}},
        "http": {"addr": f"127.0.0.1:{port}", "secret": "x"},
        "auth": auth,
    }
    (directory / "config.yml").write_text(json.dumps(settings))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(directory / "config.yml")], stdout=log, stderr=log)
    try:
        end = time.monotonic() + START_DEADLINE_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None and time.monotonic() < end, (directory / "log").read_text()
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def push(directory: Path, image: OciImage, target: str, *, kind: str = "oci", login: tuple[str, str] | None = None) -> None:
    """Puts an image into a registry with skopeo."""
    (directory / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    (directory / "push.tar").write_bytes(image.archive())
    credentials = ["--dest-creds", ":".join(login)] if login else []
    options = ["--dest-tls-verify=false", f"--format={kind}", *credentials]
    copy = ["skopeo", "--policy", str(directory / "policy.json"), "copy", *options]
    tool(*copy, f"oci-archive:{directory}/push.tar", f"docker://{target}")


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[str]:
    """A registry with passwords."""
    line = tool("htpasswd", "-nbB", USER, PASSWORD)
    (tmp_path / "htpasswd").write_text(line)
    with registry(tmp_path / "closed", {"htpasswd": {"realm": "closed", "path": str(tmp_path / "htpasswd")}}) as host:
        yield host


class TokenServer:
    """Gives tokens that the registry believes: JWTs signed with a key of which it has the certificate (the token specification)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.asked: list[str] = []
        request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=tokens"]
        tool(*request, "-keyout", str(directory / "key.pem"), "-out", str(directory / "certificate.pem"))

    @property
    def auth(self) -> dict[str, object]:
        realm = f"http://localhost:{self.port}/token"
        bundle = str(self.directory / "certificate.pem")
        return {"token": {"realm": realm, "service": SERVICE, "issuer": ISSUER, "rootcertbundle": bundle}}

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.query.get("scope", ""))
        if request.headers.get("Authorization") != "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode():
            return web.Response(status=401)
        access = []
        if scope := request.query.get("scope"):
            kind, name, actions = scope.split(":")
            access = [{"type": kind, "name": name, "actions": actions.split(",")}]
        return web.json_response({"token": self._signed(access), "expires_in": 300})

    def _signed(self, access: list[dict[str, object]]) -> str:
        der = "".join((self.directory / "certificate.pem").read_text().splitlines()[1:-1])
        now = int(time.time())
        claims = {
            "iss": ISSUER,
            "aud": SERVICE,
            "sub": USER,
            "exp": now + 300,
            "nbf": now - 10,
            "iat": now,
            "jti": str(now),
            "access": access,
        }
        parts = [json.dumps(part).encode() for part in ({"typ": "JWT", "alg": "RS256", "x5c": [der]}, claims)]
        text = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
        command = ["openssl", "dgst", "-sha256", "-sign", str(self.directory / "key.pem")]
        signature = subprocess.run(command, input=text, capture_output=True, check=True).stdout
        return (text + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()


@pytest.fixture
async def tokens(tmp_path: Path) -> AsyncIterator[TokenServer]:
    server = TokenServer(tmp_path)
    application = web.Application()
    application.router.add_get("/token", server.answer)
    runner = web.AppRunner(application, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "localhost", server.port).start()
    yield server
    await runner.cleanup()


def image(base_tar: Path | None = None) -> OciImage:
    layers = [files({"etc/motd": b"from a registry\n", "big": os.urandom(3 << 20)})]
    return OciImage.of([*([base_tar.read_bytes()] if base_tar else []), *layers], compress=True, run={"Env": ["FROM=registry"]})


async def test_a_sandbox_runs_on_an_image_of_a_registry_with_passwords(
    client: DSecClient, closed: str, base_tar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(tmp_path, image(base_tar), f"{closed}/team/app:1", login=(USER, PASSWORD))
    source = f"docker://{closed}/team/app:1"
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    for wrong in (None, (USER, "wrong")):
        with pytest.raises(PermissionDenied, match="log in"):
            await client.images.import_(source, name="registry:test", credentials=wrong)
    with pytest.raises(ImageNotFound):
        await client.images.import_(f"docker://{closed}/team/app:none", name="registry:test", credentials=(USER, PASSWORD))
    login = ["--tls-verify=false", "--username", USER, "--password-stdin", "--authfile", str(tmp_path / "auth.json")]
    tool("skopeo", "login", *login, closed, stdin=PASSWORD)
    steps: set[str] = set()
    info = await client.images.import_(source, name="registry:test", progress=lambda step, done: steps.add(step.split()[0]))
    assert info.config.env == {"FROM": "registry"} and {"asking", "fetching", "converting", "storing"} <= steps
    args = DSecContainerRunArgs(container_image="registry:test", memory_limit_mb=256, disk_limit_mb=256)
    sandbox = await client.run_container(args, timeout=60)
    assert (await sandbox.exec("cat /etc/motd; echo $FROM")).stdout == "from a registry\nregistry\n"
    await sandbox.stop()


@pytest.mark.parametrize("kind", ["oci", "v2s2"])
async def test_a_token_server_of_another_origin_is_asked_for_just_this(
    client: DSecClient, tokens: TokenServer, tmp_path: Path, kind: str
) -> None:
    with registry(tmp_path / "registry", tokens.auth) as host:
        await asyncio.to_thread(push, tmp_path, image(), f"{host}/team/app:1", kind=kind, login=(USER, PASSWORD))
        tokens.asked.clear()
        source = f"docker://{host}/team/app:1"
        with pytest.raises(PermissionDenied):
            await client.images.import_(source, name="token:test", credentials=(USER, "wrong"))
        await client.images.import_(source, name="token:test", credentials=(USER, PASSWORD))
        assert set(tokens.asked) == {"repository:team/app:pull"}


async def test_the_image_for_this_machine_is_taken_from_a_list(client: DSecClient, tmp_path: Path) -> None:
    with registry(tmp_path / "registry", {}) as host:
        push(tmp_path, image(), f"{host}/app:mine")
        other = image()
        other.config["architecture"] = "s390x"
        push(tmp_path, other, f"{host}/app:other")
        storage = ["--storage-driver=vfs", f"--root={tmp_path}/storage", f"--runroot={tmp_path}/runroot"]
        tool("buildah", *storage, "manifest", "create", "list")
        for tag, architecture in (("other", "s390x"), ("mine", ARCHITECTURE)):
            add = ["manifest", "add", "--tls-verify=false", "--arch", architecture, "--os", "linux", "list", f"docker://{host}/app:{tag}"]
            tool("buildah", *storage, *add)
        policy = f"--signature-policy={tmp_path}/policy.json"
        tool("buildah", *storage, "manifest", "push", policy, "--tls-verify=false", "list", f"docker://{host}/app:list")
        listed = await client.images.import_(f"docker://{host}/app:list", name="listed:test")
        assert listed.digest == (await client.images.import_(f"docker://{host}/app:mine", name="mine:test")).digest


async def test_a_projects_key_may_not_have_the_service_fetch(instance: Instance, client: DSecClient) -> None:
    key = await client.keys.create("narrow")
    async with DSecClient(instance.url, key.key) as narrow:
        with pytest.raises(PermissionDenied, match="--allow-registry"):
            await narrow.images.import_("docker://127.0.0.1:1/app", name="narrow:test")


async def test_a_projects_key_may_import_from_a_registry_that_the_operator_lists(tmp_path: Path) -> None:
    with registry(tmp_path / "registry", {}) as host, tempfile.TemporaryDirectory(prefix="dsec-test-") as home:
        push(tmp_path, image(), f"{host}/app:1")
        os.chmod(home, 0o755)
        running = start_instance(Path(home), scratch_mb=1024, extra=("--allow-registry", host))
        try:
            async with DSecClient(running.url, running.api_key) as admin:
                key = await admin.keys.create("narrow")
            async with DSecClient(running.url, key.key) as narrow:
                assert (await narrow.images.import_(f"docker://{host}/app:1", name="listed")).version == 1
        finally:
            left = stop_instance(running)
        assert not left, left


DOCKERFILE = """
FROM scratch
ARG GREETING=nothing
ADD root.tar /
COPY hello /etc/hello
ENV GREETING=$GREETING
WORKDIR /srv
RUN echo built > /srv/made && rm /etc/motd
"""


async def test_a_dockerfile_is_built_here_and_runs_there(
    client: DSecClient, base_tar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = tmp_path / "context"
    context.mkdir()
    shutil.copy(base_tar, context / "root.tar")
    (context / "hello").write_text("hello\n")
    (context / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "storage.conf").write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/storage"\nrunroot = "{tmp_path}/runroot"\n')
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(tmp_path / "storage.conf"))
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    info = await client.images.build(context, name="built:test", build_args={"GREETING": "hi"})
    assert (info.config.env["GREETING"], info.config.workdir) == ("hi", "/srv")
    assert tool("buildah", "images", "--quiet", "--filter", "reference=localhost/dsec-build").strip() == ""
    sandbox = await client.run_container(
        DSecContainerRunArgs(container_image="built:test", memory_limit_mb=256, disk_limit_mb=256), timeout=60
    )
    assert (await sandbox.exec("cat made /etc/hello; ls /etc/motd")).stdout == "built\nhello\n"
    await sandbox.stop()
    (context / "Dockerfile").write_text("FROM scratch\nCOPY nothing /\n")
    with pytest.raises(ImageError, match="nothing"):
        await client.images.build(context, name="built:test")


async def test_without_a_builder_the_error_says_what_to_install(
    client: DSecClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument, match="no Dockerfile"):
        await client.images.build(tmp_path, name="built:test")
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidArgument, match="apt-get install buildah"):
        await client.images.build(tmp_path, name="built:test")
