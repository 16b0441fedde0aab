"""One instance of the service on this machine: where it lives, which process carries it, and the file that tells local clients of it."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import select
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from dsec.cli.run import CliError

DEFAULT_RUN_DIR = Path("/run/dsec")
DEFAULT_STATE_DIR = Path("/var/lib/dsec")
DEFAULT_CGROUP = "dsec"
DEFAULT_PORT = 7070
DEFAULT_SCRATCH_MB = 16 * 1024
DEFAULT_UID_BASE = 0x1000_0000
"""First host uid of sandboxes: above what /etc/subuid hands out by habit, with room for thousands of ranges below 2**31."""
DEFAULT_MAX_SANDBOXES = 4_080
"""As many ranges of uids as fit into 2**28: seven instances have room for that below 2**31."""
SERVICE_USER = "dsec"
FALLBACK_SERVICE_UID = 64_913
"""Runs the service where there is no system user for it: a number that distributions give to nobody for good."""
RUN_DIR_LIMIT = 80
"""Bytes of the run directory's path: the sockets below it must fit into 108 (sun_path)."""

CHECKOUT = Path(__file__).resolve().parents[2]
_CGROUP = re.compile(r"[a-z0-9-]{1,40}")


class Mounts(StrEnum):
    """How layers are mounted."""

    auto = "auto"
    """From files and by descriptor, where the kernel can."""
    classic = "classic"
    """From loop devices and by path, as kernels before 6.12 and 6.15 need it."""


@dataclass(frozen=True)
class Instance:
    """What tells one instance from another. Several run side by side if nothing of it but the service's user is shared: the supervisor
    refuses to start a second one on a directory, a cgroup or a uid of another's."""

    run_dir: Path
    state_dir: Path
    cgroup: str
    uid_base: int
    service_uid: int
    scratch_mb: int
    mounts: str = "auto"
    """How layers are mounted: a value of :class:`Mounts`."""
    max_sandboxes: int = DEFAULT_MAX_SANDBOXES
    """How many may live at once, each with a range of uids."""

    def check(self) -> None:
        """Raises CliError for values that can't work."""
        if not self.run_dir.is_absolute() or not self.state_dir.is_absolute():
            raise CliError("--run-dir and --state-dir must be absolute paths")
        if len(os.fsencode(self.run_dir)) > RUN_DIR_LIMIT:
            raise CliError(
                f"--run-dir {self.run_dir} is too long: socket paths below it must fit into 108 bytes, so it may have {RUN_DIR_LIMIT}"
            )
        if not _CGROUP.fullmatch(self.cgroup):
            raise CliError(f"--cgroup {self.cgroup!r}: 1 to 40 of a-z, 0-9 and '-'")
        if self.service_uid == 0:
            raise CliError("--service-uid 0: the service never runs as root; name an unprivileged user")

    def spawner_options(self) -> list[str]:
        """The options that every ``dsec-spawner`` subcommand shares."""
        return [
            *("--run-dir", str(self.run_dir)),
            *("--state-dir", str(self.state_dir)),
            *("--cgroup", self.cgroup),
            *("--uid-base", str(self.uid_base)),
            *("--max-sandboxes", str(self.max_sandboxes)),
            *("--service-uid", str(self.service_uid)),
            *("--scratch-mb", str(self.scratch_mb)),
            *("--mounts", self.mounts),
            *("--chronus", str(binary("chronus"))),
        ]


def left_of(instance: Instance) -> list[Path]:
    """What the instance has, or has left for its next start, beyond its state: where the supervisor has swept, nothing."""
    swept = [
        *(instance.run_dir / name for name in ("c", "layers.ns", "meta", "bin", "stage", "spawner.sock")),
        instance.state_dir / "scratch",
    ]
    return [path for path in swept if path.exists()]


def binary(name: str) -> Path:
    """The built program ``name``: in ``DSEC_BIN``, else beside the package. Raises CliError."""
    directory = Path(os.environ.get("DSEC_BIN") or CHECKOUT / ".cache" / "native" / "bin")
    path = directory / name
    if not os.access(path, os.X_OK):
        raise CliError(f"{path} is not there: build it with `./run setup`, or name the directory of the binaries in DSEC_BIN")
    return path


def default_service_uid() -> int:
    """The ``dsec`` system user, where the administrator made one."""
    try:
        return pwd.getpwnam(SERVICE_USER).pw_uid
    except KeyError:
        return FALLBACK_SERVICE_UID


# -- the process that carries it


