"""Where every failure becomes an HTTP answer: the outermost layer of the apiserver.

Below it code raises the classes of :mod:`libdsec.errors`; nothing else reaches a caller. What nobody foresaw is logged with its traceback
under an incident id, and the caller gets the id.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec
from prometheus_client import Counter, Gauge
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsec.http_errors import BodyTooLarge, MethodNotAllowed, incident
from libdsec.errors import AuthenticationError, DSecError, ErrorEnvelope, InvalidArgument, NotFound

_requests = Counter("dsec_api_requests", "Requests answered, by first path segment after /v1 and by status", ["area", "status"])
_open_requests = Gauge("dsec_api_requests_open", "Requests (streams and WebSockets too) that are being answered")

_AREAS = frozenset({"sandboxes", "images", "keys", "nodes", "doctor"})
_WEBSOCKET_INTERNAL_ERROR = 1011
_WEBSOCKET_POLICY_VIOLATION = 1008


class ErrorBoundary:
    """ASGI middleware: lets everything through as it comes, and answers what raises. Counts requests by status."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = _Response(scope, send)
        _open_requests.inc()
        try:
            await self._app(scope, receive, response.send)
        except ClientDisconnect:
            response.status = 499
        except Exception as error:
            known = _foreseen(error, scope)
            if known is None:
                known = incident(error, f"{scope.get('method', 'WS')} {scope['path']}")
            await response.fail(known)
        finally:
            _open_requests.dec()
            _requests_of(_area(scope["path"]), response.status).inc()


class _Response:
    """What of a response has been sent, and how it ends if it fails."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._started = False
        self.status = 0

    async def send(self, message: Message) -> None:
        if not self._started and message["type"] != "websocket.close":
            self._started = True
            self.status = message.get("status", 101)
        await self._send(message)

    async def fail(self, error: DSecError) -> None:
        """Answer with ``error``; a response that has begun is cut off instead, so that nobody takes it for a whole one."""
        websocket = self._scope["type"] == "websocket"
        if self._started:
            if websocket:
                await self._send({"type": "websocket.close", "code": _WEBSOCKET_INTERNAL_ERROR, "reason": error.message[:100]})
                return
            cut = self._scope.get("dsec.cut")
            if cut is None:
                raise error
            cut()
            return
        self.status = error.status
        if not websocket:
            await _send_body(self._send, "http.response", error)
        elif "websocket.http.response" in self._scope.get("extensions", {}):
            await _send_body(self._send, "websocket.http.response", error)
        else:
            await self._send({"type": "websocket.close", "code": _WEBSOCKET_POLICY_VIOLATION, "reason": error.message[:100]})


async def _send_body(send: Send, kind: str, error: DSecError) -> None:
    body = msgspec.json.encode(ErrorEnvelope(error.body()))
    await send({"type": f"{kind}.start", "status": error.status, "headers": [(k, v) for k, v in _headers(error, len(body)).items()]})
    await send({"type": f"{kind}.body", "body": body, "more_body": False})


def _headers(error: DSecError, length: int) -> Mapping[bytes, bytes]:
    headers = {b"content-type": b"application/json", b"content-length": str(length).encode("ascii")}
    if error.retry_after is not None:
        headers[b"retry-after"] = str(max(1, round(error.retry_after))).encode("ascii")
    if isinstance(error, AuthenticationError):
        headers[b"www-authenticate"] = b"Bearer"
    return headers


def _foreseen(error: Exception, scope: Scope) -> DSecError | None:
    """The error to answer with, if this is one that code below raises on purpose."""
    if isinstance(error, DSecError):
        return error
    if isinstance(error, HTTPException):
        path = scope["path"]
        if error.status_code == 404:
            return NotFound(f"there is nothing at {path}; GET /openapi.json lists what there is")
        if error.status_code == 405:
            return MethodNotAllowed(f"{scope['method']} is not possible on {path}; GET /openapi.json lists what is")
        if error.status_code == 413:
            return BodyTooLarge(f"the body is too large for {path}")
        return InvalidArgument(error.detail)
    return None


@functools.cache
def _requests_of(area: str, status: int) -> Counter:
    """One series of the counter; looking it up by label anew costs more than counting."""
    return _requests.labels(area, status)


def _area(path: str) -> str:
    """The label under which a request is counted: one of a few, whatever paths callers make up."""
    parts = path.split("/", 3)
    name = parts[2] if len(parts) > 2 and parts[1] == "v1" else ""
    return name if name in _AREAS else "other"
