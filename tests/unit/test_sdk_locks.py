"""Lock files: written, read back, refused when they aren't any."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from libdsec import Lock, Sandbox
from libdsec.errors import InvalidArgument

DIGEST = f"python:3.11@sha256:{'a' * 64}"
LOCK = Lock(image=DIGEST, workspace="w@3", toolkits=("t@1", "u@2"), network="none", network_rules={'a"b.org': True, "c": False})


@pytest.mark.parametrize("name", ["env.toml", "env.json"])
@pytest.mark.parametrize("lock", [LOCK, Lock(image=DIGEST)])
def test_a_lock_is_read_as_it_was_written(name: str, lock: Lock, tmp_path: Path) -> None:
    lock.write(tmp_path / name)
    assert Lock.read(tmp_path / name) == lock
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_toml_is_for_people(tmp_path: Path) -> None:
    LOCK.write(tmp_path / "env.toml")
    text = (tmp_path / "env.toml").read_text()
    assert f'image = "{DIGEST}"' in text and tomllib.loads(text)["network_rules"] == {'a"b.org': True, "c": False}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "image"),
        ('image = "python"\nversion = 1', "isn't pinned"),
        (f'image = "{DIGEST}"\nversion = 2', "version"),
        (f'image = "{DIGEST}"\nother = 1', "other"),
        (f'image = "{DIGEST}"\ntoolkits = ["t"]', "isn't pinned"),
        ("image = ", "no lock file"),
        ("x" * 2_000_000, "more than"),
    ],
)
def test_what_is_no_lock_says_why(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "env.toml").write_text(content)
    with pytest.raises(InvalidArgument, match=words) as refusal:
        Lock.read(tmp_path / "env.toml")
    assert refusal.value.field == "lock"


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"\.toml or \.json"):
        LOCK.write(tmp_path / "env.yaml")


def test_a_creation_takes_its_layers_and_network_from_the_lock(tmp_path: Path) -> None:
    LOCK.write(tmp_path / "env.json")
    for lock in (LOCK, tmp_path / "env.json"):
        args = Sandbox.create(lock=lock, memory_limit_mb=512)._args
        assert (args.container_image, args.workspace, args.toolkits) == (DIGEST, "w@3", ("t@1", "u@2"))
        assert (args.network, args.network_rules, args.memory_limit_mb) == ("none", LOCK.network_rules, 512)


def test_a_lock_stands_alone() -> None:
    with pytest.raises(InvalidArgument, match="either"):
        Sandbox.create()
    with pytest.raises(InvalidArgument, match="either"):
        Sandbox.create("python", lock=LOCK)
    besides: list[dict[str, Any]] = [{"workspace": "x"}, {"toolkits": ["x"]}, {"network": "bridged"}, {"network_rules": {"x": True}}]
    for beside in besides:
        with pytest.raises(InvalidArgument, match="beside"):
            Sandbox.create(lock=LOCK, **beside)
