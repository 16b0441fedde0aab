"""``dsec image``: base images, workspaces and toolkits in the image store."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import quote

import typer

from dsec.cli.output import AsJson, age, print_json, print_table, printable, size, transferring, working
from dsec.cli.run import with_client

if TYPE_CHECKING:
    from libdsec import DSecClient, ImageFinding, ImageInfo, ImageReads, ImportLine

app = typer.Typer(help="Import, look at and remove images.", no_args_is_help=True)

Kind = Literal["base", "workspace", "toolkit"]
Format = Literal["auto", "tar", "docker-archive", "oci-archive"]
Name = Annotated[str, typer.Argument(help="name, or name@version.")]


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="A directory, tar, docker or OCI archive or layout, docker://HOST/REPOSITORY:TAG, or mmdebstrap:SUITE?include=a,b."
        ),
    ],
    name: Annotated[str, typer.Option("--name", "-n", help="What the image is called; the same name again makes its next version.")],
    kind: Annotated[Kind, typer.Option(help="What it is used as.")] = "base",
    at: Annotated[str, typer.Option(help="Where in the sandbox the content of a directory or plain tar appears.")] = "/",
    format: Annotated[Format, typer.Option(help="What kind of archive it is; auto: found out by what is in it.")] = "auto",
    username: Annotated[
        str | None,
        typer.Option(help="User of the registry; asks for the password. Default: what `docker login` or `skopeo login` left here."),
    ] = None,
    password_stdin: Annotated[bool, typer.Option("--password-stdin", help="Read the password from standard input.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure-registry", help="Speak plain HTTP to the registry.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make an image of something on this machine, or of one in a registry (which the server fetches).

    Example: dsec image import ./repo --name my-repo --kind workspace --at /work
    """
    credentials = None
    if username is not None:
        password = sys.stdin.readline().rstrip("\n") if password_stdin else typer.prompt("password", hide_input=True, err=True)
        credentials = (username, password)

    async def run(client: DSecClient, tell: Callable[[ImportLine], None]) -> ImageInfo:
        return await client.images.import_(
            source, name=name, kind=kind, at=at, format=format, credentials=credentials, insecure=insecure, told=tell
        )

    _make(source, run, as_json=as_json)


