"""A sandbox as its user holds it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import msgspec

from libdsec.durations import check_timeout
from libdsec.errors import (
    CommandFailed,
    Conflict,
    DeadlineExceeded,
    DSecError,
    InvalidArgument,
    NotFound,
    ProcessNotFound,
    SandboxFailed,
    SandboxGone,
    Unavailable,
    Unsupported,
    from_body,
)
from libdsec.files import Files
from libdsec.idempotency import once_key
from libdsec.ids import NAME, exec_path, sandbox_path, session_path
from libdsec.locks import Lock
from libdsec.ports import open_port
from libdsec.process import Process
from libdsec.schema import (
    MAX_ARGS_BYTES,
    MAX_OUTPUT_DEFAULT,
    Backend,
    CommandResult,
    CreateItem,
    DiffEntry,
    DSecContainerRunArgs,
    DSecMicroVMRunArgs,
    ExecRequest,
    ForkRequest,
    Metrics,
    PackLine,
    PackRequest,
    PackResult,
    PatchRequest,
    ProcessEntry,
    ProcessInfo,
    PtySize,
    RunArgs,
    SandboxEvent,
    SandboxInfo,
    ShellRequest,
    SignalRequest,
    State,
)
from libdsec.signing import port_url
from libdsec.streams import ByteSource, body_of, whole
from libdsec.transport import OCTETS, Answer, Retry, Source, Transport, encode

if TYPE_CHECKING:
    from libdsec.client import DSecClient

INLINE_STDIN = 1 << 20
"""Bytes of standard input that travel within the request; more is streamed beside it."""
START_POLL_S = 0.01
"""Pause between looks for a command whose standard input is about to be streamed."""
ERROR_TAIL = 400
"""Characters of stderr that the message of a CommandFailed shows."""
DEADLINE_GRACE_S = 5.0
"""The server keeps the deadline of a create or fork request; only if it hasn't spoken this much later does the client."""
CLEAN_UP_S = 30.0
"""How long a cancelled caller waits for the stop that it owes."""
STOPS_AT_ONCE = 64
"""Sandboxes that are stopped at once, where it may be thousands: each takes a connection."""

_sandbox_info = Answer(SandboxInfo)
_command_result = Answer(CommandResult)
_process_info = Answer(ProcessInfo)
_process_infos = Answer(list[ProcessInfo])
_process_entries = Answer(list[ProcessEntry])
_metrics = Answer(Metrics)
_event = Answer(SandboxEvent)
_diff_entry = Answer(DiffEntry)
_pack_line = Answer(PackLine)
_create_item = Answer(CreateItem)

Command = str | Sequence[str]
"""A command: a string is run by ``/bin/sh -c``, a sequence is an argument vector."""


