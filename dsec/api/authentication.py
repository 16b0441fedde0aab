"""The middleware that lets nobody in without a key."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from dsec.api.keys import Keys, Principal, check_project
from libdsec.errors import PermissionDenied

PROJECT_HEADER = b"x-dsec-project"
"""In which project an administrator acts; anybody else may say only what their key says already."""


class Authentication:
    """Plain ASGI (nothing is wrapped or buffered): puts who calls into ``scope["dsec.project"]``, ``["dsec.admin"]`` and ``["dsec.key"]``.

    Paths in ``public`` need no key. Raises AuthenticationError, and PermissionDenied for a project that isn't the key's, for the layer
    outside it to answer.
    """

    def __init__(self, app: ASGIApp, keys: Keys, *, public: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in self._public:
            principal = self._keys.authenticate(_header(scope, b"authorization"))
            scope["dsec.project"] = _project(principal, _header(scope, PROJECT_HEADER))
            scope["dsec.admin"] = principal.admin
            scope["dsec.key"] = principal.key_id
        await self._app(scope, receive, send)


def _project(principal: Principal, wanted: str | None) -> str:
    """The project in which a request acts. Raises PermissionDenied, InvalidArgument."""
    if wanted is None or wanted == principal.project:
        return principal.project
    if not principal.admin:
        raise PermissionDenied(f"this key belongs to project {principal.project!r} and may act in no other")
    check_project(wanted)
    return wanted


def _header(scope: Scope, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return str(value, "latin-1")
    return None
