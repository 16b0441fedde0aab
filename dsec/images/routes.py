"""The HTTP side of the image store: ``/v1/images``."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar, cast, get_args

import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from dsec.images.catalog import Caller
from dsec.images.importing import ImportRequest, Kind, RegistrySource, Tell
from dsec.images.manifests import Format
from dsec.images.names import check_name, parse_reference
from dsec.images.registry import Credentials, RegistryReference
from dsec.images.threads import to_end
from libdsec.errors import DSecError, InvalidArgument, PermissionDenied
from libdsec.schema import FsckLine, ImageInfo, ImagePage, ImportLine, RegistryImport

if TYPE_CHECKING:
    from dsec.images.image_store import ImageStore

PAGE_LIMIT = 1000
MSGPACK = "application/msgpack"
DIFFS_AT_ONCE = 2
"""Comparisons of images: each holds the trees of both in memory, and its answer."""
BODY_LIMIT = 64 << 10
"""Bytes of a body that describes an import."""
_PATH_LIMIT = 4095
_IDEMPOTENCY_KEY_LIMIT = 128
"""Characters; the column that it is kept in has room for a project's name beside it."""
_CREDENTIAL_LIMIT = 16 << 10
"""Characters of a user name or a password: some are tokens."""

_log = structlog.get_logger("dsec.images")


class RemovedBytes(msgspec.Struct, kw_only=True):
    """The answer to ``POST /v1/images/gc``."""

    removed_bytes: int


class ImageRoutes:
    """Binds the store to Starlette. The caller's project and rights come from the scope, where authentication put them."""

    def __init__(self, images: ImageStore) -> None:
        self._images = images
        self._diffs = asyncio.Semaphore(DIFFS_AT_ONCE)

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/images", self._list, methods=["GET"]),
            Route("/v1/images", self._import, methods=["POST"]),
            Route("/v1/images/from-registry", self._import_registry, methods=["POST"]),
            Route("/v1/images/gc", self._collect, methods=["POST"]),
            Route("/v1/images/push", self._push, methods=["POST"]),
            Route("/v1/images/pull", self._pull, methods=["POST"]),
            Route("/v1/images/tag", self._tag, methods=["POST"]),
            Route("/v1/images/fsck", self._fsck, methods=["POST"]),
            Route("/v1/image-stats", self._stats, methods=["GET"]),
            Route("/v1/image-diff", self._diff, methods=["GET"]),
            Route("/v1/images/{reference:path}", self._get, methods=["GET"]),
            Route("/v1/images/{reference:path}", self._remove, methods=["DELETE"]),
        ]

    async def _list(self, request: Request) -> Response:
        limit = _integer(request, "limit", PAGE_LIMIT)
        images = self._images.page(_decode_cursor(request.query_params.get("cursor")), min(limit, PAGE_LIMIT) + 1)
        more = len(images) > min(limit, PAGE_LIMIT)
        images = images[: min(limit, PAGE_LIMIT)]
        return _answer(request, ImagePage(images=images, cursor=_encode_cursor(images[-1]) if more else None))

    async def _get(self, request: Request) -> Response:
        return _answer(request, await self._images.find(request.path_params["reference"]))

    async def _remove(self, request: Request) -> Response:
        return _answer(request, await self._images.remove(request.path_params["reference"], _caller(request)))

    async def _collect(self, request: Request) -> Response:
        if not _caller(request).admin:
            raise PermissionDenied("this key may not collect garbage; an admin's key may")
        return _answer(request, RemovedBytes(removed_bytes=await self._images.collect_garbage()))

    async def _push(self, request: Request) -> Response:
        reference, caller = _reference(request), _caller(request)

        async def push(tell: Tell) -> ImportLine:
            return ImportLine(image=await self._images.push(reference, caller, tell))

        return _LinesResponse(push, ImportLine)

    async def _pull(self, request: Request) -> Response:
        reference, whole = _reference(request), _flag(request, "whole")

        async def pull(tell: Tell) -> ImportLine:
            return ImportLine(image=await self._images.pull(reference, whole, tell))

        return _LinesResponse(pull, ImportLine)

    async def _tag(self, request: Request) -> Response:
        reference, caller = _reference(request), _caller(request)
        name, key = check_name(request.query_params.get("name", "")), _idempotency_key(request, caller)

        async def tag(tell: Tell) -> ImportLine:
            return ImportLine(image=await self._images.tag(reference, name, caller, key, tell))

        return _LinesResponse(tag, ImportLine)

    async def _fsck(self, request: Request) -> Response:
        if not _caller(request).admin:
            raise PermissionDenied("this key may not check the image store; an admin's key may")
        deep, repair = _flag(request, "deep"), _flag(request, "repair")

        async def check(tell: Callable[[FsckLine], None]) -> FsckLine:
            await self._images.fsck(lambda finding: tell(FsckLine(finding=finding)), deep=deep, repair=repair)
            return FsckLine(done=True)

        return _LinesResponse(check, FsckLine)

    async def _stats(self, request: Request) -> Response:
        return _answer(request, await self._images.stats(_reference(request)))

    async def _diff(self, request: Request) -> Response:
        before, after = _reference(request, "before"), _reference(request, "after")
        async with self._diffs:
            changes = await self._images.diff(before, after, _caller(request))
            body = await to_end(lambda: b"".join(msgspec.json.encode(change) + b"\n" for change in changes))
        return Response(body, media_type="application/x-ndjson")

    async def _import(self, request: Request) -> Response:
        wanted = _import_request(request)
        if wanted.idempotency_key is not None:
            made = self._images.made_by(wanted.idempotency_key)
            if made is not None:
                async for _ in request.stream():
                    pass
                return Response(_line(ImportLine(image=made)), media_type="application/x-ndjson")
        return _ImportResponse(wanted.name, lambda body, tell: self._images.import_archive(wanted, body, tell))

    async def _import_registry(self, request: Request) -> Response:
        body = await _registry_import(request)
        reference = RegistryReference.parse(body.source)
        caller = _caller(request)
        self._images.registries.check(reference.host, admin=caller.admin)
        wanted = ImportRequest(
            name=check_name(body.name),
            kind=body.kind,
            format=None,
            at="/",
            caller=caller,
            idempotency_key=_idempotency_key(request, caller),
        )
        if wanted.idempotency_key is not None:
            made = self._images.made_by(wanted.idempotency_key)
            if made is not None:
                return Response(_line(ImportLine(image=made)), media_type="application/x-ndjson")
        source = RegistrySource(reference=reference, credentials=_credentials(body), insecure=body.insecure)

        return _ImportResponse(wanted.name, lambda _, tell: self._images.import_registry(wanted, source, tell), body_is_read=True)


