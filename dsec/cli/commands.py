"""``dsec exec`` and ``dsec logs``: commands in a sandbox, with their output as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar

import typer

from dsec.cli import sandboxes
from dsec.cli.input import read_chunks
from dsec.cli.interrupts import ctrl_c_goes_to, finished
from dsec.cli.output import AsJson, clock, print_json, print_table, write_all
from dsec.cli.run import complain, fail, with_client

if TYPE_CHECKING:
    from libdsec import DSecClient, OutputStream, Process, Sandbox
    from libdsec.schema import CommandResult, ProcessInfo

KILL_S = 5.0
"""How long the killing of a command may take when its `dsec exec` is to end."""
START_POLL_S = 0.05
"""How often a command is asked for whose start is on its way."""

T = TypeVar("T")
FreshImage = Annotated[str | None, typer.Option("--image", help="Run in a fresh sandbox of this image, which is stopped at the end.")]
Cwd = Annotated[str | None, typer.Option("--cwd", "-w", help="Where the command starts.")]
User = Annotated[str | None, typer.Option("--user", "-u", help="Name, uid, user:group or uid:gid.")]


class _How(TypedDict):
    """How a command runs."""

    cwd: str | None
    env: Mapping[str, str]
    user: str | None
    timeout: float | None
    exec_id: str


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    # Options end at the first word that is none: what follows belongs to the command that is run.
    app.command("exec", context_settings={"allow_interspersed_args": False})(exec_)
    app.command()(logs)


def exec_(
    words: Annotated[list[str], typer.Argument(metavar="SANDBOX COMMAND...", help="With --image only the command.")],
    image: FreshImage = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Send this command's standard input.")] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Give the command a terminal (and the input).")] = False,
    background: Annotated[bool, typer.Option("--detach", "-d", help="Print the exec_id and leave the command running.")] = False,
    cwd: Cwd = None,
    env: sandboxes.Env = None,
    user: User = None,
    timeout: Annotated[float | None, typer.Option(help="Kill the command's whole tree after so many seconds.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a command in a sandbox; its exit code is this command's.

    Output comes as it is written, stdout and stderr apart. Ctrl-C interrupts the command inside; a second one kills its whole tree, and so
    does the end of this program by a signal, or of whoever reads its output. A string for the shell: dsec exec SANDBOX -- sh -c '...'.

    Example: dsec exec sb-e1-... -- pytest -q
    """
    command = list(words) if image else list(words[1:])
    if command[:1] == ["--"]:
        # Behind the sandbox's id it is no longer taken for the end of our own options.
        del command[0]
    if not command:
        fail("a command is missing: dsec exec SANDBOX -- COMMAND...", code=2)
    if background and (image or tty or stdin):
        fail("--detach goes with none of --image, --tty and --stdin", code=2)

    async def run(client: DSecClient) -> int:
        async with sandbox_for(client, words[0], image) as sandbox:
            environment = sandboxes.pairs(env, "--env")
            if tty:
                from dsec.cli.shell import interact

                return await interact(client, sandbox, command, cwd=cwd, env=environment, user=user, timeout=timeout)
            content = b"".join([chunk async for chunk in read_chunks(sys.stdin.fileno())]) if stdin and as_json else None
            process = named_process(client, sandbox, command)
            more: _How = {"cwd": cwd, "env": environment, "user": user, "timeout": timeout, "exec_id": process.exec_id}
            if background:
                await begun(process, sandbox.start(command, stdin=stdin, **more))
                print_json(await process.info()) if as_json else print(process.exec_id)
                return 0
            with _interrupts_go_to(process):
                if as_json:
                    result = await begun(process, sandbox.exec(command, stdin=content, **more))
                    print_json(result_for_people(result))
                    return result.exit_code
                await begun(process, sandbox.start(command, stdin=stdin, **more))
                async with killed_unless_ended(process):
                    return await _follow_to_end(process, stdin=stdin)

    with_client(run)


