"""The middleware that lets nobody in without a key."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from dsec.api.keys import Keys


class Authentication:
    """Plain ASGI (nothing is wrapped or buffered): puts who calls into ``scope["dsec.project"]``, ``["dsec.admin"]`` and ``["dsec.key"]``.

    Paths in ``public`` need no key. Raises AuthenticationError for the layer outside it to answer.
    """

    def __init__(self, app: ASGIApp, keys: Keys, *, public: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in self._public:
            principal = self._keys.authenticate(_authorization(scope))
            scope["dsec.project"] = principal.project
            scope["dsec.admin"] = principal.admin
            scope["dsec.key"] = principal.key_id
        await self._app(scope, receive, send)


def _authorization(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return str(value, "latin-1")
    return None
