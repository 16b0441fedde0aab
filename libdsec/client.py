"""The client: where sandboxes are made, found and listed."""

from __future__ import annotations

import asyncio
import builtins
import os
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import quote

import msgspec
from yarl import URL

from libdsec.config import resolve
from libdsec.errors import DeadlineExceeded, DSecError, InvalidArgument, NoCapacity, Unavailable, from_body
from libdsec.images import Images
from libdsec.keys import Keys
from libdsec.nodes import Nodes
from libdsec.sandbox import Sandbox
from libdsec.schema import (
    MAX_BATCH,
    Backend,
    CreateItem,
    DoctorReport,
    DSecContainerRunArgs,
    DSecMicroVMRunArgs,
    RunArgs,
    SandboxInfo,
    SandboxPage,
    State,
)
from libdsec.transport import Answer, Retry, Transport, encode

PAGE = 1000
"""Sandboxes asked for at a time by ``list``."""
DEADLINE_GRACE_S = 5.0
"""The server keeps a create request's deadline; only if it hasn't spoken this much later does the client."""

_sandbox_info = Answer(SandboxInfo)
_sandbox_page = Answer(SandboxPage)
_create_item = Answer(CreateItem)
_doctor_report = Answer(DoctorReport)


@dataclass(frozen=True, kw_only=True)
class RunItem:
    """One outcome of :meth:`DSecClient.run_many`: exactly one of ``sandbox`` and ``error`` is set."""

    index: int
    """Position in the request, from 0."""
    sandbox: Sandbox | None = None
    error: DSecError | None = None


