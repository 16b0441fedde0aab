"""Ids and names as parts of a request's path. What can't be one is refused before it is sent: it would lead to another route."""

from __future__ import annotations

import re

from libdsec.errors import InvalidArgument, ProcessNotFound, SandboxNotFound

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
"""What an exec_id and a shell session's name must be; every sandbox's id is such a name too."""


def sandbox_path(sandbox_id: str) -> str:
    """Where a sandbox is found. Raises SandboxNotFound for what can't be a sandbox's id."""
    if not NAME.fullmatch(sandbox_id):
        raise SandboxNotFound(f"there is no sandbox {sandbox_id!r}: that can't be an id")
    return f"/v1/sandboxes/{sandbox_id}"


def exec_path(sandbox: str, exec_id: str) -> str:
    """Where a command is found of the sandbox at path ``sandbox``. Raises ProcessNotFound for what can't be an exec_id."""
    if not NAME.fullmatch(exec_id):
        raise ProcessNotFound(f"there is no command {exec_id!r}: that can't be an exec_id")
    return f"{sandbox}/exec/{exec_id}"


def session_path(sandbox: str, session: str) -> str:
    """Where a shell session is found of the sandbox at path ``sandbox``. Raises InvalidArgument for what can't be a session's name."""
    if not NAME.fullmatch(session):
        text = f"a session's name is 1 to 128 letters, digits and . _ : -, beginning with a letter or digit, not {session!r}"
        raise InvalidArgument(text, field="session")
    return f"{sandbox}/shell/{session}"
