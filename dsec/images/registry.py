"""OCI registries as a source of images: references, authentication, documents and layers. Nothing is believed before its digest is checked.

Protocol: OCI distribution-spec 1.1 ("Pulling manifests", "Pulling blobs"), the token authentication that registries share
(``WWW-Authenticate: Bearer realm=…,service=…``), RFC 7617 (basic), RFC 9110 section 14 (ranges).
The Authorization header goes to the registry's own origin only: redirects are followed here, by hand, and carry nothing.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType

import aiohttp
import msgspec
from yarl import URL

from dsec.images.documents import decode
from dsec.images.limits import ImportLimits
from dsec.images.manifests import (
    ENDLESS,
    INDEX_DEPTH,
    INDEXES,
    MANIFESTS,
    Descriptor,
    Index,
    RemoteLayer,
    check_config_type,
    check_descriptor,
    check_digest,
    choose,
    parse_index_or_manifest,
    remote_image,
)
from dsec.images.registry_access import Gate
from dsec.images.streams import sha256_of
from libdsec.docker_hub import full_repository, registry_host
from libdsec.errors import ImageError, ImageNotFound, InvalidArgument, PermissionDenied, Unavailable
from libdsec.schema import ImageConfig

SCHEME = "docker://"
CONNECT_TIMEOUT_S = 15.0
READ_TIMEOUT_S = 60.0
"""Without a byte for so long a connection counts as broken."""
REDIRECTS = 5
ATTEMPTS = 5
"""Of one request in a row that fail without getting any further."""
BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
RETRY_AFTER_MAX_S = 30.0
TOKEN_LIMIT = 1 << 20
"""Bytes of a token server's answer."""
TOKEN_AGE_S = 60.0
"""How long a token counts when its server doesn't say (the token specification's own default)."""

_HOST = re.compile(r"(\[[0-9a-f:]+\]|[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?)(:[0-9]{1,5})?\Z", re.IGNORECASE)
_REPOSITORY = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_REPOSITORY_LIMIT = 255
_CHALLENGE = re.compile(r'([a-zA-Z_]+)="((?:[^"\\]|\\.)*)"')
_ERROR_CODE = re.compile(r"[A-Z_]{1,40}\Z")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/([0-9]{1,19}|\*)\Z")
_BROKEN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, ConnectionError)


@dataclass(frozen=True)
class RegistryReference:
    """One image in a registry."""

    host: str
    """Where the registry is, with its port, if one was given."""
    repository: str
    """The whole name, also where Docker Hub has a short one."""
    tag: str
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> RegistryReference:
        """``docker://HOST[:PORT]/REPOSITORY[:TAG][@sha256:…]``; Docker Hub by any of its names. Raises InvalidArgument that says what is
        missing."""

        def wrong(why: str) -> InvalidArgument:
            return InvalidArgument(f"{text[:300]!r}: {why}; write docker://HOST[:PORT]/REPOSITORY[:TAG][@sha256:…]", field="source")

        if not text.startswith(SCHEME):
            raise wrong(f"it doesn't begin with {SCHEME}")
        host, _, rest = text.removeprefix(SCHEME).partition("/")
        if not _HOST.match(host) or not ("." in host or ":" in host or host == "localhost"):
            raise wrong(f"{host[:100]!r} is no registry's host (there is no default one)")
        name, at, digest = rest.partition("@")
        repository, colon, tag = name.partition(":")
        if len(repository) > _REPOSITORY_LIMIT or not _REPOSITORY.match(repository):
            raise wrong(f"{repository[:100]!r} is no repository's name")
        if colon and not _TAG.match(tag):
            raise wrong(f"{tag[:100]!r} is no tag")
        if at:
            try:
                check_digest(digest)
            except ImageError as error:
                raise wrong(error.message) from None
        return cls(registry_host(host), full_repository(host, repository), tag or "latest", digest or None)

    @property
    def name(self) -> str:
        """As it stands in messages."""
        return f"{self.host}/{self.repository}{f'@{self.digest}' if self.digest else f':{self.tag}'}"

    @property
    def is_loopback(self) -> bool:
        """Whether the host is this machine by its name alone."""
        name = URL(f"http://{self.host}").host or ""
        if name == "localhost":
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    def origin(self, *, insecure: bool) -> URL:
        """Where the registry is: HTTPS, but HTTP on this machine and where it was asked for."""
        scheme = "http" if insecure or self.is_loopback else "https"
        return URL(f"{scheme}://{self.host}")