class Sandbox:
    """An isolated computer that lives until it is stopped. Made by :meth:`DSecClient.run` and its kin, or by :meth:`Sandbox.create`.

    ``async with sandbox`` stops it at the end. Every call may raise SandboxNotFound (no such sandbox in this project), SandboxGone
    (stopped or expired; when and why), SandboxFailed (it broke; why), Conflict (it isn't running yet: found while it was being made),
    InvalidArgument (text that has no UTF-8 form; the client is closed), AuthenticationError, and Unavailable (the platform couldn't be
    reached for a minute); the docstrings name what comes on top. Interrupted calls are repeated by the SDK where that is safe.
    """

    def __init__(self, transport: Transport, info: SandboxInfo) -> None:
        self._transport = transport
        self._info = info
        self._own_client: DSecClient | None = None
        self._path = sandbox_path(info.id)
        self._exec_url = transport.at(f"{self._path}/exec")
        self._shell_url = transport.at(f"{self._path}/shell")
        self.files = Files(transport, self._path, info.workdir)
        """The sandbox's files."""

    @classmethod
    def create(
        cls,
        image: str | None = None,
        *,
        lock: Lock | str | os.PathLike[str] | None = None,
        backend: Literal["container", "microvm", "fullvm"] = "container",
        client: DSecClient | None = None,
        timeout: float | None = None,
        workspace: str | None = None,
        toolkits: Sequence[str] = (),
        memory_limit_mb: int | None = None,
        cpu_cores_limit: float | None = None,
        disk_limit_mb: int | None = None,
        pids_limit: int | None = None,
        ttl_running_stop: float | None = None,
        ttl_total: float | None = None,
        network: Literal["aether", "none", "bridged"] = "aether",
        network_rules: Mapping[str, bool] | None = None,
        init_user: str = "root",
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        cpu_class: Literal["best_effort", "latency_sensitive"] = "best_effort",
        no_new_privs: bool = False,
        keep_on_failure: bool = False,
        idempotency_key: str | None = None,
    ) -> SandboxCreation:
        """The short form: ``async with Sandbox.create("python:3.11") as sandbox`` or ``sandbox = await Sandbox.create("python:3.11")``.

        ``image`` is the base image, ``timeout`` the seconds until DeadlineExceeded; the other arguments are the fields of
        :class:`DSecContainerRunArgs`. ``lock``, instead of image, workspace, toolkits and the network's, is a :class:`Lock` or a file that
        ``dsec lock`` wrote: the sandbox starts from exactly those layers. Without ``client`` a client of its own is made from the
        environment; it is closed when the sandbox is stopped.

        Raises InvalidArgument and Unsupported (backend) at once, and OSError for a lock file that can't be read; when it is awaited or
        entered, what :meth:`DSecClient.run` raises, and InvalidArgument where no server is to be found. Safe to repeat with an
        ``idempotency_key``; without one each call makes a sandbox.
        """
        if (image is None) == (lock is None):
            raise InvalidArgument("either an image or a lock is wanted", field="image")
        if lock is not None:
            if workspace is not None or toolkits or network != "aether" or network_rules is not None:
                raise InvalidArgument("a lock says what the layers and the network are: give none of them beside it", field="lock")
            locked = lock if isinstance(lock, Lock) else Lock.read(lock)
            image, workspace, toolkits = locked.image, locked.workspace, locked.toolkits
            network, network_rules = locked.network, locked.network_rules
        fields = {
            "workspace": workspace,
            "toolkits": tuple(toolkits),
            "memory_limit_mb": memory_limit_mb,
            "cpu_cores_limit": cpu_cores_limit,
            "disk_limit_mb": disk_limit_mb,
            "pids_limit": pids_limit,
            "ttl_running_stop": ttl_running_stop,
            "ttl_total": ttl_total,
            "network": network,
            "network_rules": None if network_rules is None else dict(network_rules),
            "init_user": init_user,
            "workdir": workdir,
            "env": dict(env or {}),
            "labels": dict(labels or {}),
            "cpu_class": cpu_class,
            "no_new_privs": no_new_privs,
            "keep_on_failure": keep_on_failure,
            "idempotency_key": idempotency_key,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        kinds: dict[str, type[DSecContainerRunArgs] | type[DSecMicroVMRunArgs]] = {
            "container": DSecContainerRunArgs,
            "microvm": DSecMicroVMRunArgs,
        }
        if backend == "fullvm":
            raise Unsupported("there is no full VM backend yet; use a container", field="backend")
        if backend not in kinds:
            raise InvalidArgument(f"backend {backend!r} is none of {', '.join(kinds)}", field="backend")
        try:
            args = msgspec.convert({"backend": backend, "container_image": image, **given}, kinds[backend])
        except msgspec.ValidationError as error:
            raise InvalidArgument(str(error)) from error
        return SandboxCreation(args, client, timeout)

    # -- identity and state ---------------------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """``sb-…``: any client of the project finds the sandbox again by it (:meth:`DSecClient.attach`)."""
        return self._info.id

    @property
    def backend(self) -> Backend:
        """What kind of sandbox it is."""
        return self._info.backend

    @property
    def state(self) -> State:
        """The state as last heard; :meth:`info` asks."""
        return self._info.state

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.backend} {self.state}>"

    async def info(self) -> SandboxInfo:
        """The sandbox's record: state, limits, labels, times. Of one that was stopped SandboxGone says when and why; :meth:`stop` answers
        its record, with what it used, for 24 hours. Safe to repeat."""
        if not (self._transport.closed and self._own_client):
            self._info = await self._transport.call("GET", self._transport.at(self._path), _sandbox_info)
        return self._info

    async def stop(self) -> SandboxInfo:
        """End the sandbox and delete it, from any state, at once. Answers with its record. Stopping a stopped one changes nothing.
        Raises SandboxNotFound. Safe to repeat."""
        if self._transport.closed and self._own_client:
            return self._info
        self._info = await self._transport.call("DELETE", self._transport.at(self._path), _sandbox_info)
        if self._own_client is not None:
            gone = SandboxGone(f"{self.id} was stopped", reason=self._info.reason, at=self._info.ended_at)
            await self._own_client.close(because=gone)
        return self._info

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await _to_its_end(self.stop())

    async def set_ttl(self, *, ttl_running_stop: float | None = None, ttl_total: float | None = None) -> SandboxInfo:
        """Change the idle limit (seconds without use) and the absolute lifetime (seconds from creation). 0 removes one, None leaves it.
        Raises InvalidArgument. Safe to repeat."""
        return await self._patch(PatchRequest(ttl_running_stop=ttl_running_stop, ttl_total=ttl_total))

    async def set_labels(self, labels: Mapping[str, str]) -> SandboxInfo:
        """Replace all labels. Raises InvalidArgument. Safe to repeat."""
        return await self._patch(PatchRequest(labels=dict(labels)))

    async def set_network_rules(self, rules: Mapping[str, bool]) -> SandboxInfo:
        """Replace the network rules. Raises InvalidArgument for a rule that can't be. Safe to repeat."""
        return await self._patch(PatchRequest(network_rules=dict(rules)))

    async def _patch(self, change: PatchRequest) -> SandboxInfo:
        self._info = await self._transport.call("PATCH", self._transport.at(self._path), _sandbox_info, body=encode(change))
        return self._info

    # -- commands -------------------------------------------------------------------------------------------------------------------------

    async def run_shell(
        self,
        command: str,
        *,
        session: str = "default",
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        max_output: int = MAX_OUTPUT_DEFAULT,
        check: bool = False,
    ) -> CommandResult:
        """Run ``command`` in a shell session that keeps working directory, variables and functions between calls.

        Calls of one session are carried out first come, first served. ``exit`` ends the session; the next call opens a new one and says so
        (``session_restarted``). ``timeout`` (seconds) counts the wait for earlier calls: a call whose turn has not come by then is never
        carried out and leaves the session alone, one that runs is killed with the session; both results are ``timed_out``. To cancel a call
        before its turn withdraws it; one that runs goes on. ``cwd``, ``env`` and ``user`` count only when the call opens the session, else
        InvalidArgument. ``max_output``: bytes kept of each stream (at most 64 MiB), the rest is counted and dropped (``truncated``).
        ``check=True`` raises CommandFailed unless the exit code is 0.

        Raises InvalidArgument also for a command and environment above 1.5 MiB together, a NUL byte in them, and any other argument that
        can't be. Interrupted calls are taken up again, never run twice; to repeat a call that raised Unavailable may run the command again.
        """
        request = ShellRequest(
            command=command,
            session=session,
            timeout_s=timeout,
            max_output=max_output,
            cwd=cwd,
            env=None if env is None else dict(env),
            user=user,
            exec_id=_new_exec_id(),
        )
        result = await self._transport.call("POST", self._shell_url, _command_result, body=encode(request))
        return _checked(result, command) if check else result

    async def close_session(self, session: str = "default") -> None:
        """End a shell session and kill its background children. Closing one that isn't there changes nothing. Raises InvalidArgument for
        what can't be a session's name. Safe to repeat."""
        with contextlib.suppress(ProcessNotFound):
            await self._transport.send("DELETE", self._transport.at(session_path(self._path, session)))

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: ByteSource | None = None,
        timeout: float | None = None,
        max_output: int = MAX_OUTPUT_DEFAULT,
        leftovers: Literal["kill", "keep"] = "kill",
        check: bool = False,
        exec_id: str | None = None,
    ) -> CommandResult:
        """Run a command to its end and return what it wrote. A string is run by ``/bin/sh -c``, a sequence is an argument vector.

        ``cwd``: default is the sandbox's working directory. ``env`` is added to the sandbox's environment. ``user``: name, uid,
        ``user:group`` or ``uid:gid``. ``stdin``: bytes, text, an async iterable of bytes of any length, or None (no input).
        ``timeout`` (seconds): then the whole process tree is killed and the result is ``timed_out``. ``max_output``: bytes kept of each
        stream (at most 64 MiB); the rest is counted and dropped (``truncated``), the command never blocks. ``leftovers="keep"`` lets
        background children live on when the command ends. ``check=True`` raises CommandFailed unless the exit code is 0. ``exec_id``
        names the call: one that is known already is attached to, not run again.

        A program that isn't there is a result too (exit code 127, ``start_error``). Raises InvalidArgument (an argument vector and
        environment above 1.5 MiB together, one argument, string or variable of 128 KiB (:meth:`run_shell` takes longer strings), a NUL byte
        in them, and any other argument that can't be), and what an iterable ``stdin``
        raises: then the command is killed.

        An interrupted call is taken up again, never run twice; only where the connection breaks that carries more than 1 MiB of ``stdin``,
        or an iterable, the command is killed and Unavailable raised. Cancelling the call leaves the command running; to repeat a call is
        safe only with an ``exec_id`` of your own.
        """
        content = None if stdin is None else whole(stdin)
        streamed = stdin is not None and (content is None or len(content) > INLINE_STDIN)
        request = self._exec_request(command, cwd, env, user, exec_id)
        request.timeout_s = timeout
        request.max_output = max_output
        request.leftovers = leftovers
        if streamed:
            assert stdin is not None
            request.stdin_stream = True
            result = await self._exec_streaming_stdin(request, stdin)
        else:
            request.stdin = None if content is None else bytes(content)
            result = await self._transport.call("POST", self._exec_url, _command_result, body=encode(request))
        return _checked(result, command) if check else result

    async def _exec_streaming_stdin(self, request: ExecRequest, stdin: ByteSource) -> CommandResult:
        """Run a command while its standard input is sent beside it. The command's end wins: input that it didn't want is given up."""
        assert request.exec_id is not None
        path = exec_path(self._path, request.exec_id)
        command = asyncio.ensure_future(self._transport.call("POST", self._exec_url, _command_result, body=encode(request)))
        feeding = asyncio.ensure_future(self._feed(path, stdin))
        try:
            await asyncio.wait((command, feeding), return_when=asyncio.FIRST_COMPLETED)
            if not command.done() and feeding.exception() is not None:
                kill = SignalRequest(signal="KILL", tree=True)
                await self._transport.send("POST", self._transport.at(f"{path}/signal"), body=encode(kill))
                feeding.result()
            return await command
        finally:
            command.cancel()
            feeding.cancel()
            await asyncio.gather(command, feeding, return_exceptions=True)

    async def _feed(self, path: str, stdin: ByteSource) -> None:
        """Send the whole input. Raises Unavailable when the connection breaks, and what the source raises.

        Any other refusal means that the command ended or closed its input first: its result tells what it made of it.
        """
        content = body_of(stdin)
        source = content if isinstance(content, bytes) else Source(content)
        try:
            await self._until_started(path)
            url = self._transport.at(f"{path}/stdin", {"eof": True})
            async with self._transport.request("PUT", url, data=source, headers={"Content-Type": OCTETS}) as response:
                await response.read()
        except Unavailable:
            raise
        except DSecError as error:
            # A source may well read from a sandbox itself: what it raises says nothing about this command.
            if isinstance(source, Source) and error is source.failure:
                raise

    async def _until_started(self, path: str) -> None:
        while True:
            try:
                await self._transport.call("GET", self._transport.at(path), _process_info)
                return
            except ProcessNotFound:
                await asyncio.sleep(START_POLL_S)

    async def start(
        self,
        command: Command,
        *,
        pty: PtySize | None = None,
        stdin: bool | bytes | str = True,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        leftovers: Literal["kill", "keep"] = "kill",
        exec_id: str | None = None,
    ) -> Process:
        """Start a command and return as soon as it runs; its output is read from the :class:`Process`.

        ``stdin``: True: what ``write_stdin`` sends, until ``close_stdin``; False: no input; bytes or text: that (at most 16 MiB), then the
        end. ``pty`` gives the command a terminal of that size. ``timeout`` (seconds) kills its whole tree. Without ``exec_id`` one is made.
        A program that isn't there: the process ends at once with exit code 127. The other arguments are those of :meth:`exec`.

        Raises InvalidArgument for the same as :meth:`exec`, a longer ``stdin`` and a size that no terminal has. An interrupted call is
        taken up again, never run twice; to repeat a call is safe with an ``exec_id`` of your own.
        """
        request = self._exec_request(command, cwd, env, user, exec_id)
        request.mode = "start"
        request.pty = pty
        request.timeout_s = timeout
        request.leftovers = leftovers
        if isinstance(stdin, bool):
            request.stdin_stream = stdin
        else:
            request.stdin = stdin.encode("utf-8", "surrogateescape") if isinstance(stdin, str) else stdin
        info = await self._transport.call("POST", self._exec_url, _process_info, body=encode(request))
        return Process(self._transport, self._path, info)

    def _exec_request(
        self, command: Command, cwd: str | None, env: Mapping[str, str] | None, user: str | None, exec_id: str | None
    ) -> ExecRequest:
        _check_size(command, env or {})
        if exec_id and not NAME.fullmatch(exec_id):
            text = f"an exec_id is 1 to 128 letters, digits and . _ : -, beginning with a letter or digit, not {exec_id!r}"
            raise InvalidArgument(text, field="exec_id")
        request = ExecRequest(cwd=cwd, env={} if env is None else dict(env), user=user, exec_id=exec_id or _new_exec_id())
        if isinstance(command, str):
            request.command = command
        else:
            request.argv = list(command)
            if not request.argv:
                raise InvalidArgument("the argument vector is empty", field="argv")
        return request

    async def process(self, exec_id: str) -> Process:
        """A command found again by its exec_id, whoever started it. Raises ProcessNotFound. Safe to repeat."""
        url = self._transport.at(exec_path(self._path, exec_id))
        return Process(self._transport, self._path, await self._transport.call("GET", url, _process_info))

    async def commands(self) -> list[ProcessInfo]:
        """The commands that were started here: those that run and the newest 256 that ended. Safe to repeat."""
        return await self._transport.call("GET", self._exec_url, _process_infos)

    # -- looking inside -------------------------------------------------------------------------------------------------------------------

    async def processes(self) -> list[ProcessEntry]:
        """Every process inside the sandbox, as its /proc shows it. Safe to repeat."""
        return await self._transport.call("GET", self._transport.at(f"{self._path}/processes"), _process_entries)

    async def metrics(self) -> Metrics:
        """CPU seconds, memory, pids and disk in use, with their limits, now. Safe to repeat."""
        return await self._transport.call("GET", self._transport.at(f"{self._path}/metrics"), _metrics)

    def events(self, *, follow: bool = False) -> AsyncIterator[SandboxEvent]:
        """What happened to the sandbox so far, oldest first; with ``follow=True`` also what happens from now on, until it is gone.
        A broken connection raises Unavailable; asking again begins at the oldest event."""
        return self._transport.lines("GET", self._transport.at(f"{self._path}/events", {"follow": follow}), _event)

    def diff(self) -> AsyncIterator[DiffEntry]:
        """What was written and removed since creation: the paths of the writable layer, also of a failed sandbox that is kept. A broken
        connection raises Unavailable. Safe to repeat."""
        return self._transport.lines("GET", self._transport.at(f"{self._path}/diff"), _diff_entry)

    # -- its files as an image, and as the start of others --------------------------------------------------------------------------------

    async def pack_diff(
        self,
        name: str,
        *,
        exclude: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        leftovers: Literal["remove", "keep"] = "remove",
        progress: Callable[[str], None] | None = None,
    ) -> PackResult:
        """Make an image of what the sandbox runs on and what was written and removed in it: the next version of ``name``, a base image.

        The sandbox stands still for some milliseconds (``freeze_ms``), then runs on while the layer is made. Shell histories and the caches
        of package managers stay out unless ``leftovers="keep"``, and so does what matches a glob of ``exclude``: ``*`` and ``?`` within a
        name, ``**`` over directories, ``~/`` for every home directory, at any depth without a leading slash; a directory takes along what
        is in it. What stays out is listed in ``removed``, and stays in the sandbox; where it had replaced a file of the image, the image's
        shows again. ``labels`` are set over those of the image. ``progress`` is called with what is being done.

        Where the server shares a store, the image is sent there after this has returned: other nodes find it some seconds to minutes later,
        or once ``client.images.push`` has returned.

        Raises InvalidArgument (a name, a label or a glob), PermissionDenied (a name of another project), ImageError (what was written can't
        be a layer, or it is one too many), NoCapacity (no disk space), Conflict (the sandbox doesn't run), Unsupported (the node can't
        freeze it), and Unavailable where it doesn't stand still within 2 seconds. An interrupted call is taken up again: it makes one
        image; your own repetition makes another version.
        """
        request = PackRequest(name=name, exclude=tuple(exclude), labels=dict(labels or {}), leftovers=leftovers)
        headers = {"Idempotency-Key": secrets.token_hex(12)}
        return await self._transport.repeat(lambda: self._pack(request, headers, progress))

    async def _pack(self, request: PackRequest, headers: Mapping[str, str], progress: Callable[[str], None] | None) -> PackResult:
        url = self._transport.at(f"{self._path}/pack")
        async with aclosing(self._transport.lines("POST", url, _pack_line, body=encode(request), headers=headers)) as lines:
            async for line in lines:
                if line.error is not None:
                    raise from_body(line.error)
                if line.result is not None:
                    return line.result
                if progress is not None and line.step is not None:
                    progress(line.step)
        raise Unavailable("the server ended the pack without a result")

    async def fork(
        self,
        count: int = 1,
        *,
        memory: bool = False,
        memory_limit_mb: int | None = None,
        cpu_cores_limit: float | None = None,
        disk_limit_mb: int | None = None,
        pids_limit: int | None = None,
        ttl_running_stop: float | None = None,
        ttl_total: float | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> list[Sandbox]:
        """Make ``count`` sandboxes that start with this one's files of one moment; from then on each is on its own.

        Processes don't come along, nor what is in /dev/shm and other memory. Layers, limits, environment, labels and lifetimes are those of
        this sandbox but for what is given: ``env`` is set over its environment, ``labels`` replace its labels. ``disk_limit_mb`` covers the
        files that they begin with. ``info().forked_from`` tells where they come from. ``memory=True``, with processes and all, is
        Unsupported for a container.

        All or nothing: if one fails, the others are stopped and its error is raised (as :meth:`DSecClient.run` raises them). ``timeout``:
        seconds, then DeadlineExceeded. Raises on top InvalidArgument (``disk_limit_mb`` below what the files take, say), NoCapacity (it
        isn't waited for), Unsupported (``memory``, or a node that can't freeze this sandbox), and Unavailable where it doesn't stand still
        within 2 seconds.

        An interrupted call is taken up again with the same keys, so nothing is made twice; what wasn't begun before starts with the files
        of that later moment (``info().forked_at``). Of several, sandbox i has the key ``<idempotency_key>/<i>``. Your own repetition is
        safe with an ``idempotency_key``; after an error it takes another one, for the keys of those that were stopped answer SandboxGone.
        """
        if memory:
            raise Unsupported(f"a fork of a {self.backend} has its files only, not its memory", field="memory")
        request = ForkRequest(
            count=count,
            memory_limit_mb=memory_limit_mb,
            cpu_cores_limit=cpu_cores_limit,
            disk_limit_mb=disk_limit_mb,
            pids_limit=pids_limit,
            ttl_running_stop=ttl_running_stop,
            ttl_total=ttl_total,
            env=None if env is None else dict(env),
            labels=None if labels is None else dict(labels),
            idempotency_key=idempotency_key or once_key(),
        )
        check_timeout(timeout)
        made: dict[int, Sandbox] = {}
        try:
            await self._fork(request, made, timeout)
        except BaseException:
            await stop_all(made.values())
            raise
        return [made[index] for index in sorted(made)]

    async def _fork(self, request: ForkRequest, made: dict[int, Sandbox], timeout: float | None) -> None:
        """Fills ``made``. Raises the first item's error, and what concerns the request as a whole."""
        clock = asyncio.get_running_loop().time
        deadline = None if timeout is None else clock() + timeout
        retry: Retry | None = None
        while True:
            started = clock()
            request.timeout_s = None if deadline is None else deadline - started
            if request.timeout_s is not None and request.timeout_s <= 0:
                raise DeadlineExceeded(f"{request.count - len(made)} of {request.count} sandboxes weren't ready in time")
            try:
                async with asyncio.timeout_at(None if deadline is None else deadline + DEADLINE_GRACE_S):
                    failures = await self._forked(request, made)
                lasting = next((failure for failure in failures if not isinstance(failure, Unavailable)), None)
                if lasting is not None:
                    raise lasting
                if len(made) == request.count:
                    return
                text = f"the server ended its answer with {request.count - len(made)} of {request.count} sandboxes missing"
                error = failures[0] if failures else Unavailable(text)
            except Unavailable as failure:
                error = failure
            except TimeoutError as failure:
                text = f"{request.count - len(made)} of {request.count} sandboxes weren't ready in time, and the server is silent"
                raise DeadlineExceeded(text) from failure
            retry = retry or self._transport.retry(deadline)
            delay = retry.delay(error, attempt_started=started, now=clock())
            if delay is None:
                raise error
            await asyncio.sleep(delay)

    async def _forked(self, request: ForkRequest, made: dict[int, Sandbox]) -> list[DSecError]:
        """One attempt, read to its end whatever fails in it: the server counts what it wrote as told, so what comes behind a failure would
        live on, and only the caller of ``made`` can stop it. Returns the items' errors."""
        failures: list[DSecError] = []

        def take(item: CreateItem) -> None:
            if item.error is not None:
                failures.append(from_body(item.error))
            elif item.sandbox is not None:
                made[item.index] = Sandbox(self._transport, item.sandbox)

        url = self._transport.at(f"{self._path}/fork")
        async with self._transport.open_lines("POST", url, _create_item, body=encode(request)) as items:
            try:
                async for item in items:
                    take(item)
            except asyncio.CancelledError:
                for item in await items.left_over():
                    take(item)
                raise
        return failures

    # -- ports ----------------------------------------------------------------------------------------------------------------------------

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A TCP connection to ``port`` inside (127.0.0.1, then ::1), as asyncio's streams. Closing the writer closes both directions.

        Raises InvalidArgument for what is no port. Where nothing listens Conflict is raised, or the first read raises ConnectionResetError.
        So does one on a connection that broke, and the message says why; an end of file is always the program's own. Nothing is repeated.
        """
        url = self._transport.at(f"{self._path}/tcp/{_port(port)}")
        try:
            return await open_port(self._transport, url)
        except (NotFound, Conflict, SandboxGone, SandboxFailed, Unavailable) as refusal:
            # A refused upgrade has no body: whether it is the port or the sandbox that isn't there, and why, must be asked.
            info = await self.info()
            if info.state in ("stopping", "stopped", "lost"):
                raise SandboxGone(f"{self.id} is {info.state}: {info.reason}", reason=info.reason, at=info.ended_at) from refusal
            if info.state == "failed":
                raise SandboxFailed(f"{self.id} failed: {info.reason}", reason=info.reason, at=info.ended_at) from refusal
            raise Conflict(f"port {port} of {self.id} ({info.state}) can't be reached: does anything listen there?") from refusal

    def url(self, port: int) -> str:
        """An HTTP address of ``port`` inside, for browsers and other clients: it holds a signature instead of a key, so whoever has it may
        use the port while the sandbox lives. Asks nobody. Raises InvalidArgument."""
        return port_url(self._info.ports_url, self.id, self._info.ports_key, _port(port))


class SandboxCreation(contextlib.AbstractAsyncContextManager[Sandbox]):
    """What :meth:`Sandbox.create` returns: await it for a sandbox to stop yourself, or enter it for one that is stopped at the end."""

    def __init__(self, args: RunArgs, client: DSecClient | None, timeout: float | None) -> None:
        self._args = args
        self._client = client
        self._timeout = timeout
        self._sandbox: Sandbox | None = None
        self._used = False

    def __await__(self) -> Generator[object, None, Sandbox]:
        return self._create().__await__()

    async def _create(self) -> Sandbox:
        """Raises InvalidArgument the second time: of two sandboxes only one would be stopped."""
        if self._used:
            raise InvalidArgument("this Sandbox.create(...) has made its sandbox: call it again for another one")
        self._used = True
        if self._client is not None:
            return await self._client.run(self._args, timeout=self._timeout)
        from libdsec.client import DSecClient

        client = DSecClient()
        try:
            sandbox = await client.run(self._args, timeout=self._timeout)
        except BaseException:
            await client.close()
            raise
        # From now on stopping the sandbox closes its client.
        sandbox._own_client = client
        return sandbox

    async def __aenter__(self) -> Sandbox:
        self._sandbox = await self._create()
        return self._sandbox

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._sandbox is not None
        await _to_its_end(self._sandbox.stop())


async def _to_its_end(work: Coroutine[object, object, object]) -> None:
    """Finishes what cleans up although the caller is cancelled meanwhile, which is passed on then. A second cancelling ends the wait."""
    task = asyncio.ensure_future(work)
    # Where nobody waits any more nobody asks for its error either.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=CLEAN_UP_S)
        raise


async def stop_all(sandboxes: Iterable[Sandbox]) -> None:
    """Stop sandboxes that nobody will be given. One that can't be stopped now is left: the error on the way is the caller's concern."""
    turns = asyncio.Semaphore(STOPS_AT_ONCE)

    async def stop(sandbox: Sandbox) -> None:
        async with turns:
            await sandbox.stop()

    await asyncio.gather(*map(stop, sandboxes), return_exceptions=True)


def _new_exec_id() -> str:
    return f"ex-{secrets.token_hex(10)}"


def _check_size(command: Command, env: Mapping[str, str]) -> None:
    """Refuse here what the server would refuse after it was sent."""
    argv_size = len(command) if isinstance(command, str) else sum(map(len, command))
    env_size = sum(len(name) + len(value) for name, value in env.items())
    if argv_size + env_size > MAX_ARGS_BYTES:
        field = "argv" if argv_size >= env_size else "env"
        text = f"arguments ({argv_size} bytes) and environment ({env_size}) are larger than {MAX_ARGS_BYTES} bytes together: pass a file"
        raise InvalidArgument(text, field=field)


def _port(port: int) -> int:
    if not 0 < port < 65536:
        raise InvalidArgument(f"{port} is not a TCP port", field="port")
    return port


def _checked(result: CommandResult, command: Command) -> CommandResult:
    if result.exit_code == 0:
        return result
    shown = command if isinstance(command, str) else " ".join(command)
    if result.timed_out:
        how = f"timed out after {result.duration_s:.1f} s"
    elif result.oom_killed:
        how = "was killed at the memory limit"
    elif result.signal is not None:
        how = f"was ended by signal {result.signal}"
    else:
        how = f"ended with exit code {result.exit_code}"
    tail = (result.start_error or result.stderr).strip()[-ERROR_TAIL:]
    raise CommandFailed(f"{shown[:200]!r} {how}{': ' + tail if tail else ''}", result=result)
