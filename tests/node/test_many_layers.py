"""A sandbox of a hundred layers: base, workspace and toolkits, attached nowhere or by path and loop device."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import DSecClient, DSecContainerRunArgs
from tests.conftest import Instance, node_at, require_root
from tests.node.test_classic_mounts import loops_of
from tests.unit.images_archives import files

LAYERS = 100
TOOLKITS = LAYERS - 2
PLACES = TOOLKITS // 2
"""Directories below /opt; the second half of the toolkits lies on top of the first."""
IMPORTS_AT_ONCE = 8
ARGS = DSecContainerRunArgs(
    container_image="base", workspace="work", toolkits=tuple(f"tool-{number}" for number in range(TOOLKITS)), network="none"
)


async def fill(node: Instance, base_tar: Path, home: Path) -> None:
    """Imports the base, the workspace and the toolkits, each of which brings a file of its own and one that another brings too."""
    turns = asyncio.Semaphore(IMPORTS_AT_ONCE)
    async with DSecClient(node.url, node.api_key) as client:

        async def import_toolkit(number: int) -> None:
            archive = home / f"tool-{number}.tar"
            archive.write_bytes(files({f"own-{number}": b"%d\n" % number, "topmost": b"%d\n" % number}))
            async with turns:
                await client.images.import_(archive, name=f"tool-{number}", kind="toolkit", at=f"/opt/{number % PLACES}")

        (home / "work.tar").write_bytes(files({"file": b"from the workspace\n"}))
        await client.images.import_(base_tar, name="base")
        await client.images.import_(home / "work.tar", name="work", kind="workspace", at="/work")
        await asyncio.gather(*map(import_toolkit, range(TOOLKITS)))


@pytest.fixture
def node(mounts: str, base_tar: Path) -> Iterator[Instance]:
    require_root()
    with tempfile.TemporaryDirectory(prefix="dsec-test-", ignore_cleanup_errors=True) as name:
        home = Path(name)
        home.chmod(0o755)
        with node_at(home / "many-001", "--mounts", mounts) as running:
            asyncio.run(fill(running, base_tar, home))
            yield running


@pytest.mark.parametrize("mounts", ["auto", "classic"])
async def test_a_hundred_layers_are_all_seen_in_their_order(node: Instance, mounts: str) -> None:
    async with DSecClient(node.url, node.api_key) as client:
        images = [await client.images.get(name) for name in ("base", "work", *ARGS.toolkits)]
        assert sum(len(image.layers) for image in images) == LAYERS
        made = [item async for item in client.run_many([ARGS] * 2)]
        one, two = [item.sandbox for item in made if item.sandbox is not None]
        assert mounts == "auto" or len(loops_of(node)) >= LAYERS
        own = (await one.exec("cat /opt/*/own-* | sort -n")).stdout
        assert own == "".join(f"{number}\n" for number in range(TOOLKITS))
        topmost = (await one.exec("cat /opt/*/topmost | sort -n")).stdout
        assert topmost == "".join(f"{number}\n" for number in range(PLACES, TOOLKITS))
        assert (await one.exec("cat /work/file; rm /work/file /opt/0/own-0; rm -r /opt/1; ls /opt/0; ls -d /opt/1")).stdout == (
            f"from the workspace\nown-{PLACES}\ntopmost\n"
        )
        assert (await two.exec(["cat", "/work/file", "/opt/0/own-0", "/opt/1/own-1"])).stdout == "from the workspace\n0\n1\n"
        await one.stop()
        await two.stop()