def logs(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX")],
    exec_id: Annotated[str | None, typer.Argument(metavar="[EXEC_ID]", help="Whose output to show. Without it: list the commands.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the command ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """List a sandbox's commands, or show the output of one.

    What was written stays readable in a window of 8 MiB a stream, also after the command has ended.

    Example: dsec logs sb-e1-... ex-... --follow
    """

    async def run(client: DSecClient) -> None:
        sandbox = await client.attach(sandbox_id)
        if exec_id is None:
            _list_commands(await sandbox.commands(), as_json=as_json)
            return
        process = await sandbox.process(exec_id)
        info = await process.info()
        if as_json:
            print_json(info)
            return
        endless = follow or not info.running
        await asyncio.gather(
            copy_out(process.stdout, sys.stdout.fileno(), None if endless else info.stdout_total),
            copy_out(process.stderr, sys.stderr.fileno(), None if endless else info.stderr_total),
        )

    with_client(run)


def _list_commands(infos: list[ProcessInfo], *, as_json: bool) -> None:
    if as_json:
        print_json(infos)
        return
    rows = [
        (
            info.exec_id,
            clock(info.started_at),
            "running" if info.running else f"exit {info.exit_code}",
            str(info.stdout_total),
            " ".join(info.argv),
        )
        for info in infos
    ]
    print_table(("exec_id", "started", "state", "stdout", "command"), rows, empty="no commands yet")


# -- shared by the commands that run something in a sandbox


@contextlib.asynccontextmanager
async def sandbox_for(client: DSecClient, sandbox_id: str, image: str | None) -> AsyncIterator[Sandbox]:
    """The sandbox of that id; with ``image`` a fresh one, which is stopped whatever happens."""
    if image is None:
        yield await client.attach(sandbox_id)
        return
    run_label = secrets.token_hex(6)
    made: list[str] = []
    try:
        sandbox = await client.run(sandboxes.run_args(image, {"labels": {sandboxes.CREATE_LABEL: run_label}}))
        made.append(sandbox.id)
        yield sandbox
    finally:
        await sandboxes.stop_labelled(client, run_label, made)


def named_process(client: DSecClient, sandbox: Sandbox, command: Sequence[str]) -> Process:
    """A command that isn't started yet, under an exec_id of ours: so it can be ended also while nobody knows how far its start is."""
    from libdsec import Process
    from libdsec.ids import sandbox_path
    from libdsec.schema import ProcessInfo

    info = ProcessInfo(exec_id=f"ex-{secrets.token_hex(8)}", argv=list(command))
    return Process(client.transport, sandbox_path(sandbox.id), info)


async def begun(process: Process, call: Coroutine[Any, Any, T]) -> T:
    """What the call gives that starts ``process``. If we are to end meanwhile, the command is killed."""
    calling = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(calling)
    except BaseException:
        # A call that failed by itself has started nothing, or the service isn't there.
        if not calling.done():
            await finished(_kill(process, calling))
        raise


@contextlib.asynccontextmanager
async def killed_unless_ended(process: Process) -> AsyncIterator[None]:
    """Kills the command where the body is left because we are to end, or nobody reads what it writes. Where the service can't be reached
    it stays."""
    from libdsec.errors import DSecError

    try:
        yield
    except DSecError:
        raise
    except BaseException:
        await finished(_kill(process))
        raise


async def _kill(process: Process, calling: asyncio.Future[T] | None = None) -> None:
    """Kills a command. ``calling``: the call that starts it, which is given up then."""
    from libdsec.errors import DSecError, ProcessNotFound

    with contextlib.suppress(DSecError, TimeoutError):
        async with asyncio.timeout(KILL_S):
            while True:
                try:
                    await process.kill()
                    break
                except ProcessNotFound:
                    if calling is None or calling.done():
                        break
                    # Its start is still on its way.
                    await asyncio.wait([calling], timeout=START_POLL_S)
    if calling is not None:
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)


def result_for_people(result: CommandResult) -> dict[str, object]:
    """A result with its output as text."""
    import msgspec

    fields = msgspec.structs.asdict(result)
    del fields["stdout_bytes"], fields["stderr_bytes"]
    return {**fields, "stdout": result.stdout, "stderr": result.stderr}


async def copy_out(stream: OutputStream, descriptor: int, limit: int | None = None) -> None:
    """Write a command's stream to a descriptor of ours as it comes, up to byte ``limit`` (None: to its end)."""
    if limit is not None and stream.offset >= limit:
        return
    async for chunk in stream:
        await asyncio.to_thread(write_all, descriptor, chunk)
        if limit is not None and stream.offset >= limit:
            return


async def _follow_to_end(process: Process, *, stdin: bool) -> int:
    """Pass output (and input) on until the command ends; returns its exit code. Raises what keeps the input from being sent, and then kills
    the command: it has only a part of it."""
    ending = asyncio.ensure_future(_show_to_end(process))
    feeding = asyncio.ensure_future(_feed(process)) if stdin else None
    try:
        if feeding is not None:
            await asyncio.wait((ending, feeding), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done() and feeding.exception() is not None:
                await process.kill()
                feeding.result()
        result = await ending
    finally:
        left = [task for task in (ending, feeding) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    tell_end(result)
    return result.exit_code


async def _show_to_end(process: Process) -> CommandResult:
    await asyncio.gather(copy_out(process.stdout, sys.stdout.fileno()), copy_out(process.stderr, sys.stderr.fileno()))
    return await process.wait()


def tell_end(result: CommandResult) -> None:
    """Say on stderr what the exit code alone doesn't."""
    if result.start_error is not None:
        complain(result.start_error)
    if result.timed_out:
        complain(f"killed after its timeout ({result.duration_s:.1f} s)")
    if result.oom_killed:
        complain("killed by the sandbox's memory limit")


async def _feed(process: Process) -> None:
    """Send the whole standard input. Raises OSError where it can't be read, Unavailable when the connection breaks."""
    from libdsec.errors import DSecError, Unavailable

    try:
        async for chunk in read_chunks(sys.stdin.fileno()):
            await process.write_stdin(chunk)
        await process.close_stdin()
    except Unavailable:
        raise
    except DSecError:
        # The command ended, or closed its input, before all was sent: its exit code tells what it made of it.
        return


@contextlib.contextmanager
def _interrupts_go_to(process: Process) -> Iterator[None]:
    """Ctrl-C signals the command instead of ending this program: SIGINT first, then SIGKILL to its whole tree. A third one ends us."""
    loop = asyncio.get_running_loop()
    sending: set[asyncio.Task[None]] = set()
    interrupts = 0

    async def send(kill: bool) -> None:
        from libdsec.errors import DSecError, ProcessNotFound

        with contextlib.suppress(DSecError):
            while True:
                try:
                    return await (process.kill() if kill else process.signal("INT"))
                except ProcessNotFound:
                    # Its start is still on its way.
                    await asyncio.sleep(START_POLL_S)

    def interrupted() -> bool:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 2:
            return False
        task = loop.create_task(send(kill=interrupts > 1))
        sending.add(task)
        task.add_done_callback(sending.discard)
        return True

    with ctrl_c_goes_to(interrupted):
        try:
            yield
        finally:
            for task in sending:
                task.cancel()
