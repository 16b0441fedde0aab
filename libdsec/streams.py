"""Bytes in and out of the SDK: what callers may pass as content, in the forms that a request sends without stalling."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import TypeAlias

from libdsec.transport import SEND_CHUNK

ByteSource: TypeAlias = bytes | bytearray | memoryview | str | AsyncIterable[bytes]
"""Content to send: bytes, text (sent as UTF-8), or an async iterable of bytes."""


def whole(source: ByteSource) -> bytes | memoryview | None:
    """The content if it is at hand as a whole, else None: it is a stream."""
    if isinstance(source, str):
        return source.encode("utf-8", "surrogateescape")
    if isinstance(source, bytes):
        return source
    if isinstance(source, bytearray | memoryview):
        return memoryview(source).cast("B")
    return None


def body_of(source: ByteSource) -> bytes | AsyncIterable[bytes | memoryview]:
    """The content in a form that can be a request's body: small bytes as they are, everything else as a stream."""
    content = whole(source)
    if content is None:
        assert not isinstance(source, bytes | bytearray | memoryview | str)
        return source
    return bytes(content) if len(content) <= SEND_CHUNK else _once(content)


async def _once(content: bytes | memoryview) -> AsyncIterator[bytes | memoryview]:
    yield content
