"""How the SDK turns answers into results and errors, and what it repeats."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from sdk_server import FakeServer

import libdsec.transport
from libdsec import DSecClient, DSecError, InvalidArgument, NotFound, SandboxInfo, Unavailable
from libdsec.errors import BY_CODE, ErrorBody, ErrorEnvelope, from_body
from libdsec.transport import BACKOFF_MAX_S, Retry, build_url, error_of


@pytest.fixture
def server(server: FakeServer) -> FakeServer:
    server.sandboxes["sb-1"] = SandboxInfo(id="sb-1", backend="container", state="running", image="x")
    return server


@pytest.mark.parametrize("code", sorted(code for code, kind in BY_CODE.items() if kind.status >= 300))
@pytest.mark.parametrize("as_msgpack", [False, True])
async def test_every_code_is_raised_as_its_class_with_all_it_carries(
    server: FakeServer, client: DSecClient, code: str, as_msgpack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libdsec.transport, "RETRY_FOR_S", 0.0)
    monkeypatch.setattr(libdsec.transport, "FIRST_CONTACT_S", 0.0)
    body = ErrorBody(code, "what happened", "field", 0.5, 28, "reason", 12.0)
    server.error, server.errors_as_msgpack = from_body(body), as_msgpack
    with pytest.raises(DSecError) as caught:
        await client.get("sb-1")
    assert type(caught.value) is BY_CODE[code]
    assert caught.value.body() == body


@pytest.mark.parametrize(
    ("status", "kind"), [(400, InvalidArgument), (404, NotFound), (502, Unavailable), (504, Unavailable), (418, DSecError)]
)
def test_a_proxys_page_is_mapped_by_its_status(status: int, kind: type[DSecError]) -> None:
    error = error_of(status, "text/html", b"<h1>bad</h1>")
    assert type(error) is kind and str(status) in error.message and "bad" in error.message


def test_an_unknown_code_is_still_an_error_with_its_message() -> None:
    error = error_of(400, "application/json", msgspec.json.encode(ErrorEnvelope(ErrorBody("from_the_future", "later"))))
    assert type(error) is DSecError and error.message == "later"


async def test_the_key_and_the_project_travel_with_every_request(server: FakeServer) -> None:
    async with DSecClient(server.url, "dsec_secret", project="team") as client:
        await client.get("sb-1")
    assert server.headers[-1]["Authorization"] == "Bearer dsec_secret"
    assert server.headers[-1]["X-DSec-Project"] == "team"


async def test_unavailable_is_tried_again_until_it_works(server: FakeServer, client: DSecClient) -> None:
    server.fail_next = [Unavailable("restarting", retry_after=0.0), Unavailable("restarting")]
    assert (await client.get("sb-1")).id == "sb-1"
    assert len(server.requests) == 3


async def test_other_errors_are_not_tried_again(server: FakeServer, client: DSecClient) -> None:
    server.fail_next = [InvalidArgument("no")]
    with pytest.raises(InvalidArgument):
        await client.get("sb-1")
    assert len(server.requests) == 1


async def test_a_server_that_never_answered_is_given_up_soon_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libdsec.transport, "FIRST_CONTACT_S", 0.05)
    async with DSecClient("http://127.0.0.1:1", "k") as client:
        with pytest.raises(Unavailable, match="dsec up"):
            await client.get("sb-1")


@pytest.mark.parametrize(
    "url", ["foo", "localhost:8000", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://a b", "http://h?q", "unix://relative"]
)
def test_what_is_no_address_says_what_one_looks_like(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="http://HOST:PORT") as caught:
        DSecClient(url, "k")
    assert caught.value.field == "url" and repr(url) in caught.value.message
    monkeypatch.setenv("DSEC_URL", url)
    with pytest.raises(InvalidArgument, match="http://HOST:PORT"):
        DSecClient()


@pytest.mark.parametrize("url", ["http://h", "https://h/prefix/", "http://[::1]:80", "http://127.0.0.1:8000", "unix:///run/dsec.sock"])
def test_addresses_are_taken_as_they_are(url: str) -> None:
    assert DSecClient(url, "k").url == url.rstrip("/")


async def test_the_removal_of_an_image_is_not_repeated(server: FakeServer, client: DSecClient) -> None:
    with pytest.raises(Unavailable):
        await client.images.remove("python:3.11")
    assert len(server.requests) == 1


async def test_a_server_that_restarts_is_waited_for(server: FakeServer, client: DSecClient) -> None:
    await client.get("sb-1")
    await server.stop()
    call = asyncio.create_task(client.get("sb-1"))
    port = int(server.url.rsplit(":", 1)[1])
    await asyncio.sleep(0)
    await server.start_at(port)
    assert (await asyncio.wait_for(call, 10)).id == "sb-1"


async def test_a_closed_client_says_so_and_can_be_opened_again(server: FakeServer) -> None:
    client = DSecClient(server.url, "k")
    await client.get("sb-1")
    await client.close()
    await client.close()
    with pytest.raises(InvalidArgument, match="closed"):
        await client.get("sb-1")
    async with client:
        assert (await client.get("sb-1")).id == "sb-1"


class TestRetry:
    def test_delays_grow_to_a_ceiling_and_end_with_the_budget(self) -> None:
        retry, now, delays = Retry(20.0), 100.0, []
        while (delay := retry.delay(Unavailable("x"), attempt_started=now, now=now)) is not None:
            delays.append(delay)
            now += delay
        assert delays[0] < 0.05 and max(delays) <= BACKOFF_MAX_S
        assert 117.0 < now <= 120.0

    def test_the_servers_wish_is_kept(self) -> None:
        assert Retry(20.0).delay(Unavailable("x", retry_after=7.0), attempt_started=0.0, now=0.0) == 7.0

    def test_no_attempt_starts_after_the_deadline(self) -> None:
        assert Retry(60.0, deadline=5.0).delay(Unavailable("x", retry_after=6.0), attempt_started=0.0, now=0.0) is None

    def test_a_long_attempt_renews_the_budget(self) -> None:
        retry = Retry(1.0)
        assert retry.delay(Unavailable("x"), attempt_started=0.0, now=0.0) is not None
        assert retry.delay(Unavailable("x"), attempt_started=0.1, now=600.0) is not None


def test_query_values_are_percent_encoded_bytes() -> None:
    url = build_url("http://h", "/p", {"path": b"/a b/\xff&c%d", "flag": True, "left_out": None, "n": 3})
    assert str(url) == "http://h/p?path=/a%20b/%FF%26c%25d&flag=true&n=3"


class TestAddress:
    @pytest.fixture(autouse=True)
    def _nowhere(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in ("DSEC_URL", "DSEC_API_KEY", "DSEC_PROJECT"):
            monkeypatch.delenv(name, raising=False)
        self.local = tmp_path / "local.json"
        monkeypatch.setenv("DSEC_CONFIG", str(self.local))

    def test_without_any_the_error_says_what_to_do(self) -> None:
        with pytest.raises(InvalidArgument, match="dsec up"):
            DSecClient()

    def test_the_local_server_is_found(self) -> None:
        self.local.write_text(json.dumps({"url": "http://here:1", "api_key": "local"}))
        client = DSecClient()
        assert (client.url, client.api_key) == ("http://here:1", "local")

    def test_the_environment_goes_first_and_arguments_before_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.local.write_text(json.dumps({"url": "http://here:1", "api_key": "local"}))
        monkeypatch.setenv("DSEC_URL", "http://env:2")
        monkeypatch.setenv("DSEC_API_KEY", "env")
        assert (DSecClient().url, DSecClient().api_key) == ("http://env:2", "env")
        assert DSecClient("http://arg:3/").url == "http://arg:3"

    def test_the_local_key_is_not_sent_elsewhere(self) -> None:
        self.local.write_text(json.dumps({"url": "http://here:1", "api_key": "local"}))
        assert DSecClient("http://elsewhere:2").api_key is None
        assert DSecClient("http://here:1/").api_key == "local"

    @pytest.mark.parametrize("url", ["nonsense", "http://a b", ""])
    def test_an_address_that_is_none_in_the_file_is_named_with_it(self, url: str) -> None:
        self.local.write_text(json.dumps({"url": url, "api_key": "local"}))
        with pytest.raises(InvalidArgument, match=r"local\.json"):
            DSecClient()

    @pytest.mark.parametrize(("variable", "field"), [("DSEC_API_KEY", "api_key"), ("DSEC_PROJECT", "project")])
    def test_what_cannot_stand_in_a_header_is_named_and_not_told(self, monkeypatch: pytest.MonkeyPatch, variable: str, field: str) -> None:
        for value in ("secret\nline", "secr\u00e9t"):
            monkeypatch.setenv(variable, value)
            with pytest.raises(InvalidArgument, match=variable) as caught:
                DSecClient("http://here:1")
            assert caught.value.field == field and "secr" not in caught.value.message

    def test_a_broken_file_is_named(self) -> None:
        self.local.write_text("{")
        with pytest.raises(InvalidArgument, match=r"local\.json"):
            DSecClient()
