"""Every route of a sandbox, and the ASGI app that finds the route, the sandbox and the error's answer."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog
from starlette.types import Receive, Scope, Send

from dsec.edge.call import Call, Disconnected, Socket
from dsec.edge.channel import ChannelError, ChannelLost
from dsec.edge.create import Creation
from dsec.edge.exec import Commands
from dsec.edge.failures import as_error
from dsec.edge.files import Files
from dsec.edge.forks import Forks
from dsec.edge.info import Information
from dsec.edge.journal import JournalError
from dsec.edge.once import once
from dsec.edge.packs import Packs
from dsec.edge.ports import Ports
from dsec.edge.record import Record
from dsec.edge.sandbox import Sandbox, refusal
from dsec.edge.sandboxes import Sandboxes
from dsec.edge.spawner import SpawnerError
from dsec.edge.states import Call as Kind
from dsec.edge.states import takes
from dsec.http_errors import MethodNotAllowed, incident
from libdsec.errors import DSecError, NotFound

_log = structlog.get_logger("dsec.edge")

PREFIX = "/v1/sandboxes"
ANY = "*"
"""Every method."""
WEBSOCKET = "WS"


@dataclass(frozen=True)
class Route:
    """One method of one path below :data:`PREFIX`. Exactly one of the four handlers is set; it says what the route needs.

    ``kind`` is what the sandbox's state must take. Only ``use`` and ``change`` count against the idle rule: watching a sandbox doesn't keep
    it.
    """

    method: str
    path: str
    kind: Kind = "info"
    on_all: Callable[[Call], Awaitable[None]] | None = None
    on_sandbox: Callable[[Call, Sandbox], Awaitable[None]] | None = None
    on_record: Callable[[Call, Sandbox | Record], Awaitable[None]] | None = None
    on_socket: Callable[[Call, Socket, Sandbox], Awaitable[None]] | None = None
    reads: bool = False
    """It tells what somebody may ask of every sandbox that a list shows, so whoever calls it needn't know of this one."""


@dataclass
class _Node:
    """One step of a path: what may follow it."""

    literal: dict[str, _Node] = field(default_factory=dict)
    variable: _Node | None = None
    rest: bool = False
    """A variable that takes everything that follows, slashes too."""
    routes: dict[str, Route] = field(default_factory=dict)


