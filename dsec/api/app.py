"""The apiserver as one ASGI app: the error boundary around authentication around the routes.

ErrorBoundary -> Authentication -> /v1/sandboxes…   -> Edges (streamed through)
                                -> everything else  -> Starlette routes
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Receive, Scope, Send

from dsec.api import bodies, doctor, openapi
from dsec.api.authentication import Authentication
from dsec.api.edges import SANDBOXES, Edges
from dsec.api.errors import ErrorBoundary
from dsec.api.keys import Keys
from libdsec.errors import InvalidArgument, PermissionDenied
from libdsec.schema import DoctorReport, Health, KeyRequest

IDEMPOTENCY_KEY_LIMIT = 128
"""Characters of an ``Idempotency-Key``."""

_PUBLIC = frozenset({"/healthz", "/openapi.json"})
"""What needs no key: that the service lives, and what its API is, are no secrets."""


class ApiServer:
    """The ASGI app of one apiserver.

    ``image_routes`` come from the image store and are mounted as they are, behind authentication. ``metrics_public`` opens ``/metrics`` to
    callers without a key: right where the listener is bound to loopback only, wrong anywhere else (a scraper can send a bearer key).
    """

    def __init__(self, keys: Keys, edges: Edges, image_routes: Sequence[BaseRoute], *, state_dir: Path, metrics_public: bool) -> None:
        self._keys = keys
        self._edges = edges
        self._state_dir = state_dir
        self._stopping = False
        self._router = Router([*self._routes(), *image_routes], redirect_slashes=False)
        public = _PUBLIC | {"/metrics"} if metrics_public else _PUBLIC
        self._app = ErrorBoundary(Authentication(self._route, keys, public=public))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @property
    def routes(self) -> Sequence[BaseRoute]:
        """What is answered here, and not handed to an edge."""
        return self._router.routes

    def begin_stop(self) -> None:
        """From now on ``/healthz`` answers 503, so that nobody sends new work here."""
        self._stopping = True

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path.startswith(SANDBOXES) and path[len(SANDBOXES) : len(SANDBOXES) + 1] in ("", "/"):
            await self._edges(scope, receive, send)
            return
        # Within an "app", Starlette raises for an unknown path or method instead of answering in plain text.
        scope["app"] = self
        await self._router(scope, receive, send)

    def _routes(self) -> list[BaseRoute]:
        return [
            Route("/healthz", self._healthz),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._openapi),
            Route("/v1/keys", self._list_keys, methods=["GET"]),
            Route("/v1/keys", self._create_key, methods=["POST"]),
            Route("/v1/keys/{key_id}", self._revoke_key, methods=["DELETE"]),
            Route("/v1/nodes", self._nodes),
            Route("/v1/doctor", self._doctor),
        ]

    async def _healthz(self, request: Request) -> Response:
        if self._stopping:
            return bodies.answer(request, Health(status="stopping"), status=503)
        return bodies.answer(request, Health(status="ok"))

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def _openapi(self, request: Request) -> Response:
        return Response(openapi.document(), media_type=bodies.JSON)

    async def _list_keys(self, request: Request) -> Response:
        _require_admin(request)
        return bodies.answer(request, self._keys.infos())

    async def _create_key(self, request: Request) -> Response:
        _require_admin(request)
        body = await bodies.read(request, KeyRequest)
        return bodies.answer(request, await self._keys.create(body, idempotency_key=_idempotency_key(request)), status=201)

    async def _revoke_key(self, request: Request) -> Response:
        _require_admin(request)
        return bodies.answer(request, await self._keys.revoke(request.path_params["key_id"]))

    async def _nodes(self, request: Request) -> Response:
        return bodies.answer(request, self._edges.node_infos())

    async def _doctor(self, request: Request) -> Response:
        node = self._edges.of_name(request.query_params.get("edge")).node_info()
        here = await run_in_threadpool(doctor.user_space_findings, self._state_dir)
        findings = doctor.sort([*doctor.kernel_findings(node.features), *here])
        return bodies.answer(request, DoctorReport(edge=node.edge, findings=findings))


def _require_admin(request: Request) -> None:
    if not request.scope["dsec.admin"]:
        raise PermissionDenied("this key may not manage keys; an admin's key may")


def _idempotency_key(request: Request) -> str | None:
    """The caller's ``Idempotency-Key``, told apart from the same words of another caller."""
    given = request.headers.get("idempotency-key")
    if given is None:
        return None
    if not 0 < len(given) <= IDEMPOTENCY_KEY_LIMIT:
        raise InvalidArgument(f"Idempotency-Key: 1 to {IDEMPOTENCY_KEY_LIMIT} characters", field="idempotency_key")
    return f"{request.scope['dsec.key']}:{given}"
