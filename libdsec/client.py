"""The client: where sandboxes are made, found and listed."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import msgspec
from yarl import URL

from libdsec.config import check_header, resolve
from libdsec.durations import check_timeout
from libdsec.errors import DeadlineExceeded, DSecError, InvalidArgument, NoCapacity, Unavailable, Unsupported, from_body
from libdsec.idempotency import check_differ, once_key
from libdsec.ids import sandbox_path
from libdsec.images import Images
from libdsec.keys import Keys
from libdsec.nodes import Nodes
from libdsec.sandbox import DEADLINE_GRACE_S, Sandbox, stop_all
from libdsec.schema import (
    MAX_BATCH,
    AnyRunArgs,
    Backend,
    CreateItem,
    DoctorReport,
    DSecContainerRunArgs,
    DSecFullVMRunArgs,
    DSecMicroVMRunArgs,
    RunArgs,
    SandboxInfo,
    SandboxPage,
    State,
)
from libdsec.transport import Answer, Lines, Retry, Transport, encode

PAGE = 1000
"""Sandboxes asked for at a time by ``list``."""

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
    ``dsec up`` runs on this machine; ``unix:///PATH`` is a server's Unix socket. ``async with DSecClient() as client``, or ``open`` and
    ``close``. A client belongs to one event loop.

    ``project``: in which an administrator's key acts instead of its own; another project than its own is refused to any other key.

    Raises InvalidArgument when no address is to be found, or what was given is none. Every call may raise AuthenticationError,
    PermissionDenied, and Unavailable when the server can't be reached: after 3 seconds if it never was, else after a minute of trying.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, project: str | None = None) -> None:
        address, self._api_key = resolve(url, api_key)
        project = project or os.environ.get("DSEC_PROJECT") or None
        if project is not None:
            check_header(project, "the project (DSEC_PROJECT, or project=)", "project")
        self.transport = Transport(address, self._api_key, project)
        """For the SDK's own parts: the session with the server."""
        self.images = Images(self)
        """The image store."""
        self.keys = Keys(self.transport)
        """The server's API keys."""
        self.nodes = Nodes(self.transport)
        """The machines that sandboxes run on."""
        self._open_creates: set[_OpenCreate] = set()

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
        """Close all connections. Sandboxes live on, but for those of a :meth:`run_many` that is still open: it is left, as if by ``break``.
        Later calls raise ``because``, or InvalidArgument. Safe to repeat."""
        # A loop that was left by `break` or an exception has a generator that nobody has closed yet; later it couldn't give back anything.
        await asyncio.gather(*(left.leave() for left in list(self._open_creates) if not left.being_read), return_exceptions=True)
        await self.transport.close(because)

    async def __aenter__(self) -> DSecClient:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    # -- making sandboxes -----------------------------------------------------------------------------------------------------------------

    async def run(self, args: AnyRunArgs, *, timeout: float | None = None) -> Sandbox:
        """Make one sandbox and return it when it answers.

        ``timeout``: seconds, then DeadlineExceeded, and nothing of the sandbox stays. While there is time left, a refusal for want of
        capacity is tried again as often as the server proposes. Cancelled, it takes back what it has made, unless that has a key of
        yours.

        Raises InvalidArgument, ImageNotFound, ImageError (its layers can't be used), NoCapacity (its ``reason`` says what is short),
        Unsupported (backend, ``network="bridged"``), SandboxGone and SandboxFailed (it was stopped or broke before it was ready),
        and PermissionDenied, FileNotFound or FileError with ``errno`` where its ``workdir`` can't be made. With an
        ``args.idempotency_key`` also Conflict (the key was used with other arguments), SandboxGone and SandboxFailed (the key's sandbox has
        ended): these stay, so another try takes another key.

        Interrupted calls are repeated with the same idempotency key, so no second sandbox comes of it; repeating the call yourself is safe
        with an ``args.idempotency_key`` of your own, and makes another sandbox without.
        """
        check_timeout(timeout)
        return self._sandbox(await self._create_one(args, timeout))

    async def run_container(self, args: DSecContainerRunArgs, *, timeout: float | None = None) -> Sandbox:
        """:meth:`run` for a container."""
        return await self.run(_of_kind(args, DSecContainerRunArgs), timeout=timeout)

    async def run_microvm(self, args: DSecMicroVMRunArgs, *, timeout: float | None = None) -> Sandbox:
        """:meth:`run` for a microVM."""
        return await self.run(_of_kind(args, DSecMicroVMRunArgs), timeout=timeout)

    async def run_full_vm(self, args: DSecFullVMRunArgs, *, timeout: float | None = None) -> Sandbox:
        """:meth:`run` for a full VM. Raises Unsupported: no node has this backend."""
        return await self.run(_of_kind(args, DSecFullVMRunArgs), timeout=timeout)

    async def _create_one(self, args: AnyRunArgs, timeout: float | None) -> SandboxInfo:
        wanted = _with_keys([args], count=1)
        clock = asyncio.get_running_loop().time
        deadline = None if timeout is None else clock() + timeout
        retry = self.transport.retry(deadline) if timeout is None else Retry(timeout, deadline)
        while True:
            started = clock()
            outcome = await self._outcome(wanted, deadline)
            if isinstance(outcome, SandboxInfo):
                return outcome
            error = outcome
            if not isinstance(error, Unavailable) and (timeout is None or not isinstance(error, NoCapacity)):
                raise error
            delay = retry.delay(error, attempt_started=started, now=clock())
            if delay is None:
                raise error
            await asyncio.sleep(delay)

    async def _outcome(self, wanted: _Wanted, deadline: float | None) -> SandboxInfo | DSecError:
        """What became of a request for one sandbox. A node may refuse the item, or the whole request when its queue is full."""
        try:
            [item] = [item async for item in self._create(wanted, deadline)]
        except NoCapacity as error:
            return error
        if item.sandbox is not None:
            return item.sandbox
        assert item.error is not None
        return from_body(item.error)

    async def run_many(
        self, args: AnyRunArgs | Sequence[AnyRunArgs], *, count: int = 1, timeout: float | None = None
    ) -> AsyncGenerator[RunItem, None]:
        """Make ``count`` sandboxes of one kind, or one for each element of a sequence (at most 32,000), in one request.

        ``async for item in client.run_many(args, count=64)`` yields each as soon as it is ready, in order of readiness: ``item.index`` and
        either ``item.sandbox`` or ``item.error`` (what :meth:`run` raises). One sandbox's failure is no other's. ``timeout``: seconds;
        what isn't ready by then is taken back and comes as a DeadlineExceeded item.

        Raises what concerns the request as a whole: InvalidArgument and Unsupported (of any element: nothing is made), NoCapacity
        (``reason`` "start_queue": the node's queue has no room for all that are missing), DeadlineExceeded (the server was silent until 5
        seconds after the deadline), AuthenticationError, PermissionDenied, Unavailable. Some may have been made before that: repeating the
        request is safe with keys of your own, and gives those too.

        Left early (by ``break``, an exception, cancelling), it stops what the server had made by then and the
        caller wasn't given; the server begins no more, and takes back what it was just making. That is at the latest when the client is
        closed; ``contextlib.aclosing`` around the call has it done at once. What has an ``idempotency_key`` of the
        caller's lives on: the caller can ask for it again, for two minutes where this call wasn't told of it. Elements of a sequence that
        have one need different ones (else InvalidArgument).

        A broken answer is asked for again with the same idempotency keys, for what is missing: nothing is made twice. With
        ``args.idempotency_key`` set, sandbox i of ``count`` has the key ``<key>/<i>``: a client that starts again finds the same ones.
        Those that the one before was not told of wait two minutes for that; then they are stopped, and their keys answer SandboxGone.
        """
        check_timeout(timeout)
        wanted = _with_keys([args] if isinstance(args, AnyRunArgs) else list(args), count)
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        async with contextlib.aclosing(self._create(wanted, deadline)) as items:
            async for item in items:
                if item.sandbox is not None:
                    yield RunItem(index=item.index, sandbox=self._sandbox(item.sandbox))
                elif item.error is not None:
                    yield RunItem(index=item.index, error=from_body(item.error))

    async def _create(self, wanted: _Wanted, deadline: float | None) -> AsyncGenerator[CreateItem, None]:
        """The items of a create request, asked for again until every one was answered; indices are those of ``wanted``.

        Left early, it stops what was made and not given away, as far as nobody else has the key by which to ask for it.
        """
        clock = asyncio.get_running_loop().time
        missing = dict(enumerate(wanted.items))
        retry: Retry | None = None
        while missing:
            indices = list(missing)
            started = clock()
            left = None if deadline is None else deadline - started
            if left is not None and left <= 0:
                late = DeadlineExceeded("the request's deadline passed before the server could be asked again").body()
                for index in indices:
                    yield CreateItem(index=index, error=late)
                return
            silence = None if left is None else started + left + DEADLINE_GRACE_S
            try:
                async with AsyncExitStack() as connection:
                    async with asyncio.timeout_at(silence):
                        answers = await connection.enter_async_context(self._ask_for(list(missing.values()), left))
                    named_here = frozenset(place for place, index in enumerate(indices) if index in wanted.named_here)
                    opened = _OpenCreate(answers, named_here, self._sandbox)
                    self._open_creates.add(opened)
                    try:
                        while missing:
                            # Only waiting for the server is limited, not what the caller does with an item.
                            async with asyncio.timeout_at(silence):
                                item = await opened.next()
                            if item is None:
                                break
                            item.index = indices[item.index]
                            if missing.pop(item.index, None) is not None:
                                yield item
                    except (GeneratorExit, asyncio.CancelledError):
                        if missing:
                            await opened.leave()
                        raise
                    finally:
                        self._open_creates.discard(opened)
                if not missing:
                    return
                error = Unavailable(f"the server ended its answer with {len(missing)} of {len(wanted.items)} sandboxes missing")
            except Unavailable as failure:
                error = failure
            except TimeoutError as failure:
                text = f"{len(missing)} of {len(wanted.items)} sandboxes weren't ready in time, and the server is silent"
                raise DeadlineExceeded(text) from failure
            retry = retry or self.transport.retry(deadline)
            delay = retry.delay(error, attempt_started=started, now=clock())
            if delay is None:
                raise error
            await asyncio.sleep(delay)

    def _ask_for(self, items: builtins.list[RunArgs], timeout_s: float | None) -> contextlib.AbstractAsyncContextManager[Lines[CreateItem]]:
        shared = {} if timeout_s is None else {"timeout_s": timeout_s}
        body = {"args": _given(items[0]), **shared} if len(items) == 1 else {"items": [_given(item) for item in items], **shared}
        return self.transport.open_lines("POST", self.transport.at("/v1/sandboxes"), _create_item, body=encode(body))

    # -- finding sandboxes ----------------------------------------------------------------------------------------------------------------

    async def attach(self, sandbox_id: str) -> Sandbox:
        """A sandbox made by any client of the project, by its id. One whose creator went away before it was told of it is kept from then
        on, as by any call that works with it. Raises SandboxNotFound, SandboxGone. Safe to repeat."""
        url = self.transport.at(f"{sandbox_path(sandbox_id)}/attach")
        return self._sandbox(await self.transport.call("POST", url, _sandbox_info))

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """A sandbox's record, also of a failed one. Only looks: no sandbox is kept by it (:meth:`attach`). Raises SandboxNotFound,
        and SandboxGone (when and why) of one that was stopped: for 24 hours ``list(state="stopped")`` shows those. Safe to repeat."""
        url = self.transport.at(sandbox_path(sandbox_id))
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
        ``state``: only those in it; without one only live sandboxes are listed, and failed ones that are kept for inspection: what was
        stopped, failed or was lost is listed by its state for 24 hours. Raises InvalidArgument. Safe to repeat."""
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
        """What the node has of the kernel features that sandboxes need, and what each lack costs; ``dsec doctor`` on the node also tells
        what to do about it where ``todo`` is empty. Safe to repeat."""
        return await self.transport.call("GET", self.transport.at("/v1/doctor"), _doctor_report)


class _OpenCreate:
    """A create request whose answer is being read, and what is done where that ends early."""

    def __init__(self, answers: Lines[CreateItem], named_here: frozenset[int], sandbox: Callable[[SandboxInfo], Sandbox]) -> None:
        """``named_here``: places of those whose key nobody else has."""
        self.being_read = False
        self._answers = answers
        self._named_here = named_here
        self._sandbox = sandbox
        self._leaving: asyncio.Task[None] | None = None

    async def next(self) -> CreateItem | None:
        """None at the end."""
        self.being_read = True
        try:
            return await anext(self._answers, None)
        finally:
            self.being_read = False

    async def leave(self) -> None:
        """Has the server begin nothing more, and stops what it had made and nobody was given. Once, whoever asks for it, and to its end."""
        if self._leaving is None:
            self._leaving = asyncio.ensure_future(self._leave())
        await asyncio.shield(self._leaving)

    async def _leave(self) -> None:
        untold = await self._answers.left_over()
        await stop_all(self._sandbox(item.sandbox) for item in untold if item.sandbox and item.index in self._named_here)


def _of_kind(args: AnyRunArgs, kind: type[AnyRunArgs]) -> AnyRunArgs:
    if not isinstance(args, kind):
        raise InvalidArgument(f"{kind.__name__} is wanted, not {type(args).__name__}", field="args")
    return args


class _Wanted(NamedTuple):
    """What a create request asks for."""

    items: list[RunArgs]
    """One for each sandbox, each with an idempotency key of its own."""
    named_here: frozenset[int]
    """Places of those whose key was made here: nobody but this call can ask for them again."""


def _with_keys(asked: list[AnyRunArgs], count: int) -> _Wanted:
    """Raises InvalidArgument for a batch of the wrong size or with a key twice; Unsupported for a full VM: it has only a name."""
    items = [args for args in asked if not isinstance(args, DSecFullVMRunArgs)]
    if len(items) < len(asked):
        raise Unsupported("there is no full VM backend yet; use a container", field="backend")
    if count != 1 and len(items) != 1:
        raise InvalidArgument("count goes with one args, not with a sequence", field="count")
    if count < 1 or not 0 < len(items) * count <= MAX_BATCH:
        raise InvalidArgument(f"a batch has 1 to {MAX_BATCH} sandboxes, not {len(items) * count}", field="count")
    if count > 1:
        base = items[0].idempotency_key or once_key()
        keyed = [msgspec.structs.replace(items[0], idempotency_key=f"{base}/{index}") for index in range(count)]
        return _Wanted(keyed, frozenset(range(count) if items[0].idempotency_key is None else ()))
    check_differ(item.idempotency_key for item in items)
    named_here = frozenset(index for index, item in enumerate(items) if item.idempotency_key is None)
    keyed = [msgspec.structs.replace(item, idempotency_key=once_key()) if index in named_here else item for index, item in enumerate(items)]
    return _Wanted(keyed, named_here)


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
