"""`dsec-spawner supervise` with the real daemon and, for the service, a small program that tells what it finds itself to be."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from tests.conftest import uid_options

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("DSEC_BIN") or ROOT / ".cache" / "native" / "bin")
DEADLINE_S = 60
SERVICE_UID = 64_913
SERVICE = """
import json, os, signal, sys, threading
run, state, *rest = sys.argv[1:]
if "fail" in rest:
    sys.exit("the port is taken")
stopping = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopping.set())
if "stubborn" in rest:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "leave a child" in rest and os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()
open(state + "/journal.sqlite", "ab").close()
status = dict(line.split() for line in open("/proc/self/status") if line.startswith(("Cap", "NoNewPrivs")))
descriptors = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
told = {"pid": os.getpid(), "uids": os.getresuid(), "gids": os.getresgid(), "groups": os.getgroups(), "status": status, "cwd": os.getcwd(),
        "argv": sys.argv, "file": __file__, "environ": dict(os.environ), "writable": os.access(".", os.W_OK),
        "descriptors": descriptors}
with open(run + "/ready.part", "w") as file:
    json.dump(told, file)
os.rename(run + "/ready.part", run + "/ready")
if "die once" in rest and not os.path.exists(state + "/died"):
    open(state + "/died", "x").close()
    os.kill(os.getpid(), signal.SIGKILL)
while not stopping.wait(3600):
    pass
os.unlink(run + "/ready")
"""

T = TypeVar("T")


def eventually(look: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
    """The first thing that ``look`` finds."""
    end = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)
    return found


@dataclass
class Supervised:
    """One instance on directories of its own, its code in a directory that only root can enter."""

    home: Path
    cgroup: str = f"dsec-sv-{os.getpid()}"
    process: subprocess.Popen[bytes] | None = None
    uids: Sequence[str] = field(default_factory=uid_options)
    state: Path = field(init=False)

    def __post_init__(self) -> None:
        self.state = self.home / "state"

    @property
    def run(self) -> Path:
        return self.home / "run"

    def log(self) -> str:
        return (self.home / "log").read_text()

    def start(self, *arguments: str, more: Sequence[str] = ()) -> None:
        code = self.home / "closed" / "code"
        code.mkdir(parents=True, exist_ok=True)
        (code / "service.py").write_text(SERVICE)
        code.parent.chmod(0o700)
        options: list[str | Path] = ["--run-dir", self.run, "--state-dir", self.state, "--cgroup", self.cgroup, *self.uids]
        options += ["--service-uid", str(SERVICE_UID), "--scratch-mb", "512", "--chronus", BIN / "chronus", "--code", code, *more]
        argv: list[str | Path] = [os.path.realpath(sys.executable), code / "service.py", self.run, self.state, *arguments]
        with (self.home / "log").open("ab") as log:
            environment = {**os.environ, "AWS_SECRET_ACCESS_KEY": "secret", "DSEC_EXAMPLE": str(code / "x")}
            self.process = subprocess.Popen(
                [BIN / "dsec-spawner", "supervise", *options, "--", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def sweep(self) -> subprocess.CompletedProcess[str]:
        options: list[str | Path] = ["--run-dir", self.run, "--state-dir", self.state, "--cgroup", self.cgroup]
        return subprocess.run([BIN / "dsec-spawner", "sweep", *options], capture_output=True, text=True, check=False)

    def option(self, name: str) -> str:
        """The value of an option, by the name of the attribute."""
        return self.uids[1] if name == "uids" else str(getattr(self, name))

    def give_own(self, name: str) -> None:
        """What no other has, in the place of this attribute."""
        own = Supervised(self.home, cgroup=f"{self.cgroup}-own")
        setattr(self, name, getattr(own, name))

    def told(self, not_pid: int = 0) -> dict[str, object]:
        """What the service tells of itself once it is ready."""

        def look() -> dict[str, object] | None:
            with contextlib.suppress(FileNotFoundError):
                told: dict[str, object] = json.loads((self.run / "ready").read_bytes())
                return None if told["pid"] == not_pid else told
            assert self.process is None or self.process.poll() is None, self.log()
            return None

        return eventually(look, f"ready; the log says:\n{self.log()}")

    def pid_of(self, word: str) -> int | None:
        return next(iter(self.pids(word)), None)

    def pids(self, word: str = "") -> list[int]:
        """Processes of this instance with that word among their arguments."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0") if entry.name.isdigit() else []
                if str(self.run) in words and (not word or word in words):
                    found.append(int(entry.name))
        return sorted(found)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> int:
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def traces(self) -> list[str]:
        """What the kernel still has of it."""
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.home) in line]
        cgroups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{self.cgroup}")]
        loops = subprocess.run(["losetup", "--all", "--noheadings"], capture_output=True, text=True, check=True).stdout.splitlines()
        return mounts + cgroups + [line for line in loops if str(self.home) in line] + [f"pid {pid}" for pid in self.pids()]