@dataclass(frozen=True, repr=False)
class Credentials:
    """A user of a registry. Never logged, stored or shown."""

    username: str
    password: str

    @property
    def basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode("ascii")


@dataclass(frozen=True)
class RemoteImage:
    """An image in a registry, as far as its documents tell: all of them checked by digest and size."""

    digest: str
    """Of the manifest for this machine."""
    layers: tuple[RemoteLayer, ...]
    config: ImageConfig


class _Token(msgspec.Struct):
    token: str | None = None
    access_token: str | None = None
    expires_in: float | None = None


class _ErrorItem(msgspec.Struct):
    code: str = ""


class _Errors(msgspec.Struct):
    errors: list[_ErrorItem] = []


class _Retry(Exception):
    """The answer asks for another attempt."""

    def __init__(self, status: int, after_s: float | None) -> None:
        super().__init__(f"HTTP {status}")
        self.after_s = after_s


class Registry:
    """One repository of a registry, for the time of one import. An async context manager."""

    def __init__(
        self, reference: RegistryReference, limits: ImportLimits, *, credentials: Credentials | None = None, insecure: bool = False
    ) -> None:
        self.reference = reference
        self._limits = limits
        self._credentials = credentials
        self._origin = reference.origin(insecure=insecure)
        self._gate = Gate(direct=True)
        self._other_gate = Gate(direct=False)
        self._authorization: str | None = None
        self._expires_at = 0.0
        self._authenticating = asyncio.Lock()
        self._closing = AsyncExitStack()
        self._session: aiohttp.ClientSession
        self._other_session: aiohttp.ClientSession

    async def __aenter__(self) -> Registry:
        self._session = await self._closing.enter_async_context(_session(self._gate))
        self._other_session = await self._closing.enter_async_context(_session(self._other_gate))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._closing.aclose()

    @property
    def origin(self) -> str:
        """Scheme, host and repository: whatever has the same ones comes from the same place."""
        return f"{self._origin}/{self.reference.repository}"

    async def image(self) -> RemoteImage:
        """Reads the documents. Raises ImageNotFound, ImageError, PermissionDenied where the registry or our rules refuse, Unavailable."""
        wanted = self.reference.digest or self.reference.tag
        data, media_type, stated = await self._document("manifests", wanted, ", ".join(sorted(INDEXES | MANIFESTS)))
        digest = sha256_of(data)
        # A tag's digest is only the registry's word for it; what was asked for by digest must have it.
        if digest != (self.reference.digest or stated or digest):
            raise ImageError(f"the manifest of {self.reference.name} has the digest {digest}: it is broken or forged")
        document = parse_index_or_manifest(data, media_type, f"the manifest of {self.reference.name}")
        for _ in range(INDEX_DEPTH):
            if not isinstance(document, Index):
                break
            chosen = choose(document, self.reference.name)
            data = await self._checked("manifests", chosen, chosen.media_type)
            digest = chosen.digest
            document = parse_index_or_manifest(data, chosen.media_type, f"the manifest {chosen.digest}")
        else:
            raise ImageError(ENDLESS)
        check_config_type(document)
        config = await self._checked("blobs", document.config, "*/*")
        layers, settings = remote_image(document, config, self._limits)
        return RemoteImage(digest, layers, settings)

    @asynccontextmanager
    async def blob(self, digest: str, offset: int) -> AsyncGenerator[tuple[int, aiohttp.StreamReader], None]:
        """The bytes of a blob from ``offset`` on, or from wherever the server begins: the offset that it really is comes first.

        Raises what :meth:`image` raises; what ``_BROKEN`` names when the connection breaks while the caller reads.
        """
        headers = {"Accept": "*/*"} if offset == 0 else {"Accept": "*/*", "Range": f"bytes={offset}-"}
        async with self._get(f"blobs/{digest}", headers, f"the layer {digest}") as response:
            if response.status != 206:
                yield 0, response.content
                return
            match = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
            if match is None or int(match[1]) != offset:
                raise ImageError(f"{self.reference.host} answers a request for a part of {digest} with another part")
            yield offset, response.content

    async def _checked(self, kind: str, descriptor: Descriptor, accept: str) -> bytes:
        """A document that must have the digest and the size by which it is referred to."""
        check_descriptor(descriptor)
        if descriptor.size > self._limits.document:
            raise ImageError(f"{descriptor.digest} has {descriptor.size} bytes, at most {self._limits.document} are allowed")
        data, _, _ = await self._document(kind, descriptor.digest, accept)
        if len(data) != descriptor.size:
            raise ImageError(f"{descriptor.digest} has {len(data)} bytes, {descriptor.size} are promised")
        if sha256_of(data) != descriptor.digest:
            raise ImageError(f"the content of {descriptor.digest} has another digest: it is broken or forged")
        return data

    async def _document(self, kind: str, name: str, accept: str) -> tuple[bytes, str, str | None]:
        """A small document, its media type and the digest that the registry gives it. Bounded, and not checked yet."""
        what = self.reference.name if kind == "manifests" else f"the configuration {name}"
        failure: Exception | None = None
        for attempt in range(ATTEMPTS):
            await pause(attempt, failure)
            try:
                async with self._get(f"{kind}/{name}", {"Accept": accept}, what) as response:
                    data = await _read(response, self._limits.document, what)
                    media_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
                    return data, media_type, response.headers.get("Docker-Content-Digest")
            except Exception as error:
                self.check_failure(error)
                failure = error
        raise self.unreachable(failure)

    def unreachable(self, failure: Exception | None) -> Unavailable:
        """What a row of failures is to the caller."""
        return Unavailable(f"{self.reference.host} can't be reached: {str(failure) or type(failure).__name__}")

    def check_failure(self, failure: Exception) -> None:
        """Raises PermissionDenied if the failure is our own refusal of an address, Unavailable for a certificate that isn't trusted, and
        ``failure`` itself where else trying again can't help."""
        for gate in (self._gate, self._other_gate):
            if gate.refused and isinstance(failure, aiohttp.ClientConnectorError):
                raise PermissionDenied(f"nothing is fetched for {self.reference.name}: {gate.refused[-1]}") from failure
        if isinstance(failure, aiohttp.ClientSSLError):
            raise Unavailable(
                f"{failure.host} has no certificate that is trusted here ({failure}): add its CA to the trust store of the service's "
                "machine, or ask for plain HTTP (`--insecure-registry`)"
            ) from failure
        if not isinstance(failure, (_Retry, *_BROKEN)):
            raise failure

    @asynccontextmanager
    async def _get(self, path: str, headers: Mapping[str, str], what: str) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """A successful answer: authenticated where it is asked for, redirects followed. Raises ImageNotFound, PermissionDenied, ImageError;
        _Retry and what ``_BROKEN`` names where another attempt may help."""
        url = self._origin.joinpath("v2", *self.reference.repository.split("/"), *path.split("/"))
        challenged = False
        redirects = 0
        while True:
            own = url.origin() == self._origin
            self._other_gate.private_allowed = self._gate.saw_private
            sent = dict(headers)
            used = self._live_authorization() if own else None
            if used is not None:
                sent["Authorization"] = used
            session = self._session if own else self._other_session
            async with session.get(url, headers=sent, allow_redirects=False) as response:
                if response.status in (200, 206):
                    yield response
                    return
                if response.status == 401 and own and not challenged:
                    challenged = True
                    await self._authenticate(response.headers.getall("WWW-Authenticate", []), used)
                    continue
                if response.status in (301, 302, 303, 307, 308) and redirects < REDIRECTS:
                    redirects += 1
                    url = self._redirected(url, response.headers.get("Location", ""))
                    continue
                raise await self._refusal(response, what)

    def _live_authorization(self) -> str | None:
        return self._authorization if asyncio.get_running_loop().time() < self._expires_at else None

    def _redirected(self, url: URL, location: str) -> URL:
        """Where a redirect leads. Raises ImageError for anything but HTTP, and for a step from HTTPS down to it."""
        try:
            target = url.join(URL(location, encoded=True))
            port = target.port
        except ValueError:
            target, port = URL(), None
        schemes = ("https",) if self._origin.scheme == "https" else ("http", "https")
        if not location or port is None or target.scheme not in schemes or target.user is not None:
            raise ImageError(f"{self.reference.host} redirects to {location[:200]!r}, where nothing is fetched from")
        return target

    async def _refusal(self, response: aiohttp.ClientResponse, what: str) -> Exception:
        """What an answer that isn't a success means. Nothing of its body is passed on but the registry's error codes."""
        status = response.status
        if status in (408, 429) or status >= 500:
            after = response.headers.get("Retry-After", "")
            return _Retry(status, min(float(after), RETRY_AFTER_MAX_S) if after.isascii() and after.isdigit() else None)
        try:
            decoded = decode(await _read(response, TOKEN_LIMIT, what), _Errors)
            codes = [item.code for item in decoded.errors if _ERROR_CODE.match(item.code)]
        except (msgspec.DecodeError, ImageError):
            codes = []
        detail = f"HTTP {status}{' ' if codes else ''}{', '.join(codes[:3])}"
        host = self.reference.host
        if status in (401, 403):
            given = "refuses the credentials" if self._credentials else "wants credentials"
            return PermissionDenied(f"{host} {given} for {what} ({detail}): log in (`docker login`, `skopeo login`), or give a user name")
        if status == 404:
            return ImageNotFound(f"{host} has no {what} ({detail})")
        return ImageError(f"{host} doesn't give {what} ({detail})")

    async def _authenticate(self, challenges: list[str], used: str | None) -> None:
        """Makes an Authorization header of the credentials, as the registry asks for it. Raises PermissionDenied."""
        async with self._authenticating:
            live = self._live_authorization()
            if live is not None and live != used:
                return  # somebody else has just done it
            kinds = {challenge.partition(" ")[0].lower(): challenge for challenge in challenges}
            if "bearer" in kinds:
                attributes = {key.lower(): value for key, value in _CHALLENGE.findall(kinds["bearer"])}
                await self._fetch_token(attributes)
                return
            if "basic" not in kinds:
                raise PermissionDenied(f"{self.reference.host} wants an authentication that isn't supported: bearer tokens and basic are")
            if self._credentials is None:
                raise PermissionDenied(
                    f"{self.reference.host} wants credentials for {self.reference.repository}: log in (`docker login`, `skopeo login`), "
                    "or give a user name"
                )
            self._authorization = self._credentials.basic
            self._expires_at = float("inf")

    async def _fetch_token(self, attributes: Mapping[str, str]) -> None:
        realm = attributes.get("realm", "")
        url = self._redirected(self._origin, realm)
        # Only what this import needs, whatever the registry asks us to ask for.
        query = {"scope": f"repository:{self.reference.repository}:pull"}
        if "service" in attributes:
            query["service"] = attributes["service"]
        headers = {"Accept": "application/json"}
        if self._credentials is not None:
            headers["Authorization"] = self._credentials.basic
        own = url.origin() == self._origin
        self._other_gate.private_allowed = self._gate.saw_private
        session = self._session if own else self._other_session
        async with session.get(url.extend_query(query), headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                raise await self._refusal(response, "a token")
            data = await _read(response, TOKEN_LIMIT, "a token")
        try:
            answer = decode(data, _Token)
        except msgspec.DecodeError as error:
            raise ImageError(f"the token server of {self.reference.host} doesn't answer with a token") from error
        token = answer.token or answer.access_token
        if not token or not token.isascii() or not token.isprintable():
            raise ImageError(f"the token server of {self.reference.host} doesn't answer with a token")
        self._authorization = f"Bearer {token}"
        # Renewed a little early: a request takes its time.
        lifetime = TOKEN_AGE_S if answer.expires_in is None else answer.expires_in
        self._expires_at = asyncio.get_running_loop().time() + max(lifetime - 10, 5)


async def pause(attempt: int, failure: Exception | None) -> None:
    """Waits before attempt number ``attempt`` (from 0), after ``failure``."""
    if attempt == 0:
        return
    delay = BACKOFF_S[min(attempt, len(BACKOFF_S)) - 1]
    if isinstance(failure, _Retry) and failure.after_s is not None:
        delay = failure.after_s
    await asyncio.sleep(delay)


def _session(gate: Gate) -> aiohttp.ClientSession:
    """Without proxies from the environment, cookies, decompression and redirects: all of that would act behind our back."""
    connector = aiohttp.TCPConnector(socket_factory=gate.make_socket, limit=0, ttl_dns_cache=60)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        headers={"Accept-Encoding": "identity", "User-Agent": "opendsec"},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S),
    )


async def _read(response: aiohttp.ClientResponse, limit: int, what: str) -> bytes:
    """The whole body. Raises ImageError beyond ``limit`` bytes."""
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > limit:
            raise ImageError(f"{what}: the answer has more than {limit} bytes")
    return bytes(data)
