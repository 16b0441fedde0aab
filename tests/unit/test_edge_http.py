"""The edge's HTTP surface: errors, bounds, content types, streams, and what a client that goes away leaves."""

from __future__ import annotations

import asyncio
import base64
import errno
from pathlib import Path

import msgspec
import pytest
import structlog
from edge_fakes import Client, Node, eventually, open_edge

from dsec.edge import Edge
from dsec.edge.admission import AdmissionPolicy
from dsec.edge.channel import ChannelError, ChannelLost, Exit
from dsec.edge.failures import as_error, of_complaint
from dsec.edge.journal import JournalError
from dsec.edge.once import REMEMBERED, Acts
from dsec.edge.ports import PortSigner
from dsec.edge.spawner import SpawnerError, SpawnerLost
from libdsec.errors import DSecError
from libdsec.schema import DiffEntry

MB = 1 << 20


@pytest.fixture
def client(edge: Edge) -> Client:
    return Client(edge)


ARGS = {"backend": "container", "container_image": "base"}


async def create(client: Client, **changes: object) -> str:
    answer = await client("POST", "/v1/sandboxes", {"args": ARGS | changes})
    (line,) = answer.lines()
    return f"/v1/sandboxes/{line['sandbox']['id']}"


class TestCreate:
    async def test_a_batch_is_answered_a_line_a_sandbox(self, client: Client) -> None:
        answer = await client("POST", "/v1/sandboxes", {"args": ARGS, "count": 100})
        assert answer.status == 200
        assert answer.whole
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert sorted(line["index"] for line in answer.lines()) == list(range(100))
        assert len({line["sandbox"]["id"] for line in answer.lines()}) == 100

    async def test_each_item_has_its_own_success_or_error(self, client: Client) -> None:
        items = [ARGS, ARGS | {"container_image": "nope"}, ARGS]
        lines = {line["index"]: line for line in (await client("POST", "/v1/sandboxes", {"items": items})).lines()}
        assert lines[1]["error"]["code"] == "image_not_found"
        assert "sandbox" not in lines[1]
        assert lines[0]["sandbox"]["state"] == lines[2]["sandbox"]["state"] == "running"

    async def test_items_that_are_not_ready_by_the_deadline_are_taken_back(self, client: Client, edge: Edge, node: Node) -> None:
        node.gate = asyncio.Event()
        answering = asyncio.ensure_future(client("POST", "/v1/sandboxes", {"args": ARGS, "count": 40, "timeout_s": 0.05}))
        answer = await answering
        assert [line["error"]["code"] for line in answer.lines()] == ["deadline_exceeded"] * 40
        node.gate.set()
        await eventually(lambda: not node.kernel and not edge.sandboxes.counts())

    async def test_a_full_queue_is_refused_with_the_time_to_wait(self, node: Node, tmp_path: Path) -> None:
        async with open_edge(node, tmp_path, start_queue=10) as edge:
            answer = await Client(edge)("POST", "/v1/sandboxes", {"args": ARGS, "count": 11})
            assert answer.error() == "503 no_capacity"
            assert answer.json()["error"]["reason"] == "start_queue"
            assert int(answer.headers["retry-after"]) >= 1
            assert len((await Client(edge)("POST", "/v1/sandboxes", {"args": ARGS, "count": 10})).lines()) == 10

    @pytest.mark.parametrize(
        ("reason", "policy"),
        [
            ("memory", AdmissionPolicy(memory_floor=1.1)),
            ("memory_pressure", AdmissionPolicy(pressure_max=-1.0)),
            ("scratch", AdmissionPolicy(scratch_floor=1.1)),
            ("descriptors", AdmissionPolicy(descriptors_kept=1 << 40)),
        ],
    )
    async def test_a_node_that_is_short_of_something_says_of_what(
        self, reason: str, policy: AdmissionPolicy, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The host's own figures but for this one, which not every kernel has.
        monkeypatch.setattr("dsec.edge.node.memory_pressure", lambda: 0.0)
        async with open_edge(node, tmp_path, admission=policy, start_slots=2) as edge:
            # More than the slots: each refusal gives its own back.
            lines = (await Client(edge)("POST", "/v1/sandboxes", {"args": ARGS, "count": 10})).lines()
            assert {line["index"] for line in lines} == set(range(10))
            for error in (line["error"] for line in lines):
                assert (error["code"], error["reason"]) == ("no_capacity", reason)
                assert error["message"].startswith("no sandbox can start on this node now")
                assert error["retry_after"] >= 1
            assert not node.kernel and not edge.sandboxes.counts()

    async def test_a_client_that_goes_away_leaves_nothing_that_it_cannot_find(self, client: Client, edge: Edge, node: Node) -> None:
        node.gate = asyncio.Event()
        gone = asyncio.Event()
        answering = asyncio.ensure_future(client("POST", "/v1/sandboxes", {"args": ARGS, "count": 3}, gone=gone))
        await node.creating.wait()
        gone.set()
        await asyncio.sleep(0.01)
        node.gate.set()
        await answering
        assert not node.kernel
        assert not edge.sandboxes.counts()

    async def test_with_a_key_it_finds_again_what_was_made(self, client: Client, edge: Edge, node: Node) -> None:
        node.gate = asyncio.Event()
        body = {"args": ARGS | {"idempotency_key": "K"}, "count": 3}
        gone = asyncio.Event()
        answering = asyncio.ensure_future(client("POST", "/v1/sandboxes", body, gone=gone))
        await node.creating.wait()
        gone.set()
        await asyncio.sleep(0.01)
        node.gate.set()
        await answering
        made = set(node.kernel)
        assert made
        again = {line["sandbox"]["id"] for line in (await client("POST", "/v1/sandboxes", body)).lines()}
        assert made <= again
        assert len(again) == len(node.kernel) == 3

    @pytest.mark.parametrize("args", [{"backend": "fullvm", "disk_image": "x", "firmware": "uefi"}, ARGS | {"backend": "microvm"}])
    async def test_a_backend_that_is_not_here_is_unsupported(self, client: Client, args: dict[str, str]) -> None:
        answer = await client("POST", "/v1/sandboxes", {"args": args})
        assert answer.error() == "501 unsupported"
        assert answer.json()["error"]["field"] == "args.backend"

    @pytest.mark.parametrize("key", ["", "x" * 257, "a\tb"])
    async def test_a_key_that_names_nothing_is_refused(self, client: Client, key: str) -> None:
        answer = await client("POST", "/v1/sandboxes", {"args": ARGS}, headers={"Idempotency-Key": key})
        assert answer.error() == "400 invalid_argument"
        assert answer.json()["error"]["field"] == "idempotency_key"
        parent = await create(client)
        answer = await client("POST", f"{parent}/fork", {}, headers={"Idempotency-Key": key})
        assert answer.error() == "400 invalid_argument"


class TestOnce:
    async def test_what_was_done_is_not_done_again(self, client: Client, node: Node) -> None:
        path = await create(client)
        agent = node.agent(path.rsplit("/", 1)[1])
        agent.files[b"/x"] = b""
        headers = {"Idempotency-Key": "once"}
        for _ in range(3):
            assert (await client("POST", f"{path}/files/remove?path=/x", headers=headers)).status == 204
        assert [start.builtin for start in agent.started] == ["remove"]
        other = await client("POST", f"{path}/files/remove?path=/x", headers={"Idempotency-Key": "another"})
        assert other.error() == "404 file_not_found"
        assert (await client("POST", f"{path}/files/remove?path=/y", headers=headers)).error() == "404 file_not_found"

    async def test_what_failed_is_tried_again(self, client: Client, node: Node) -> None:
        path = await create(client)
        headers = {"Idempotency-Key": "once"}
        assert (await client("POST", f"{path}/files/remove?path=/x", headers=headers)).error() == "404 file_not_found"
        node.agent(path.rsplit("/", 1)[1]).files[b"/x"] = b""
        assert (await client("POST", f"{path}/files/remove?path=/x", headers=headers)).status == 204

    async def test_without_a_key_each_call_is_a_new_one(self, client: Client, node: Node) -> None:
        path = await create(client)
        assert (await client("POST", f"{path}/files/mkdir?path=/x&parents=false")).status == 204
        assert (await client("POST", f"{path}/files/mkdir?path=/x&parents=false")).error() == "409 conflict"

    async def test_a_repetition_waits_for_the_call_under_way(self) -> None:
        acts, gate, done = Acts(), asyncio.Event(), 0

        async def act() -> None:
            nonlocal done
            await gate.wait()
            done += 1

        calls = [asyncio.create_task(acts.once(b"name", act)) for _ in range(3)]
        await asyncio.sleep(0)
        gate.set()
        assert sorted(await asyncio.gather(*calls)) == [False, False, True]
        assert done == 1

    async def test_the_memory_is_bounded(self) -> None:
        acts = Acts()

        async def act() -> None: ...

        for number in range(REMEMBERED + 1):
            assert await acts.once(b"%d" % number, act)
        assert not await acts.once(b"1", act)
        assert await acts.once(b"0", act)


class TestErrors:
    @pytest.mark.parametrize(
        ("body", "field"),
        [
            (b"{", None),
            (b"\xff", None),
            (b'{"argv": ["x"], "nonsense": 1}', "nonsense"),
            (b'{"argv": "x"}', "argv"),
            (b'{"argv": []}', "argv"),
            (b"{}", "argv"),
            (b'{"argv": ["x"], "command": "x"}', "argv"),
            (b'{"argv": ["a\\u0000b"]}', "argv"),
            (b'{"command": "x", "timeout_s": -1}', "timeout_s"),
            (b'{"command": "x", "max_output": 999999999}', "max_output"),
            (b'{"command": "x", "user": "a b"}', "user"),
            (b'{"command": "x", "exec_id": "../x"}', "exec_id"),
            (b'{"command": "x", "cwd": ""}', "cwd"),
            (b'{"command": "x", "env": {"": "x"}}', "env"),
            (b'{"command": "x", "stdin": "eA==", "stdin_stream": true}', "stdin"),
            (b'{"command": "x", "pty": [0, 80]}', "pty"),
        ],
    )
    async def test_a_bad_command_is_400_and_names_the_field(self, client: Client, body: bytes, field: str | None) -> None:
        answer = await client("POST", f"{await create(client)}/exec", raw=body)
        assert answer.error() == "400 invalid_argument"
        assert answer.json()["error"].get("field") == field

    @pytest.mark.parametrize("field", ["argv", "env"])
    async def test_a_megabyte_of_arguments_is_refused_by_name(self, client: Client, field: str) -> None:
        long = "x" * (2 * MB)
        body = {"argv": ["echo", long]} if field == "argv" else {"argv": ["env"], "env": {"A": long}}
        answer = await client("POST", f"{await create(client)}/exec", body)
        assert answer.error() == "400 invalid_argument"
        assert answer.json()["error"]["field"] == field

    @pytest.mark.parametrize("field", ["argv", "env"])
    async def test_a_hundred_megabytes_are_refused_by_name_without_being_decoded(self, client: Client, field: str) -> None:
        long = b"x" * (100 * MB)
        raw = b'{"argv": ["echo", "%s"]}' % long if field == "argv" else b'{"argv": ["env"], "env": {"A": "%s"}}' % long
        answer = await client("POST", f"{await create(client)}/exec", raw=raw)
        assert answer.status == 413
        assert answer.json()["error"]["field"] == field

    async def test_another_projects_sandbox_is_not_found(self, client: Client, edge: Edge) -> None:
        path = await create(client)
        stranger = Client(edge, "q")
        for method, below in (("GET", ""), ("DELETE", ""), ("POST", "/exec"), ("GET", "/files?path=/x"), ("GET", "/events")):
            assert (await stranger(method, path + below, {"command": "x"})).error() == "404 sandbox_not_found"
        assert (await stranger("GET", "/v1/sandboxes")).json()["sandboxes"] == []

    async def test_unknown_paths_and_methods(self, client: Client) -> None:
        path = await create(client)
        assert (await client("GET", f"{path}/nonsense")).error() == "404 not_found"
        assert (await client("GET", f"{path}/exec/a/b/c")).error() == "404 not_found"
        assert (await client("PUT", f"{path}/exec")).error() == "405 invalid_argument"

    async def test_what_nobody_foresaw_is_told_as_an_incident_without_a_traceback(self, client: Client, edge: Edge) -> None:
        path = await create(client)
        edge.sandboxes.cgroups.usage = lambda sandbox: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        answer = await client("GET", f"{path}/metrics")
        assert answer.error() == "500 internal"
        assert "ZeroDivision" not in answer.body.decode()
        assert answer.json()["error"]["reason"] in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("failure", "code"),
        [
            (SpawnerLost("x"), "unavailable"),
            (SpawnerError("no_capacity", "x"), "no_capacity"),
            (SpawnerError("no_space", "x"), "no_capacity"),
            (SpawnerError("timeout", "x"), "unavailable"),
            (SpawnerError("invalid_layer", "x"), "image_error"),
            (SpawnerError("image_error", "x"), "image_error"),
            (SpawnerError("conflict", "x"), "conflict"),
            (SpawnerError("failed", "x"), "internal"),
            (SpawnerError("internal", "x"), "internal"),
            (SpawnerError("something_new", "x"), "internal"),
            (ChannelLost("x"), "sandbox_failed"),
            (ChannelError("process_not_found", "x", 0), "process_not_found"),
            (ChannelError("offset_gone", "x", 0), "offset_gone"),
            (ChannelError("invalid_argument", "x", 0), "invalid_argument"),
            (JournalError("x"), "unavailable"),
        ],
    )
    def test_failures_below_have_one_code_each(self, failure: Exception, code: str) -> None:
        with structlog.testing.capture_logs() as logs:
            error = as_error(failure)
        assert error.code == code
        # What is our fault is an incident: the log has it, the caller its name.
        assert [log["incident"] for log in logs] == ([error.reason] if code == "internal" else [])

    @pytest.mark.parametrize(
        ("number", "code", "status"),
        [
            (errno.ENOENT, "file_not_found", 404),
            (errno.EACCES, "permission_denied", 403),
            (errno.EPERM, "permission_denied", 403),
            (errno.EEXIST, "conflict", 409),
            (errno.ENOTEMPTY, "conflict", 409),
            (errno.ENOTDIR, "invalid_argument", 400),
            (errno.EISDIR, "invalid_argument", 400),
            (errno.ENAMETOOLONG, "invalid_argument", 400),
            (errno.ELOOP, "invalid_argument", 400),
            (errno.EINVAL, "invalid_argument", 400),
            (errno.ENXIO, "invalid_argument", 400),
            (errno.ENOSPC, "disk_full", 507),
            (errno.EDQUOT, "disk_full", 507),
            (errno.EIO, "file_error", 422),
        ],
    )
    def test_file_errors_have_one_code_each(self, number: int, code: str, status: int) -> None:
        error: DSecError = of_complaint(msgspec.msgpack.encode({"errno": number, "message": "m"}), "read '/x'")
        assert (error.code, error.status, error.errno) == (code, status, number)