def routes(
    information: Information, creation: Creation, commands: Commands, files: Files, ports: Ports, packs: Packs, forks: Forks
) -> tuple[Route, ...]:
    """The table."""
    one = "/{id}"
    command = "/{id}/exec/{exec_id}"
    return (
        Route("POST", f"{one}/exec", "use", on_sandbox=commands.run),
        Route("POST", "", on_all=creation.create),
        Route("GET", "", on_all=information.list),
        Route("GET", one, "info", on_record=information.show, reads=True),
        Route("POST", f"{one}/attach", "info", on_record=information.show),
        Route("PATCH", one, "change", on_sandbox=information.patch),
        Route("DELETE", one, "stop", on_record=information.stop),
        Route("GET", f"{one}/exec", "use", on_sandbox=commands.list),
        Route("GET", command, "use", on_sandbox=commands.show),
        Route("GET", f"{command}/wait", "use", on_sandbox=commands.wait),
        Route("GET", f"{command}/stdout", "use", on_sandbox=commands.stdout),
        Route("GET", f"{command}/stderr", "use", on_sandbox=commands.stderr),
        Route("PUT", f"{command}/stdin", "use", on_sandbox=commands.stdin),
        Route("POST", f"{command}/signal", "use", on_sandbox=once(commands.signal)),
        Route("POST", f"{command}/resize", "use", on_sandbox=commands.resize),
        Route(WEBSOCKET, f"{command}/attach", "use", on_socket=commands.attach),
        Route("POST", f"{one}/shell", "use", on_sandbox=commands.shell),
        Route("DELETE", f"{one}/shell/{{session}}", "use", on_sandbox=commands.close_session),
        Route("GET", f"{one}/commands", "info", on_sandbox=commands.history, reads=True),
        Route("GET", f"{one}/files", "use", on_sandbox=files.read),
        Route("PUT", f"{one}/files", "use", on_sandbox=files.write),
        Route("GET", f"{one}/files/stat", "use", on_sandbox=files.stat),
        Route("GET", f"{one}/files/list", "use", on_sandbox=files.list),
        Route("GET", f"{one}/files/watch", "use", on_sandbox=files.watch),
        Route("POST", f"{one}/files/mkdir", "use", on_sandbox=once(files.mkdir)),
        Route("POST", f"{one}/files/move", "use", on_sandbox=once(files.move)),
        Route("POST", f"{one}/files/remove", "use", on_sandbox=once(files.remove)),
        Route("POST", f"{one}/files/chmod", "use", on_sandbox=once(files.chmod)),
        Route("POST", f"{one}/files/chown", "use", on_sandbox=once(files.chown)),
        Route("GET", f"{one}/files/tar", "use", on_sandbox=files.tar_out),
        Route("PUT", f"{one}/files/tar", "use", on_sandbox=files.tar_in),
        Route(WEBSOCKET, f"{one}/tcp/{{port}}", "use", on_socket=ports.tcp),
        Route("GET", f"{one}/url/{{port}}", "use", on_sandbox=ports.url),
        Route(ANY, f"{one}/ports/{{port}}/{{rest...}}", "use", on_sandbox=ports.http),
        Route(WEBSOCKET, f"{one}/ports/{{port}}/{{rest...}}", "use", on_socket=ports.websocket),
        Route("GET", f"{one}/processes", "use", on_sandbox=information.processes),
        Route("GET", f"{one}/metrics", "info", on_sandbox=information.metrics, reads=True),
        Route("GET", f"{one}/events", "info", on_record=information.events, reads=True),
        Route("POST", f"{one}/pack", "use", on_sandbox=packs.pack),
        Route("POST", f"{one}/fork", "use", on_sandbox=forks.fork),
        Route("GET", f"{one}/diff", "inspect", on_sandbox=information.diff, reads=True),
    )


