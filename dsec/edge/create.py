"""``POST /v1/sandboxes``: one or 32,000, each answered as it becomes ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import msgspec

from dsec.edge.call import NDJSON, Body, Call
from dsec.edge.sandbox import Sandbox
from dsec.edge.sandboxes import Sandboxes
from dsec.edge.starts import Origin
from dsec.edge.validation import KEY_MAX, check_run_args, check_seconds
from dsec.http_errors import incident
from libdsec.errors import DSecError, InvalidArgument
from libdsec.idempotency import check_differ
from libdsec.schema import MAX_BATCH, AnyRunArgs, CreateItem, CreateRequest, RunArgs

_body = Body(CreateRequest, large=("items", "args"))
_to_json = msgspec.json.Encoder().encode


class Creation:
    """The create route."""

    def __init__(self, sandboxes: Sandboxes, count: Callable[[str], None]) -> None:
        """``count`` is told the outcome of each item: ``ok`` or the error's code."""
        self._sandboxes = sandboxes
        self._count = count

    async def create(self, call: Call) -> None:
        """POST /v1/sandboxes"""
        request = await _body.read(call)
        items = plan(request, call.idempotency_key(KEY_MAX))
        batch = Batch(self._sandboxes, call, items, deadline_of(request.timeout_s), self._count)
        self._sandboxes.starts.slots.enqueue(len(items))
        try:
            await batch.run()
        finally:
            self._sandboxes.starts.slots.dequeue(len(items))


def deadline_of(timeout_s: float | None) -> float | None:
    """The time of the event loop's clock at which a request's time is up. Raises InvalidArgument."""
    if timeout_s is None:
        return None
    check_seconds("timeout_s", timeout_s)
    return asyncio.get_running_loop().time() + timeout_s


def plan(request: CreateRequest, header_key: str | None) -> list[RunArgs]:
    """The items of a request, each with its own idempotency key. Raises InvalidArgument.

    With ``count`` above 1, key K becomes K/0, K/1, …, and so does the header's if it stands in for several of ``items``. Keys in
    ``items`` stay as they are, so that a caller may repeat only what is missing; two that are alike are refused.
    """
    asked: Sequence[AnyRunArgs]
    if request.args is not None and request.items is None:
        asked, named = [request.args], "args"
    elif request.items is not None and request.args is None:
        asked, named = request.items, "items"
    else:
        raise InvalidArgument("exactly one of args and items is needed", field="args")
    if named == "items" and request.count != 1:
        raise InvalidArgument("count goes with args, not with items", field="count")
    if not 1 <= request.count <= MAX_BATCH:
        raise InvalidArgument(f"count must be between 1 and {MAX_BATCH}", field="count")
    if not 1 <= len(asked) <= MAX_BATCH:
        raise InvalidArgument(f"a request has 1 to {MAX_BATCH} items", field=named)
    items: list[RunArgs] = []
    for index, args in enumerate(asked):
        try:
            items.append(check_run_args(args))
        except DSecError as error:
            error.field = f"items[{index}].{error.field}" if named == "items" else f"args.{error.field}"
            raise
    if request.count > 1:
        key = items[0].idempotency_key or header_key
        return _numbered(items * request.count, key)
    unnamed = [index for index, args in enumerate(items) if args.idempotency_key is None]
    if header_key is not None:
        for index in unnamed:
            key = header_key if len(unnamed) == 1 else f"{header_key}/{index}"
            items[index] = msgspec.structs.replace(items[index], idempotency_key=key)
    check_differ(args.idempotency_key for args in items)
    return items


def _numbered(items: list[RunArgs], key: str | None) -> list[RunArgs]:
    if key is None:
        return items
    return [msgspec.structs.replace(args, idempotency_key=f"{key}/{index}") for index, args in enumerate(items)]


class Batch:
    """One create or fork request: at most as many creations at once as the edge has start slots, and the lines that tell of them."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        call: Call,
        items: list[RunArgs],
        deadline: float | None,
        count: Callable[[str], None],
        origin: Origin | None = None,
    ) -> None:
        """``origin``: what all of them start with; None: their image."""
        self._sandboxes = sandboxes
        self._call = call
        self._items = items
        self._deadline = deadline
        self._count = count
        self._origin = origin
        self._untold: list[CreateItem] = []
        self._news = asyncio.Event()
        self._gone = False
        self._left = len(items)

    async def run(self) -> None:
        """Creates and tells. When the client goes away, what has begun is finished, nothing more is begun, and what it was never told of
        is given up (:mod:`dsec.edge.orphans`)."""
        await self._call.begin(NDJSON)
        queue = enumerate(self._items)
        loop = asyncio.get_running_loop()
        watching = loop.create_task(self._watch_client())
        workers = [loop.create_task(self._work(queue)) for _ in range(min(len(self._items), self._sandboxes.starts.slots.slots))]
        try:
            while (self._left or self._untold) and not self._gone:
                if not self._untold:
                    await self._news.wait()
                    self._news.clear()
                await self._tell()
        except asyncio.CancelledError:
            for worker in workers:
                worker.cancel()
            raise
        finally:
            watching.cancel()
            self._gone = self._gone or self._left > 0
            await asyncio.gather(*workers, return_exceptions=True)
            await self._give_up_untold()
        if not self._gone:
            await self._call.end()

    async def _work(self, queue: Iterator[tuple[int, RunArgs]]) -> None:
        for index, args in queue:
            if self._gone:
                return
            item = CreateItem(index=index)
            try:
                item.sandbox = await self._sandboxes.create(self._call.project, args, self._deadline, self._origin)
                self._count("ok")
            except DSecError as error:
                item.error = error.body()
                self._count(error.code)
            except Exception as error:
                item.error = incident(error, "create").body()
                self._count("internal")
            self._untold.append(item)
            self._left -= 1
            self._news.set()

    async def _tell(self) -> None:
        # Until they are handed over they stay untold, also if this is cancelled while it waits for a client that doesn't read.
        lines = self._untold[:]
        if not lines:
            return
        await self._call.send(b"".join([_to_json(item) + b"\n" for item in lines]))
        if not self._call.connected():
            self._gone = True
            return
        # Whether the client read them can't be known: they count as told.
        del self._untold[: len(lines)]
        for sandbox in self._live(lines):
            self._sandboxes.orphans.tell(sandbox)

    async def _watch_client(self) -> None:
        await self._call.gone()
        self._gone = True
        self._news.set()

    async def _give_up_untold(self) -> None:
        left = self._call.left()
        given_up = [self._sandboxes.orphans.give_up(sandbox, left=left) for sandbox in self._live(self._untold)]
        for outcome in await asyncio.gather(*given_up, return_exceptions=True):
            if isinstance(outcome, Exception):
                incident(outcome, "giving up an untold sandbox")

    def _live(self, items: list[CreateItem]) -> Iterator[Sandbox]:
        for item in items:
            sandbox = None if item.sandbox is None else self._sandboxes.live(item.sandbox.id)
            if sandbox is not None:
                yield sandbox
