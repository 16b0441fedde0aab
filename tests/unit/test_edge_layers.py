"""Mounted layers: counted, unmounted when idle, and in agreement with what the spawner has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from edge_fakes import FakeClock, FakeSpawner, Node, open_edge

from dsec.edge.layers import LayerMounts
from dsec.edge.record import LayerRef
from dsec.edge.spawner import SpawnerError
from libdsec.schema import DSecContainerRunArgs

LAYER = LayerRef("a" * 64, "b" * 64)


@pytest.fixture
def node() -> Node:
    return Node()


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


async def test_layers_of_the_edge_before_are_unmounted_when_nobody_uses_them(node: Node, tmp_path: Path) -> None:
    async with open_edge(node, tmp_path) as edge:
        info = await edge.sandboxes.create("p", DSecContainerRunArgs(container_image="base"), None)
        sandbox = edge.sandboxes.live(info.id)
        assert sandbox is not None
        await edge.sandboxes.stop(sandbox, "stopped by request")
    assert node.mounted
    clock = FakeClock()
    async with open_edge(node, tmp_path, clock) as edge:
        clock.now += edge.config.layer_idle_s + 1
        await edge.sandboxes.sweep.round()
    assert not node.mounted
