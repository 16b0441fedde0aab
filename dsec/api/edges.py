"""Which edge a request is for, and how it gets there.

A sandbox's id names its edge (``sb-<edge>-…``), so no look-up is needed. What stands behind an :class:`EdgeLink` may be in this process
(:class:`LocalEdge`) or elsewhere: the request's own ``receive`` and ``send`` are handed on, nothing is read, copied or re-framed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from libdsec.errors import NotFound, SandboxNotFound
from libdsec.schema import NodeInfo

SANDBOXES = "/v1/sandboxes"


class EdgeLink(Protocol):
    """The way to one edge."""

    edge_id: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the edge answer the request. ``scope`` carries the caller's project (``dsec.project``).

        May raise any :class:`libdsec.errors.DSecError` as long as no response has begun.
        """

    def node_info(self) -> NodeInfo:
        """What the edge last said of itself."""


class InProcessEdge(Protocol):
    """What an edge in the same process offers (:class:`dsec.edge.Edge`)."""

    @property
    def app(self) -> ASGIApp: ...

    def node_info(self) -> NodeInfo: ...


class LocalEdge:
    """The edge in this process: a function call away."""

    def __init__(self, edge_id: str, edge: InProcessEdge) -> None:
        self.edge_id = edge_id
        self._edge = edge
        self._app = edge.app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def node_info(self) -> NodeInfo:
        return self._edge.node_info()


class Edges:
    """Every known edge; an ASGI app for everything at and below ``/v1/sandboxes``.

    Requests that name no sandbox (create, list) go to ``home``, the first edge given.
    """

    def __init__(self, edges: Iterable[EdgeLink]) -> None:
        self._by_id = {edge.edge_id: edge for edge in edges}
        if not self._by_id:
            raise ValueError("an apiserver needs at least one edge")
        self._home = next(iter(self._by_id.values()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sandbox_id = scope["path"][len(SANDBOXES) :].strip("/").partition("/")[0]
        edge = self.of_sandbox(sandbox_id) if sandbox_id else self._home
        await edge(scope, receive, send)

    def of_sandbox(self, sandbox_id: str) -> EdgeLink:
        """The edge that a sandbox id names. Raises SandboxNotFound where there is none of that name, or the id isn't one."""
        kind, _, rest = sandbox_id.partition("-")
        edge = self._by_id.get(rest.partition("-")[0]) if kind == "sb" else None
        if edge is None:
            raise SandboxNotFound(f"there is no sandbox {sandbox_id!r}")
        return edge

    def of_name(self, edge_id: str | None) -> EdgeLink:
        """The edge of that name; of None: the first one. Raises NotFound."""
        edge = self._home if edge_id is None else self._by_id.get(edge_id)
        if edge is None:
            raise NotFound(f"there is no edge {edge_id!r}; GET /v1/nodes lists them")
        return edge

    def node_infos(self) -> list[NodeInfo]:
        """One entry an edge."""
        return [edge.node_info() for edge in self._by_id.values()]