class TestExec:
    async def test_the_result_is_bytes_and_codes(self, client: Client, node: Node) -> None:
        path = await create(client)
        answer = await client("POST", f"{path}/exec", {"argv": ["echo", "ok"]})
        assert answer.json() | {"duration_s": 0} == {
            "exit_code": 0,
            "signal": None,
            "stdout_bytes": base64.b64encode(b"ok\n").decode(),
            "stderr_bytes": "",
            "stdout_total": 3,
            "stderr_total": 0,
            "truncated": False,
            "timed_out": False,
            "oom_killed": False,
            "duration_s": 0,
            "exec_id": answer.json()["exec_id"],
            "session_restarted": False,
            "start_error": None,
        }

    async def test_msgpack_in_and_out(self, client: Client) -> None:
        path = await create(client)
        headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
        answer = await client("POST", f"{path}/exec", raw=msgspec.msgpack.encode({"command": "x"}), headers=headers)
        assert answer.headers["content-type"] == "application/msgpack"
        assert msgspec.msgpack.decode(answer.body)["stdout_bytes"] == b"ok\n"

    async def test_environment_directory_and_user_come_from_the_sandbox_and_the_call_wins(self, client: Client, node: Node) -> None:
        path = await create(client, container_image="configured", env={"B": "create", "C": "create"})
        await client("POST", f"{path}/exec", {"command": "x", "env": {"C": "call"}, "cwd": "sub"})
        start = node.agent(path.rsplit("/", 1)[1]).started[-1]
        assert start.argv == [b"/bin/sh", b"-c", b"x"]
        assert start.env == {b"A": b"image", b"B": b"create", b"C": b"call"}
        assert start.cwd == b"/work/sub"
        assert start.user == "root"

    async def test_the_idempotency_header_names_the_command(self, client: Client, node: Node) -> None:
        path = await create(client)
        for _ in range(2):
            await client("POST", f"{path}/exec", {"command": "x"}, headers={"idempotency-key": "once"})
        assert [start.exec_id for start in node.agent(path.rsplit("/", 1)[1]).started] == ["once"]

    async def test_the_idempotency_header_names_the_command_of_a_session_too(self, client: Client, node: Node) -> None:
        path = await create(client)
        await client("POST", f"{path}/shell", {"command": "x"}, headers={"idempotency-key": "once"})
        await client("POST", f"{path}/shell", {"command": "x", "exec_id": "named"}, headers={"idempotency-key": "once"})
        assert [shell.exec_id for shell in node.agent(path.rsplit("/", 1)[1]).shells] == ["once", "named"]
        answer = await client("POST", f"{path}/shell", {"command": "x"}, headers={"idempotency-key": ""})
        assert answer.error() == "400 invalid_argument"

    async def test_long_stdin_follows_its_command(self, client: Client, node: Node) -> None:
        path = await create(client)
        agent = node.agent(path.rsplit("/", 1)[1])
        data = base64.b64encode(bytes(2 * MB)).decode()
        answer = await client("POST", f"{path}/exec", {"command": "cat", "stdin": data, "exec_id": "in"})
        assert answer.json()["exit_code"] == 0
        assert base64.b64decode(answer.json()["stdout_bytes"]) == b"ok\n"
        await eventually(lambda: len(agent.inputs.get("in", b"")) == 2 * MB)
        assert not agent.started[-1].stdin_data

    async def test_a_start_does_not_wait_until_its_command_has_read_long_stdin(self, client: Client, node: Node) -> None:
        path = await create(client)
        agent = node.agent(path.rsplit("/", 1)[1])
        agent.held, agent.reading = True, asyncio.Event()
        data = base64.b64encode(bytes(2 * MB)).decode()
        body = {"command": "cat", "stdin": data, "exec_id": "in", "mode": "start"}
        answer = await asyncio.wait_for(client("POST", f"{path}/exec", body), 5)
        assert (answer.json()["exec_id"], agent.inputs) == ("in", {})
        agent.reading.set()
        await eventually(lambda: len(agent.inputs.get("in", b"")) == 2 * MB)

    @pytest.mark.parametrize("mode", ["start", "wait"])
    async def test_a_repeated_call_does_not_feed_its_command_again(self, client: Client, node: Node, mode: str) -> None:
        path = await create(client)
        agent = node.agent(path.rsplit("/", 1)[1])
        agent.held = True
        data = base64.b64encode(bytes(2 * MB)).decode()
        body = {"command": "cat", "stdin": data, "exec_id": "in", "mode": mode}
        first = asyncio.ensure_future(client("POST", f"{path}/exec", body))
        await eventually(lambda: len(agent.inputs.get("in", b"")) == 2 * MB)
        second = asyncio.ensure_future(client("POST", f"{path}/exec", body))
        channel = agent.channel
        assert channel is not None
        await eventually(lambda: sum(not stream.detached for stream in channel.streams) == 2)
        agent.end("in", Exit(exec_id="in", stdout=b"ok", stdout_total=2))
        assert [answer.status for answer in await asyncio.gather(first, second)] == [200, 200]
        assert len(agent.inputs["in"]) == 2 * MB

    async def test_started_commands_are_listed_shown_and_waited_for(self, client: Client, node: Node) -> None:
        path = await create(client)
        agent = node.agent(path.rsplit("/", 1)[1])
        agent.held = True
        started = (await client("POST", f"{path}/exec", {"command": "x", "exec_id": "job", "mode": "start"})).json()
        assert (started["exec_id"], started["pid"], started["running"]) == ("job", 7, True)
        assert [entry["exec_id"] for entry in (await client("GET", f"{path}/exec")).json()] == ["job"]
        assert (await client("GET", f"{path}/exec/job")).json()["running"]
        assert (await client("GET", f"{path}/exec/job/wait?timeout_s=0.02")).error() == "504 deadline_exceeded"
        agent.end("job", Exit(exec_id="job", exit_code=4))
        assert (await client("GET", f"{path}/exec/job/wait")).json()["exit_code"] == 4
        assert (await client("GET", f"{path}/exec/other")).error() == "404 process_not_found"
        (command,) = (await client("GET", f"{path}/commands")).json()
        assert (command["exec_id"], command["command"], command["exit_code"]) == ("job", "x", 4)

    async def test_output_is_streamed_and_the_stream_is_let_go(self, client: Client, node: Node) -> None:
        path = await create(client)
        agent = node.agent(path.rsplit("/", 1)[1])
        agent.outputs["job"] = [b"one", b"two"]
        await client("POST", f"{path}/exec", {"command": "x", "exec_id": "job", "mode": "start"})
        answer = await client("GET", f"{path}/exec/job/stdout?from_offset=0")
        assert (answer.body, answer.whole, answer.headers["x-dsec-offset"]) == (b"onetwo", True, "0")
        assert agent.channel is not None
        assert agent.channel.streams[-1].detached

    async def test_a_reader_that_goes_away_lets_the_stream_go(self, client: Client, node: Node) -> None:
        path = await create(client)
        agent = node.agent(path.rsplit("/", 1)[1])
        agent.held = True
        await client("POST", f"{path}/exec", {"command": "x", "exec_id": "job", "mode": "start"})
        gone = asyncio.Event()
        waiting = asyncio.ensure_future(client("GET", f"{path}/exec/job/wait", gone=gone))
        await asyncio.sleep(0.01)
        gone.set()
        await waiting
        assert agent.channel is not None
        assert agent.channel.streams[-1].detached
        assert agent.running() == 1

    @pytest.mark.parametrize(("signal", "ok"), [("TERM", True), ("SIGKILL", True), (15, True), ("NOPE", False), (0, False)])
    async def test_signals_have_names_and_numbers(self, client: Client, signal: object, ok: bool) -> None:
        path = await create(client)
        answer = await client("POST", f"{path}/exec/job/signal", {"signal": signal})
        assert (answer.status == 204) == ok
        if not ok:
            assert answer.json()["error"]["field"] == "signal"

    async def test_a_session_gets_the_sandboxes_own_as_its_base(self, client: Client, node: Node) -> None:
        path = await create(client, container_image="configured")
        assert (await client("POST", f"{path}/shell", {"command": "pwd"})).json()["exit_code"] == 0
        (shell,) = node.agent(path.rsplit("/", 1)[1]).shells
        assert (shell.session, shell.base_cwd, shell.base_env[b"A"], shell.cwd, shell.env, shell.user) == (
            "default",
            b"/work",
            b"image",
            None,
            None,
            None,
        )


