"""``dsec create``, ``lock``, ``ls``, ``fork``, ``pack``, ``stop``: sandboxes as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dsec.cli.interrupts import finished
from dsec.cli.output import AsJson, age, print_json, print_table, printable, progress, size, working
from dsec.cli.run import CliError, complain, fail, with_client

if TYPE_CHECKING:
    from libdsec import DSecClient
    from libdsec.errors import DSecError
    from libdsec.schema import DSecContainerRunArgs, SandboxInfo, State

CREATE_LABEL = "dsec-cli-create"
"""Names one run of a command that makes sandboxes, so that it finds all of them again when it is interrupted."""
STOPS_AT_ONCE = 64
TELL_AFTER_S = 1.0
"""When it is said that sandboxes are being stopped: before, nobody wonders."""
STOPPING_S = 70.0
"""How long the stopping of what a command made may take: longer than the SDK waits for a service that restarts."""
STOPPING_EACH_S = 0.1
"""So much longer for each sandbox."""
ENDED: tuple[State, ...] = ("stopped", "failed", "lost")
"""States whose sandboxes the server lists only if asked for them, but for failed ones that are kept for inspection."""

Image = Annotated[str, typer.Argument(help="Base image: a name or a digest.")]
MaybeImage = Annotated[str | None, typer.Argument(help="Base image: a name or a digest.")]
Network = Literal["aether", "none", "bridged"]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="Environment; may be repeated.")]
Label = Annotated[list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="Label; may be repeated.")]
MaybeSandboxes = Annotated[list[str] | None, typer.Argument(metavar="[SANDBOX]...", help="Ids of sandboxes.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command()(create)
    app.command("lock")(write_lock)
    app.command("ls")(ls)
    app.command()(fork)
    app.command()(pack)
    app.command()(stop)


def create(
    image: MaybeImage = None,
    lock: Annotated[Path | None, typer.Option(help="Start from what `dsec lock` wrote, instead of an image and layers.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", help="How many, all alike.")] = 1,
    workspace: Annotated[str | None, typer.Option(help="Workspace layer.")] = None,
    toolkit: Annotated[list[str] | None, typer.Option(help="Toolkit layer; may be repeated, lowest first.")] = None,
    memory_mb: Annotated[int | None, typer.Option(help="Memory limit.")] = None,
    cpus: Annotated[float | None, typer.Option(help="Limit of CPU cores.")] = None,
    disk_mb: Annotated[int | None, typer.Option(help="Limit of the writable layer.")] = None,
    pids: Annotated[int | None, typer.Option(help="Limit of processes.")] = None,
    idle: Annotated[float | None, typer.Option(help="Stop after so many seconds without use.")] = None,
    lifetime: Annotated[float | None, typer.Option(help="Stop so many seconds after creation, whatever it does.")] = None,
    network: Annotated[str | None, typer.Option(help="aether, none or bridged.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="Who commands run as.")] = None,
    workdir: Annotated[str | None, typer.Option("--workdir", "-w", help="Where commands start.")] = None,
    env: Env = None,
    label: Label = None,
    no_new_privs: Annotated[bool, typer.Option(help="setuid programs gain nothing.")] = False,
    keep_on_failure: Annotated[bool, typer.Option(help="Keep what is left of a failed sandbox for `dsec debug`.")] = False,
    rm: Annotated[bool, typer.Option("--rm", help="Wait for Ctrl-C, then stop them all.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds until what isn't ready is given up.")] = None,
    as_json: AsJson = False,
) -> None:
    """Create one sandbox, or many at once, and print their ids as they become ready.

    If interrupted, it stops those that it had made.

    Example: dsec create python:3.11 --count 8 --memory-mb 512 --label run=1
    """
    if (image is None) == (lock is None):
        fail("name an image, or give --lock FILE: one of the two", code=2)
    if lock is not None and (workspace or toolkit or network):
        fail("--lock says what the layers and the network are: give none of them beside it", code=2)
    fields = {
        "workspace": workspace,
        "toolkits": tuple(toolkit or ()),
        "memory_limit_mb": memory_mb,
        "cpu_cores_limit": cpus,
        "disk_limit_mb": disk_mb,
        "pids_limit": pids,
        "ttl_running_stop": idle,
        "ttl_total": lifetime,
        "network": network,
        "init_user": user,
        "workdir": workdir,
        "no_new_privs": no_new_privs,
        "keep_on_failure": keep_on_failure,
    }

    async def run(client: DSecClient) -> int:
        given = {name: value for name, value in fields.items() if value not in (None, {}, ())}
        run_label = secrets.token_hex(6)
        base, pinned = (image, {}) if lock is None else locked(lock)
        args = run_args(
            base or "", {**pinned, **given, "env": pairs(env, "--env"), "labels": {**pairs(label, "--label"), CREATE_LABEL: run_label}}
        )
        async with stopped_on_failure(client, run_label) as made:
            failures = await _create_all(client, args, count, timeout, made, as_json=as_json)
            if rm:
                typer.echo("Ctrl-C stops them.", err=True)
                await asyncio.Event().wait()
        return 1 if failures else 0

    with_client(run)


async def _create_all(
    client: DSecClient, args: DSecContainerRunArgs, count: int, timeout: float | None, made: list[str], *, as_json: bool
) -> int:
    """Print each as it is ready, and add it to ``made``; returns how many failed."""
    failures: list[str] = []
    infos: list[SandboxInfo] = []
    with progress() as bar:
        task = bar.add_task("creating", total=count)
        async for item in client.run_many(args, count=count, timeout=timeout):
            bar.advance(task)
            if item.error is not None:
                failures.append(item.error.message)
            elif item.sandbox is not None:
                made.append(item.sandbox.id)
                if as_json:
                    infos.append(await item.sandbox.info())
                else:
                    print(item.sandbox.id, flush=True)
    if as_json:
        print_json(infos)
    for message in sorted(set(failures)):
        complain(f"{failures.count(message)} of {count} not created: {message}")
    return len(failures)


def ls(
    state: Annotated[str | None, typer.Option(help="Only those in this state.")] = None,
    label: Label = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also those that ended in the last 24 hours.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the sandboxes of this key's project, oldest first. A failed one that is kept for inspection is there until it is stopped.

    Example: dsec ls --label run=1
    """

    async def run(client: DSecClient) -> None:
        if state is not None:
            found = [info async for info in matching(client, label, state)]
        elif everything:
            found = await with_ended(client, pairs(label, "--label"))
        else:
            found = await still_there(client, pairs(label, "--label"))
        if as_json:
            print_json(found)
            return
        rows = [
            (
                info.id,
                info.state,
                info.image + "".join(f" +{layer}" for layer in (info.workspace, *info.toolkits) if layer),
                age(info.created_at),
                f"{info.memory_limit_mb} MB, {info.cpu_cores_limit:g} cores",
                " ".join(f"{name}={value}" for name, value in shown_labels(info)),
                info.reason or "",
            )
            for info in found
        ]
        print_table(
            ("id", "state", "image", "age", "limits", "labels", "reason"), rows, empty="no sandboxes; `dsec create IMAGE` makes one"
        )

    with_client(run)


