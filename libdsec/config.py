"""Which server a client talks to, and with which key."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from yarl import URL

from libdsec.errors import InvalidArgument

UNIX = "unix://"
"""What an address begins with that is the path of a Unix socket."""


class LocalConfig(msgspec.Struct):
    """What ``dsec up`` writes for clients on the same machine (mode 0600)."""

    url: str
    api_key: str | None = None
    socket: str | None = None
    """Path of the Unix socket on which the same server answers: cheaper than loopback."""

    @property
    def nearest(self) -> str:
        """The address to use from here: the socket's, where it is to be seen (in a container it may not be)."""
        return f"{UNIX}{self.socket}" if self.socket is not None and os.path.exists(self.socket) else self.url

    def names(self, url: str) -> bool:
        """Whether ``url`` is an address of this server."""
        own = [self.url.rstrip("/"), *([] if self.socket is None else [f"{UNIX}{self.socket}"])]
        return url.rstrip("/") in own


def local_config_path() -> Path:
    """``DSEC_CONFIG``, else ``$XDG_CONFIG_HOME/dsec/local.json`` (``~/.config/dsec/local.json``)."""
    given = os.environ.get("DSEC_CONFIG")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "dsec" / "local.json"


def read_local_config() -> LocalConfig | None:
    """The local server's address and key; None where ``dsec up`` left none. Raises InvalidArgument for a file that can't be used."""
    path = local_config_path()
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidArgument(f"{path} can't be read: {error.strerror}", field="url") from error
    try:
        return msgspec.json.decode(content, type=LocalConfig)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"{path} is not what `dsec up` writes: {error}", field="url") from error


def _is_address(url: str) -> bool:
    if url.startswith(UNIX):
        return url.removeprefix(UNIX).startswith("/") and "\0" not in url
    if any(character.isspace() for character in url):
        return False
    try:
        parsed = URL(url)
    except ValueError:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host) and not parsed.query_string and not parsed.fragment


def check_header(value: str, what: str, field: str) -> None:
    """Raises InvalidArgument for what can't be sent in a header; the value isn't told."""
    if not value.isascii() or not value.isprintable():
        raise InvalidArgument(f"{what} has characters that no such thing has: a line break, perhaps", field=field)


def resolve(url: str | None, api_key: str | None) -> tuple[str, str | None]:
    """The address and the key to use: arguments first, then ``DSEC_URL`` and ``DSEC_API_KEY``, then the local ``dsec up``.

    The local server's key is never sent to another address. Raises InvalidArgument when no address is to be found, or what was given is
    none.
    """
    url = url or os.environ.get("DSEC_URL") or None
    if url is not None and not _is_address(url):
        text = f"{url!r} is not a server's address: that is http://HOST:PORT, https://HOST or unix:///PATH (DSEC_URL, or url=)"
        raise InvalidArgument(text, field="url")
    api_key = api_key or os.environ.get("DSEC_API_KEY") or None
    if api_key is not None:
        check_header(api_key, "the API key (DSEC_API_KEY, or api_key=)", "api_key")
    if url is not None and api_key is not None:
        return url, api_key
    local = read_local_config()
    if url is None:
        if local is None:
            raise InvalidArgument(
                f"no server: pass url=, set DSEC_URL, or start one on this machine with `dsec up` (it writes {local_config_path()})",
                field="url",
            )
        url = local.nearest
        if not _is_address(url):
            raise InvalidArgument(
                f"{local_config_path()} names {url!r}, which is no server's address: `dsec up` writes it anew", field="url"
            )
    if api_key is None and local is not None and local.names(url):
        api_key = local.api_key
    return url, api_key