@pytest.fixture
def instance() -> Iterator[Supervised]:
    with tempfile.TemporaryDirectory(prefix="dsec-sv-") as home:
        os.chmod(home, 0o755)
        supervised = Supervised(Path(home))
        yield supervised
        for pid in supervised.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if supervised.process is not None:
            supervised.process.wait()
        eventually(lambda: not supervised.pids(), "the end of all processes")
        swept = supervised.sweep()
        assert swept.returncode == 0, swept.stderr
        assert supervised.traces() == []


def test_the_service_has_no_privilege_and_sees_its_code_read_only(instance: Supervised) -> None:
    instance.start()
    told = instance.told()
    status = told["status"]
    assert isinstance(status, dict)
    assert (told["uids"], told["gids"], told["groups"]) == ([SERVICE_UID] * 3, [SERVICE_UID] * 3, [])
    none = "0" * 16
    assert status == {"CapInh:": none, "CapPrm:": none, "CapEff:": none, "CapBnd:": none, "CapAmb:": none, "NoNewPrivs:": "1"}
    app = str(instance.run / "app")
    assert (told["cwd"], told["file"], told["writable"]) == (app, f"{app}/service.py", False)
    assert told["argv"] == [f"{app}/service.py", str(instance.run), str(instance.state)]


def test_the_service_gets_a_small_environment(instance: Supervised) -> None:
    instance.start()
    environ = instance.told()["environ"]
    assert isinstance(environ, dict)
    app = str(instance.run / "app")
    expected = {"HOME": str(instance.state), "PYTHONPATH": app, "PYTHONDONTWRITEBYTECODE": "1", "DSEC_EXAMPLE": f"{app}/x"}
    assert expected.items() <= environ.items()
    assert "AWS_SECRET_ACCESS_KEY" not in environ


def test_the_service_inherits_no_descriptor_but_its_lock(instance: Supervised) -> None:
    instance.start()
    descriptors = instance.told()["descriptors"]
    assert isinstance(descriptors, list)
    (lock,) = set(descriptors) - {"/dev/null", str(instance.home / "log")}
    assert lock.startswith("/run/dsec-instances/")


@contextlib.contextmanager
def beside(instance: Supervised, **shared: object) -> Iterator[Supervised]:
    """An instance that shares these attributes with another one, and nothing else."""
    with tempfile.TemporaryDirectory(prefix="dsec-sv-") as home:
        os.chmod(home, 0o755)
        other = Supervised(Path(home), cgroup=f"{instance.cgroup}-b")
        for name, value in shared.items():
            setattr(other, name, value)
        yield other
        if other.process is not None and other.process.poll() is None:
            other.signal(signal.SIGINT)
            assert other.end() == 0
        # A cgroup that it shares is not its own.
        assert [line for line in other.traces() if not line.endswith(f"/{instance.cgroup}")] == []


SHARED = {"cgroup": "--cgroup", "uids": "--uid-base", "state": "--state-dir"}


def share(instance: Supervised, name: str) -> dict[str, object]:
    return {name: getattr(instance, name)}


