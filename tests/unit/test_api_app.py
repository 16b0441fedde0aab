"""The apiserver as an ASGI app, with an edge that the tests play."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from dsec.api.app import ApiServer
from dsec.api.edges import Edges, LocalEdge
from dsec.api.keys import Keys
from dsec.store import Store
from libdsec.errors import NoCapacity, SandboxNotFound
from libdsec.schema import DoctorReport, KeyInfo, KeyRequest, NewKey, NodeInfo

SANDBOX = "sb-e1-00abcdef"


class FakeEdge:
    """Answers with whatever ``behaviour`` does, and remembers the scopes that it saw."""

    def __init__(self, name: str = "e1") -> None:
        self.name = name
        self.scopes: list[Scope] = []
        self.behaviour: Callable[[Scope, Receive, Send], Awaitable[None]] = self._empty

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        await self.behaviour(scope, receive, send)

    async def _empty(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Response(self.name)(scope, receive, send)

    def node_info(self) -> NodeInfo:
        return NodeInfo(
            edge=self.name, kernel="6.18", cores=2, memory=1, memory_available=1, scratch=1, scratch_used=0, sandboxes={"running": 3},
            features={"erofs from a file": "yes", "lowerdir+": "older mount options are used"},
        )  # fmt: skip


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, object]:
        decoded: dict[str, object] = json.loads(self.body)
        return decoded

    def error(self) -> dict[str, object]:
        found = self.json()["error"]
        assert isinstance(found, dict)
        return found


class Api:
    """The app under test, its keys and its edge."""

    def __init__(self, app: ApiServer, keys: Keys, edge: FakeEdge, admin: NewKey, user: NewKey) -> None:
        self.app, self.keys, self.edge, self.admin, self.user = app, keys, edge, admin, user

    async def __call__(
        self, method: str, path: str, *, key: str | None = "", body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        """One request. ``key`` "": the user's; None: none."""
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await self.app(self.scope(method, path, key, headers), incoming(body), send)
        assert sent[0]["type"] == "http.response.start"
        found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))

    def scope(self, method: str, path: str, key: str | None = "", headers: dict[str, str] | None = None, kind: str = "http") -> Scope:
        given = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        if key is not None:
            given.append((b"authorization", f"Bearer {key or self.user.key}".encode()))
        path, _, query = path.partition("?")
        scope = {"type": kind, "path": path, "raw_path": path.encode(), "query_string": query.encode(), "headers": given, "root_path": ""}
        return {
            **scope,
            "http_version": "1.1",
            "scheme": "http",
            "client": None,
            "server": None,
            **({"method": method} if kind == "http" else {}),
        }


def incoming(body: bytes) -> Receive:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    return receive


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    store = await Store.open("sqlite+aiosqlite://")
    keys = Keys(store)
    await keys.open()
    edge = FakeEdge()

    async def images(request: Request) -> Response:
        return Response(request.scope["dsec.project"])

    app = ApiServer(keys, Edges([LocalEdge("e1", edge)]), [Route("/v1/images", images)], state_dir=tmp_path, metrics_public=True)
    admin = await keys.create(KeyRequest(name="admin", project="ops", admin=True))
    user = await keys.create(KeyRequest(name="user", project="rl"))
    yield Api(app, keys, edge, admin, user)
    await store.close()


# -- who gets in


async def test_health_needs_no_key_and_turns_when_the_service_stops(api: Api) -> None:
    assert (await api("GET", "/healthz", key=None)).json() == {"status": "ok"}
    api.app.begin_stop()
    stopping = await api("GET", "/healthz", key=None)
    assert (stopping.status, stopping.json()) == (503, {"status": "stopping"})


@pytest.mark.parametrize(
    "path", ["/v1/sandboxes", f"/v1/sandboxes/{SANDBOX}", "/v1/keys", "/v1/images", "/v1/nodes", "/v1/doctor", "/v1/nothing"]
)
async def test_every_kind_of_bad_key_gets_the_same_401_everywhere(api: Api, path: str) -> None:
    await api.keys.revoke((revoked := await api.keys.create(KeyRequest(name="gone"))).info.id)
    answers = [
        await api("GET", path, key=key)
        for key in (None, "nonsense", revoked.key, api.user.key[:-1] + ("a" if api.user.key[-1] != "a" else "b"), api.user.key + "x")
    ]
    assert {answer.status for answer in answers} == {401}
    assert len({answer.body for answer in answers}) == 1
    assert answers[0].error()["code"] == "authentication"
    assert answers[0].headers["www-authenticate"] == "Bearer"
    assert not api.edge.scopes, "nothing of the request reached the edge"


async def test_metrics_are_public_only_where_the_listener_is(api: Api, tmp_path: Path) -> None:
    assert b"dsec_api_requests_total" in (await api("GET", "/metrics", key=None)).body
    app = ApiServer(api.keys, Edges([LocalEdge("e1", api.edge)]), [], state_dir=tmp_path, metrics_public=False)
    closed = Api(app, api.keys, api.edge, api.admin, api.user)
    assert (await closed("GET", "/metrics", key=None)).status == 401
    assert (await closed("GET", "/metrics")).status == 200


