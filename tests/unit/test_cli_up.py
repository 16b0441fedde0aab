"""``dsec up`` and ``dsec down`` around a supervisor that the tests play: what is started, told, announced and taken away again."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.api.bearer import Seed, split

# Stands in for dsec-spawner. `supervise` answers /healthz, writes the ready file and notes its arguments and the signals that it gets.
SPAWNER = """#!{python}
import http.server, json, os, signal, sys, threading
from pathlib import Path

command, words = sys.argv[1], sys.argv[2:]
if command == "doctor":
    lacking = os.environ.get("LACKING")
    print(json.dumps([{{"feature": "clone3", "state": "missing" if lacking else "ok", "cost": "no sandbox starts", "todo": "upgrade"}}]))
    sys.exit(0)
run = Path(words[words.index("--run-dir") + 1])
notes = run.parent / "notes"
with notes.open("a") as file:
    print(json.dumps([command, *words]), file=file)
if command == "sweep":
    if (run.parent / "stuck").exists():
        print("dsec-spawner: sweeping: dsec: Device or resource busy", file=sys.stderr)
        sys.exit(1)
    for left in ("layers.ns", "c"):
        (run / left).unlink(missing_ok=True)
    sys.exit(0)
if os.environ.get("BREAK") == "late":
    # Once the state directory is its own.
    log = Path(words[words.index("--log") + 1])
    log.parent.mkdir(exist_ok=True)
    with log.open("a") as file:
        file.write("the reason of this run\\n")
    sys.exit(7)
if os.environ.get("BREAK"):
    print("no room for the scratch file", file=sys.stderr)
    sys.exit(7)

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Health)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = "http://127.0.0.1:%d" % server.server_address[1]
first = words[words.index("--first-key") + 1].split(":")[0]
used = run.parent / "used"
ready = {{"url": url, "ports_url": "http://127.0.0.1:1", "socket": str(run / "api.sock"), "pid": os.getpid()}}
ready["first_key"] = None if used.exists() else first
used.touch()
(run / "ready").write_text(json.dumps(ready))
if os.environ.get("LEAVE"):
    for left in ("layers.ns", "c"):
        (run / left).touch()
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT, signal.SIGTERM}})
number = signal.sigwait({{signal.SIGINT, signal.SIGTERM}})
with notes.open("a") as file:
    print(json.dumps([signal.Signals(number).name]), file=file)