class DSecClient:
    """One server's sandboxes, through one key.

    ``url``, ``api_key`` and ``project`` default to ``DSEC_URL``, ``DSEC_API_KEY`` and ``DSEC_PROJECT``, and after those to the server that
    ``dsec up`` runs on this machine. ``async with DSecClient() as client``, or ``open`` and ``close``. A client belongs to one event loop.

    Raises InvalidArgument when no address is to be found. Every call may raise AuthenticationError, PermissionDenied, and Unavailable when
    the server can't be reached: after 3 seconds if it never was, else after a minute of trying.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, project: str | None = None) -> None:
        address, self._api_key = resolve(url, api_key)
        self.transport = Transport(address, self._api_key, project or os.environ.get("DSEC_PROJECT") or None)
        """For the SDK's own parts: the session with the server."""
        self.images = Images(self)
        """The image store."""
        self.keys = Keys(self.transport)
        """The server's API keys."""
        self.nodes = Nodes(self.transport)
        """The machines that sandboxes run on."""

    @property
    def url(self) -> str:
        """The server's address."""
        return self.transport.url

    @property
    def api_key(self) -> str | None:
        """The key that the client shows."""
        return self._api_key

    async def open(self) -> None:
        """Make the client usable; nothing is sent yet. A first call opens it by itself. Safe to repeat."""
        await self.transport.open()

    async def close(self, *, because: DSecError | None = None) -> None:
        """Close all connections. Sandboxes live on. Later calls raise ``because``, or InvalidArgument. Safe to repeat."""
        await self.transport.close(because)

    async def __aenter__(self) -> DSecClient:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    # -- making sandboxes -----------------------------------------------------------------------------------------------------------------

    async def run(self, args: RunArgs, *, timeout: float | None = None) -> Sandbox:
        """Make one sandbox and return it when it answers.

        ``timeout``: seconds, then DeadlineExceeded, and nothing of the sandbox stays. While there is time left, a refusal for want of
        capacity is tried again as often as the server proposes. Raises InvalidArgument, ImageNotFound, ImageError, QuotaExceeded,
        NoCapacity (its ``reason`` says what is short), Unsupported (backend). Interrupted calls are repeated with the same idempotency
        key, so no second sandbox comes of it; repeating the call yourself is safe with an ``args.idempotency_key`` of your own.
        """
        return self._sandbox(await self._create_one(args, timeout))

    async def run_container(self, args: DSecContainerRunArgs, *, timeout: float | None = None) -> Sandbox:
        """:meth:`run` for a container."""
        return await self.run(_of_kind(args, DSecContainerRunArgs), timeout=timeout)

    async def run_microvm(self, args: DSecMicroVMRunArgs, *, timeout: float | None = None) -> Sandbox:
        """:meth:`run` for a microVM."""
        return await self.run(_of_kind(args, DSecMicroVMRunArgs), timeout=timeout)

    async def _create_one(self, args: RunArgs, timeout: float | None) -> SandboxInfo:
        keyed = _with_keys([args], count=1)
        clock = asyncio.get_running_loop().time
        deadline = None if timeout is None else clock() + timeout
        retry = self.transport.retry(deadline) if timeout is None else Retry(timeout, deadline)
        while True:
            started = clock()
            outcome = await self._outcome(keyed, deadline)
            if isinstance(outcome, SandboxInfo):
                return outcome
            error = outcome
            if not isinstance(error, Unavailable) and (timeout is None or not isinstance(error, NoCapacity)):
                raise error
            delay = retry.delay(error, attempt_started=started, now=clock())
            if delay is None:
                raise error
            await asyncio.sleep(delay)

    async def _outcome(self, keyed: builtins.list[RunArgs], deadline: float | None) -> SandboxInfo | DSecError:
        """What became of a request for one sandbox. A node may refuse the item, or the whole request when its queue is full."""
        try:
            [item] = [item async for item in self._create(keyed, deadline)]
        except NoCapacity as error:
            return error
        if item.sandbox is not None:
            return item.sandbox
        assert item.error is not None
        return from_body(item.error)

    async def run_many(
        self, args: RunArgs | Sequence[RunArgs], *, count: int = 1, timeout: float | None = None
    ) -> AsyncGenerator[RunItem, None]:
        """Make ``count`` sandboxes of one kind, or one for each element of a sequence (at most 32,000), in one request.

        ``async for item in client.run_many(args, count=64)`` yields each as soon as it is ready, in order of readiness: ``item.index`` and
        either ``item.sandbox`` or ``item.error``. One sandbox's failure is no other's. ``timeout``: seconds; what isn't ready by then is
        taken back and comes as a DeadlineExceeded item. Raises what concerns the request as a whole (InvalidArgument, AuthenticationError,
        Unavailable).

        A broken answer is asked for again with the same idempotency keys, for what is missing: nothing is made twice. With
        ``args.idempotency_key`` set, sandbox i of ``count`` has the key ``<key>/<i>``: a client that starts again finds the same ones.
        Those that the one before was not told of wait two minutes for that; then they are stopped, and their keys answer SandboxGone.
        """
        keyed = _with_keys([args] if isinstance(args, DSecContainerRunArgs | DSecMicroVMRunArgs) else list(args), count)
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        async for item in self._create(keyed, deadline):
            if item.sandbox is not None:
                yield RunItem(index=item.index, sandbox=self._sandbox(item.sandbox))
            elif item.error is not None:
                yield RunItem(index=item.index, error=from_body(item.error))

    async def _create(self, keyed: builtins.list[RunArgs], deadline: float | None) -> AsyncGenerator[CreateItem, None]:
        """The items of a create request, asked for again until every one was answered; indices are those of ``keyed``."""
        clock = asyncio.get_running_loop().time
        missing = dict(enumerate(keyed))
        retry: Retry | None = None
        while missing:
            indices = list(missing)
            started = clock()
            left = None if deadline is None else max(0.0, deadline - started)
            try:
                async with aclosing(self._ask_for(list(missing.values()), left)) as answers:
                    while missing:
                        # Only waiting for the server is limited, not what the caller does with an item.
                        async with asyncio.timeout(None if left is None else started + left + DEADLINE_GRACE_S - clock()):
                            item = await anext(answers)
                        item.index = indices[item.index]
                        if missing.pop(item.index, None) is not None:
                            yield item
                return
            except StopAsyncIteration:
                error = Unavailable(f"the server ended its answer with {len(missing)} of {len(keyed)} sandboxes missing")
            except Unavailable as failure:
                error = failure
            except TimeoutError as failure:
                text = f"{len(missing)} of {len(keyed)} sandboxes weren't ready in time, and the server is silent"
                raise DeadlineExceeded(text) from failure
            retry = retry or self.transport.retry(deadline)
            delay = retry.delay(error, attempt_started=started, now=clock())
            if delay is None:
                raise error
            await asyncio.sleep(delay)

    def _ask_for(self, items: builtins.list[RunArgs], timeout_s: float | None) -> AsyncGenerator[CreateItem, None]:
        shared = {} if timeout_s is None else {"timeout_s": timeout_s}
        body = {"args": _given(items[0]), **shared} if len(items) == 1 else {"items": [_given(item) for item in items], **shared}
        return self.transport.lines("POST", self.transport.at("/v1/sandboxes"), _create_item, body=encode(body))

    # -- finding sandboxes ----------------------------------------------------------------------------------------------------------------

    async def attach(self, sandbox_id: str) -> Sandbox:
        """A sandbox made by any client of the project, by its id. Raises SandboxNotFound, SandboxGone. Safe to repeat."""
        info = await self.get(sandbox_id)
        return self._sandbox(info)

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """A sandbox's record; of a stopped one for 24 hours. Raises SandboxNotFound. Safe to repeat."""
        url = self.transport.at(f"/v1/sandboxes/{quote(sandbox_id, safe='')}")
        return await self.transport.call("GET", url, _sandbox_info)

    async def list(
        self,
        *,
        state: State | None = None,
        backend: Backend | None = None,
        labels: Mapping[str, str] | None = None,
        page_size: int = PAGE,
    ) -> AsyncGenerator[SandboxInfo, None]:
        """The project's sandboxes, oldest first, fetched ``page_size`` at a time. ``labels``: only those that have all of these.
        Raises InvalidArgument. Safe to repeat."""
        cursor: str | None = None
        while True:
            page = await self.transport.call("GET", self._list_url(state, backend, labels or {}, page_size, cursor), _sandbox_page)
            for info in page.sandboxes:
                yield info
            cursor = page.cursor
            if cursor is None:
                return

    def _list_url(self, state: State | None, backend: Backend | None, labels: Mapping[str, str], limit: int, cursor: str | None) -> URL:
        pairs: list[tuple[str, str | None]] = [("state", state), ("backend", backend), ("cursor", cursor), ("limit", str(limit))]
        pairs += [("label", f"{name}={value}") for name, value in labels.items()]
        return self.transport.at("/v1/sandboxes", pairs)

    def _sandbox(self, info: SandboxInfo) -> Sandbox:
        return Sandbox(self.transport, info)

    async def doctor(self) -> DoctorReport:
        """What the node has of the kernel features that sandboxes need, and what each lack costs. Safe to repeat."""
        return await self.transport.call("GET", self.transport.at("/v1/doctor"), _doctor_report)