def stop(
    sandboxes: MaybeSandboxes = None,
    everything: Annotated[bool, typer.Option("--all", help="Every sandbox of this key's project.")] = False,
    label: Label = None,
    as_json: AsJson = False,
) -> None:
    """Stop sandboxes at once, from whatever state, also failed ones that are kept. What they wrote is gone.

    Example: dsec stop --label run=1
    """
    if bool(sandboxes) + everything + bool(label) != 1:
        fail("name sandboxes, or give --label, or --all: one of the three", code=2)

    async def run(client: DSecClient) -> int:
        ids = list(sandboxes or []) or [info.id for info in await still_there(client, pairs(label, "--label"))]
        stopped, errors = await stop_many(client, ids)
        if as_json:
            print_json(stopped)
        else:
            for info in stopped:
                print(f"{info.id} {info.state}")
        for sandbox_id, message in errors.items():
            complain(f"{sandbox_id}: {message}")
        return 1 if errors else 0

    with_client(run)


def write_lock(
    file: Annotated[Path, typer.Argument(help="To be written; .toml or .json.")],
    image: Image,
    workspace: Annotated[str | None, typer.Option(help="Workspace layer.")] = None,
    toolkit: Annotated[list[str] | None, typer.Option(help="Toolkit layer; may be repeated, lowest first.")] = None,
    network: Annotated[Network, typer.Option(help="aether, none or bridged.")] = "aether",
    allow: Annotated[list[str] | None, typer.Option(help="Network rule that allows; may be repeated.")] = None,
    deny: Annotated[list[str] | None, typer.Option(help="Network rule that denies; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write down the digests, and network rules, that make an environment reproducible; `dsec create --lock` starts from the file.

    Example: dsec lock env.toml python:3.11 --workspace my-repo --toolkit agent
    """

    async def run(client: DSecClient) -> None:
        rules = {**dict.fromkeys(allow or (), True), **dict.fromkeys(deny or (), False)}
        made = await client.images.lock(image, workspace=workspace, toolkits=toolkit or (), network=network, network_rules=rules or None)
        made.write(file)
        if as_json:
            print_json(made)
        else:
            print(f"{file}: {' '.join((made.image, *([made.workspace] if made.workspace else []), *made.toolkits))}")

    with_client(run)


def fork(
    sandbox: Annotated[str, typer.Argument(help="Id of a running sandbox.")],
    count: Annotated[int, typer.Option("--count", "-n", help="How many.")] = 1,
    label: Label = None,
    env: Env = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds until it is given up.")] = None,
    as_json: AsJson = False,
) -> None:
    """Create sandboxes that start with another one's files of this moment, and print their ids. Its processes don't come along.

    Labels, limits and environment are the other one's; --label replaces its labels, --env is set over its environment.

    Example: dsec fork sb-e1-… --count 8 --label branch=2
    """

    async def run(client: DSecClient) -> None:
        parent = await client.attach(sandbox)
        labels = pairs(label, "--label") if label else None
        with working(f"forking {sandbox}"):
            made = await parent.fork(count, labels=labels, env=pairs(env, "--env"), timeout=timeout)
        if as_json:
            print_json([await child.info() for child in made])
            return
        for child in made:
            print(child.id)

    with_client(run)


def pack(
    sandbox: Annotated[str, typer.Argument(help="Id of a running sandbox.")],
    name: Annotated[str, typer.Argument(help="What the image is called; the same name again makes its next version.")],
    exclude: Annotated[list[str] | None, typer.Option(help="Glob of paths that stay out; may be repeated. ** crosses directories.")] = None,
    label: Label = None,
    keep_leftovers: Annotated[bool, typer.Option(help="Take shell histories and package caches along.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a base image of a sandbox: what it runs on, and what was written and removed in it. It runs on meanwhile.

    Example: dsec pack sb-e1-… solved:17 --exclude '**/__pycache__' --exclude '/tmp/**'
    """

    async def run(client: DSecClient) -> None:
        with working(f"packing {sandbox}") as tell:
            result = await (await client.attach(sandbox)).pack_diff(
                name,
                exclude=exclude or (),
                labels=pairs(label, "--label"),
                leftovers="keep" if keep_leftovers else "remove",
                progress=lambda step: tell(f"{step} ({sandbox})"),
            )
        if as_json:
            print_json(result)
            return
        image = result.image
        print(f"{image.name}@{image.version} {size(result.bytes)} in {len(image.layers)} layers, frozen for {result.freeze_ms:.1f} ms")
        for leftover in result.removed:
            print(f"left out {printable(leftover.glob)}: {leftover.entries} paths, {size(leftover.bytes)}")

    with_client(run)


# -- shared by the commands that make, find or stop sandboxes


def locked(path: Path) -> tuple[str, dict[str, object]]:
    """The base image of a lock file, and the other fields that it sets. Raises InvalidArgument, OSError."""
    from libdsec import Lock

    lock = Lock.read(path)
    fields: dict[str, object] = {"workspace": lock.workspace, "toolkits": lock.toolkits, "network": lock.network}
    return lock.image, {**fields, **({} if lock.network_rules is None else {"network_rules": lock.network_rules})}


def pairs(given: Sequence[str] | None, option: str) -> dict[str, str]:
    """``NAME=VALUE`` words as a mapping. Raises CliError."""
    found = {}
    for word in given or ():
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise CliError(f"{option} {word!r}: NAME=VALUE is wanted")
        found[name] = value
    return found


def run_args(image: str, fields: dict[str, object]) -> DSecContainerRunArgs:
    """The args of a container from command line values. Raises CliError for one that doesn't fit."""
    import msgspec

    from libdsec.schema import DSecContainerRunArgs

    try:
        return msgspec.convert({"backend": "container", "container_image": image, **fields}, DSecContainerRunArgs)
    except msgspec.ValidationError as error:
        raise CliError(str(error)) from error


async def matching(client: DSecClient, label: Sequence[str] | None, state: str) -> AsyncIterator[SandboxInfo]:
    """The project's sandboxes with all of the labels, in the state. Raises CliError for a state that doesn't exist."""
    import msgspec

    from libdsec.schema import State

    try:
        wanted: State = msgspec.convert(state, State)
    except msgspec.ValidationError as error:
        raise CliError(f"--state {state}: {error}") from error
    async for info in client.list(state=wanted, labels=pairs(label, "--label")):
        yield info


async def still_there(client: DSecClient, labels: Mapping[str, str]) -> list[SandboxInfo]:
    """The project's sandboxes with all of the labels that something is left of: a failed one that is kept has its disk."""
    return [info async for info in client.list(labels=labels) if info.state not in ("stopped", "lost")]


async def with_ended(client: DSecClient, labels: Mapping[str, str]) -> list[SandboxInfo]:
    """The project's sandboxes with all of the labels, also those of which only the record is left."""
    found = {info.id: info async for info in client.list(labels=labels)}
    for state in ENDED:
        # One that ended meanwhile is in both answers; the later one tells how it ended.
        found.update({info.id: info async for info in client.list(state=state, labels=labels)})
    return sorted(found.values(), key=lambda info: (info.created_at, info.id))


def shown_labels(info: SandboxInfo) -> list[tuple[str, str]]:
    """The user's own labels."""
    return [(printable(name), printable(value)) for name, value in info.labels.items() if name != CREATE_LABEL]


async def stop_many(client: DSecClient, ids: Sequence[str]) -> tuple[list[SandboxInfo], dict[str, str]]:
    """Stop many at once; returns the records and, by id, what went wrong."""
    stopped: list[SandboxInfo] = []
    with progress() as bar:
        task = bar.add_task("stopping", total=len(ids))
        errors = await _stop_each(client, ids, stopped, lambda: bar.advance(task))
    return stopped, {sandbox_id: error.message for sandbox_id, error in errors.items()}


async def _stop_each(client: DSecClient, ids: Sequence[str], stopped: list[SandboxInfo], tell: Callable[[], None]) -> dict[str, DSecError]:
    """Stop many at once: the records go to ``stopped`` as they come. Returns, by id, what went wrong."""
    from libdsec.errors import DSecError

    errors: dict[str, DSecError] = {}
    slots = asyncio.Semaphore(STOPS_AT_ONCE)

    async def one(sandbox_id: str) -> None:
        async with slots:
            try:
                stopped.append(await _stop_one(client, sandbox_id))
            except DSecError as error:
                errors[sandbox_id] = error
            tell()

    await asyncio.gather(*map(one, ids))
    return errors


async def _stop_one(client: DSecClient, sandbox_id: str) -> SandboxInfo:
    """Stop a sandbox by its id alone; of one that has ended already: its record. Raises SandboxNotFound, Unavailable."""
    from libdsec.ids import sandbox_path
    from libdsec.schema import SandboxInfo
    from libdsec.transport import Answer

    url = client.transport.at(sandbox_path(sandbox_id))
    return await client.transport.call("DELETE", url, Answer(SandboxInfo))


@asynccontextmanager
async def stopped_on_failure(client: DSecClient, run_label: str) -> AsyncIterator[list[str]]:
    """If the body is interrupted or fails, stop every sandbox with this run's label, also those still on their way. The body adds the ids
    that it learns of to what it is given."""
    made: list[str] = []
    try:
        yield made
    except BaseException:
        await stop_labelled(client, run_label, made)
        raise


async def stop_labelled(client: DSecClient, run_label: str, made: Sequence[str]) -> None:
    """Stop every sandbox that this run of a command made, whatever signals come meanwhile. Where that can't be done, the ids that are known
    (from the service, or as ``made``) are named, and how to stop them."""
    await finished(_stop_labelled(client, run_label, made))


async def _stop_labelled(client: DSecClient, run_label: str, made: Sequence[str]) -> None:
    from libdsec.errors import DSecError, SandboxNotFound

    left = list(made)
    stopped: list[SandboxInfo] = []
    reasons: set[str] = set()
    telling = asyncio.ensure_future(_tell_of_stopping(left))
    try:
        async with asyncio.timeout(STOPPING_S) as patience:
            left[:] = [info.id for info in await still_there(client, {CREATE_LABEL: run_label})]
            patience.reschedule(asyncio.get_running_loop().time() + STOPPING_S + STOPPING_EACH_S * len(left))
            errors = await _stop_each(client, left, stopped, lambda: None)
        # What was on its way when we left may have been taken back by the service itself.
        gone = {sandbox_id for sandbox_id, error in errors.items() if isinstance(error, SandboxNotFound)}
        left[:] = [sandbox_id for sandbox_id in left if sandbox_id not in gone]
        reasons.update(error.message for sandbox_id, error in errors.items() if sandbox_id not in gone)
    except DSecError as error:
        reasons.add(error.message)
    except TimeoutError:
        reasons.add("it took too long")
    except asyncio.CancelledError:
        reasons.add("interrupted again")
    finally:
        telling.cancel()
    if reasons:
        ended = {info.id for info in stopped}
        names = " ".join(sandbox_id for sandbox_id in left if sandbox_id not in ended) or "some that were on their way"
        # A terminal that has gone must not hide from the caller that all else is done.
        with contextlib.suppress(OSError):
            complain(f"sandboxes that may be left: {names} ({'; '.join(sorted(reasons))})")
            complain(f"`dsec stop --label {CREATE_LABEL}={run_label}` stops them")


async def _tell_of_stopping(ids: list[str]) -> None:
    await asyncio.sleep(TELL_AFTER_S)
    with contextlib.suppress(OSError):
        complain(f"stopping {len(ids)} {'sandbox' if len(ids) == 1 else 'sandboxes'}…" if ids else "stopping what was made…")
