"""Layers made earlier become one: the same as if their archives had been converted together, and as overlayfs shows them."""

from __future__ import annotations

import json
import random
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from dsec.images.converter import find_program
from tests.unit.images_archives import check_passes, files, member, tar

REFUSED = 1


def make(directory: Path, name: str, *arguments: str | Path) -> tuple[Path, Path]:
    """Runs the converter; the metadata and the blob that it made."""
    meta, blob = directory / f"{name}.meta", directory / f"{name}.blob"
    command = [str(find_program()), "--meta", str(meta), "--blob", str(blob), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["blob"] is None) != blob.exists()
    check_passes(meta, report)
    return meta, blob


def of_archives(directory: Path, name: str, archives: Sequence[bytes]) -> tuple[Path, Path]:
    paths = []
    for position, archive in enumerate(archives):
        paths.append(directory / f"{name}-{position}.tar")
        paths[-1].write_bytes(archive)
    return make(directory, name, *paths)


def of_layers(directory: Path, name: str, layers: Sequence[tuple[Path, Path]]) -> tuple[Path, Path]:
    arguments: list[str | Path] = []
    for meta, blob in layers:
        arguments += ["--layer", meta, *(["--data", blob] if blob.exists() else [])]
    return make(directory, name, *arguments)


def content(layer: tuple[Path, Path]) -> tuple[bytes, bytes]:
    meta, blob = layer
    return meta.read_bytes(), blob.read_bytes() if blob.exists() else b""


def check_merge(directory: Path, archives: Sequence[bytes]) -> None:
    """Merging the layers of the archives one by one, and converting the archives together, give one tree. Both are read back once more, so
    that the order in which data lies in the blob is that of the tree."""
    together = of_archives(directory, "together", archives)
    singly = [of_archives(directory, f"layer{position}", [archive]) for position, archive in enumerate(archives)]
    merged = of_layers(directory, "merged", singly)
    assert content(of_layers(directory, "a", [together])) == content(of_layers(directory, "b", [merged]))


def test_every_kind_of_file_is_read_back(tmp_path: Path) -> None:
    sparse = b"x" * 5000
    entries = [
        (member("d", tarfile.DIRTYPE, mode=0o1750, uid=7, gid=70_000, mtime=12.5), b""),
        (member("d/f", mode=0o4755, pax_headers={"SCHILY.xattr.user.note": "hi"}), sparse),
        (member("d/g", tarfile.LNKTYPE, linkname="d/f"), b""),
        (member("d/empty"), b""),
        (member("link", tarfile.SYMTYPE, linkname="d/" + "f" * 200), b""),
        (member("pipe", tarfile.FIFOTYPE), b""),
        (member("device", tarfile.CHRTYPE, devmajor=1, devminor=300), b""),
        (member("disk", tarfile.BLKTYPE, devmajor=259, devminor=70_000), b""),
        *[(member(f"many/{index:04}-{'n' * 150}"), bytes([index % 251]) * index) for index in range(300)],
        (member(b"\xff\xfe"), b"odd"),
    ]
    layer = of_archives(tmp_path, "layer", [tar(entries)])
    once = of_layers(tmp_path, "once", [layer])
    assert content(once) == content(of_layers(tmp_path, "twice", [once]))
    assert once[0].read_bytes() == layer[0].read_bytes(), "one layer, read back, is the same layer"
    assert once[1].read_bytes() == layer[1].read_bytes()


@pytest.mark.parametrize(
    "upper",
    [
        [".wh.a"],
        ["a"],
        [".wh.a", "a/new"],
        ["a/.wh..wh..opq", "a/new"],
        ["a/.wh.b"],
        ["a/b/c/.wh.f", "a/b/other"],
        [".wh.a", ".wh.x"],
        ["x/y"],
        ["x/y/z", "a/b"],
        [".wh..wh..opq", "only"],
    ],
)
def test_deletions_and_type_changes_are_those_of_an_overlay(tmp_path: Path, upper: list[str]) -> None:
    check_merge(tmp_path, [files({"a/b/c/f": b"1" * 5000, "a/b/g": b"2", "x": b"3"}), files(dict.fromkeys(upper, b"4" * 4097))])


def test_random_stacks_merge_like_their_archives(tmp_path: Path) -> None:
    generator = random.Random(7)
    for number in range(20):
        directory = tmp_path / str(number)
        directory.mkdir()
        check_merge(directory, [_random_archive(generator) for _ in range(4)])


def _random_archive(generator: random.Random) -> bytes:
    chosen: dict[str, bytes] = {}
    for _ in range(generator.randrange(1, 12)):
        parts = [generator.choice("abc") for _ in range(generator.randrange(1, 4))]
        if generator.random() < 0.3:
            parts[-1] = f".wh.{parts[-1]}" if generator.random() < 0.7 else ".wh..wh..opq"
        name = "/".join(parts)
        parents = {"/".join(parts[:length]) for length in range(1, len(parts))}
        if not parents & chosen.keys() and not any(known.startswith(name + "/") for known in chosen):
            chosen[name] = b"" if parts[-1].startswith(".wh.") else bytes([generator.randrange(256)]) * generator.randrange(9000)
    return files(chosen)


def test_hardlinks_stay_one_file_and_dead_data_goes(tmp_path: Path) -> None:
    lower = tar([(member("f"), b"A" * 100_000), (member("g", tarfile.LNKTYPE, linkname="f"), b""), (member("h"), b"B" * 100_000)])
    layers = [of_archives(tmp_path, "lower", [lower]), of_archives(tmp_path, "upper", [files({".wh.h": b"", ".wh.f": b""})])]
    _, blob = of_layers(tmp_path, "merged", layers)
    assert blob.stat().st_size == 102_400


def test_a_damaged_layer_is_refused(tmp_path: Path) -> None:
    meta, blob = of_archives(tmp_path, "layer", [files({f"d{index}/f": b"x" * 100 for index in range(40)})])
    whole = meta.read_bytes()
    generator = random.Random(3)
    for number in range(60):
        broken = bytearray(whole[: generator.randrange(len(whole))] if number % 2 else whole)
        for _ in range(8):
            if broken:
                broken[generator.randrange(1024, max(1025, len(broken))) % len(broken)] ^= 1 << generator.randrange(8)
        meta.write_bytes(broken)
        arguments = ["--meta", tmp_path / "m", "--blob", tmp_path / "b", "--layer", meta, "--data", blob]
        done = subprocess.run([str(find_program()), *map(str, arguments)], capture_output=True, check=False, timeout=20)
        assert done.returncode in (0, 1, 3), (done.returncode, done.stderr)
        for name in ("m", "b"):
            (tmp_path / name).unlink(missing_ok=True)
