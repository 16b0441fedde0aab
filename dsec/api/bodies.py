"""Request and response bodies: the structs of the one schema as JSON, or as msgpack where the client says so."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dsec.http_errors import BodyTooLarge, invalid_body

BODY_LIMIT = 64 * 1024
"""Bytes of a request body that the apiserver itself reads; what goes to a sandbox or is an image never passes through here."""
JSON = "application/json"
MSGPACK = "application/msgpack"

_T = TypeVar("_T")


async def read(request: Request, type_: type[_T]) -> _T:
    """The body of ``request`` as ``type_``. Raises InvalidArgument (which names the field) and BodyTooLarge."""
    chunks = bytearray()
    async for chunk in request.stream():
        chunks += chunk
        if len(chunks) > BODY_LIMIT:
            raise BodyTooLarge(f"the body of {request.method} {request.url.path} may have {BODY_LIMIT} bytes")
    try:
        if request.headers.get("content-type", "").startswith(MSGPACK):
            return msgspec.msgpack.decode(chunks, type=type_)
        return msgspec.json.decode(chunks, type=type_)
    except msgspec.DecodeError as error:
        raise invalid_body(error) from error


def answer(request: Request, value: object, *, status: int = 200) -> Response:
    """``value`` (a struct, or a list of them) as the response, in the format that the client accepts."""
    if MSGPACK in request.headers.get("accept", ""):
        return Response(msgspec.msgpack.encode(value), status_code=status, media_type=MSGPACK)
    return Response(msgspec.json.encode(value), status_code=status, media_type=JSON)