@pytest.mark.parametrize("name", SHARED)
def test_what_a_live_instance_has_no_other_gets(instance: Supervised, name: str) -> None:
    instance.start()
    before = instance.told()
    with beside(instance, **share(instance, name)) as other:
        other.start()
        assert other.end() == 1
        assert f"{SHARED[name]} {instance.option(name)}" in other.log()
        assert f"is in use by another instance, whose --run-dir is {instance.run}: give this one its own" in other.log()
        assert not other.run.exists()
        if name != "uids":
            swept = other.sweep()
            assert swept.returncode == 1 and "sweeping would destroy that one" in swept.stderr
        # Refused for that alone: with its own it runs beside.
        other.give_own(name)
        other.start()
        other.told()
    assert instance.told() == before


@pytest.mark.parametrize("name", SHARED)
def test_sandboxes_that_wait_for_the_next_start_keep_what_is_theirs(instance: Supervised, name: str) -> None:
    instance.start()
    instance.told()
    instance.signal(signal.SIGKILL)
    instance.end()
    eventually(lambda: instance.pids() == [], "the end of its children")
    with beside(instance, **share(instance, name)) as other:
        other.start()
        assert other.end() == 1
        assert f"is in use by sandboxes that wait for the next start with --run-dir {instance.run}" in other.log()
    instance.start()
    instance.told()
    instance.signal(signal.SIGTERM)
    assert instance.end() == 0
    instance.cgroup += "-c"
    instance.start()
    assert instance.end() == 1
    assert "what an earlier run left in" in instance.log() and "name the same ones" in instance.log()
    instance.cgroup = instance.cgroup.removesuffix("-c")
    assert instance.sweep().returncode == 0
    with beside(instance, **share(instance, name)) as other:
        other.start()
        other.told()


def test_an_instance_that_is_gone_leaves_no_claim(instance: Supervised) -> None:
    instance.start()
    instance.told()
    assert claims_of(instance) == 1
    instance.signal(signal.SIGINT)
    assert instance.end() == 0
    assert claims_of(instance) == 0


def claims_of(instance: Supervised) -> int:
    return sum(os.fsencode(instance.run) in path.read_bytes() for path in Path("/run/dsec-instances").iterdir())


def test_what_root_relies_on_the_service_cant_replace(instance: Supervised) -> None:
    instance.start()
    instance.told()
    for directory in (instance.run, instance.state):
        found = directory.stat()
        assert found.st_uid == 0 and found.st_mode & stat.S_ISVTX
    scratch = (instance.state / "scratch").stat()
    assert (scratch.st_uid, stat.S_IMODE(scratch.st_mode)) == (0, 0o700)


def test_a_killed_service_is_started_again_and_its_children_end_with_it(instance: Supervised) -> None:
    instance.start("leave a child")
    first = instance.told()
    service = first["pid"]
    assert isinstance(service, int)
    (child,) = set(instance.pids(str(instance.run / "app" / "service.py"))) - {service}
    os.kill(service, signal.SIGKILL)
    instance.told(not_pid=service)
    eventually(lambda: child not in instance.pids(), "the end of the service's child")


def test_a_service_that_dies_as_soon_as_it_is_ready_is_started_again(instance: Supervised) -> None:
    instance.start("die once")
    eventually(lambda: (instance.state / "died").exists() and instance.told(), "the second service")
    assert instance.process is not None and instance.process.poll() is None


def test_a_killed_spawner_is_started_again_without_the_service_noticing(instance: Supervised) -> None:
    instance.start()
    service = instance.told()["pid"]
    spawner = instance.pid_of("serve")
    assert spawner is not None
    os.kill(spawner, signal.SIGKILL)
    eventually(lambda: instance.pid_of("serve") not in (None, spawner), "another spawner")
    assert instance.told()["pid"] == service


def uid_of(pid: int) -> int:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert int(status["CapEff"], 16) == 0
    return int(status["Uid"].split()[0])