class TestFiles:
    async def test_small_and_large_files_go_up_and_come_down(self, client: Client, node: Node) -> None:
        path = await create(client)
        for content in (b"small", bytes(range(256)) * 4096):
            info = await client("PUT", f"{path}/files?path=/f%FF", raw=content)
            assert (info.status, info.json()["size"]) == (200, len(content))
            assert node.agent(path.rsplit("/", 1)[1]).files[b"/f\xff"] == content
            answer = await client("GET", f"{path}/files?path=/f%FF")
            assert (answer.body, answer.headers["x-dsec-size"], answer.whole) == (content, str(len(content)), True)

    async def test_a_missing_file_is_an_error_before_the_answer_begins(self, client: Client) -> None:
        path = await create(client)
        answer = await client("GET", f"{path}/files?path=/nope")
        assert answer.error() == "404 file_not_found"
        assert answer.json()["error"]["errno"] == errno.ENOENT
        assert (await client("POST", f"{path}/files/remove?path=/nope")).error() == "404 file_not_found"

    @pytest.mark.parametrize(
        ("query", "field"),
        [("", "path"), ("path=", "path"), ("path=/a%00b", "path"), ("path=/x&offset=-1", "offset"), ("path=/x&user=a%20b", "user")],
    )
    async def test_a_bad_query_names_the_field(self, client: Client, query: str, field: str) -> None:
        answer = await client("GET", f"{await create(client)}/files?{query}")
        assert answer.error() == "400 invalid_argument"
        assert answer.json()["error"]["field"] == field

    async def test_a_builtin_whose_reader_goes_away_is_killed(self, client: Client, node: Node) -> None:
        path = await create(client)
        agent = node.agent(path.rsplit("/", 1)[1])
        agent.files[b"/f"] = b"x" * 100

        gone = asyncio.Event()
        watching = asyncio.ensure_future(client("GET", f"{path}/files/watch?path=/f", gone=gone))
        await eventually(lambda: bool(agent.channel and agent.channel.streams))
        gone.set()
        await watching
        assert agent.channel is not None
        stream = agent.channel.streams[-1]
        assert stream.detached
        assert stream.signals == [9]


