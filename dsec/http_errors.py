"""Errors of HTTP requests that the apiserver and the edges answer alike."""

from __future__ import annotations

import re
import secrets

import msgspec
import structlog

from libdsec.errors import DSecError, InvalidArgument

_log = structlog.get_logger("dsec")

# How msgspec names the place in its messages: "… - at `$.items[3].args`", "… field `count`".
_PATH_IN_MESSAGE = re.compile(r" - at `\$\.?([^`]*)`$")
_FIELD_IN_MESSAGE = re.compile(r"field `([^`]+)`")


class BodyTooLarge(InvalidArgument):
    """The request's body is larger than this route takes."""

    status = 413


class MethodNotAllowed(InvalidArgument):
    """The path exists, the method doesn't."""

    status = 405


def invalid_body(failure: msgspec.MsgspecError | UnicodeDecodeError) -> InvalidArgument:
    """The error for a body that doesn't fit its type: msgspec's own words, and the field taken out of them."""
    text = str(failure)
    path, field = _PATH_IN_MESSAGE.search(text), _FIELD_IN_MESSAGE.search(text)
    names = [found[1] for found in (path, field) if found and found[1]]
    return InvalidArgument(f"the request body is not as it should be: {text}", field=".".join(names) or None)


def incident(failure: Exception, what: str) -> DSecError:
    """The error for something unforeseen during ``what``: logged whole under an id, of which the caller gets only the id."""
    name = secrets.token_hex(6)
    _log.error("unforeseen failure", incident=name, what=what, exc_info=failure)
    return DSecError(f"something broke on our side; the service's log tells more under incident {name}", reason=name)