def test_blobfs_and_the_fetcher_run_beside_the_service_and_are_started_again(instance: Supervised) -> None:
    words = [os.path.realpath(sys.executable), "-c", "import signal; signal.pause()", str(instance.run), "the-fetcher"]
    instance.start(more=[f"--fetcher={word}" for word in words])
    service = instance.told()["pid"]
    for word in (str(BIN / "dsec-blobfs"), "the-fetcher"):
        first = eventually(lambda word=word: instance.pid_of(word), word)
        assert uid_of(first) == SERVICE_UID
        os.kill(first, signal.SIGKILL)
        eventually(lambda word=word, first=first: instance.pid_of(word) not in (None, first), f"another {word}")
    assert instance.told()["pid"] == service
    eventually((instance.run / "blobfs.sock").exists, "blobfs' socket")
    instance.signal(signal.SIGINT)
    assert instance.end() == 0
    assert instance.traces() == []
    assert not instance.run.exists() or list(instance.run.iterdir()) == []


def test_a_blobfs_that_cant_run_takes_nothing_down(instance: Supervised) -> None:
    instance.start(more=["--blobfs", "/nowhere/dsec-blobfs"])
    service = instance.told()["pid"]
    eventually(lambda: "/nowhere/dsec-blobfs can't be started" in instance.log(), "the reason")
    assert instance.told()["pid"] == service


def test_sigint_leaves_nothing_in_the_kernel_nor_in_the_run_directory(instance: Supervised) -> None:
    instance.start()
    instance.told()
    instance.signal(signal.SIGINT)
    assert instance.end() == 0
    assert instance.traces() == []
    assert not instance.run.exists() or list(instance.run.iterdir()) == []
    assert (instance.state / "journal.sqlite").exists()


def test_sigterm_ends_the_processes_and_the_next_start_takes_over(instance: Supervised) -> None:
    instance.start()
    instance.told()
    instance.signal(signal.SIGTERM)
    assert instance.end() == 0
    assert instance.pids() == []
    assert (instance.run / "layers.ns").exists()
    instance.start()
    instance.told()
    instance.signal(signal.SIGINT)
    assert instance.end() == 0
    assert instance.traces() == []


def test_a_second_sigint_does_not_wait_for_a_stubborn_service(instance: Supervised) -> None:
    instance.start("stubborn")
    service = instance.told()["pid"]

    def gone() -> bool:
        # Again and again: two that come at once count as one.
        instance.signal(signal.SIGINT)
        return service not in instance.pids()

    eventually(gone, "the end of the service", deadline_s=10)
    assert instance.end() == 0
    assert instance.traces() == []


def test_children_of_a_killed_supervisor_end_softly(instance: Supervised) -> None:
    instance.start()
    instance.told()
    instance.signal(signal.SIGKILL)
    instance.end()
    eventually(lambda: instance.pids() == [], "the end of both children")
    assert not (instance.run / "ready").exists(), "the service was not told to end, but killed"


def test_a_second_supervisor_waits_for_the_service_of_a_killed_one(instance: Supervised) -> None:
    instance.start()
    first = instance.told()["pid"]
    assert isinstance(first, int)
    os.kill(first, signal.SIGSTOP)
    instance.signal(signal.SIGKILL)
    instance.end()
    instance.start()
    eventually(lambda: instance.pid_of("supervise"), "the second supervisor")
    os.kill(first, signal.SIGCONT)
    assert instance.told(not_pid=first)["pid"] != first
    assert first not in instance.pids()


def test_a_service_that_cant_start_ends_it_all_with_its_reason(instance: Supervised) -> None:
    instance.start("fail")
    assert instance.end() == 1
    assert "the port is taken" in instance.log()
    assert "before it was ready" in instance.log()
    assert instance.traces() == []


def test_a_directory_of_somebody_else_is_left_alone(instance: Supervised) -> None:
    instance.state.mkdir(mode=0o750)
    (instance.state / "thesis.tex").touch()
    instance.start()
    assert instance.end() == 1
    assert "thesis.tex" in instance.log()
    assert stat.S_IMODE(instance.state.stat().st_mode) == 0o750
