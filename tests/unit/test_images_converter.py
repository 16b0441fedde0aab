"""dsec-mklayer by itself: what it makes of good archives, and that it makes nothing of bad ones."""

from __future__ import annotations

import hashlib
import io
import json
import random
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dsec.images.converter import find_program
from tests.unit.images_archives import check_passes, files, member, tar

REFUSED, USAGE, SYSTEM = 1, 2, 3


def run(directory: Path, archives: Sequence[bytes], *options: str) -> subprocess.CompletedProcess[bytes]:
    inputs = []
    for position, archive in enumerate(archives):
        path = directory / f"{position}.tar"
        path.write_bytes(archive)
        inputs.append(str(path))
    for name in ("meta", "blob"):
        (directory / name).unlink(missing_ok=True)
    command = [str(find_program()), "--meta", str(directory / "meta"), "--blob", str(directory / "blob"), *options, *inputs]
    return subprocess.run(command, capture_output=True, check=False, timeout=60)


def convert(directory: Path, *archives: bytes, options: Sequence[str] = ()) -> dict[str, object]:
    done = run(directory, archives, *options)
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    check_passes(directory / "meta", report)
    return report


def refuse(directory: Path, archive: bytes, *options: str) -> str:
    """The complaint about an archive that must be refused whole."""
    done = run(directory, [archive], *options)
    assert done.returncode == REFUSED, (done.returncode, done.stdout, done.stderr)
    assert sorted(path.name for path in directory.iterdir()) == ["0.tar"], "something half made stayed"
    return done.stderr.decode()


def test_the_digests_are_those_of_the_files(tmp_path: Path) -> None:
    report = convert(tmp_path, files({"a": b"content", "b": b"x" * 10_000}))
    for name, size in (("meta", "meta_bytes"), ("blob", "blob_bytes")):
        data = (tmp_path / name).read_bytes()
        assert (report[name], report[size]) == (hashlib.sha256(data).hexdigest(), len(data))
        assert len(data) % 4096 == 0


def test_the_same_input_gives_the_same_layer(tmp_path: Path) -> None:
    archive = files({f"d{index % 7}/f{index}": bytes([index]) * index for index in range(200)})
    assert convert(tmp_path, archive) == convert(tmp_path, archive)


def test_stdin_and_files_give_the_same_layer(tmp_path: Path) -> None:
    archive = files({"a": b"content"})
    report = convert(tmp_path, archive)
    for name in ("meta", "blob"):
        (tmp_path / name).unlink()
    command = [str(find_program()), "--meta", str(tmp_path / "meta"), "--blob", str(tmp_path / "blob")]
    assert json.loads(subprocess.run(command, input=archive, capture_output=True, check=True).stdout) == report


def test_a_layer_without_data_has_no_blob(tmp_path: Path) -> None:
    report = convert(tmp_path, tar([member("d", tarfile.DIRTYPE), member("empty")]))
    assert (report["blob"], report["blob_bytes"]) == (None, 0)
    assert not (tmp_path / "blob").exists()


def test_replaced_files_leave_no_dead_data_behind(tmp_path: Path) -> None:
    big, small = files({"f": b"A" * 1_000_000}), files({"f": b"B" * 5000})
    collapsed = convert(tmp_path, big, small)
    assert collapsed["blob_bytes"] == 8192
    assert collapsed["blob"] == convert(tmp_path, small)["blob"]


def test_large_owner_ids_are_reported(tmp_path: Path) -> None:
    report = convert(tmp_path, tar([member("a", uid=70_000), member("b", gid=4_000_000_000), member("c", uid=65_535)]))
    assert report["extra_ids"] == [70_000, 4_000_000_000]


def test_more_than_a_hundred_large_owner_ids_are_refused(tmp_path: Path) -> None:
    assert "101 owner ids" in refuse(tmp_path, tar([member(f"f{index}", uid=100_000 + index) for index in range(101)]))


def test_foreign_overlay_attributes_are_dropped(tmp_path: Path) -> None:
    headers = {"SCHILY.xattr.trusted.overlay.opaque": "y", "SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.user.note": "kept"}
    report = convert(tmp_path, tar([member("d", tarfile.DIRTYPE, pax_headers=headers)]))
    assert report["dropped_xattrs"] == 2
    meta = (tmp_path / "meta").read_bytes()
    assert b"overlay.opaque" not in meta and b"note" + b"kept" in meta