def _of_kind(args: RunArgs, kind: type[RunArgs]) -> RunArgs:
    if not isinstance(args, kind):
        raise InvalidArgument(f"{kind.__name__} is wanted, not {type(args).__name__}", field="args")
    return args


def _with_keys(items: list[RunArgs], count: int) -> list[RunArgs]:
    """One element for each sandbox, each with an idempotency key of its own. Raises InvalidArgument for a batch of the wrong size."""
    if count != 1 and len(items) != 1:
        raise InvalidArgument("count goes with one args, not with a sequence", field="count")
    if count < 1 or not 0 < len(items) * count <= MAX_BATCH:
        raise InvalidArgument(f"a batch has 1 to {MAX_BATCH} sandboxes, not {len(items) * count}", field="count")
    if count > 1:
        base = items[0].idempotency_key or secrets.token_hex(12)
        return [msgspec.structs.replace(items[0], idempotency_key=f"{base}/{index}") for index in range(count)]
    return [
        item if item.idempotency_key is not None else msgspec.structs.replace(item, idempotency_key=secrets.token_hex(12)) for item in items
    ]


def _given(args: RunArgs) -> dict[str, object]:
    """``args`` without what has its default value: a batch of 32,000 is 4 MB instead of 14."""
    fields: dict[str, object] = {"backend": "container" if isinstance(args, DSecContainerRunArgs) else "microvm"}
    for name in args.__struct_fields__:
        value = getattr(args, name)
        if value != _DEFAULTS.get(name, msgspec.NODEFAULT):
            fields[name] = value
    return fields


_DEFAULTS = {
    field.name: field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    for field in msgspec.structs.fields(DSecContainerRunArgs)
    if not field.required
}
"""Field to default value, the same for both kinds of args."""
