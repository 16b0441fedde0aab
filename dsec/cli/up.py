"""``dsec up`` and ``dsec down``: the service of this machine, started and stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import instance as inst
from dsec.cli.instance import Instance, LocalClient, UpRecord
from dsec.cli.output import AsJson
from dsec.cli.run import CliError, reported

if TYPE_CHECKING:
    from dsec.api.bearer import MintedKey

READY_TIMEOUT_S = 120.0
"""From start to ready: most of it, on the first start, is the allocation of the scratch file."""
STOP_TIMEOUT_S = 90.0
"""The service has 20 s for what is under way; the rest is for sweeping thousands of sandboxes."""
DEFAULT_CACHE_GB = 64
CHUNK_CACHE_SHARE = 4
"""The cache of chunks has this fraction of what whole layers may take: it is for layers that aren't whole yet."""
POLL_S = 0.05
MAX_PORT = 65_535
OWN = "its own --run-dir, --state-dir, --cgroup, --uid-base and ports"
LOG_TAIL_LINES = 15
SAID_BYTES = 1 << 16
"""Of what a supervisor says before it writes to the log: one line, as a rule."""

RunDir = Annotated[Path, typer.Option(help="Sockets and everything else that ends with the instance.")]
StateDir = Annotated[Path, typer.Option(help="What survives: keys, images, the journal, the scratch file.")]
CgroupName = Annotated[str, typer.Option("--cgroup", help="Name of the cgroup that holds all sandboxes.")]
UidBase = Annotated[
    int, typer.Option(help="First host uid of sandboxes. Up to 2**28 above it (--max-sandboxes) no other instance may have.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command()(up)
    app.command()(down)


def up(
    port: Annotated[int, typer.Option(help="Port of the API; 0: any free one.", min=0, max=MAX_PORT)] = inst.DEFAULT_PORT,
    ports_port: Annotated[
        int | None, typer.Option(help="Port of the listener for ports inside sandboxes. Default: the next one.", min=0, max=MAX_PORT)
    ] = None,
    host: Annotated[str, typer.Option(help="Address that both listen on. Not loopback: put TLS in front.")] = "127.0.0.1",
    state_dir: StateDir = inst.DEFAULT_STATE_DIR,
    run_dir: RunDir = inst.DEFAULT_RUN_DIR,
    scratch_mb: Annotated[int, typer.Option(help="Size of the scratch file that holds all writable layers; allocated at once.")] = (
        inst.DEFAULT_SCRATCH_MB
    ),
    cgroup: CgroupName = inst.DEFAULT_CGROUP,
    uid_base: UidBase = inst.DEFAULT_UID_BASE,
    max_sandboxes: Annotated[
        int, typer.Option(help="How many may live at once: each has 65,792 host uids from --uid-base on, 268,431,360 in all by default.")
    ] = inst.DEFAULT_MAX_SANDBOXES,
    store: Annotated[
        str | None,
        typer.Option(help="Store that nodes share images through: a directory, or s3://BUCKET/PREFIX?endpoint=URL&credentials=FILE."),
    ] = None,
    cache_gb: Annotated[
        int,
        typer.Option(
            min=1,
            help="Disk for whole layers that the store has too: beyond it those go that were not used for longest. Chunks of others get a "
            "quarter as much.",
        ),
    ] = DEFAULT_CACHE_GB,
    prefetch: Annotated[bool, typer.Option(help="Fetch ahead what an earlier run is known to have read of an image.")] = True,
    mounts: Annotated[
        inst.Mounts,
        typer.Option(help="How layers are mounted; classic: by loop devices and paths, also where the kernel can do better."),
    ] = inst.Mounts.auto,
    service_uid: Annotated[int | None, typer.Option(help="Who the service runs as. Default: the user `dsec`, else 64913.")] = None,
    allow_registry: Annotated[
        list[str] | None,
        typer.Option(help="HOST[:PORT] of a registry that keys of projects may import from; may be repeated. Admins' keys may use any."),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it is ready; `dsec down` stops it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start the sandbox service on this machine.

    Prints the address and, the first time, an API key. Clients of the same user find both by themselves. Ctrl-C stops everything, with all
    sandboxes; SIGTERM leaves the sandboxes for the next start.

    Example: sudo dsec up --detach
    """
    with reported():
        _require_root("up")
        uid = inst.default_service_uid() if service_uid is None else service_uid
        instance = Instance(run_dir, state_dir, cgroup, uid_base, uid, scratch_mb, mounts.value, max_sandboxes)
        instance.check()
        _check_listeners(host, port, ports_port)
        listen = [
            *("--host", host),
            *("--port", str(port)),
            *("--ports-port", str(_ports_port(port) if ports_port is None else ports_port)),
            *("--cache-gb", str(cache_gb)),
            *(part for host in allow_registry or () for part in ("--allow-registry", host)),
        ]
        if not prefetch:
            listen.append("--no-prefetch")
        if store is not None:
            _check_store(store)
        _refuse_second(run_dir)
        _check_machine()
        service = _Service(instance, listen, store, (cache_gb << 30) // CHUNK_CACHE_SHARE, detach=detach)
        service.start()
        _print_ready(service, as_json=as_json)
        if not detach:
            service.wait()


def down(
    run_dir: RunDir = inst.DEFAULT_RUN_DIR,
    state_dir: StateDir = inst.DEFAULT_STATE_DIR,
    cgroup: CgroupName = inst.DEFAULT_CGROUP,
    uid_base: UidBase = inst.DEFAULT_UID_BASE,
    keep_sandboxes: Annotated[bool, typer.Option(help="Stop the service only: the next `dsec up` takes the sandboxes over.")] = False,
) -> None:
    """Stop the service on this machine, and its sandboxes.

    After a crash it removes whatever is left of them. The options besides --run-dir are needed only then, and only if the run directory is
    gone.

    Example: sudo dsec down
    """
    with reported():
        _require_root("down")
        record = UpRecord.read(run_dir)
        instance = (
            record.instance
            if record
            else Instance(run_dir, state_dir, cgroup, uid_base, inst.default_service_uid(), inst.DEFAULT_SCRATCH_MB)
        )
        number = signal.SIGTERM if keep_sandboxes else signal.SIGINT
        was_running = record is not None and inst.stop_process(record, number, STOP_TIMEOUT_S)
        inst.retract(run_dir)
        if keep_sandboxes:
            print("stopped; the sandboxes live on" if was_running else f"nothing runs in {run_dir}")
            return
        # How its supervisor ended only its parent knows: what counts is what it left.
        if was_running and not inst.left_of(instance):
            words = "stopped; nothing is left"
        else:
            _sweep(instance, stopped=was_running)
            words = (
                "stopped; what was left is swept" if was_running else f"nothing runs in {run_dir}; swept what an earlier run may have left"
            )
        UpRecord.path(run_dir).unlink(missing_ok=True)
        print(words)


class _Service:
    """One run of ``dsec-spawner supervise`` with the service below it."""

    def __init__(self, instance: Instance, listen: list[str], store: str | None, chunk_cache: int, *, detach: bool) -> None:
        """``chunk_cache``: bytes that blobfs may keep."""
        from dsec.api.bearer import mint

        self.instance = instance
        self.ready: dict[str, str] = {}
        self.config: Path | None = None
        self._first: MintedKey = mint()
        self._local: MintedKey = mint()
        self._log = instance.state_dir / "dsec.log" if detach else None
        self._stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        # What is said before the directories are known to be this instance's: then the log isn't written yet.
        self._said = os.memfd_create("dsec-up") if detach else None
        self._logged_before = 0
        # The service is told the hashes only: argument vectors can be read by everybody.
        keys = [*("--first-key", str(self._first.seed)), *("--local-key", str(self._local.seed))]
        directories = [*("--state-dir", str(instance.state_dir)), *("--run-dir", str(instance.run_dir)), *("--cgroup", instance.cgroup)]
        self._command = [
            *(str(inst.binary("dsec-spawner")), "supervise"),
            *instance.spawner_options(),
            *("--code", str(inst.CHECKOUT)),
            *("--cache-bytes", str(chunk_cache)),
            *(() if self._log is None else ("--log", str(self._log))),
            *(word for each in _fetcher(instance, store) for word in ("--fetcher", each)),
            *("--", *inst.python_command("dsec.serve"), *directories, *listen, *keys),
            *([] if store is None else ["--store", store]),
        ]

    @property
    def detached(self) -> bool:
        """Whether it goes on without this process."""
        return self._log is not None

    @property
    def first_key(self) -> str | None:
        """The store's first key, if it was made in this run."""
        return self._first.text if self.ready.get("first_key") == self._first.seed.id else None

    def start(self) -> None:
        """Start it and wait until it takes requests. Raises CliError, with what it logged, if it doesn't."""
        instance = self.instance
        before = UpRecord.read(instance.run_dir)
        instance.run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        (instance.run_dir / "ready").unlink(missing_ok=True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._pass_on)
        if self._log is not None and self._log.exists():
            self._logged_before = self._log.stat().st_size
        said = self._said
        # A session of its own: Ctrl-C reaches it once, through us, and a closed terminal not at all.
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if said is None else said,
            stderr=said,
            start_new_session=True,
            cwd="/",
        )
        self._process = process
        record = UpRecord(instance, process.pid, inst.start_ticks(process.pid) or 0)
        record.write()
        try:
            self._await_ready(process)
        except BaseException:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait()
            _forget(instance, before)
            raise
        dataclasses.replace(record, url=self.ready["url"]).write()
        self.config = inst.announce(LocalClient(self.ready["url"], self._local.text, self.ready["socket"]), instance.run_dir)

    def wait(self) -> None:
        """Wait for the end. Raises CliError if it wasn't asked to end, or couldn't remove all that it should."""
        assert self._process is not None
        code = self._process.wait()
        _forget(self.instance)
        if code and self._stopping:
            raise CliError(
                f"not everything could be removed; the reason is above. `dsec down --run-dir {self.instance.run_dir}` tries again"
            )
        if code:
            raise CliError(f"the service ended by itself (exit code {code}); its last words are above")

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        path = self.instance.run_dir / "ready"
        while True:
            if self._stopping:
                raise KeyboardInterrupt
            if process.poll() is not None:
                raise CliError(f"the service did not start (exit code {process.returncode}){self._last_words()}")
            if path.exists():
                self.ready = json.loads(path.read_bytes())
                if inst.is_healthy(self.ready["url"]):
                    return
            if time.monotonic() > deadline:
                raise CliError(f"the service was not ready after {READY_TIMEOUT_S:.0f} s{self._last_words()}")
            time.sleep(POLL_S)

    def _last_words(self) -> str:
        """Of this run alone: the log has those of earlier ones, too."""
        if self._said is None or self._log is None:
            return "; what it said is above"
        said = os.pread(self._said, SAID_BYTES, 0)
        with contextlib.suppress(FileNotFoundError), self._log.open("rb") as log:
            log.seek(self._logged_before)
            said += log.read()
        lines = said.decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "; it said:\n" + "\n".join(lines)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        """SIGINT stops everything (a second one hastens it); SIGTERM and a closed terminal leave the sandboxes."""
        self._stopping = True
        if self._process is not None:
            self._process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


def _print_ready(service: _Service, *, as_json: bool) -> None:
    own = inst.client_file(service.instance.run_dir)
    if as_json:
        told = {
            "url": service.ready["url"],
            "ports_url": service.ready["ports_url"],
            "socket": service.ready["socket"],
            "api_key": service.first_key,
            "config": str(service.config or own),
            "run_dir": str(service.instance.run_dir),
        }
        print(json.dumps(told), flush=True)
        return
    print(f"OpenDSec is ready at {service.ready['url']}")
    if service.first_key is not None:
        print(f"First API key (admin, shown this once): {service.first_key}")
    if service.config is None:
        print(f"Another instance is your default one; for this one: export DSEC_CONFIG={own}")
    else:
        print(f"Clients of this user find it through {service.config}")
    print("`dsec down` stops it." if service.detached else "Ctrl-C stops it, with all sandboxes.", flush=True)


def _ports_port(port: int) -> int:
    return port + 1 if port else 0


def _fetcher(instance: Instance, store: str | None) -> list[str]:
    """The command of the process that fetches from the store for blobfs."""
    if store is None:
        return []
    return [*inst.python_command("dsec.images.fetcher"), "--store", store, "--socket", str(instance.run_dir / "fetch.sock")]


def _check_store(url: str) -> None:
    """Raises CliError for a store that can't be, before anything is started."""
    from dsec.images.shared import check_url
    from libdsec.errors import InvalidArgument

    try:
        check_url(url)
    except InvalidArgument as error:
        raise CliError(f"--store: {error.message}") from error


def _check_listeners(host: str, port: int, ports_port: int | None) -> None:
    """Raises CliError for an address or a pair of ports that nothing can listen at. Whether they are free only the service finds out."""
    if ports_port is None and port == MAX_PORT:
        raise CliError(f"--port {port}: the next one, for ports inside sandboxes, doesn't exist; give --ports-port")
    if port and port == ports_port:
        raise CliError(f"--ports-port {port} is the API's own --port: each listener needs one for itself")
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CliError(f"--host {host}: {reason}; an address of this machine is needed, such as 127.0.0.1, or 0.0.0.0 for all") from error


def _require_root(command: str) -> None:
    if os.geteuid() != 0:
        raise CliError(f"sandboxes need root to be made: sudo dsec {command}")


def _refuse_second(run_dir: Path) -> None:
    record = UpRecord.read(run_dir)
    if record is not None and record.is_running():
        where = f" at {record.url}" if record.url else ""
        raise CliError(f"it runs already{where} (pid {record.pid}): `dsec down` stops it; a second one needs {OWN}")


def _check_machine() -> None:
    """Raises CliError naming the first thing without which no sandbox can start."""
    from dsec.cli.doctor import local_report

    if shutil.which("mkfs.btrfs", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None:
        raise CliError("mkfs.btrfs is missing, and sandboxes need it for their writable layers: apt-get install btrfs-progs")
    for finding in local_report().findings:
        if finding.state == "missing":
            raise CliError(f"this machine lacks {finding.feature}: {finding.cost}; {finding.todo} (`dsec doctor` shows everything)")


def _sweep(instance: Instance, *, stopped: bool) -> None:
    """Raises CliError if something can't be removed; then the record stays, for the next ``dsec down``."""
    command = [str(inst.binary("dsec-spawner")), "sweep", *instance.spawner_options()]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        left = ", ".join(str(path) for path in inst.left_of(instance))
        raise CliError(
            f"{'the service has stopped, but ' if stopped else ''}not everything could be removed{left and f' ({left})'}: "
            f"{done.stderr.strip() or done.stdout.strip()}; once that is mended, `dsec down --run-dir {instance.run_dir}` removes the rest"
        )


def _forget(instance: Instance, before: UpRecord | None = None) -> None:
    """Take back what clients find; the record too, but where something is left for the next start or for ``dsec down``. ``before``: that of
    the run that left it."""
    inst.retract(instance.run_dir)
    # The state directory may be another instance's: then this one was refused.
    if not any(path.parent == instance.run_dir for path in inst.left_of(instance)):
        UpRecord.path(instance.run_dir).unlink(missing_ok=True)
    elif before is not None:
        before.write()
