"""A registry that behaves, or misbehaves on purpose: it serves what it is given, and remembers what it was asked."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from tests.unit.images_archives import OCI_CONFIG, OCI_MANIFEST, OciImage, descriptor, digest

USER, PASSWORD = "reader", "secret word"
TOKEN = "a-token-for-this-repository"
BASIC = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Asked:
    """A request that came in."""

    path: str
    authorization: str | None
    range: str | None


@dataclass
class FakeRegistry:
    """Repository ``team/app``. ``host`` is where it listens; everything else may be changed while it runs."""

    host: str = ""
    manifests: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    auth: str | None = None
    """None, ``basic`` or ``bearer``."""
    realm: str = ""
    """Where tokens are had; empty: here, at ``/token``."""
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """By blob: after how many bytes each of its next answers breaks off."""
    ranges: bool = True
    """False: it always answers with the whole."""
    instead: dict[str, Answer] = field(default_factory=dict)
    """By path: what answers in the place of the usual."""
    asked: list[Asked] = field(default_factory=list)

    def add(self, image: OciImage, *, tag: str = "1", media_type: str = OCI_MANIFEST) -> str:
        """Puts an image there; returns its manifest's digest."""
        config = json.dumps(image.config).encode()
        layers = [descriptor(data, kind) for data, kind in zip(image.layers, image.media_types, strict=True)]
        manifest = {"schemaVersion": 2, "mediaType": media_type, "config": descriptor(config, OCI_CONFIG), "layers": layers}
        self.blobs |= {digest(data): data for data in (config, *image.layers)}
        return self.put(tag, json.dumps(manifest).encode(), media_type)

    def put(self, tag: str, data: bytes, media_type: str) -> str:
        self.manifests[tag] = self.manifests[digest(data)] = (data, media_type)
        return digest(data)

    def reference(self, tag: str = "1") -> str:
        return f"docker://{self.host}/team/app:{tag}"

    def asked_for(self, part: str) -> list[Asked]:
        return [each for each in self.asked if part in each.path]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(Asked(request.path, request.headers.get("Authorization"), request.headers.get("Range")))
        if (instead := self.instead.get(request.path)) is not None:
            return await instead(request)
        if request.path == "/token":
            return self._token(request)
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        name = request.path.rsplit("/", 1)[-1]
        if request.path.startswith("/v2/team/app/manifests/") and name in self.manifests:
            data, kind = self.manifests[name]
            return web.Response(body=data, headers={"Content-Type": kind, "Docker-Content-Digest": digest(data)})
        if request.path.startswith("/v2/team/app/blobs/") and name in self.blobs:
            return await self.serve(request, name, self.blobs[name])
        return web.json_response({"errors": [{"code": "MANIFEST_UNKNOWN", "message": "<b>from outside</b>"}]}, status=404)

    async def serve(self, request: web.Request, name: str, data: bytes) -> web.StreamResponse:
        """A blob, whole or from an offset, and broken off where it is told to."""
        start = int(request.headers["Range"].removeprefix("bytes=").removesuffix("-")) if self.ranges and "Range" in request.headers else 0
        part = data[start:]
        response = web.StreamResponse(status=206 if start else 200, headers={"Content-Length": str(len(part))})
        if start:
            response.headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        await response.prepare(request)
        cuts = self.cuts.get(name)
        if cuts:
            await response.write(part[: cuts.pop(0)])
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(part)
        await response.write_eof()
        return response

    def _refusal(self, request: web.Request) -> web.Response | None:
        given = request.headers.get("Authorization")
        if self.auth is None or given == (BASIC if self.auth == "basic" else f"Bearer {TOKEN}"):
            return None
        challenge = 'Basic realm="x"'
        if self.auth == "bearer":
            realm = self.realm or f"http://{self.host}/token"
            challenge = f'Bearer realm="{realm}",service="the registry",scope="repository:team/app:pull,push"'
        return web.json_response({"errors": [{"code": "UNAUTHORIZED"}]}, status=401, headers={"WWW-Authenticate": challenge})

    def _token(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != BASIC:
            return web.json_response({"errors": [{"code": "DENIED"}]}, status=401)
        assert request.query["scope"] == "repository:team/app:pull" and request.query["service"] == "the registry"
        return web.json_response({"access_token": TOKEN, "expires_in": 300})


@asynccontextmanager
async def running(host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeRegistry]:
    """A registry on a free port of ``host``."""
    registry = FakeRegistry()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", registry.answer)
    runner = web.AppRunner(application, handle_signals=False, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, host, 0, ssl_context=tls)
    await site.start()
    registry.host = f"{host}:{runner.addresses[0][1]}"
    try:
        yield registry
    finally:
        await runner.cleanup()