class EdgeApp:
    """The ASGI app of an edge. The caller's project is ``scope["dsec.project"]``."""

    def __init__(self, sandboxes: Sandboxes, table: tuple[Route, ...]) -> None:
        self.routes = table
        self._sandboxes = sandboxes
        self._clock = sandboxes.clock
        self._root = _Node()
        for route in table:
            self._add(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        socket = Socket(scope, receive, send) if scope["type"] == "websocket" else None
        await answer(call, socket, self._serve(call, socket))

    async def _serve(self, call: Call, socket: Socket | None) -> None:
        route, names = self._find(call.scope)
        if route.on_all is not None:
            await route.on_all(call)
            return
        target = self._sandboxes.live(names[0])
        if target is None or target.record.project != call.project:
            found = await self._sandboxes.find(call.project, names[0])
        else:
            found = target
            if not target.told and not route.reads:
                await self._sandboxes.orphans.keep(target)
        call.names = names[1:]
        if isinstance(found, Record) or not takes(found.state, route.kind):
            await self._serve_ended(call, route, found)
            return
        if route.kind not in ("use", "change"):
            await self._handle(call, socket, route, found)
            return
        found.begin_use(self._clock.monotonic())
        try:
            await self._handle(call, socket, route, found)
        except ChannelLost as error:
            raise await self._sandboxes.agents.verdict(found) from error
        finally:
            found.end_use(self._clock.monotonic())

    async def _handle(self, call: Call, socket: Socket | None, route: Route, sandbox: Sandbox) -> None:
        if route.on_sandbox is not None:
            await route.on_sandbox(call, sandbox)
        elif route.on_record is not None:
            await route.on_record(call, sandbox)
        elif route.on_socket is not None and socket is not None:
            await route.on_socket(call, socket, sandbox)

    async def _serve_ended(self, call: Call, route: Route, found: Sandbox | Record) -> None:
        """What a sandbox that has ended still answers: its record to those who ask for that."""
        record = found if isinstance(found, Record) else found.record
        if route.on_record is None or (not takes(record.state, route.kind)):
            raise refusal(record)
        await route.on_record(call, found)

    def _find(self, scope: Scope) -> tuple[Route, list[str]]:
        """The route and the variable parts of the path. Raises NotFound, MethodNotAllowed."""
        path: str = scope["path"]
        node, names = self._root, list[str]()
        segments = [segment for segment in path[len(PREFIX) :].split("/") if segment]
        for index, segment in enumerate(segments):
            follower = node.literal.get(segment)
            if follower is None:
                follower = node.variable
                if follower is None:
                    raise NotFound(f"there is nothing at {path}; GET /openapi.json lists what there is")
                if follower.rest:
                    names.append(_rest(scope, index))
                    node = follower
                    break
                names.append(segment)
            node = follower
        else:
            if node.variable is not None and node.variable.rest:
                node = node.variable
                names.append("")
        method = WEBSOCKET if scope["type"] == "websocket" else scope["method"]
        route = node.routes.get(method) or (node.routes.get(ANY) if method != WEBSOCKET else None)
        if route is None:
            if not node.routes:
                raise NotFound(f"there is nothing at {path}; GET /openapi.json lists what there is")
            raise MethodNotAllowed(f"{method} is not possible on {path}; possible: {', '.join(node.routes)}")
        return route, names

    def _add(self, route: Route) -> None:
        node = self._root
        for segment in route.path.split("/"):
            if not segment:
                continue
            if segment.startswith("{"):
                if node.variable is None:
                    node.variable = _Node(rest=segment.endswith("...}"))
                node = node.variable
            else:
                node = node.literal.setdefault(segment, _Node())
        node.routes[route.method] = route


class PortsApp:
    """The ASGI app of the ports' own origin: the signature in the path stands in for a key."""

    def __init__(self, sandboxes: Sandboxes, ports: Ports) -> None:
        self._sandboxes = sandboxes
        self._ports = ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        socket = Socket(scope, receive, send) if scope["type"] == "websocket" else None
        await answer(call, socket, self._serve(call, socket))

    async def _serve(self, call: Call, socket: Socket | None) -> None:
        names = self._ports.check(call.scope)
        sandbox = self._sandboxes.live(names[0])
        if sandbox is None:
            raise NotFound("there is nothing here")
        if not sandbox.told:
            await self._sandboxes.orphans.keep(sandbox)
        if not takes(sandbox.state, "use"):
            raise refusal(sandbox.record)
        clock = self._sandboxes.clock
        sandbox.begin_use(clock.monotonic())
        try:
            if socket is None:
                await self._ports.signed(call, names, sandbox)
            else:
                await self._ports.signed_websocket(call, socket, names, sandbox)
        except ChannelLost as error:
            raise await self._sandboxes.agents.verdict(sandbox) from error
        finally:
            sandbox.end_use(clock.monotonic())


async def answer(call: Call, socket: Socket | None, served: Awaitable[None]) -> None:
    """Lets a request be served; what it raises becomes its answer. An answer that has begun is cut off instead, so that nobody takes it for
    a whole one."""
    try:
        await served
        return
    except Disconnected:
        return
    except DSecError as failure:
        error = failure
    except (ChannelLost, ChannelError, SpawnerError, JournalError) as failure:
        error = as_error(failure)
    except Exception as failure:
        error = incident(failure, f"{call.scope.get('method', WEBSOCKET)} {call.scope['path']}")
    if socket is not None:
        with contextlib.suppress(Disconnected):
            await socket.fail(error)
    elif not call.responding:
        await call.fail(error)
    else:
        _log.info("an answer was cut off", path=call.scope["path"], error=error.message)
        raise error


def _rest(scope: Scope, index: int) -> str:
    """The path from segment ``index`` (behind the prefix) on, as it was sent: percent-encoded, with its slashes."""
    raw: bytes | None = scope.get("raw_path")
    path = scope["path"] if raw is None else raw.partition(b"?")[0].decode("ascii", "replace")
    return str(path).split("/", PREFIX.count("/") + 1 + index)[-1]
