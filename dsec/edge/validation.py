"""What a request may ask for. Pure; every refusal names the field."""

from __future__ import annotations

import math
import re

from libdsec.errors import InvalidArgument, Unsupported
from libdsec.ids import NAME
from libdsec.schema import MAX_ARG_BYTES, AnyRunArgs, DSecContainerRunArgs, DSecFullVMRunArgs

MEMORY_MB_MIN = 16
"""Below it not even a shell starts reliably beside the agent."""
MEMORY_MB_MAX = 16 << 20
DISK_MB_MIN = 1
DISK_MB_MAX = 1 << 30
PIDS_MIN = 4
"""The agent, a session's shell, a command and its child."""
PIDS_MAX = 4_194_304
"""The kernel's own PID_MAX_LIMIT."""
CPU_CORES_MIN = 0.01
"""The smallest quota that the kernel takes is 1 ms in 100 ms."""
SECONDS_MAX = 10 * 366 * 86400.0
"""Ten years: more is surely a mistake of units."""
LABELS_MAX = 64
LABEL_NAME_MAX = 128
LABEL_VALUE_MAX = 1024
KEY_MAX = 256
ENV_BYTES_MAX = 256 << 10
"""Environment of a sandbox: it is part of every command's."""
PATH_MAX = 4096
"""Linux' own PATH_MAX."""
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?)?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]*")


def check_run_args(args: AnyRunArgs) -> DSecContainerRunArgs:
    """The arguments, if they are valid. Raises InvalidArgument for a value out of its range, Unsupported for a backend that this edge
    doesn't have."""
    if not isinstance(args, DSecContainerRunArgs):
        kind = "full VM" if isinstance(args, DSecFullVMRunArgs) else "microVM"
        raise Unsupported(f"this edge has no {kind} backend; use a container", field="backend")
    if args.network == "bridged":
        raise Unsupported('network "bridged" is not available on this edge; use "aether" or "none"', field="network")
    if not args.container_image:
        raise InvalidArgument("container_image is empty", field="container_image")
    _between("memory_limit_mb", args.memory_limit_mb, MEMORY_MB_MIN, MEMORY_MB_MAX)
    _between("cpu_cores_limit", args.cpu_cores_limit, CPU_CORES_MIN, 65536)
    _between("disk_limit_mb", args.disk_limit_mb, DISK_MB_MIN, DISK_MB_MAX)
    _between("pids_limit", args.pids_limit, PIDS_MIN, PIDS_MAX)
    for name, seconds in (("ttl_running_stop", args.ttl_running_stop), ("ttl_total", args.ttl_total)):
        if seconds is not None:
            check_seconds(name, seconds)
    check_user("init_user", args.init_user)
    if args.workdir is not None:
        check_path("workdir", args.workdir)
        if not args.workdir.startswith("/"):
            raise InvalidArgument(f"workdir must be an absolute path, not {args.workdir!r}", field="workdir")
    check_env(args.env)
    if sum(len(name) + len(value) for name, value in args.env.items()) > ENV_BYTES_MAX:
        raise InvalidArgument(f"env of a sandbox may have {ENV_BYTES_MAX} characters; pass more with the single command", field="env")
    check_labels(args.labels)
    check_rules(args.network_rules)
    if args.idempotency_key is not None and not 0 < len(args.idempotency_key) <= KEY_MAX:
        raise InvalidArgument(f"idempotency_key must have 1 to {KEY_MAX} characters", field="idempotency_key")
    return args


def check_env(env: dict[str, str]) -> None:
    """Names are not empty and have no ``=``; nothing has a NUL."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            raise InvalidArgument(f"env has a variable named {name!r}: a name is not empty and has neither '=' nor NUL", field="env")
        if "\0" in value:
            raise InvalidArgument(f"the value of env variable {name!r} has a NUL in it", field="env")
        if len(f"{name}={value}".encode("utf-8", "replace")) >= MAX_ARG_BYTES:
            raise InvalidArgument(f"env variable {name[:64]!r} has {MAX_ARG_BYTES} bytes or more: no program could be started", field="env")


def check_labels(labels: dict[str, str]) -> None:
    """At most 64 labels with names like ``team/run.id``."""
    if len(labels) > LABELS_MAX:
        raise InvalidArgument(f"{len(labels)} labels; {LABELS_MAX} are possible", field="labels")
    for name, value in labels.items():
        if len(name) > LABEL_NAME_MAX or not _LABEL_NAME.fullmatch(name):
            raise InvalidArgument(
                f"label name {name[:LABEL_NAME_MAX]!r}: letters, digits and _ . / - are possible, {LABEL_NAME_MAX} at most", field="labels"
            )
        if len(value) > LABEL_VALUE_MAX:
            raise InvalidArgument(
                f"the value of label {name!r} has {len(value)} characters; {LABEL_VALUE_MAX} are possible", field="labels"
            )


def check_rules(rules: dict[str, bool] | None) -> None:
    """Network rules: a name of a mirror or domain, and whether it may be reached."""
    for name in rules or ():
        if not 0 < len(name) <= 253 or any(char.isspace() or not char.isprintable() for char in name):
            raise InvalidArgument(f"network rule {name[:253]!r} names no mirror or domain", field="network_rules")
    if rules is not None and len(rules) > 1024:
        raise InvalidArgument(f"{len(rules)} network rules; 1024 are possible", field="network_rules")


def check_user(field: str, user: str) -> None:
    """``name``, ``uid``, ``user:group`` or ``uid:gid``."""
    if not _USER.fullmatch(user):
        raise InvalidArgument(f"{field} {user[:64]!r} is neither a name, a uid, user:group nor uid:gid", field=field)


def check_path(field: str, path: str) -> None:
    """A path that the kernel could take."""
    if not path or "\0" in path or len(path) > PATH_MAX:
        raise InvalidArgument(f"{field} is no path: it is empty, has a NUL, or more than {PATH_MAX} characters", field=field)


def check_seconds(field: str, seconds: float) -> None:
    """A positive, finite number of seconds."""
    if not math.isfinite(seconds) or not 0 < seconds <= SECONDS_MAX:
        raise InvalidArgument(f"{field} must be more than 0 and at most {SECONDS_MAX:.0f} seconds, not {seconds!r}", field=field)


def check_exec_id(exec_id: str) -> None:
    if not NAME.fullmatch(exec_id):
        raise InvalidArgument("exec_id must be 1 to 128 letters, digits and . _ : -, beginning with a letter or digit", field="exec_id")


def check_session(session: str) -> None:
    if not NAME.fullmatch(session):
        raise InvalidArgument("session must be 1 to 128 letters, digits and . _ : -, beginning with a letter or digit", field="session")


def _between(field: str, value: float, least: float, most: float) -> None:
    if not math.isfinite(value) or not least <= value <= most:
        raise InvalidArgument(f"{field} must be between {least:g} and {most:g}, not {value!r}", field=field)