class TestInformation:
    async def test_lists_are_filtered_and_paged_in_the_order_of_creation(self, client: Client) -> None:
        for number in range(5):
            await create(client, labels={"parity": str(number % 2)})
        even = (await client("GET", "/v1/sandboxes?label=parity=0")).json()
        assert len(even["sandboxes"]) == 3
        found, cursor = [], ""
        while True:
            page = (await client("GET", f"/v1/sandboxes?limit=2{cursor}")).json()
            found += [entry["id"] for entry in page["sandboxes"]]
            if page["cursor"] is None:
                break
            cursor = f"&cursor={page['cursor']}"
        assert len(found) == len(set(found)) == 5
        assert (await client("GET", "/v1/sandboxes?state=nonsense")).error() == "400 invalid_argument"

    async def test_ended_ones_are_listed_when_asked_for(self, client: Client) -> None:
        path = await create(client)
        await client("DELETE", path)
        assert (await client("GET", "/v1/sandboxes")).json()["sandboxes"] == []
        (entry,) = (await client("GET", "/v1/sandboxes?state=stopped")).json()["sandboxes"]
        assert entry["reason"] == "stopped by request"

    async def test_delete_can_be_repeated_and_everything_else_is_gone(self, client: Client) -> None:
        path = await create(client)
        first = (await client("DELETE", path)).json()
        assert (await client("DELETE", path)).json() == first
        assert first["exit"]["cpu_s"] == 2.0
        for method, below in (("GET", ""), ("POST", "/exec"), ("GET", "/metrics"), ("PATCH", "")):
            answer = await client(method, path + below, {"command": "x"})
            assert answer.error() == "410 sandbox_gone"
            assert answer.json()["error"]["at"] > 0

    async def test_a_failed_sandbox_still_tells_its_state_and_events(self, client: Client, node: Node, edge: Edge) -> None:
        path = await create(client)
        node.kill_agent(path.rsplit("/", 1)[1])
        await eventually(lambda: not edge.sandboxes.counts())
        assert (await client("GET", path)).json()["state"] == "failed"
        events = (await client("GET", f"{path}/events")).lines()
        assert events[-1]["message"] == "failed: its agent was killed by signal 9"

    async def test_events_can_be_followed_to_the_end(self, client: Client, edge: Edge) -> None:
        path = await create(client)
        following = asyncio.ensure_future(client("GET", f"{path}/events?follow=true"))
        await asyncio.sleep(0)
        await client("DELETE", path)
        assert [event["message"] for event in (await following).lines()] == [
            "running",
            "stopping: stopped by request",
            "stopped: stopped by request",
        ]

    async def test_metrics_come_from_outside(self, client: Client) -> None:
        metrics = (await client("GET", f"{await create(client)}/metrics")).json()
        assert (metrics["cpu_s"], metrics["disk"], metrics["memory_limit"]) == (1.5, 4096, 2048 * MB)

    async def test_a_diff_of_many_pages_comes_as_one_answer(self, client: Client, node: Node) -> None:
        node.diff = [DiffEntry(path_bytes=b"%02d" % number, kind="written", size=1) for number in range(25)]
        node.diff_page = 10
        path = f"{await create(client)}/diff"
        sizes = [len((await client("GET", path + query)).lines()) for query in ("", "?limit=25", "?limit=20", "?limit=3")]
        assert sizes == [25, 25, 20, 3]

    async def test_changes_are_checked_and_kept(self, client: Client) -> None:
        path = await create(client)
        changed = await client("PATCH", path, {"ttl_running_stop": 30, "labels": {"a": "b"}, "network_rules": {"pypi": True}})
        assert changed.json()["ttl_running_stop"] == 30
        assert (await client("GET", path)).json()["labels"] == {"a": "b"}
        assert (await client("PATCH", path, {"ttl_total": -1})).json()["error"]["field"] == "ttl_total"
        assert (await client("PATCH", path, {"state": "stopped"})).json()["error"]["field"] == "state"


