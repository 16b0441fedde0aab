"""``dsec key``: API keys. Every command needs an admin's key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.output import AsJson, age, duration, print_json, print_table
from dsec.cli.run import with_client

if TYPE_CHECKING:
    from libdsec import DSecClient
    from libdsec.schema import KeyInfo

app = typer.Typer(help="Make, list and revoke API keys (with an admin's key).", no_args_is_help=True)

_DAY_S = 24 * 3600.0


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    project: Annotated[str | None, typer.Option(help="Sandboxes are seen within their project only. Default: one of its own.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May manage keys.")] = False,
    days: Annotated[float | None, typer.Option(help="Expires after so many days. Default: never.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it: the only time that it is shown.

    Example: dsec key create trainer-7 --project rl --days 30
    """

    async def run(client: DSecClient) -> None:
        made = await client.keys.create(name, project=project, admin=admin, expires_in_s=None if days is None else days * _DAY_S)
        if as_json:
            print_json(made)
        else:
            print(made.key)

    with_client(run)


@app.command("ls")
def ls(as_json: AsJson = False) -> None:
    """List the keys, also expired and revoked ones; never the keys themselves.

    Example: dsec key ls
    """

    async def run(client: DSecClient) -> None:
        infos = await client.keys.list()
        if as_json:
            print_json(infos)
            return
        rows = [
            (info.id, info.name, info.prefix + "…", info.project, "admin" if info.admin else "", age(info.created_at), _standing(info))
            for info in infos
        ]
        print_table(("id", "name", "key", "project", "role", "age", "standing"), rows, empty="no keys")

    with_client(run)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="The id that `dsec key ls` shows.")], as_json: AsJson = False
) -> None:
    """End a key for good, at once.

    Example: dsec key revoke q3xr5k7a
    """

    async def run(client: DSecClient) -> None:
        info = await client.keys.revoke(key_id)
        if as_json:
            print_json(info)
        else:
            print(f"{info.id} ({info.name}) is revoked")

    with_client(run)


def _standing(info: KeyInfo) -> str:
    if info.revoked_at is not None:
        return f"revoked {age(info.revoked_at)} ago"
    if info.expires_at is None:
        return "valid"
    left = info.expires_at - time.time()
    return f"valid for {duration(left)}" if left > 0 else f"expired {duration(-left)} ago"
