"""What ``dsec up`` leaves for clients and for ``dsec down``, and how much of it can be trusted later."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.cli import instance as inst
from dsec.cli.instance import Instance, LocalClient, UpRecord
from dsec.cli.run import CliError
from dsec.serve import privilege_refusal
from libdsec.config import read_local_config, resolve


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home" / ".config" / "dsec" / "local.json"
    monkeypatch.setenv("DSEC_CONFIG", str(path))
    return path


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    return Instance(run_dir, tmp_path / "state", "dsec-test", 1 << 28, 64913, 1024)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def record_of(instance: Instance, pid: int) -> UpRecord:
    ticks = inst.start_ticks(pid)
    assert ticks is not None
    return UpRecord(instance, pid, ticks, "http://127.0.0.1:1")


# -- the files for clients


def test_what_up_writes_is_what_the_sdk_reads(instance: Instance, config: Path) -> None:
    assert inst.announce(LocalClient("http://127.0.0.1:1", "dsec_a_b", "/nowhere/api.sock"), instance.run_dir) == config
    for path in (config, inst.client_file(instance.run_dir)):
        assert path.stat().st_mode & 0o777 == 0o600
    found = read_local_config()
    assert found is not None
    assert (found.url, found.api_key) == ("http://127.0.0.1:1", "dsec_a_b")


def test_clients_use_the_socket_where_it_is_to_be_seen(instance: Instance, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DSEC_URL", "DSEC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    socket = instance.run_dir / "api.sock"
    inst.announce(LocalClient("http://127.0.0.1:1", "key", str(socket)), instance.run_dir)
    assert resolve(None, None) == ("http://127.0.0.1:1", "key")
    socket.touch()
    assert resolve(None, None) == (f"unix://{socket}", "key")
    for own in ("http://127.0.0.1:1/", f"unix://{socket}"):
        assert resolve(own, None) == (own, "key")
    for other in ("http://127.0.0.1:2", "unix:///other.sock"):
        assert resolve(other, None) == (other, None), "the key goes to no other server"


def test_down_removes_both_files_and_nothing_beside_them(instance: Instance, config: Path) -> None:
    inst.announce(LocalClient("http://127.0.0.1:1", "k", "/nowhere/api.sock"), instance.run_dir)
    inst.retract(instance.run_dir)
    inst.retract(instance.run_dir)
    assert list(config.parent.iterdir()) == []
    assert list(instance.run_dir.iterdir()) == []


def test_down_leaves_the_configuration_of_another_instance(instance: Instance, config: Path) -> None:
    inst.announce(LocalClient("http://127.0.0.1:1", "mine", "/nowhere/api.sock"), instance.run_dir)
    config.write_text(json.dumps({"url": "http://127.0.0.1:2", "api_key": "other"}))
    inst.retract(instance.run_dir)
    assert json.loads(config.read_text())["api_key"] == "other"


def test_a_link_in_the_users_directory_is_replaced_not_followed(instance: Instance, config: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    config.parent.mkdir(parents=True)
    config.symlink_to(victim)
    inst.announce(LocalClient("http://127.0.0.1:1", "k", "/nowhere/api.sock"), instance.run_dir)
    assert victim.read_text() == "precious"
    assert not config.is_symlink()


# -- the record for down


def test_a_record_survives_the_disk(instance: Instance) -> None:
    record = record_of(instance, os.getpid())
    record.write()
    assert UpRecord.read(instance.run_dir) == record
    assert record.is_running()


def test_no_record_is_no_error_but_a_broken_one_is(instance: Instance) -> None:
    assert UpRecord.read(instance.run_dir) is None
    UpRecord.path(instance.run_dir).write_text("{")
    with pytest.raises(CliError, match=r"up\.json"):
        UpRecord.read(instance.run_dir)


def test_a_later_process_with_the_same_pid_is_never_signalled(instance: Instance, sleeper: subprocess.Popen[bytes]) -> None:
    real = record_of(instance, sleeper.pid)
    earlier = UpRecord(instance, real.pid, real.start_ticks - 1)
    assert not earlier.is_running()
    assert not inst.stop_process(earlier, signal.SIGKILL, 1)
    assert sleeper.poll() is None


def test_stopping_waits_for_the_end(instance: Instance, sleeper: subprocess.Popen[bytes]) -> None:
    record = record_of(instance, sleeper.pid)
    assert inst.stop_process(record, signal.SIGTERM, 10)
    assert not record.is_running(), "also while nobody has reaped it"
    assert sleeper.wait(10) == -signal.SIGTERM
    assert not inst.stop_process(record, signal.SIGTERM, 10)


def test_a_process_that_does_not_end_is_an_error(instance: Instance) -> None:
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", ignores], stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        with pytest.raises(CliError, match="hastens"):
            inst.stop_process(record_of(instance, stubborn.pid), signal.SIGTERM, 0.05)
        stubborn.kill()


# -- values that can't work


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run_dir": Path("relative")}, "absolute"),
        ({"run_dir": Path("/" + "x" * 90)}, "108"),
        ({"cgroup": "a/b"}, "--cgroup"),
        ({"cgroup": ""}, "--cgroup"),
        ({"service_uid": 0}, "never runs as root"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(instance: Instance, change: dict[str, Path | str | int], words: str) -> None:
    fields = {**vars(instance), **change}
    with pytest.raises(CliError, match=words):
        Instance(**fields).check()


# -- the service's own guard


NO_CAPABILITIES = (
    "Name:\tpython\nCapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapAmb:\t0000000000000000\n"
)


def test_the_service_refuses_to_run_as_root_or_with_a_capability() -> None:
    assert privilege_refusal(1000, NO_CAPABILITIES) is None
    assert "root" in (privilege_refusal(0, NO_CAPABILITIES) or "")
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        held = NO_CAPABILITIES.replace(f"{name}:\t0000000000000000", f"{name}:\t0000000000000400")
        assert name in (privilege_refusal(1000, held) or "")