class TestPorts:
    async def test_a_signature_is_good_for_one_port_of_one_sandbox(self, tmp_path: Path) -> None:
        signer = PortSigner.from_file(tmp_path / "ports.key")
        signature = signer.sign("sb-a", 80)
        assert signer.good("sb-a", 80, signature)
        assert not signer.good("sb-a", 81, signature)
        assert not signer.good("sb-b", 80, signature)
        assert PortSigner.from_file(tmp_path / "ports.key").good("sb-a", 80, signature)
        assert (tmp_path / "ports.key").stat().st_mode & 0o777 == 0o600

    @pytest.mark.parametrize("torn", [b"", b"x" * 31])
    async def test_a_secret_of_which_only_a_part_was_written_is_made_anew(self, tmp_path: Path, torn: bytes) -> None:
        path = tmp_path / "ports.key"
        path.write_bytes(torn)
        signature = PortSigner.from_file(path).sign("sb-a", 80)
        assert not PortSigner(torn).good("sb-a", 80, signature)
        assert len(path.read_bytes()) == 32
        assert path.stat().st_mode & 0o777 == 0o600
        assert PortSigner.from_file(path).good("sb-a", 80, signature)
        assert list(tmp_path.iterdir()) == [path]

    async def test_the_url_leads_to_the_port_and_a_closed_port_says_so(self, client: Client, edge: Edge) -> None:
        path = await create(client)
        url = (await client("GET", f"{path}/url/8000")).json()["url"]
        assert url.startswith("http://127.0.0.1:7071/sb-e1-")
        outside = Client(edge, "")
        outside._app = edge.ports_app  # type: ignore[assignment]
        below = url.removeprefix("http://127.0.0.1:7071")
        assert (await outside("GET", below)).error() == "503 unavailable"
        assert (await outside("GET", below.replace("/8000/", "/8001/"))).error() == "404 not_found"
        assert (await outside("GET", "/")).error() == "404 not_found"

    @pytest.mark.parametrize("port", ["0", "65536", "x"])
    async def test_what_is_no_port_is_refused(self, client: Client, port: str) -> None:
        assert (await client("GET", f"{await create(client)}/url/{port}")).json()["error"]["field"] == "port"


async def test_node_info_counts_by_state(client: Client, edge: Edge) -> None:
    await create(client)
    info = edge.node_info()
    assert (info.edge, info.sandboxes, info.cores) == ("e1", {"running": 1}, 2)
