"""What the tests of the SDK share: a server in memory that misbehaves as they want it to, and somebody who calls it. What those of the edge
share: an edge over a machine in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from edge_fakes import Node, open_edge
from sdk_server import FakeServer

from dsec.edge import Edge
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeServer]:
    """The server, which a client that is made without arguments finds."""
    fake = FakeServer()
    await fake.start()
    monkeypatch.setenv("DSEC_URL", fake.url)
    monkeypatch.setenv("DSEC_API_KEY", "dsec_k")
    yield fake
    await fake.stop()


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[DSecClient]:
    async with DSecClient() as opened:
        yield opened


@pytest.fixture
async def sandbox(client: DSecClient) -> Sandbox:
    return await client.run(DSecContainerRunArgs(container_image="x"))


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
async def edge(node: Node, tmp_path: Path) -> AsyncIterator[Edge]:
    async with open_edge(node, tmp_path) as opened:
        yield opened
