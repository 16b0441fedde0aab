"""Forks and packs on an edge whose machine is a fake: what children are made of, and what becomes of snapshots whatever happens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from edge_fakes import Client, Images, Node, eventually, open_edge

from dsec.edge import Edge
from dsec.edge.spawner import SpawnerError, SpawnerLost

ARGS = {
    "backend": "container",
    "container_image": "configured",
    "env": {"B": "call"},
    "labels": {"k": "v"},
    "disk_limit_mb": 64,
    "ttl_total": 600.0,
    "init_user": "1000",
}


@pytest.fixture
def client(edge: Edge) -> Client:
    return Client(edge)


async def create(client: Client) -> str:
    (line,) = (await client("POST", "/v1/sandboxes", {"args": ARGS})).lines()
    return str(line["sandbox"]["id"])


async def fork(client: Client, parent: str, **request: object) -> list[dict[str, object]]:
    answer = await client("POST", f"/v1/sandboxes/{parent}/fork", request)
    assert answer.status == 200, answer.body
    return answer.lines()


class TestFork:
    async def test_children_are_like_their_parent_but_for_what_is_asked(self, client: Client, edge: Edge, node: Node) -> None:
        parent = await create(client)
        lines = await fork(client, parent, count=3, env={"C": "fork"}, memory_limit_mb=77)
        for line in lines:
            child = line["sandbox"]
            assert isinstance(child, dict)
            assert (child["forked_from"], child["labels"], child["image"], child["memory_limit_mb"]) == (
                parent,
                {"k": "v"},
                "configured@2",
                77,
            )
            assert (child["ttl_total"], child["init_user"], child["workdir"]) == (600.0, "1000", "/work")
            live = edge.sandboxes.live(child["id"])
            assert live is not None and live.env == {b"A": b"image", b"B": b"call", b"C": b"fork"}
            spec = node.specs[child["id"]]
            assert spec.origin is not None and spec.origin.startswith("sn-e1-") and spec.hostname == child["id"]
            assert spec.disk == (64 << 20) - 4096, "what it shares with its parent counts against its limit"
            assert spec.layers == node.specs[parent].layers
        assert len({node.specs[line["sandbox"]["id"]].origin for line in lines}) == 1, "all of one moment"
        await eventually(lambda: not node.snapshots)

    async def test_a_machine_id_is_replaced_where_there_is_one(self, client: Client, node: Node) -> None:
        parent = await create(client)
        (plain,) = await fork(client, parent)
        assert node.agent(plain["sandbox"]["id"]).files == {}
        node.files = {b"/etc/machine-id": b"0" * 32 + b"\n"}
        (child,) = await fork(client, parent)
        content = node.agent(child["sandbox"]["id"]).files[b"/etc/machine-id"]
        assert len(content) == 33 and content != b"0" * 32 + b"\n"

    async def test_a_repetition_finds_the_same_children_and_takes_no_snapshot(self, client: Client, node: Node) -> None:
        parent = await create(client)
        first = await fork(client, parent, count=3, idempotency_key="k")
        node.fail_snapshot = [SpawnerError("failed", "must not be asked for")]
        again = await fork(client, parent, count=3, idempotency_key="k")
        assert {line["sandbox"]["id"] for line in first} == {line["sandbox"]["id"] for line in again}

    async def test_full_quota_groups_count_shared_files_themselves(self, client: Client, edge: Edge, node: Node) -> None:
        node.quotas = "full"
        await edge.sandboxes.inventory.refresh_facts()
        (line,) = await fork(client, await create(client))
        child = line["sandbox"]
        assert isinstance(child, dict)
        assert node.specs[child["id"]].disk == 64 << 20
        assert (await client("GET", f"/v1/sandboxes/{child['id']}/metrics")).json()["disk"] == 4096, "once"

    async def test_a_disk_limit_below_what_is_inherited_is_refused(self, client: Client, edge: Edge, node: Node) -> None:
        parent = await create(client)
        live = edge.sandboxes.live(parent)
        assert live is not None
        live.record.inherited = 64 << 20
        answer = await client("POST", f"/v1/sandboxes/{parent}/fork", {})
        assert answer.error() == "400 invalid_argument" and answer.json()["error"]["field"] == "disk_limit_mb"
        assert not node.snapshots

    async def test_a_spawner_that_dies_is_asked_again(self, client: Client, node: Node) -> None:
        parent = await create(client)
        node.fail_snapshot = [SpawnerLost("gone"), SpawnerLost("gone")]
        node.fail_create = [SpawnerLost("gone")]
        (line,) = await fork(client, parent)
        assert "sandbox" in line
        await eventually(lambda: not node.snapshots)

    @pytest.mark.parametrize(("code", "told", "why"), [("timeout", "503 unavailable", "why"), ("failed", "500 internal", "incident")])
    async def test_a_snapshot_that_fails_is_told_and_leaves_none(
        self, client: Client, edge: Edge, node: Node, code: str, told: str, why: str
    ) -> None:
        parent = await create(client)
        node.fail_snapshot = [SpawnerError(code, "why")]
        answer = await client("POST", f"/v1/sandboxes/{parent}/fork", {"count": 2})
        assert answer.error() == told and why in answer.json()["error"]["message"]
        await eventually(lambda: not edge.sandboxes.inventory.snapshots)

    async def test_the_snapshot_stays_until_the_last_child_has_started(self, client: Client, node: Node) -> None:
        parent = await create(client)
        node.gate = asyncio.Event()
        node.creating.clear()
        forking = asyncio.ensure_future(fork(client, parent, count=2))
        await node.creating.wait()
        assert len(node.snapshots) == 1
        node.gate.set()
        await forking
        await eventually(lambda: not node.snapshots)

    async def test_a_strangers_sandbox_is_not_forked(self, client: Client, edge: Edge, node: Node) -> None:
        parent = await create(client)
        for route in ("fork", "pack"):
            answer = await Client(edge, "other")("POST", f"/v1/sandboxes/{parent}/{route}", {"name": "x"} if route == "pack" else {})
            assert answer.error() == "404 sandbox_not_found"


class TestSnapshots:
    async def test_those_of_an_earlier_edge_are_removed_at_the_start(self, node: Node, tmp_path: Path) -> None:
        node.snapshots = ["sn-e1-left", "sn-e1-over"]
        async with open_edge(node, tmp_path):
            assert not node.snapshots

    async def test_the_sweep_leaves_those_that_are_worked_on(self, edge: Edge, node: Node) -> None:
        node.snapshots = ["sn-e1-mine", "sn-e1-nobodys"]
        edge.sandboxes.inventory.snapshots.add("sn-e1-mine")
        await edge.sandboxes.sweep.round()
        assert node.snapshots == ["sn-e1-mine"]


class TestPack:
    async def test_without_a_store_for_it_packing_is_unsupported(self, client: Client) -> None:
        parent = await create(client)
        answer = await client("POST", f"/v1/sandboxes/{parent}/pack", {"name": "x"})
        assert answer.error() == "501 unsupported"

    @pytest.mark.parametrize(("request_", "field"), [({}, "name"), ({"name": "x", "exclude": [""]}, "exclude")])
    async def test_what_can_not_be_is_told_by_field(self, client: Client, request_: dict[str, object], field: str) -> None:
        parent = await create(client)
        answer = await client("POST", f"/v1/sandboxes/{parent}/pack", request_)
        assert answer.error() == "400 invalid_argument" and answer.json()["error"]["field"] == field


async def test_what_another_project_packed_is_not_there(client: Client, edge: Edge) -> None:
    images = edge.sandboxes.starts._images
    assert isinstance(images, Images)
    known = images.known
    known["theirs"] = msgspec.structs.replace(known["base"], owners=frozenset({"other"}))
    args = {"args": {"backend": "container", "container_image": "theirs"}}
    (line,) = (await client("POST", "/v1/sandboxes", args)).lines()
    assert line["error"]["code"] == "image_not_found"
    (line,) = (await Client(edge, "other")("POST", "/v1/sandboxes", args)).lines()
    assert "sandbox" in line