async def test_the_callers_project_reaches_edge_and_images(api: Api) -> None:
    await api("GET", "/v1/sandboxes")
    assert (api.edge.scopes[0]["dsec.project"], api.edge.scopes[0]["dsec.admin"]) == ("rl", False)
    await api("GET", "/v1/sandboxes", key=api.admin.key)
    assert (api.edge.scopes[1]["dsec.project"], api.edge.scopes[1]["dsec.admin"]) == ("ops", True)
    assert (await api("GET", "/v1/images")).body == b"rl"


async def test_an_administrator_may_act_in_any_project_and_others_in_their_own(api: Api) -> None:
    await api("GET", "/v1/sandboxes", key=api.admin.key, headers={"X-DSec-Project": "rl"})
    assert (api.edge.scopes[-1]["dsec.project"], api.edge.scopes[-1]["dsec.admin"]) == ("rl", True)
    await api("GET", "/v1/sandboxes", headers={"X-DSec-Project": "rl"})
    assert (api.edge.scopes[-1]["dsec.project"], api.edge.scopes[-1]["dsec.admin"]) == ("rl", False)
    for project in ("ops", "", "caf\u00e9"):
        refused = await api("GET", "/v1/images", headers={"X-DSec-Project": project})
        assert (refused.status, refused.error()["code"]) == (403, "permission_denied")
    assert (await api("GET", "/v1/images", key=api.admin.key, headers={"X-DSec-Project": "no project"})).status == 400
    assert len(api.edge.scopes) == 2


# -- which edge


async def test_the_sandbox_id_names_the_edge(api: Api, tmp_path: Path) -> None:
    near, far = FakeEdge("e1"), FakeEdge("e2")
    app = ApiServer(api.keys, Edges([LocalEdge("e1", near), LocalEdge("e2", far)]), [], state_dir=tmp_path, metrics_public=False)
    routed = Api(app, api.keys, near, api.admin, api.user)
    assert (await routed("GET", "/v1/sandboxes/sb-e2-00ff/exec/ex-1/stdout")).body == b"e2"
    assert (await routed("DELETE", "/v1/sandboxes/sb-e1-00ff")).body == b"e1"
    assert (await routed("POST", "/v1/sandboxes")).body == b"e1"


@pytest.mark.parametrize("name", ["sb-e9-00ff", "sb-", "sb", "xx-e1-00ff", "..", "e1", "sb-e1x-00ff"])
async def test_an_id_that_names_no_edge_is_a_sandbox_that_is_not_there(api: Api, name: str) -> None:
    answer = await api("GET", f"/v1/sandboxes/{name}/files")
    assert (answer.status, answer.error()["code"]) == (404, "sandbox_not_found")


async def test_the_first_chunk_reaches_the_client_before_the_last_is_made(api: Api) -> None:
    may_end, got_first = asyncio.Event(), asyncio.Event()
    chunks: list[bytes] = []

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await may_end.wait()
        await send({"type": "http.response.body", "body": b"last", "more_body": False})

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            chunks.append(message["body"])
            got_first.set()

    api.edge.behaviour = stream
    request = asyncio.create_task(api.app(api.scope("GET", f"/v1/sandboxes/{SANDBOX}/exec/e/stdout"), incoming(b""), send))
    async with asyncio.timeout(5):
        await got_first.wait()
        assert chunks == [b"first"]
        may_end.set()
        await request
    assert chunks == [b"first", b"last"]


async def test_a_request_body_reaches_the_edge_chunk_by_chunk(api: Api) -> None:
    taken: list[bytes] = []
    wanted = asyncio.Queue[bytes]()

    async def receive() -> Message:
        return {"type": "http.request", "body": await wanted.get(), "more_body": True}

    async def take_two(scope: Scope, receive: Receive, send: Send) -> None:
        taken.append((await receive())["body"])
        wanted.put_nowait(b"second")
        taken.append((await receive())["body"])
        await Response(b"")(scope, receive, send)

    async def ignore(message: Message) -> None:
        return

    api.edge.behaviour = take_two
    wanted.put_nowait(b"first")
    async with asyncio.timeout(5):
        await api.app(api.scope("PUT", f"/v1/sandboxes/{SANDBOX}/files?path=/x"), receive, ignore)
    assert taken == [b"first", b"second"]


# -- what goes wrong


async def test_an_edges_error_becomes_its_envelope_with_retry_after(api: Api) -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        raise NoCapacity("no memory left on e1", reason="memory", retry_after=2.4)

    api.edge.behaviour = refuse
    answer = await api("POST", "/v1/sandboxes")
    assert answer.status == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.error() == {"code": "no_capacity", "message": "no memory left on e1", "retry_after": 2.4, "reason": "memory"}


