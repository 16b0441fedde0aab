"""The machines that sandboxes run on."""

from __future__ import annotations

import builtins

from libdsec.schema import NodeInfo
from libdsec.transport import Answer, Transport

_nodes = Answer(list[NodeInfo])


class Nodes:
    """The platform's nodes, reached as ``client.nodes``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> builtins.list[NodeInfo]:
        """Every node: its machine, its load, its sandboxes by state. Any key may ask. Safe to repeat."""
        return await self._transport.call("GET", self._transport.at("/v1/nodes"), _nodes)
