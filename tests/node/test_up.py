"""`dsec up` and `dsec down` for real: privileges, several instances, and what is left when something was killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.demo import lifetime
from tests.conftest import uid_options

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 150


class Place:
    """Directories, a cgroup name and a configuration file of one instance."""

    def __init__(self, home: Path, name: str) -> None:
        self.home, self.run, self.config, self.cgroup = home, home / "run", home / "local.json", name
        # Looked up when it starts: two places must not share uids.
        self.uids: tuple[str, ...] = ()
        self.environment = {**os.environ, "DSEC_CONFIG": str(self.config)}

    def dsec(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dsec.cli", *words]
        return subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    def try_up(self, *words: str) -> subprocess.CompletedProcess[str]:
        places = ["--state-dir", str(self.home / "state"), "--run-dir", str(self.run), "--cgroup", self.cgroup]
        self.uids = self.uids or uid_options()
        return self.dsec("up", "--detach", "--json", "--port", "0", "--scratch-mb", "512", *places, *self.uids, *words)

    def up(self) -> dict[str, str]:
        done = self.try_up()
        assert done.returncode == 0, done.stderr
        told: dict[str, str] = json.loads(done.stdout)
        return told

    def down(self, *words: str) -> None:
        done = self.dsec("down", "--run-dir", str(self.run), "--state-dir", str(self.home / "state"), "--cgroup", self.cgroup, *words)
        assert done.returncode == 0, done.stderr

    def key(self) -> str:
        found: str = json.loads(self.config.read_text())["api_key"]
        return found

    def left(self) -> list[str]:
        """What the instance still holds on this machine, by name."""
        roots = Path("/sys/fs/cgroup")
        found = [str(path) for path in (roots / self.cgroup, *roots.glob(f"*/{self.cgroup}")) if path.exists()]
        found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.home) in line]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and str(self.home).encode() in read(entry / "cmdline"):
                found.append(f"pid {entry.name}: {read(entry / 'cmdline')!r}")
        return found


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def status_of(url: str, key: str | None = None) -> int:
    request = urllib.request.Request(url, headers={} if key is None else {"Authorization": f"Bearer {key}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as response:
            status: int = response.status
            return status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def places() -> Iterator[list[Place]]:
    """Two places to start an instance in; at the end nothing of either may be left."""
    if os.geteuid() != 0:
        pytest.fail("these tests make real mounts and cgroups: run them as root")
    homes = [Path(tempfile.mkdtemp(prefix="dsec-up-")) for _ in range(2)]
    for home in homes:
        home.chmod(0o755)
    made = [Place(home, f"dsec-up-{os.getpid()}-{index}") for index, home in enumerate(homes)]
    yield made
    try:
        for place in made:
            place.down()
        left = [line for place in made for line in place.left()]
        assert not left, left
    finally:
        for home in homes:
            shutil.rmtree(home)


def test_the_service_has_no_privilege_and_the_caller_has_its_key(places: list[Place]) -> None:
    place = places[0]
    told = place.up()
    ready = json.loads((place.run / "ready").read_text())
    status = dict(line.split(":", 1) for line in Path(f"/proc/{ready['pid']}/status").read_text().splitlines())
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert "0" not in status["Uid"].split()
    assert status["NoNewPrivs"].strip() == "1"
    assert told["api_key"].startswith("dsec_")
    for key in (told["api_key"], place.key()):
        assert status_of(f"{told['url']}/v1/keys", key) == 200
    assert status_of(f"{told['url']}/v1/keys") == 401
    assert place.config.stat().st_mode & 0o777 == 0o600


def test_any_user_reaches_the_socket_and_nobody_is_let_in_without_a_key(places: list[Place]) -> None:
    place = places[0]
    told = place.up()
    ask = """if True:
        import socket, sys
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(sys.argv[1])
        connection.sendall(f"GET /v1/keys HTTP/1.0\\r\\nAuthorization: Bearer {sys.argv[2]}\\r\\n\\r\\n".encode())
        print(connection.recv(4096).split()[1].decode())
    """
    for key, status in ((told["api_key"], "200"), ("dsec_x_y", "401")):
        command = [sys.executable, "-c", ask, told["socket"], key]
        assert subprocess.run(command, user=65534, capture_output=True, text=True, check=True, env={}).stdout.strip() == status
    assert place.dsec("ls", "--json").returncode == 0
    place.down()
    assert not Path(told["socket"]).exists()
    assert place.up()["socket"] == told["socket"]


def test_what_keeps_the_service_from_starting_is_told_in_words(places: list[Place]) -> None:
    place = places[0]
    store = place.home / "store"
    store.mkdir(mode=0o755)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, complaint in (
            (("--store", str(store)), "may not write there"),
            (("--port", str(port)), f"can't listen at 127.0.0.1, port {port}: Address already in use"),
        ):
            done = place.try_up(*words)
            assert done.returncode == 1
            assert complaint in done.stderr and "Traceback" not in done.stderr, done.stderr
            assert place.left() == []


def test_a_directory_of_somebody_else_is_left_as_it_was(places: list[Place]) -> None:
    place = places[0]
    state = place.home / "state"
    state.mkdir()
    (state / "thesis.tex").touch()
    done = place.try_up()
    assert done.returncode == 1 and "thesis.tex" in done.stderr, done.stderr
    assert [path.name for path in state.iterdir()] == ["thesis.tex"]
    shutil.rmtree(state)


def test_a_second_instance_on_the_first_ones_things_is_refused(places: list[Place]) -> None:
    one, two = places
    url = one.up()["url"]
    for words in (("--state-dir", str(one.home / "state")), ("--cgroup", one.cgroup), one.uids):
        done = two.try_up(*words)
        assert done.returncode == 1
        assert f"{words[0]} {words[1]}" in done.stderr and "give this one its own" in done.stderr, done.stderr
        assert two.left() == []
    assert two.dsec("down", "--run-dir", str(two.run), "--state-dir", str(two.home / "state"), "--cgroup", one.cgroup).returncode == 1
    assert status_of(f"{url}/v1/nodes", one.key()) == 200


def test_down_that_could_not_remove_everything_says_so(places: list[Place]) -> None:
    place = places[0]
    place.up()
    (group,) = Path("/sys/fs/cgroup").glob(f"*/{place.cgroup}/devices.allow")
    with subprocess.Popen(["sleep", "600"]) as stranger:
        (group.parent / "cgroup.procs").write_text(str(stranger.pid))
        done = place.dsec("down", "--run-dir", str(place.run))
        assert done.returncode == 1 and done.stdout == ""
        for words in (str(place.run / "layers.ns"), f"{group.parent}: Device or resource busy", str(stranger.pid)):
            assert words in done.stderr, done.stderr
        stranger.kill()
    place.down()
    assert place.left() == []


def test_two_instances_live_side_by_side(places: list[Place]) -> None:
    one, two = places
    urls = [one.up()["url"], two.up()["url"]]
    assert status_of(f"{urls[0]}/v1/nodes", one.key()) == 200
    assert status_of(f"{urls[0]}/v1/nodes", two.key()) == 401
    one.down()
    assert one.left() == []
    assert status_of(f"{urls[1]}/v1/nodes", two.key()) == 200


def test_the_first_key_works_after_a_restart_and_is_not_told_again(places: list[Place]) -> None:
    place = places[0]
    first = place.up()["api_key"]
    place.down()
    again = place.up()
    assert again["api_key"] is None
    assert status_of(f"{again['url']}/v1/keys", first) == 200


def test_the_ports_origin_takes_no_key_and_tells_nothing(places: list[Place]) -> None:
    told = places[0].up()
    for path in ("", "/v1/sandboxes", "/healthz", "/sb-e1-00/80/signature/"):
        assert status_of(f"{told['ports_url']}{path}", places[0].key()) in (403, 404)


@pytest.mark.parametrize("keep", [[], ["--keep-sandboxes"]], ids=["everything", "keep-sandboxes"])
def test_down_after_the_supervisor_was_killed_leaves_nothing(places: list[Place], keep: list[str]) -> None:
    place = places[0]
    place.up()
    os.kill(json.loads((place.run / "up.json").read_text())["pid"], signal.SIGKILL)
    place.down(*keep)
    place.down()
    assert place.left() == []
    assert not place.config.exists()


KILLED_RUN = """
import asyncio, sys
from pathlib import Path
from dsec.demo import instance
from libdsec import DSecClient, DSecContainerRunArgs

async def run():
    async with instance.running("killed", scratch_mb=512, parent=Path(sys.argv[1])) as own, DSecClient(own.nearest, own.api_key) as client:
        await client.images.import_(Path(sys.argv[2]), name="base")
        await client.run(DSecContainerRunArgs(container_image="base"))
        print(own.footprint().total, own.marks.cgroup, flush=True)
        await asyncio.sleep(600)

asyncio.run(run())
"""


def test_a_benchmark_that_is_killed_ends_its_service_and_the_next_one_removes_its_files(base_tar: Path) -> None:
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o711)
        kill_a_run(Path(parent), base_tar)


def kill_a_run(parent: Path, base_tar: Path) -> None:
    command = [sys.executable, "-c", KILLED_RUN, str(parent), str(base_tar)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        held, cgroup = run.stdout.readline().split()
        assert int(held) > 0
        run.kill()
    (left,) = parent.iterdir()
    place = Place(left, cgroup)
    deadline = time.monotonic() + TIMEOUT_S
    while place.left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert place.left() == []
    with lifetime.directory("instance", "next", parent, lambda left: None) as own:
        assert list(parent.iterdir()) == [own]
    assert list(parent.iterdir()) == []
