"""The edge's pure decisions: admission, limits, deadlines, adoption, keys of a batch, ids, msgpack sequences."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.edge.admission import AdmissionPolicy, NodeLoad, NodeSize, admit, clamp
from dsec.edge.adoption import judge
from dsec.edge.create import plan
from dsec.edge.deadlines import Deadlines, next_look
from dsec.edge.ids import SANDBOX_ID, edge_of, new_sandbox_id
from dsec.edge.record import Record
from dsec.edge.sequence import Malformed, Sequence
from dsec.edge.spawner import KernelSandbox
from dsec.edge.validation import check_run_args
from dsec.http_errors import invalid_body
from libdsec.errors import InvalidArgument, Unsupported
from libdsec.schema import MB, CreateRequest, DSecContainerRunArgs, DSecFullVMRunArgs, DSecMicroVMRunArgs, ExecRequest

GB = 1 << 30
POLICY = AdmissionPolicy()


def load(**changes: object) -> NodeLoad:
    idle = NodeLoad(memory=20 * GB, memory_available=18 * GB, pressure=0.0, scratch=100 * GB, scratch_used=GB, descriptors_free=10_000)
    return msgspec.structs.replace(idle, **changes)


class TestAdmission:
    def test_an_idle_node_admits(self) -> None:
        assert admit(load(), 0, POLICY) is None

    def test_memory_below_a_tenth_is_refused_with_the_reason(self) -> None:
        refusal = admit(load(memory_available=2 * GB), 0, POLICY)
        assert refusal is not None
        assert refusal.reason == "memory"
        assert "2048 MB available" in refusal.message
        assert refusal.retry_after > 0

    def test_each_starting_sandbox_counts_32_mb_that_memavailable_does_not_show_yet(self) -> None:
        just_enough = 2 * GB + 10 * 32 * MB
        assert admit(load(memory_available=just_enough), 9, POLICY) is None
        assert admit(load(memory_available=just_enough), 10, POLICY) is not None

    def test_memory_pressure_is_refused(self) -> None:
        assert admit(load(pressure=19.9), 0, POLICY) is None
        refusal = admit(load(pressure=20.0), 0, POLICY)
        assert refusal is not None
        assert refusal.reason == "memory_pressure"

    def test_a_kernel_without_psi_admits_by_the_other_figures(self) -> None:
        assert admit(load(pressure=None), 0, POLICY) is None

    def test_a_full_scratch_disk_is_refused(self) -> None:
        refusal = admit(load(scratch_used=99 * GB), 0, POLICY)
        assert refusal is not None
        assert refusal.reason == "scratch"

    def test_descriptors_running_out_is_refused(self) -> None:
        refusal = admit(load(descriptors_free=1_024), 0, POLICY)
        assert refusal is not None
        assert refusal.reason == "descriptors"

    def test_more_cores_than_the_node_has_are_cut_and_said(self) -> None:
        limits = clamp(DSecContainerRunArgs(container_image="x", cpu_cores_limit=64), NodeSize(cores=2, memory=24 * GB, scratch=64 * GB))
        assert limits.cpu_cores == 2
        assert limits.notices == ("cpu_cores_limit cut from 64 to 2 cores: the node has no more",)

    def test_no_sandbox_may_fill_the_scratch_disk_alone(self) -> None:
        limits = clamp(DSecContainerRunArgs(container_image="x"), NodeSize(cores=2, memory=24 * GB, scratch=4 * GB))
        assert limits.disk_mb == 3 * GB // MB
        assert "75%" in limits.notices[0]

    def test_limits_within_the_node_are_kept_unsaid(self) -> None:
        limits = clamp(DSecContainerRunArgs(container_image="x"), NodeSize(cores=2, memory=24 * GB, scratch=64 * GB))
        assert (limits.memory_mb, limits.cpu_cores, limits.disk_mb, limits.notices) == (2048, 2.0, 10240, ())


class TestDeadlines:
    def test_the_earliest_deadline_comes_up_first_and_a_replaced_one_never(self) -> None:
        deadlines = Deadlines()
        deadlines.set("a", 10)
        deadlines.set("b", 5)
        deadlines.set("a", 20)
        assert deadlines.next() == 5
        assert deadlines.take_due(15) == ["b"]
        assert deadlines.next() == 20
        deadlines.clear("a")
        assert deadlines.next() is None

    def test_replacing_one_deadline_forever_does_not_grow_the_heap(self) -> None:
        deadlines = Deadlines()
        for at in range(10_000):
            deadlines.set("a", float(at))
        assert len(deadlines._heap) < 100
        assert deadlines.take_due(10_000) == ["a"]

    def test_a_sandbox_in_use_is_looked_at_a_whole_ttl_later(self) -> None:
        assert next_look(now=100, ttl_idle=30, idle_since=None, total_at=None) == 130
        assert next_look(now=100, ttl_idle=30, idle_since=90, total_at=None) == 120
        assert next_look(now=100, ttl_idle=30, idle_since=90, total_at=110) == 110
        assert next_look(now=100, ttl_idle=None, idle_since=90, total_at=None) is None
        assert next_look(now=100, ttl_idle=None, idle_since=90, total_at=140, orphan_until=120) == 120


def record(state: str, *, key: str | None = None, keep: bool = False) -> Record:
    return Record(id="sb-e1-x", project="p", state=state, created_at=1.0, key=key, keep_on_failure=keep)  # type: ignore[arg-type]


ALIVE = KernelSandbox(sandbox="sb-e1-x", slot=3, pid=5, alive=True, socket="/c/3", scratch=True)
DEAD = KernelSandbox(sandbox="sb-e1-x", slot=3, alive=False, scratch=True)


class TestAdoption:
    @pytest.mark.parametrize(
        ("known", "kernel", "verdict"),
        [
            (None, ALIVE, "sweep"),
            (None, DEAD, "sweep"),
            (record("creating"), None, "take_back"),
            (record("creating"), ALIVE, "take_back"),
            (record("creating"), DEAD, "take_back"),
            (record("creating", key="k"), None, "take_back"),
            (record("creating", key="k"), DEAD, "take_back"),
            (record("creating", key="k"), ALIVE, "adopt"),
            (record("running"), ALIVE, "adopt"),
            (record("running"), DEAD, "fail"),
            (record("running"), None, "lose"),
            (record("paused"), ALIVE, "adopt"),
            (record("stopping"), ALIVE, "finish_stop"),
            (record("stopping"), DEAD, "finish_stop"),
            (record("stopping"), None, "finish_stop"),
            (record("failed"), DEAD, "release"),
            (record("failed"), None, "release"),
            (record("failed", keep=True), DEAD, "keep"),
            (record("failed", keep=True), None, "release"),
            (record("lost"), None, "release"),
        ],
    )
    def test_what_becomes_of_a_sandbox_after_a_restart(self, known: Record | None, kernel: KernelSandbox | None, verdict: str) -> None:
        assert judge(known, kernel) == verdict


class TestPlan:
    def test_a_single_item_keeps_its_key(self) -> None:
        args = DSecContainerRunArgs(container_image="x", idempotency_key="K")
        assert [item.idempotency_key for item in plan(CreateRequest(args=args), None)] == ["K"]

    def test_a_count_numbers_the_key(self) -> None:
        args = DSecContainerRunArgs(container_image="x", idempotency_key="K")
        assert [item.idempotency_key for item in plan(CreateRequest(args=args, count=3), None)] == ["K/0", "K/1", "K/2"]

    def test_items_keep_their_keys(self) -> None:
        other = [DSecContainerRunArgs(container_image="x", idempotency_key=key) for key in ("A", "B")]
        assert [item.idempotency_key for item in plan(CreateRequest(items=list(other)), None)] == ["A", "B"]

    def test_the_header_stands_in_for_a_missing_key(self) -> None:
        request = CreateRequest(args=DSecContainerRunArgs(container_image="x"), count=2)
        assert [item.idempotency_key for item in plan(request, "H")] == ["H/0", "H/1"]

    @pytest.mark.parametrize(
        ("keys", "planned"),
        [([None, "A", None], ["H/0", "A", "H/2"]), (["A", None], ["A", "H"]), (["A", "B"], ["A", "B"])],
    )
    def test_the_header_names_only_items_without_a_key(self, keys: list[str | None], planned: list[str]) -> None:
        items = [DSecContainerRunArgs(container_image="x", idempotency_key=key) for key in keys]
        assert [item.idempotency_key for item in plan(CreateRequest(items=list(items)), "H")] == planned

    @pytest.mark.parametrize("keys", [["A", "K", "K"], ["A", "K", "A"], ["H/2", None, None]])
    def test_items_with_the_same_key_are_refused(self, keys: list[str | None]) -> None:
        items = [DSecContainerRunArgs(container_image="x", idempotency_key=key) for key in keys]
        with pytest.raises(InvalidArgument, match="same idempotency_key") as caught:
            plan(CreateRequest(items=list(items)), "H")
        assert caught.value.field == "items[2].idempotency_key"

    @pytest.mark.parametrize(
        ("request_", "field"),
        [
            (CreateRequest(), "args"),
            (CreateRequest(args=DSecContainerRunArgs(container_image="x"), count=0), "count"),
            (CreateRequest(args=DSecContainerRunArgs(container_image="x"), count=32_001), "count"),
            (CreateRequest(items=[]), "items"),
            (CreateRequest(items=[DSecContainerRunArgs(container_image="x")], count=2), "count"),
            (CreateRequest(args=DSecContainerRunArgs(container_image="x", memory_limit_mb=1)), "args.memory_limit_mb"),
            (CreateRequest(items=[DSecContainerRunArgs(container_image="")]), "items[0].container_image"),
        ],
    )
    def test_a_request_that_cannot_be_carried_out_names_the_field(self, request_: CreateRequest, field: str) -> None:
        with pytest.raises(InvalidArgument) as caught:
            plan(request_, None)
        assert caught.value.field == field


class TestValidation:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("memory_limit_mb", 0),
            ("cpu_cores_limit", 0.0),
            ("cpu_cores_limit", float("nan")),
            ("disk_limit_mb", -1),
            ("pids_limit", 1),
            ("ttl_running_stop", 0.0),
            ("ttl_total", float("inf")),
            ("init_user", "root; rm"),
            ("workdir", "relative"),
            ("workdir", "/nul\0"),
            ("env", {"": "x"}),
            ("env", {"A=B": "x"}),
            ("env", {"A": "x\0"}),
            ("labels", {"bad name": "x"}),
            ("labels", {str(number): "x" for number in range(65)}),
            ("network_rules", {"a b": True}),
            ("idempotency_key", ""),
        ],
    )
    def test_a_value_out_of_range_is_refused_by_name(self, field: str, value: object) -> None:
        args = msgspec.structs.replace(DSecContainerRunArgs(container_image="x"), **{field: value})
        with pytest.raises(InvalidArgument) as caught:
            check_run_args(args)
        assert caught.value.field == field

    def test_a_backend_that_is_not_there_is_unsupported(self) -> None:
        with pytest.raises(Unsupported):
            check_run_args(DSecMicroVMRunArgs("x"))
        with pytest.raises(Unsupported):
            check_run_args(DSecFullVMRunArgs("disk"))

    @pytest.mark.parametrize(
        ("body", "field"),
        [(b'{"argvv": []}', "argvv"), (b'{"argv": [1]}', "argv[0]"), (b'{"env": {"A": 1}}', "env[...]"), (b'{"pty": ["x", 1]}', "pty[0]")],
    )
    def test_a_body_that_does_not_fit_names_the_field(self, body: bytes, field: str) -> None:
        with pytest.raises(msgspec.ValidationError) as caught:
            msgspec.json.decode(body, type=ExecRequest)
        assert invalid_body(caught.value).field == field


class TestIds:
    def test_an_id_names_its_edge_and_is_a_name_for_kernel_objects(self) -> None:
        sandbox = new_sandbox_id("e1", 7)
        assert SANDBOX_ID.fullmatch(sandbox)
        assert re.fullmatch(r"[a-z0-9-]{8,63}", sandbox)
        assert edge_of(sandbox) == "e1"
        assert edge_of("sb-e1-short") is None

    def test_ids_differ(self) -> None:
        assert len({new_sandbox_id("e1", 1) for _ in range(1000)}) == 1000


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=70)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
    max_leaves=30,
)


class TestSequence:
    @given(st.lists(_values, max_size=10), st.integers(1, 50))
    def test_values_come_out_whole_however_the_bytes_are_cut(self, values: list[object], size: int) -> None:
        data = b"".join(msgspec.msgpack.encode(value) for value in values)
        sequence: Sequence[object] = Sequence(object)
        found = [value for at in range(0, len(data), size) for value in sequence.feed(data[at : at + size])]
        assert found == values

    def test_what_is_no_msgpack_is_refused(self) -> None:
        with pytest.raises(Malformed):
            Sequence(object).feed(b"\xc1")