(run / "ready").unlink()
sys.exit(1 if os.environ.get("LEAVE") and number == signal.SIGINT else 0)
"""

PRELUDE = "import dsec.cli.up as up; up._require_root = lambda command: None; from dsec.cli import main; main()"


class Machine:
    """One instance's directories, and the command that works on them."""

    def __init__(self, home: Path) -> None:
        self.home, self.run, self.config = home, home / "run", home / "local.json"
        binaries = home / "bin"
        binaries.mkdir()
        for name in ("dsec-spawner", "chronus", "dsec-mklayer"):
            (binaries / name).write_text(SPAWNER.format(python=sys.executable))
            (binaries / name).chmod(0o755)
        self.environment = {**os.environ, "DSEC_BIN": str(binaries), "DSEC_CONFIG": str(self.config)}

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-c", PRELUDE, words[0], "--run-dir", str(self.run), "--state-dir", str(self.home / "state"), *words[1:]]

    def dsec(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        given = {**self.environment, **environment}
        return subprocess.run(self.command(*words), env=given, capture_output=True, text=True, timeout=60, check=False)

    @property
    def notes(self) -> list[list[str]]:
        path = self.home / "notes"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.dsec("down")


def test_up_starts_the_service_with_hashes_and_tells_the_keys_to_the_user_only(machine: Machine) -> None:
    done = machine.dsec("up", "--detach", "--json", "--port", "0", "--service-uid", "12345")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    [[command, *words]] = machine.notes
    options = dict(itertools.pairwise(words))
    assert command == "supervise"
    assert (options["--service-uid"], options["--port"], options["--ports-port"]) == ("12345", "0", "0")
    assert words[words.index("--") + 1 :][1:3] == ["-m", "dsec.serve"]
    assert (options["--cache-gb"], options["--cache-bytes"]) == ("64", str(16 << 30))
    local = json.loads(machine.config.read_text())
    for text, seed in [(told["api_key"], options["--first-key"]), (local["api_key"], options["--local-key"])]:
        assert split(text) == Seed.parse(seed)
        assert text.rpartition("_")[2] not in " ".join(words)
    assert told["url"] == local["url"]
    assert json.loads((machine.run / "client.json").read_text()) == local


def test_the_first_key_is_told_once_and_the_local_one_is_new_each_time(machine: Machine) -> None:
    first = json.loads(machine.dsec("up", "--detach", "--json").stdout)
    before = json.loads(machine.config.read_text())["api_key"]
    machine.dsec("down")
    second = json.loads(machine.dsec("up", "--detach", "--json").stdout)
    assert first["api_key"] is not None
    assert second["api_key"] is None
    assert json.loads(machine.config.read_text())["api_key"] != before


def test_down_stops_everything_and_leaves_no_file_for_clients(machine: Machine) -> None:
    machine.dsec("up", "--detach")
    done = machine.dsec("down")
    assert (done.returncode, done.stdout) == (0, "stopped; nothing is left\n")
    assert machine.notes[-1] == ["SIGINT"]
    assert not machine.config.exists()
    assert list(machine.run.iterdir()) == []


def test_down_removes_what_the_stopped_service_could_not(machine: Machine) -> None:
    machine.dsec("up", "--detach", LEAVE="1")
    done = machine.dsec("down")
    assert (done.returncode, done.stdout) == (0, "stopped; what was left is swept\n")
    assert list(machine.run.iterdir()) == []


def test_down_says_what_is_left_and_why(machine: Machine) -> None:
    machine.dsec("up", "--detach", "--cgroup", "other-name", LEAVE="1")
    (machine.home / "stuck").touch()
    done = machine.dsec("down")
    assert (done.returncode, done.stdout) == (1, "")
    for words in (str(machine.run / "layers.ns"), "Device or resource busy", f"`dsec down --run-dir {machine.run}` removes the rest"):
        assert words in done.stderr
    assert not machine.config.exists()
    (machine.home / "stuck").unlink()
    assert machine.dsec("down").returncode == 0
    command, *words = machine.notes[-1]
    assert (command, words[words.index("--cgroup") + 1]) == ("sweep", "other-name"), "still with the options of that run"
    assert list(machine.run.iterdir()) == []


def test_in_the_foreground_a_sweep_that_failed_is_told(machine: Machine) -> None:
    with subprocess.Popen(machine.command("up"), env={**machine.environment, "LEAVE": "1"}, stdout=-1, stderr=-1, text=True) as up:
        assert up.stdout is not None
        assert "ready at" in up.stdout.readline()
        up.send_signal(signal.SIGINT)
        _, complaint = up.communicate(timeout=30)
    assert up.returncode == 1
    assert "not everything could be removed" in complaint


def test_down_can_keep_the_sandboxes(machine: Machine) -> None:
    machine.dsec("up", "--detach")
    assert machine.dsec("down", "--keep-sandboxes").returncode == 0
    assert machine.notes[-1] == ["SIGTERM"]


def test_down_knows_the_options_of_a_run_whose_sandboxes_were_kept(machine: Machine) -> None:
    machine.dsec("up", "--detach", "--cgroup", "other-name", LEAVE="1")
    machine.dsec("down", "--keep-sandboxes")
    machine.dsec("up", "--detach", "--cgroup", "wrong-name", BREAK="1")
    assert machine.dsec("down").returncode == 0
    command, *words = machine.notes[-1]
    assert (command, words[words.index("--cgroup") + 1]) == ("sweep", "other-name")


def test_down_after_a_crash_sweeps_what_that_run_may_have_left(machine: Machine) -> None:
    machine.dsec("up", "--detach", "--cgroup", "other-name")
    record = json.loads((machine.run / "up.json").read_text())
    os.kill(record["pid"], signal.SIGKILL)
    with contextlib.suppress(ChildProcessError, TimeoutError):
        pidfd_wait(record["pid"])
    done = machine.dsec("down")
    assert done.returncode == 0, done.stderr
    command, *words = machine.notes[-1]
    assert command == "sweep"
    assert words[words.index("--cgroup") + 1] == "other-name", "with the options of the run that crashed"


def pidfd_wait(pid: int) -> None:
    """Until the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
        finally:
            os.close(descriptor)


def test_a_second_up_in_the_same_place_is_refused(machine: Machine) -> None:
    machine.dsec("up", "--detach")
    done = machine.dsec("up", "--detach")
    assert done.returncode == 1
    assert "runs already" in done.stderr
    assert "dsec down" in done.stderr
    assert len(machine.notes) == 1


@pytest.mark.parametrize(("number", "passed_on"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGTERM")])
def test_in_the_foreground_a_signal_is_passed_on_and_waited_for(machine: Machine, number: signal.Signals, passed_on: str) -> None:
    with subprocess.Popen(machine.command("up"), env=machine.environment, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        assert "ready at http://127.0.0.1:" in up.stdout.readline()
        up.stdout.readline()
        up.stdout.readline()
        up.stdout.readline()
        up.send_signal(number)
        assert up.wait(30) == 0
    assert machine.notes[-1] == [passed_on]
    assert not machine.config.exists()


def test_a_service_that_does_not_start_says_why_and_leaves_nothing(machine: Machine) -> None:
    done = machine.dsec("up", "--detach", BREAK="1")
    assert done.returncode == 1
    assert "exit code 7" in done.stderr
    assert "no room for the scratch file" in done.stderr
    assert not machine.config.exists()
    assert list(machine.run.iterdir()) == []
    assert not (machine.home / "state").exists(), "nothing is written before the supervisor says that it is this instance's"


def test_words_of_earlier_runs_are_not_quoted(machine: Machine) -> None:
    (machine.home / "state").mkdir()
    (machine.home / "state" / "dsec.log").write_text("the reason of an earlier run\n")
    done = machine.dsec("up", "--detach", BREAK="late")
    assert done.returncode == 1
    assert "the reason of this run" in done.stderr
    assert "earlier" not in done.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--port", "70000"), "'--port': Input should be less than or equal to 65535"),
        (("--port", "-1"), "'--port': Input should be greater than or equal to 0"),
        (("--ports-port", "65536"), "'--ports-port': Input should be less than or equal to 65535"),
        (("--port", "65535"), "--ports-port"),
        (("--port", "7070", "--ports-port", "7070"), "each listener needs one for itself"),
        (("--host", "no such host"), "--host no such host: Name or service not known"),
    ],
)
def test_what_nothing_can_listen_at_is_refused_before_anything_starts(machine: Machine, words: tuple[str, ...], complaint: str) -> None:
    done = machine.dsec("up", "--detach", *words)
    assert done.returncode in (1, 2)
    assert complaint in done.stderr and "Traceback" not in done.stderr
    assert machine.notes == []


def test_a_machine_without_an_essential_feature_is_told_what_to_do(machine: Machine) -> None:
    done = machine.dsec("up", LACKING="1")
    assert done.returncode == 1
    assert "clone3: no sandbox starts; upgrade" in done.stderr
    assert machine.notes == []


def test_missing_binaries_are_named(machine: Machine) -> None:
    done = machine.dsec("up", DSEC_BIN="/nonexistent")
    assert done.returncode == 1
    assert "./run setup" in done.stderr
    assert done.stderr.count("\n") == 1
