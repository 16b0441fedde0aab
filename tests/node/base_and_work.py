"""What tests of nodes that share a store put into it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from libdsec import DSecClient
from tests.conftest import Instance


def fill(node: Instance, base_tar: Path, work: Path, files: Mapping[str, bytes]) -> None:
    """Has a node import the images ``base`` and ``work``, which shows ``files`` in /work. ``work``: a directory to make."""
    work.mkdir()
    for name, content in files.items():
        (work / name).write_bytes(content)

    async def import_both() -> None:
        async with DSecClient(node.url, node.api_key) as client:
            await client.images.import_(base_tar, name="base")
            await client.images.import_(work, name="work", kind="workspace", at="/work")

    asyncio.run(import_both())