async def test_what_nobody_foresaw_is_logged_under_the_incident_that_the_caller_gets(api: Api) -> None:
    async def break_down(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError("secret detail")

    api.edge.behaviour = break_down
    with structlog.testing.capture_logs() as logs:
        answer = await api("GET", "/v1/sandboxes")
    assert answer.status == 500
    assert answer.error()["code"] == "internal"
    assert b"secret detail" not in answer.body
    [entry] = logs
    assert entry["incident"] == answer.error()["reason"]
    assert isinstance(entry["exc_info"], ZeroDivisionError)


async def test_a_response_that_breaks_halfway_is_cut_off_not_finished(api: Api) -> None:
    async def half(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise SandboxNotFound("gone meanwhile")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    api.edge.behaviour = half
    with pytest.raises(SandboxNotFound):
        await api.app(api.scope("GET", f"/v1/sandboxes/{SANDBOX}/files"), incoming(b""), send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


@pytest.mark.parametrize("extensions", [{}, {"websocket.http.response": {}}])
async def test_a_websocket_without_a_key_is_refused_before_it_is_accepted(api: Api, extensions: dict[str, dict[str, str]]) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = api.scope("GET", f"/v1/sandboxes/{SANDBOX}/exec/e/attach", None, kind="websocket") | {"extensions": extensions}
    await api.app(scope, incoming(b""), send)
    if extensions:
        assert [message["type"] for message in sent] == ["websocket.http.response.start", "websocket.http.response.body"]
        assert sent[0]["status"] == 401
    else:
        assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/", 404), ("PUT", "/v1/nodes", 405), ("PUT", "/v1/keys", 405), ("GET", "/v1/sandboxesX", 404)],
)
async def test_unknown_paths_and_methods_are_enveloped_too(api: Api, method: str, path: str, status: int) -> None:
    answer = await api(method, path)
    assert answer.status == status
    assert path in str(answer.error()["message"])


# -- keys over HTTP


async def test_an_admin_makes_lists_and_revokes_keys(api: Api) -> None:
    body = msgspec.json.encode(KeyRequest(name="trainer", project="rl"))
    made = msgspec.json.decode((await api("POST", "/v1/keys", key=api.admin.key, body=body)).body, type=NewKey)
    assert (await api("GET", "/v1/nodes", key=made.key)).status == 200
    listed = await api("GET", "/v1/keys", key=api.admin.key)
    assert made.info in msgspec.json.decode(listed.body, type=list[KeyInfo])
    assert made.key.encode() not in listed.body
    assert (await api("DELETE", f"/v1/keys/{made.info.id}", key=api.admin.key)).status == 200
    assert (await api("GET", "/v1/nodes", key=made.key)).status == 401


async def test_a_repeated_idempotency_key_makes_one_key(api: Api) -> None:
    body = msgspec.json.encode(KeyRequest(name="x"))
    before = len(api.keys.infos())
    for _ in range(3):
        assert (await api("POST", "/v1/keys", key=api.admin.key, body=body, headers={"Idempotency-Key": "once"})).status == 201
    assert len(api.keys.infos()) == before + 1


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/keys"), ("POST", "/v1/keys"), ("DELETE", "/v1/keys/abc")])
async def test_only_an_admin_manages_keys(api: Api, method: str, path: str) -> None:
    assert (await api(method, path)).error()["code"] == "permission_denied"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"name": 5}', "name"),
        (b"{}", "name"),
        (b'{"name": "x", "nmae": 1}', "nmae"),
        (b'{"name": "x", "expires_in_s": "1"}', "expires_in_s"),
        (b"{", None),
    ],
)
async def test_a_malformed_body_is_a_400_that_names_the_field(api: Api, body: bytes, field: str | None) -> None:
    answer = await api("POST", "/v1/keys", key=api.admin.key, body=body)
    assert (answer.status, answer.error()["code"], answer.error().get("field")) == (400, "invalid_argument", field)


async def test_a_body_beyond_the_limit_is_a_413(api: Api) -> None:
    answer = await api("POST", "/v1/keys", key=api.admin.key, body=b" " * 70_000)
    assert (answer.status, answer.error()["code"]) == (413, "invalid_argument")


async def test_msgpack_is_spoken_both_ways(api: Api) -> None:
    headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
    answer = await api("POST", "/v1/keys", key=api.admin.key, body=msgspec.msgpack.encode(KeyRequest(name="x")), headers=headers)
    assert msgspec.msgpack.decode(answer.body, type=NewKey).info.name == "x"


# -- nodes


async def test_nodes_and_doctor_tell_what_the_edge_says(api: Api) -> None:
    [node] = msgspec.json.decode((await api("GET", "/v1/nodes")).body, type=list[NodeInfo])
    assert node.sandboxes == {"running": 3}
    report = msgspec.json.decode((await api("GET", "/v1/doctor")).body, type=DoctorReport)
    by_name = {finding.feature: finding for finding in report.findings}
    assert by_name["erofs from a file"].state == "ok"
    assert (by_name["lowerdir+"].state, by_name["lowerdir+"].cost) == ("degraded", "older mount options are used")
    assert "free disk" in by_name
    states = [finding.state for finding in report.findings]
    assert states == sorted(states, key=["missing", "degraded", "ok"].index)
    assert (await api("GET", "/v1/doctor?edge=e9")).status == 404
