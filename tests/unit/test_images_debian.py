"""Debian roots: what is asked of mmdebstrap, and what becomes of its failures. A script stands in for it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dsec.images.debian import DebianRootError, debian_root_tar
from libdsec.errors import InvalidArgument
from libdsec.images import debian_command


@pytest.fixture
def mmdebstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name, alone on the path; it appends its arguments to ``calls`` and writes them as the tar."""
    directory = tmp_path / "bin"
    directory.mkdir()
    script = directory / "mmdebstrap"
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))
    return script


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def test_a_root_is_made_once_per_suite_and_package_list(mmdebstrap: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = debian_root_tar(["git", "python3"], cache=cache)
    assert debian_root_tar(["python3", "git"], cache=cache) == first
    assert debian_root_tar(["git"], cache=cache) != first
    assert debian_root_tar(["git", "python3"], cache=cache, suite="trixie") != first
    assert len(calls(tmp_path)) == 3
    assert "--include=git,python3" in calls(tmp_path)[0] and "--variant=minbase" in calls(tmp_path)[0]


def test_several_callers_at_once_make_it_once(mmdebstrap: Path, tmp_path: Path) -> None:
    threads = [threading.Thread(target=debian_root_tar, args=(["git"],), kwargs={"cache": tmp_path / "cache"}) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls(tmp_path)) == 1


def test_a_failure_shows_what_mmdebstrap_said_and_keeps_nothing(mmdebstrap: Path, tmp_path: Path) -> None:
    mmdebstrap.write_text("#!/bin/sh\necho half a tar\necho 'E: no such package' >&2\nexit 25\n")
    with pytest.raises(DebianRootError, match="no such package"):
        debian_root_tar(cache=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_without_mmdebstrap_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DebianRootError, match="apt-get install mmdebstrap"):
        debian_root_tar(cache=tmp_path / "cache")


def test_a_source_becomes_arguments() -> None:
    command = debian_command("mmdebstrap:trixie?include=git,vim&variant=apt&mirror=http://mirror.example/debian")
    assert {"--include=git,vim", "--variant=apt", "--format=tar"} <= set(command)
    assert command[-3:] == ["trixie", "-", "http://mirror.example/debian"]
    assert debian_command("mmdebstrap:bookworm")[-1] == "bookworm"


@pytest.mark.parametrize(
    "source", ["mmdebstrap:", "mmdebstrap:--mode=root", "mmdebstrap:x?variant=y", "mmdebstrap:x?hook=rm", "mmdebstrap:x?mirror=-o"]
)
def test_sources_that_make_no_sense_are_refused(source: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        debian_command(source)
    assert refusal.value.field == "source"