Line = TypeVar("Line", ImportLine, FsckLine)


class _LinesResponse(Response, Generic[Line]):
    """Answers with the lines that ``work`` tells, and its result or error as the last one. A client that goes away ends the work."""

    def __init__(self, work: Callable[[Callable[[Line], None]], Awaitable[Line]], kind: type[Line]) -> None:
        super().__init__(media_type="application/x-ndjson")
        self._work: Callable[[Callable[[Line], None]], Awaitable[Line]] = work
        self._kind: type[Line] = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        lines: asyncio.Queue[Line | None] = asyncio.Queue()
        working = asyncio.create_task(self._run(lines))
        watching = asyncio.create_task(_cancel_when_gone(receive, working))
        try:
            while (line := await lines.get()) is not None:
                await send({"type": "http.response.body", "body": msgspec.json.encode(line) + b"\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watching.cancel()
            working.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _run(self, lines: asyncio.Queue[Line | None]) -> None:
        try:
            lines.put_nowait(await self._work(lines.put_nowait))
        except DSecError as error:
            lines.put_nowait(self._kind(error=error.body()))
        except Exception as failure:
            incident = secrets.token_hex(6)
            _log.error("an image call failed", incident=incident, exc_info=failure)
            unforeseen = DSecError(f"something broke on our side; the service's log tells more under incident {incident}", reason=incident)
            lines.put_nowait(self._kind(error=unforeseen.body()))
        finally:
            lines.put_nowait(None)


async def _cancel_when_gone(receive: Receive, task: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


class _ImportResponse(Response):
    """Answers with lines while the body is still coming in. A client that goes away ends the import."""

    def __init__(
        self, name: str, work: Callable[[AsyncIterator[bytes], Tell], Awaitable[ImageInfo]], *, body_is_read: bool = False
    ) -> None:
        """``work`` gets the body (nothing, if it was read before) and whom to tell; ``name`` is the image's, for the log."""
        super().__init__(media_type="application/x-ndjson")
        self._name = name
        self._work = work
        self._body_is_read = body_is_read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        lines: asyncio.Queue[ImportLine | None] = asyncio.Queue()
        received = asyncio.Event()
        if self._body_is_read:
            received.set()
        importing = asyncio.create_task(self._run(_body(receive, received), lines))
        watching = asyncio.create_task(_watch(receive, received, importing))
        try:
            while (line := await lines.get()) is not None:
                await send({"type": "http.response.body", "body": _line(line), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watching.cancel()
            importing.cancel()
            await asyncio.gather(importing, watching, return_exceptions=True)

    async def _run(self, body: AsyncIterator[bytes], lines: asyncio.Queue[ImportLine | None]) -> None:
        try:
            image = await self._work(body, lines.put_nowait)
            lines.put_nowait(ImportLine(image=image))
        except ClientDisconnect:
            pass
        except DSecError as error:
            lines.put_nowait(ImportLine(error=error.body()))
            await _drain(body)
        except Exception as failure:
            incident = secrets.token_hex(6)
            _log.error("import failed", incident=incident, image=self._name, exc_info=failure)
            unforeseen = DSecError(f"something broke on our side; the service's log tells more under incident {incident}", reason=incident)
            lines.put_nowait(ImportLine(error=unforeseen.body()))
        finally:
            lines.put_nowait(None)


async def _body(receive: Receive, received: asyncio.Event) -> AsyncIterator[bytes]:
    """The request's body. Raises ClientDisconnect."""
    while not received.is_set():
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if not message.get("more_body", False):
            received.set()
        yield message.get("body", b"")


async def _drain(body: AsyncIterator[bytes]) -> None:
    """Takes the rest of a body whose import has failed: a client that is still sending wouldn't read the answer."""
    try:
        async for _ in body:
            pass
    except ClientDisconnect:
        pass


async def _watch(receive: Receive, received: asyncio.Event, importing: asyncio.Task[None]) -> None:
    """Cancels the import when the client disconnects after the body."""
    await received.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
    importing.cancel()


def _import_request(request: Request) -> ImportRequest:
    query = request.query_params
    kind = query.get("kind", "base")
    if kind not in get_args(Kind):
        raise InvalidArgument(f"kind is one of {', '.join(get_args(Kind))}, not {kind!r}", field="kind")
    wanted_format = query.get("format", "auto")
    if wanted_format not in ("auto", *get_args(Format)):
        raise InvalidArgument(f"format is one of auto, {', '.join(get_args(Format))}, not {wanted_format!r}", field="format")
    caller = _caller(request)
    return ImportRequest(
        name=check_name(query.get("name", "")),
        kind=cast(Kind, kind),
        format=None if wanted_format == "auto" else cast(Format, wanted_format),
        at=_place(query.get("at", "/")),
        caller=caller,
        idempotency_key=_idempotency_key(request, caller),
    )


async def _registry_import(request: Request) -> RegistryImport:
    """The body. Raises InvalidArgument."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > BODY_LIMIT:
            raise InvalidArgument(f"the description of an import has at most {BODY_LIMIT} bytes")
    try:
        if request.headers.get("content-type", "").startswith(MSGPACK):
            return msgspec.msgpack.decode(data, type=RegistryImport)
        return msgspec.json.decode(data, type=RegistryImport)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidArgument(f"the request body is not as it should be: {error}") from error


def _credentials(body: RegistryImport) -> Credentials | None:
    """Raises InvalidArgument for half of them, and for what can't be put into a header."""
    if body.username is None and body.password is None:
        return None
    for field, text in (("username", body.username), ("password", body.password)):
        if text is None or not text.isprintable() or len(text) > _CREDENTIAL_LIMIT:
            raise InvalidArgument("a user name needs a password, and both consist of printable characters", field=field)
    assert body.username is not None and body.password is not None
    if ":" in body.username:
        raise InvalidArgument("a user name may not hold ':' (RFC 7617)", field="username")
    return Credentials(body.username, body.password)


def _idempotency_key(request: Request, caller: Caller) -> str | None:
    """The request's key, apart from those of other projects. Raises InvalidArgument."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 0 < len(key) <= _IDEMPOTENCY_KEY_LIMIT:
        raise InvalidArgument(f"Idempotency-Key: 1 to {_IDEMPOTENCY_KEY_LIMIT} characters", field="idempotency_key")
    return f"{caller.project}:{key}"


def _place(at: str) -> str:
    """Where the content goes, normalized. Raises InvalidArgument."""
    if not at.startswith("/") or not at.isprintable() or len(at.encode("utf-8", "surrogateescape")) > _PATH_LIMIT:
        raise InvalidArgument("at is an absolute path of printable characters", field="at")
    parts = [part for part in at.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise InvalidArgument("at may not hold '..'", field="at")
    if any(part.startswith(".wh.") for part in parts):
        raise InvalidArgument("at may not hold the name of a whiteout", field="at")
    return "/" + "/".join(parts)


def _caller(request: Request) -> Caller:
    return Caller(project=request.scope["dsec.project"], admin=request.scope["dsec.admin"])


def _reference(request: Request, name: str = "reference") -> str:
    """A reference in the query. Raises InvalidArgument."""
    reference = request.query_params.get(name, "")
    if parse_reference(reference) is None:
        raise InvalidArgument(f"{name} is a name, name@version or a digest of an image, not {reference[:80]!r}", field=name)
    return reference


def _flag(request: Request, name: str) -> bool:
    """A yes or no in the query. Raises InvalidArgument."""
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidArgument(f"{name} is true or false, not {text[:40]!r}", field=name)
    return text == "true"


def _integer(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) == 0:
        raise InvalidArgument(f"{name} is a positive number, not {text[:40]!r}", field=name)
    return int(text)


def _encode_cursor(last: ImageInfo) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((last.name, last.version))).decode("ascii")


def _decode_cursor(cursor: str | None) -> tuple[str, int] | None:
    if cursor is None:
        return None
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(cursor), type=tuple[str, int])
    except (ValueError, msgspec.DecodeError):
        raise InvalidArgument("this cursor is not one that a list gave", field="cursor") from None


def _line(line: ImportLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _answer(request: Request, value: object) -> Response:
    if MSGPACK in request.headers.get("accept", ""):
        return Response(msgspec.msgpack.encode(value), media_type=MSGPACK)
    return Response(msgspec.json.encode(value), media_type="application/json")
