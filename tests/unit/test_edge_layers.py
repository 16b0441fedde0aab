"""Mounted layers: counted, unmounted when idle, and in agreement with what the spawner has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from edge_fakes import FakeClock, FakeSpawner, Node, eventually, open_edge

from dsec.edge import Edge
from dsec.edge.endings import SPAWNER_TRIES
from dsec.edge.layers import LayerMounts
from dsec.edge.record import LayerRef
from dsec.edge.spawner import SpawnerError
from libdsec.errors import Unavailable
from libdsec.schema import DSecContainerRunArgs

LAYER = LayerRef("a" * 64, "b" * 64)
BASE = DSecContainerRunArgs(container_image="base")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def mounts(node: Node) -> LayerMounts:
    return LayerMounts(FakeSpawner(node))


def drop(node: Node) -> None:
    """The spawner has nothing mounted any more."""
    node.mounted.clear()
    node.lazy.clear()


@pytest.mark.parametrize("told", [True, False])
async def test_a_layer_that_the_spawner_dropped_is_mounted_anew_and_its_users_stay_counted(
    node: Node, mounts: LayerMounts, told: bool
) -> None:
    await mounts.acquire([LAYER], {LAYER.meta})
    drop(node)
    if told:
        mounts.lose_lazy()
    else:
        await mounts.compare(1.0)
    assert mounts.missing([LAYER])
    assert mounts.in_use() == {LAYER.meta, LAYER.blob}
    await mounts.acquire([LAYER])
    assert (node.mounts, mounts.missing([LAYER]), mounts.as_mounted([LAYER])) == (2, False, (LAYER,))
    mounts.release([LAYER], 2.0)
    assert mounts.in_use() == {LAYER.meta, LAYER.blob}
    mounts.release([LAYER], 2.0)
    assert mounts.in_use() == set()


async def test_a_layer_that_is_gone_and_unused_is_forgotten(node: Node, mounts: LayerMounts) -> None:
    await mounts.acquire([LAYER])
    drop(node)
    await mounts.compare(1.0)
    mounts.release([LAYER], 2.0)
    await mounts.unmount_idle(before=3.0)
    assert mounts.missing([LAYER])


async def test_layers_that_are_whole_are_not_lost_with_blobfs(node: Node, mounts: LayerMounts) -> None:
    await mounts.acquire([LAYER])
    mounts.lose_lazy()
    assert not mounts.missing([LAYER])


async def test_what_an_earlier_edge_had_mounted_is_used_as_it_is_mounted_and_unmounted_when_idle(node: Node, mounts: LayerMounts) -> None:
    node.mounted, node.lazy = {LAYER.meta: LAYER.blob}, {LAYER.meta}
    await mounts.compare(10.0)
    assert not mounts.missing([LAYER])
    assert mounts.as_mounted([LAYER])[0].lazy
    await mounts.unmount_idle(before=10.0)
    assert node.mounted
    await mounts.unmount_idle(before=10.1)
    assert not node.mounted


async def test_an_unmount_that_failed_is_made_good_later_and_keeps_no_other_from_its_turn(node: Node, mounts: LayerMounts) -> None:
    other = LayerRef("c" * 64, None)
    await mounts.acquire([LAYER, other])
    mounts.release([LAYER, other], 1.0)
    node.fail_unmount.append(SpawnerError("failed", "busy"))
    with pytest.raises(SpawnerError, match="busy"):
        await mounts.unmount_idle(before=2.0)
    assert list(node.mounted) == [LAYER.meta]
    await mounts.compare(3.0)
    await mounts.unmount_idle(before=4.0)
    assert not node.mounted


async def test_a_layer_that_is_unmounted_while_the_spawner_is_asked_is_not_taken_for_a_mounted_one(node: Node) -> None:
    class Slow(FakeSpawner):
        async def layers(self) -> dict[str, bool]:
            found = await super().layers()
            await unmounted.wait()
            return found

    unmounted = asyncio.Event()
    mounts = LayerMounts(Slow(node))
    await mounts.acquire([LAYER])
    mounts.release([LAYER], 1.0)
    comparing = asyncio.ensure_future(mounts.compare(5.0))
    await asyncio.sleep(0)
    await mounts.unmount_idle(before=2.0)
    unmounted.set()
    await comparing
    assert mounts.missing([LAYER])


async def test_the_users_of_a_mount_that_fails_are_not_counted(node: Node) -> None:
    class Failing(FakeSpawner):
        async def layer_mount(self, meta: str, blob: str | None, *, lazy: bool = False) -> None:
            await asyncio.sleep(0)
            raise SpawnerError("image_error", "broken")

    mounts = LayerMounts(Failing(node))
    outcomes = await asyncio.gather(*(mounts.acquire([LAYER]) for _ in range(3)), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["broken"] * 3
    assert mounts.in_use() == set()
    assert mounts.missing([LAYER])


class TestDroppedWhileASandboxStarts:
    """The spawner drops lazy layers that nobody serves, and what it doesn't find again when it is restarted."""

    async def test_it_is_mounted_anew_and_the_sandboxes_start(self, node: Node, tmp_path: Path, clock: FakeClock) -> None:
        async with open_edge(node, tmp_path, clock) as edge:
            node.gate = asyncio.Event()
            starting = [asyncio.ensure_future(edge.sandboxes.create("p", BASE, None)) for _ in range(2)]
            await eventually(lambda: edge.sandboxes.starts.slots.starting == 2 and node.creating.is_set())
            drop(node)
            node.gate.set()
            for info in await asyncio.gather(*starting):
                assert info.state == "running"
                sandbox = edge.sandboxes.live(info.id)
                assert sandbox is not None
                await edge.sandboxes.stop(sandbox, "stopped by request")
            assert node.mounts == 2, "once for both of them, and once again"
            assert edge.in_use() == set(), "each counted as one user"
            clock.now += edge.config.layer_idle_s + 1
            await edge.sandboxes.sweep.round()
        assert not node.mounted

    async def test_one_that_is_dropped_again_and_again_is_the_nodes_failure(self, node: Node, edge: Edge) -> None:
        node.fail_create += [SpawnerError("not_found", "layer a is not mounted")] * SPAWNER_TRIES
        with pytest.raises(Unavailable, match="layer a is not mounted"):
            await edge.sandboxes.create("p", BASE, None)
        assert not node.kernel and edge.in_use() == set()
        assert (await edge.sandboxes.create("p", BASE, None)).state == "running"

    async def test_a_file_that_is_gone_at_the_mount_is_looked_for_again(self, node: Node, edge: Edge) -> None:
        node.fail_mount.append(SpawnerError("not_found", "blob b: No such file or directory"))
        assert (await edge.sandboxes.create("p", BASE, None)).state == "running"
        node.fail_mount += [SpawnerError("not_found", "blob b: No such file or directory")] * 2
        drop(node)
        await edge.sandboxes.sweep.round()
        with pytest.raises(Unavailable, match="No such file"):
            await edge.sandboxes.create("p", BASE, None)


async def test_layers_of_the_edge_before_are_unmounted_when_nobody_uses_them(node: Node, tmp_path: Path, clock: FakeClock) -> None:
    async with open_edge(node, tmp_path) as edge:
        info = await edge.sandboxes.create("p", BASE, None)
        sandbox = edge.sandboxes.live(info.id)
        assert sandbox is not None
        await edge.sandboxes.stop(sandbox, "stopped by request")
    assert node.mounted
    async with open_edge(node, tmp_path, clock) as edge:
        clock.now += edge.config.layer_idle_s + 1
        await edge.sandboxes.sweep.round()
    assert not node.mounted