@app.command()
def build(
    directory: Annotated[Path, typer.Argument(help="The build's context.")],
    name: Annotated[str, typer.Option("--name", "-n", help="What the image is called; the same name again makes its next version.")],
    file: Annotated[Path | None, typer.Option("--file", "-f", help="The Dockerfile. Default: the directory's own.")] = None,
    kind: Annotated[Kind, typer.Option(help="What it is used as.")] = "base",
    build_arg: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for an ARG of the Dockerfile; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Build a Dockerfile on this machine, with buildah or docker, and make an image of the result.

    Example: dsec image build . --name my-app
    """
    arguments = dict(argument.partition("=")[::2] for argument in build_arg or ())

    async def run(client: DSecClient, tell: Callable[[ImportLine], None]) -> ImageInfo:
        return await client.images.build(directory, name=name, file=file, kind=kind, build_args=arguments, told=tell)

    _make(str(directory), run, as_json=as_json)


@app.command()
def debian(
    name: Annotated[str, typer.Argument(help="What the image is called; the same name again makes its next version.")],
    package: Annotated[list[str] | None, typer.Option("--package", "-p", help="Debian package to install; may be repeated.")] = None,
    suite: Annotated[str, typer.Option(help="Debian release.")] = "bookworm",
    mirror: Annotated[str | None, typer.Option(help="Archive to install from. Default: this machine's own apt sources.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a base image of a minimal Debian and some packages, with mmdebstrap on this machine (half a minute).

    Example: dsec image debian python:3.11 --package python3 --package git
    """
    options = {"include": ",".join(package or ()), "mirror": mirror or ""}
    query = "&".join(f"{option}={quote(value, safe=',:/')}" for option, value in options.items() if value)
    source = f"mmdebstrap:{suite}" + (f"?{query}" if query else "")
    _make(source, lambda client, tell: client.images.import_(source, name=name, kind="base", told=tell), as_json=as_json)


def _make(source: str, work: Callable[[DSecClient, Callable[[ImportLine], None]], Awaitable[ImageInfo]], *, as_json: bool) -> None:
    """Does ``work``, shows how far it is, prints the image."""

    async def run(client: DSecClient) -> None:
        with transferring(f"importing {source}") as tell:
            info = await work(client, tell)
        _print_image(info, as_json=as_json)

    with_client(run)


@app.command("ls")
def ls(as_json: AsJson = False) -> None:
    """List the images.

    Example: dsec image ls
    """

    async def run(client: DSecClient) -> None:
        images = await client.images.list()
        if as_json:
            print_json(images)
            return
        rows = [
            (f"{info.name}@{info.version}", info.kind, size(info.size), str(len(info.layers)), age(info.created_at), info.digest)
            for info in images
        ]
        print_table(("name", "kind", "size", "layers", "age", "digest"), rows, empty="no images; `dsec image import` adds one")

    with_client(run)


@app.command()
def show(name: Name) -> None:
    """Print all that is known of an image, as JSON.

    Example: dsec image show python:3.11
    """

    async def run(client: DSecClient) -> None:
        print_json(await client.images.get(name))

    with_client(run)


@app.command()
def rm(name: Name, as_json: AsJson = False) -> None:
    """Remove one version of an image, or all by the plain name; refused while a sandbox uses it. `dsec image gc` frees the space.

    Example: dsec image rm python:3.11@2
    """

    async def run(client: DSecClient) -> None:
        removed = await client.images.remove(name)
        if as_json:
            print_json(removed)
        else:
            print(f"{name} is removed")

    with_client(run)


@app.command()
def gc(as_json: AsJson = False) -> None:
    """Remove the layers that no image names and no sandbox uses.

    Example: dsec image gc
    """

    async def run(client: DSecClient) -> None:
        removed = await client.images.gc()
        if as_json:
            print_json({"removed_bytes": removed})
        else:
            print(f"{size(removed)} removed")

    with_client(run)


@app.command()
def push(name: Name, as_json: AsJson = False) -> None:
    """Send an image to the store that this node shares with others. Imports do so by themselves; what is there already isn't sent again.

    Example: dsec image push python:3.11
    """

    async def run(client: DSecClient) -> None:
        with transferring(f"pushing {name}") as tell:
            info = await client.images.push(name, told=tell)
        _print_image(info, as_json=as_json)

    with_client(run)


@app.command()
def pull(
    name: Name,
    whole: Annotated[bool, typer.Option("--whole", help="All of its data too. Without it sandboxes fetch what they read.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch an image from the shared store to this node. Goes on where an earlier attempt broke off.

    Example: dsec image pull python:3.11 --whole
    """

    async def run(client: DSecClient) -> None:
        with transferring(f"pulling {name}") as tell:
            info = await client.images.pull(name, whole=whole, told=tell)
        _print_image(info, as_json=as_json)

    with_client(run)


def _print_image(info: ImageInfo, *, as_json: bool) -> None:
    if as_json:
        print_json(info)
    else:
        print(f"{info.name}@{info.version} {info.kind} {size(info.size)} {info.digest}")


@app.command()
def tag(
    name: Name,
    new: Annotated[str, typer.Argument(help="The name that it gets; the same name again makes its next version.")],
    as_json: AsJson = False,
) -> None:
    """Give an image another name, or make an earlier version the newest of its own. Nothing is copied.

    Example: dsec image tag python:3.11@2 python:stable
    """

    async def run(client: DSecClient) -> None:
        with transferring(f"tagging {name}") as tell:
            info = await client.images.tag(name, new, told=tell)
        _print_image(info, as_json=as_json)

    with_client(run)


@app.command()
def stats(name: Name, as_json: AsJson = False) -> None:
    """Show how much of an image sandboxes have ever read on this node, and where it came from.

    Example: dsec image stats python:3.11
    """

    async def run(client: DSecClient) -> None:
        reads = await client.images.stats(name)
        if as_json:
            print_json(reads)
            return
        rows = [
            ("data of the image", size(reads.size)),
            ("ever read", _ever_read(reads)),
            ("fetched from the store", size(reads.fetched)),
            ("answered from the cache", size(reads.from_cache)),
            ("sandboxes", str(reads.sandboxes)),
            ("fetched for each", size(reads.fetched_per_sandbox)),
        ]
        print_table((reads.image, ""), rows, empty="")

    with_client(run)


def _ever_read(reads: ImageReads) -> str:
    if reads.needed is None or reads.fraction is None:
        return "not measured: all of it is on this node"
    return f"{size(reads.needed)} ({reads.fraction:.1%})"


@app.command()
def diff(
    before: Annotated[str, typer.Argument(help="name, or name@version.")],
    after: Annotated[str, typer.Argument(help="name, or name@version.")],
    as_json: AsJson = False,
) -> None:
    """List the paths that two images don't have alike: added (+), removed (-) and changed (~), with their sizes.

    Example: dsec image diff python:3.11@1 python:3.11@2
    """

    async def run(client: DSecClient) -> None:
        changes = await client.images.diff(before, after)
        if as_json:
            print_json(changes)
            return
        for change in changes:
            mark = {"added": "+", "removed": "-", "changed": "~"}[change.kind]
            sizes = f"{size(change.size_before)} -> {size(change.size)}" if change.kind == "changed" else size(change.size)
            print(f"{mark} /{printable(change.path)}  {sizes}")

    with_client(run)


@app.command()
def fsck(
    deep: Annotated[bool, typer.Option("--deep", help="Read everything and compare digests.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be from the other side, and make room for an import.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check the images of this node and the store that it shares; exit code 1 where something is wrong and stays so.

    Example: dsec image fsck --deep --repair
    """

    async def run(client: DSecClient) -> int:
        told = None if as_json else _print_finding
        with working("checking"):
            findings = await client.images.fsck(deep=deep, repair=repair, found=told)
        left = [finding for finding in findings if not finding.repaired]
        if as_json:
            print_json(findings)
        else:
            print(f"{len(findings)} found, {len(findings) - len(left)} repaired" if findings else "nothing is wrong")
        return 1 if left else 0

    with_client(run)


def _print_finding(finding: ImageFinding) -> None:
    image = f" of {finding.image}" if finding.image else ""
    state = "repaired" if finding.repaired else finding.problem
    print(f"{state}: {finding.where} {printable(finding.object)}{printable(image)}: {printable(finding.detail)}", flush=True)
