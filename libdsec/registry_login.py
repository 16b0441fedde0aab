"""What ``docker login``, ``podman login`` or ``skopeo login`` left on this machine: a user and a password for a registry.

Format: containers-auth.json(5), which docker's config.json shares. Only this machine's files are read, by the client and for the registry
that was named; what is found goes to the DSec server with that one import, which keeps it no longer.
"""

from __future__ import annotations

import base64
import binascii
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from libdsec import docker_hub

HELPER_TIMEOUT_S = 20.0
_LIMIT = 4 << 20
"""Bytes of such a file."""


class _Auth(msgspec.Struct):
    auth: str | None = None


class _File(msgspec.Struct, rename="camel"):
    auths: dict[str, _Auth] = {}
    creds_store: str | None = None
    cred_helpers: dict[str, str] = {}


class _Stored(msgspec.Struct, rename="pascal"):
    username: str
    secret: str


def find_login(host: str, repository: str, environment: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """User and password for ``host`` (with its port, if any), the most specific entry of the first file that has one; None: not logged in.
    A login to Docker Hub is found by any name of it.

    Files that can't be read, and entries that aren't a user and a password (identity tokens), count as absent.
    """
    for path in _files(environment):
        try:
            if path.stat().st_size > _LIMIT:
                continue
            content = msgspec.json.decode(path.read_bytes(), type=_File)
        except (OSError, msgspec.DecodeError):
            continue
        found = _entry(content, host, repository) or _from_helper(content, host, environment)
        if found is not None:
            return found
    return None


def _files(environment: Mapping[str, str]) -> list[Path]:
    """In the order in which skopeo and podman look."""
    files = []
    if named := environment.get("REGISTRY_AUTH_FILE"):
        files.append(Path(named))
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        files.append(Path(runtime) / "containers" / "auth.json")
    else:
        files.append(Path(f"/run/containers/{os.getuid()}/auth.json"))
    home = Path(environment.get("HOME", "/nonexistent"))
    files.append(Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "containers" / "auth.json")
    files.append(Path(environment.get("DOCKER_CONFIG") or home / ".docker") / "config.json")
    return files


def _entry(content: _File, host: str, repository: str) -> tuple[str, str] | None:
    """``host/team/app`` before ``host/team`` before ``host``."""
    # An entry without a login only says that a helper has it.
    by_name = {_place(name): entry.auth for name, entry in content.auths.items() if entry.auth}
    parts = [docker_hub.registry_host(host), *docker_hub.full_repository(host, repository).split("/")]
    for length in range(len(parts), 0, -1):
        auth = by_name.get("/".join(parts[:length]))
        if auth is not None:
            return _decode(auth)
    return None


def _place(name: str) -> str:
    """The registry, or the part of it, that an entry is for; docker writes some hosts as URLs."""
    plain = name.removeprefix("https://").removeprefix("http://").rstrip("/").removesuffix("/v2").removesuffix("/v1")
    host, slash, path = plain.partition("/")
    return docker_hub.registry_host(host) + slash + path


def _decode(auth: str) -> tuple[str, str] | None:
    try:
        username, colon, password = base64.b64decode(auth, validate=True).decode().rstrip("\0").partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return (username, password) if colon and username else None


def _helper_keys(host: str) -> list[str]:
    """By which names a file may name a helper for this host, and the helper know the login: docker's first, then podman's."""
    return [docker_hub.LOGIN_KEY, *sorted(docker_hub.NAMES)] if docker_hub.registry_host(host) == docker_hub.HOST else [host]


def _from_helper(content: _File, host: str, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Asks the ``docker-credential-…`` program that the file names for this host."""
    keys = _helper_keys(host)
    key = next((key for key in keys if content.cred_helpers.get(key)), keys[0])
    helper = content.cred_helpers.get(key) or content.creds_store
    if not helper or "/" in helper:
        return None
    try:
        done = subprocess.run(
            [f"docker-credential-{helper}", "get"],
            input=key.encode(),
            capture_output=True,
            check=True,
            timeout=HELPER_TIMEOUT_S,
            env=dict(environment),
        )
        stored = msgspec.json.decode(done.stdout, type=_Stored)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return None
    # An identity token, which isn't a password.
    return None if stored.username == "<token>" else (stored.username, stored.secret)