def raw(entry: tarfile.TarInfo, change: Callable[[bytearray], None], content: bytes = b"") -> bytes:
    """An archive of one entry whose header is changed; the checksum is made to fit."""
    entry.size = len(content)
    header = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    change(header)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content + bytes(-len(content) % 512) + bytes(1024)


def set_field(offset: int, value: bytes) -> Callable[[bytearray], None]:
    def change(header: bytearray) -> None:
        header[offset : offset + len(value)] = value

    return change


HOSTILE = {
    "dotdot": (tar([member("../escape")]), '".." in the name'),
    "dotdot inside": (tar([member("a/../../escape")]), '".." in the name'),
    "dotdot directory": (tar([member("a/..", tarfile.DIRTYPE)]), '".." in the name'),
    "nul": (tar([member("x", pax_headers={"path": "a\0b"})]), "NUL"),
    "component of 256 bytes": (tar([member("n" * 256)]), "256 bytes"),
    "path of 5,000 bytes": (tar([member("/".join(["d" * 99] * 50))]), "a path of"),
    "too deep": (tar([member("/".join("d" * 1500))]), "below each other"),
    "hardlink to nothing": (tar([member("l", tarfile.LNKTYPE, linkname="missing")]), "neither in the archive nor below"),
    "hardlink outside": (tar([member("l", tarfile.LNKTYPE, linkname="../../etc/shadow")]), '".." in the name'),
    "hardlink to a directory": (
        tar([member("d", tarfile.DIRTYPE), member("l", tarfile.LNKTYPE, linkname="d")]),
        "hard link to a directory",
    ),
    "symlink without a target": (tar([member("l", tarfile.SYMTYPE, linkname="")]), "symbolic link"),
    "symlink loop among parents": (
        tar([member("a", tarfile.SYMTYPE, linkname="b"), member("b", tarfile.SYMTYPE, linkname="a"), member("a/x")]),
        "too many symbolic links",
    ),
    "below a file": (tar([member("f"), member("f/x")]), "is no directory"),
    "root is a file": (raw(member("x", tarfile.SYMTYPE, linkname="y"), set_field(0, b"/\0")), "root must be"),
    "whiteout of nothing": (tar([member(".wh.")]), "whiteout of no file"),
    "whiteout of the parent": (tar([member("a/.wh...")]), "whiteout of no file"),
    "below a whiteout": (tar([member(".wh.a/x")]), "used as a directory"),
    "unknown type": (raw(member("x"), set_field(156, b"Z")), "type 'Z'"),
    "multi-volume": (raw(member("x"), set_field(156, b"M")), "type 'M'"),
    "negative size": (raw(member("x"), set_field(124, b"\xff" * 12)), "negative"),
    "enormous size": (raw(member("x"), set_field(124, b"\x80" + b"\0" * 3 + b"\x7f" * 8)), "too many"),
    "garbage in a number": (raw(member("x"), set_field(124, b"12x45\0")), "size"),
    "the id that means none": (raw(member("x"), set_field(108, b"\x80\0\0\0\xff\xff\xff\xff")), "no owner id"),
    "device out of range": (raw(member("x", tarfile.CHRTYPE), set_field(329, b"\x80\0\0\0\0\1\0\0")), "out of range"),
    "wrong checksum": (tar([member("x")])[:148] + b"0000001\0" + tar([member("x")])[156:], "checksum"),
    "no tar at all": (b"hello world, " * 100, "checksum"),
    "empty": (b"", "truncated"),
    "compressed": (b"\x1f\x8b" + bytes(1022), "checksum"),
    "single zero record": (tar([member("a")])[:512] + bytes(512) + tar([member("b")]), "single zero record"),
    "pax length": (raw(member("x", tarfile.XHDTYPE), lambda header: None, b"99 path=x\n"), "PAX"),
    "pax of 2 MB": (raw(member("x", tarfile.XHDTYPE), lambda header: None, b"a" * 2_000_000), "at most"),
    "pax at the end": (raw(member("x", tarfile.XHDTYPE), lambda header: None, b"9 path=x\n"), "after an extension"),
    "global path": (raw(member("x", tarfile.XGLTYPE), lambda header: None, b"9 path=x\n"), "for all entries"),
    "empty name": (raw(member("x"), set_field(0, bytes(100))), "empty name"),
    "xattr without a name": (tar([member("x", pax_headers={"SCHILY.xattr.user.": "v"})]), "xattr"),
    "xattr of 64 KiB": (tar([member("x", pax_headers={"SCHILY.xattr.user.big": "v" * 65_536})]), "too long"),
    "sparse map that overlaps": (
        tar([(member("x", pax_headers={"GNU.sparse.map": "0,4,2,4", "GNU.sparse.size": "8"}), b"12345678")]),
        "contradicts",
    ),
    "sparse map beyond the end": (
        tar([(member("x", pax_headers={"GNU.sparse.map": "100,8", "GNU.sparse.size": "50"}), b"12345678")]),
        "contradicts",
    ),
    "sparse file of 2^60 bytes": (
        tar([(member("x", pax_headers={"GNU.sparse.map": "0,8", "GNU.sparse.size": str(2**60)}), b"12345678")]),
        "too many",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused_whole(tmp_path: Path, case: str) -> None:
    archive, why = HOSTILE[case]
    assert why in refuse(tmp_path, archive)


def test_the_complaint_names_the_entry_in_printable_characters(tmp_path: Path) -> None:
    assert refuse(tmp_path, tar([member("good"), member("bad\n\x1b[31m/../x")])).startswith('entry "bad\\n\\x1b[31m/../x": ')


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    archive = tar([(member("a"), b"x" * 3000), member("l" * 150, tarfile.DIRTYPE), (member("b"), b"y" * 700)])
    end = len(archive.rstrip(b"\0")) + 512
    for length in (1, 511, 512, 513, 2000, 3583, 3584, 4000, 5000, end - 600, end - 100):
        refuse(tmp_path, archive[:length])


def test_random_damage_gives_a_layer_or_a_clean_refusal(tmp_path: Path) -> None:
    source = random.Random(7)
    archive = tar([(member(f"d/{index}", pax_headers={"mtime": "1.5"}), bytes(index * 100)) for index in range(8)])
    for _ in range(60):
        damaged = bytearray(archive)
        for _ in range(source.randrange(1, 6)):
            damaged[source.randrange(len(damaged))] = source.randrange(256)
        done = run(tmp_path, [bytes(damaged)])
        assert done.returncode in (0, REFUSED), (done.returncode, done.stderr)
        assert (tmp_path / "meta").exists() == (done.returncode == 0)


def test_limits_are_kept(tmp_path: Path) -> None:
    many = files({f"f{index}": b"data" for index in range(50)})
    assert "more than 10 entries" in refuse(tmp_path, many, "--max-entries", "10")
    assert "file contents exceed" in refuse(tmp_path, many, "--max-bytes", "8192")
    assert "exceed 4096 bytes" in refuse(tmp_path, many, "--max-meta", "4096")
    assert "below each other" in refuse(tmp_path, files({"a/b/c/d": b""}), "--max-depth", "3")


def test_a_giant_hole_costs_nothing(tmp_path: Path) -> None:
    entry = member("x", pax_headers={"GNU.sparse.map": f"{2**43},8", "GNU.sparse.size": str(2**44)})
    report = convert(tmp_path, tar([(entry, b"12345678")]))
    assert isinstance(report["meta_bytes"], int) and report["meta_bytes"] < 64 << 20
    assert isinstance(report["blob_bytes"], int) and report["blob_bytes"] < 64 << 20


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(files({"a": b""}))
    (tmp_path / "meta").write_text("mine")
    command = [str(find_program()), "--meta", str(tmp_path / "meta"), "--blob", str(tmp_path / "blob"), str(tmp_path / "0.tar")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == SYSTEM
    assert (tmp_path / "meta").read_text() == "mine"


def test_wrong_options_are_told_apart_from_wrong_archives() -> None:
    for options in ([], ["--meta"], ["--meta", "m", "--blob", "b", "--what", "1"], ["--meta", "m", "--blob", "b", "--max-entries", "x"]):
        assert subprocess.run([str(find_program()), *options], capture_output=True, check=False).returncode == USAGE


def test_trailing_bytes_after_the_end_mark_are_read_and_ignored(tmp_path: Path) -> None:
    archive = files({"a": b"content"})
    assert convert(tmp_path, archive + b"rubbish" * 1000)["meta"] == convert(tmp_path, archive)["meta"]


def test_old_and_new_formats_give_the_same_layer(tmp_path: Path) -> None:
    entries = [(member(f"{'long' * 40}/{index}", uid=3_000_000, mtime=12_345), b"c" * index) for index in range(10)]
    reports = {
        json.dumps(convert(tmp_path, tar(entries, format=kind)) | {"entries": 0}) for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    }
    assert len(reports) == 1


def test_git_archives_with_a_global_comment_are_read(tmp_path: Path) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "0" * 40}) as archive:
        archive.addfile(member("a"))
    assert convert(tmp_path, made.getvalue())["entries"] == 1