@dataclass(frozen=True)
class UpRecord:
    """``<run>/up.json``: what ``dsec up`` started, for ``dsec down``."""

    instance: Instance
    pid: int
    """Of ``dsec-spawner supervise``."""
    start_ticks: int
    """When it started, as the kernel counts: tells it from a later process with the same pid."""
    url: str = ""

    @staticmethod
    def path(run_dir: Path) -> Path:
        return run_dir / "up.json"

    def write(self) -> None:
        """Put it where :meth:`read` finds it."""
        _write_whole(self.path(self.instance.run_dir), json.dumps(asdict(self), default=str).encode(), mode=0o644)

    @classmethod
    def read(cls, run_dir: Path) -> UpRecord | None:
        """The record in ``run_dir``; None if there is none. Raises CliError for one that can't be read, or that somebody else wrote: the
        service may make files there too, and must not choose whom root signals."""
        try:
            with open(os.open(cls.path(run_dir), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    raise CliError(f"{cls.path(run_dir)} was not written by this user; remove it")
                raw = json.loads(file.read())
            fields = raw.pop("instance")
            fields["run_dir"], fields["state_dir"] = Path(fields["run_dir"]), Path(fields["state_dir"])
            return cls(Instance(**fields), **raw)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise CliError(f"{cls.path(run_dir)} is not what `dsec up` writes ({error}); remove it") from error

    def open_process(self) -> int | None:
        """A pidfd of the process if it still lives, to be closed by the caller."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        # Only after the descriptor is there can the pid no longer be given to somebody else.
        if start_ticks(self.pid) != self.start_ticks:
            os.close(descriptor)
            return None
        return descriptor

    def is_running(self) -> bool:
        """Whether the process lives."""
        descriptor = self.open_process()
        if descriptor is None:
            return False
        os.close(descriptor)
        return True


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat (see proc_pid_stat(5)); None if the process is gone or only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def stop_process(record: UpRecord, number: signal.Signals, timeout_s: float) -> bool:
    """Signal the instance and wait for its end. False: it wasn't running. Raises CliError if it outlives ``timeout_s``."""
    descriptor = record.open_process()
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise CliError(f"the service (pid {record.pid}) has not ended after {timeout_s:.0f} s; `dsec down` again hastens it")
    finally:
        os.close(descriptor)
    return True


# -- what local clients find


@dataclass(frozen=True)
class LocalClient:
    """The address and key for clients on this machine: in ``<run>/client.json`` always, and in the user's own configuration unless another
    instance that lives is named there."""

    url: str
    api_key: str
    socket: str

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def client_file(run_dir: Path) -> Path:
    """The instance's own copy: ``DSEC_CONFIG=<run>/client.json dsec ls`` reaches this instance whatever others run."""
    return run_dir / "client.json"


def user_config_file() -> Path:
    """Where the SDK of the user looks who called (through sudo, if so): DSEC_CONFIG, else ``~/.config/dsec/local.json``."""
    given = os.environ.get("DSEC_CONFIG")
    if given:
        return Path(given)
    user = _invoking_user()
    if user is None:
        from libdsec.config import local_config_path

        return local_config_path()
    return Path(user.pw_dir) / ".config" / "dsec" / "local.json"


def announce(client: LocalClient, run_dir: Path) -> Path | None:
    """Write both files (mode 0600, owned by the user who called). Returns the user's one, or None where it is another live instance's."""
    user = _invoking_user()
    _write_whole(client_file(run_dir), client.encode(), mode=0o600, owner=user)
    path = user_config_file()
    if "DSEC_CONFIG" not in os.environ and _names_other_live_instance(path, client.url):
        return None
    with _acting_as(user):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_whole(path, client.encode(), mode=0o600)
    return path


def retract(run_dir: Path) -> None:
    """Remove what :func:`announce` wrote; the user's file only if it is still this instance's."""
    own = client_file(run_dir)
    try:
        content = own.read_bytes()
    except FileNotFoundError:
        return
    path = user_config_file()
    with contextlib.suppress(OSError), _acting_as(_invoking_user()):
        if path.read_bytes() == content:
            path.unlink()
    own.unlink(missing_ok=True)


def _names_other_live_instance(path: Path, url: str) -> bool:
    try:
        other = json.loads(path.read_bytes()).get("url")
    except (OSError, ValueError, AttributeError):
        return False
    return isinstance(other, str) and other != url and is_healthy(other)


def is_healthy(url: str) -> bool:
    """Whether a service answers at ``url`` that it takes requests."""
    import urllib.error
    import urllib.request

    # Never through a proxy: the service is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/healthz", timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, ValueError, urllib.error.URLError):
        return False


def _invoking_user() -> pwd.struct_passwd | None:
    """Who called sudo; None where the process simply is what it is."""
    uid = os.environ.get("SUDO_UID", "")
    if os.geteuid() != 0 or not uid.isdigit() or uid == "0":
        return None
    try:
        return pwd.getpwuid(int(uid))
    except KeyError:
        return None


@contextlib.contextmanager
def _acting_as(user: pwd.struct_passwd | None) -> Iterator[None]:
    """Touch files with the rights of ``user``: root must not follow links that a user placed in their home."""
    if user is None:
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def _write_whole(path: Path, content: bytes, *, mode: int, owner: pwd.struct_passwd | None = None) -> None:
    """Replace a file so that no reader sees half of it, nor anybody else its content."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with open(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        if owner is not None:
            os.fchown(file.fileno(), owner.pw_uid, owner.pw_gid)
        file.write(content)
    partial.rename(path)


def python_command(module: str) -> list[str]:
    """How a module of the platform is started: by the interpreter that runs this, in whose environment the platform is installed."""
    return [sys.executable, "-m", module]
