"""Layers under the kernel that will mount them: every file compared with the archive that it came from. Needs root for mount(2)."""

from __future__ import annotations

import ctypes
import io
import json
import os
import random
import stat
import struct
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import pytest

from dsec.images.converter import find_program
from libdsec.images import pack_tree
from tests.conftest import require_root
from tests.unit.images_archives import check_passes, member, tar

_libc = ctypes.CDLL(None, use_errno=True)
MS_RDONLY = 1
MNT_DETACH = 2


@pytest.fixture(autouse=True)
def _root() -> None:
    require_root()


@contextmanager
def mounted(kind: str, source: str, target: Path, options: str) -> Iterator[Path]:
    """A mount for as long as the body runs."""
    target.mkdir(exist_ok=True)
    if _libc.mount(source.encode(), os.fsencode(target), kind.encode(), MS_RDONLY, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(target))
    try:
        yield target
    finally:
        assert _libc.umount2(os.fsencode(target), 0) == 0, os.strerror(ctypes.get_errno())


@dataclass
class Layer:
    """A converted layer in a directory of its own."""

    directory: Path
    report: dict[str, object]

    @property
    def meta(self) -> Path:
        return self.directory / "meta"

    @property
    def blob(self) -> Path:
        return self.directory / "blob"

    @contextmanager
    def mount(self) -> Iterator[Path]:
        """The layer as the spawner mounts it: file-backed, without a loop device."""
        options = f"device={self.blob}" if self.report["blob"] else ""
        with mounted("erofs", str(self.meta), self.directory / "mnt", options) as path:
            yield path

    def check(self) -> None:
        """Lets fsck.erofs look at it."""
        device = [f"--device={self.blob}"] if self.report["blob"] else []
        done = subprocess.run(["fsck.erofs", *device, str(self.meta)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def convert(directory: Path, *archives: bytes, at: str = "/", below: Sequence[Layer] = ()) -> Layer:
    directory.mkdir(parents=True)
    names = []
    for position, archive in enumerate(archives):
        names.append(str(directory / f"{position}.tar"))
        Path(names[-1]).write_bytes(archive)
    command = [str(find_program()), "--meta", str(directory / "meta"), "--blob", str(directory / "blob"), "--at", at]
    for layer in below:
        command += ["--below", str(layer.meta), *(["--data", str(layer.blob)] if layer.report["blob"] else [])]
    done = subprocess.run([*command, *names], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    layer = Layer(directory, json.loads(done.stdout))
    check_passes(layer.meta, layer.report)
    return layer


@contextmanager
def stacked(layers: Sequence[Layer], target: Path) -> Iterator[Path]:
    """The layers, lowest first, merged by overlayfs over an empty one (it wants two at least)."""
    with ExitStack() as stack:
        empty = target.with_name(f"{target.name}-empty")
        empty.mkdir()
        paths = [empty, *(stack.enter_context(layer.mount()) for layer in layers)]
        yield stack.enter_context(mounted("overlay", "none", target, "lowerdir=" + ":".join(str(path) for path in reversed(paths))))


@dataclass(frozen=True)
class Seen:
    """Everything that can be seen of one file."""

    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    links: int
    device: int
    content: bytes
    xattrs: tuple[tuple[str, bytes], ...]


def look(root: Path, *, hidden_xattrs: str = "trusted.overlay.") -> dict[bytes, Seen]:
    """Every file below ``root`` by its name as bytes, found by reading directories and again by looking each name up."""
    found = {}
    pending = [b""]
    base = os.fsencode(root)
    while pending:
        name = pending.pop()
        path = os.path.join(base, name)
        status = os.lstat(path)
        content = b""
        if stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                content = file.read()
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif stat.S_ISDIR(status.st_mode):
            names = os.listdir(path)
            assert len(names) == len(set(names))
            pending += [os.path.join(name, child) for child in names]
        xattrs = [(key, os.getxattr(path, key, follow_symlinks=False)) for key in os.listxattr(path, follow_symlinks=False)]
        found[name] = Seen(
            mode=status.st_mode,
            uid=status.st_uid,
            gid=status.st_gid,
            size=0 if stat.S_ISDIR(status.st_mode) else status.st_size,
            mtime_ns=status.st_mtime_ns,
            links=0 if stat.S_ISDIR(status.st_mode) else status.st_nlink,
            device=status.st_rdev,
            content=content,
            xattrs=tuple(sorted((key, value) for key, value in xattrs if not key.startswith(hidden_xattrs))),
        )
    return found


def only(directory: Path, *archives: bytes) -> dict[bytes, Seen]:
    """What the kernel shows of the layer that these archives become."""
    layer = convert(directory, *archives)
    layer.check()
    with layer.mount() as path:
        return look(path, hidden_xattrs="-")


# -- one by one ---------------------------------------------------------------------------------------------------------------------------


def test_files_of_every_size_around_block_and_chunk_borders_read_back(tmp_path: Path) -> None:
    source = random.Random(1)
    sizes = [0, 1, 4095, 4096, 4097, 8191, 8192, 8193, 65_536, 65_537, 1_000_001, 1 << 20, (1 << 20) + 1]
    contents = {f"f{size}": source.randbytes(size) for size in sizes}
    seen = only(tmp_path / "l", tar([(member(name), content) for name, content in contents.items()]))
    assert {name.decode(): each.content for name, each in seen.items() if name} == contents


def test_a_file_without_holes_costs_one_index(tmp_path: Path) -> None:
    small = convert(tmp_path / "small", tar([(member("f"), b"x")]))
    large = convert(tmp_path / "large", tar([(member("f"), bytes(30_000_000))]))
    assert large.report["meta_bytes"] == small.report["meta_bytes"]


def test_modes_owners_and_special_files_are_kept(tmp_path: Path) -> None:
    entries: list[tarfile.TarInfo] = [
        member("setuid", mode=0o4755, uid=1000, gid=2000),
        member("setgid", mode=0o2711, uid=70_000, gid=4_294_967_294),
        member("sticky", tarfile.DIRTYPE, mode=0o1777),
        member("none", mode=0),
        member("char", tarfile.CHRTYPE, mode=0o666, devmajor=1, devminor=5),
        member("block", tarfile.BLKTYPE, mode=0o660, devmajor=4095, devminor=1_048_575),
        member("pipe", tarfile.FIFOTYPE),
        member("link", tarfile.SYMTYPE, linkname="../else/where"),
        member("long", tarfile.SYMTYPE, linkname="l" * 4095),
    ]
    seen = only(tmp_path / "l", tar(entries, format=tarfile.GNU_FORMAT))
    assert (seen[b"setuid"].mode, seen[b"setuid"].uid, seen[b"setuid"].gid) == (stat.S_IFREG | 0o4755, 1000, 2000)
    assert (seen[b"setgid"].mode, seen[b"setgid"].uid, seen[b"setgid"].gid) == (stat.S_IFREG | 0o2711, 70_000, 4_294_967_294)
    assert seen[b"sticky"].mode == stat.S_IFDIR | 0o1777
    assert seen[b"none"].mode == stat.S_IFREG
    assert (seen[b"char"].mode, seen[b"char"].device) == (stat.S_IFCHR | 0o666, os.makedev(1, 5))
    assert (seen[b"block"].mode, seen[b"block"].device) == (stat.S_IFBLK | 0o660, os.makedev(4095, 1_048_575))
    assert stat.S_ISFIFO(seen[b"pipe"].mode)
    assert seen[b"link"].content == b"../else/where"
    assert seen[b"long"].content == b"l" * 4095


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("0", 0),
        ("1.000000001", 1_000_000_001),
        ("-1.5", -1_500_000_000),
        ("9999999999.25", 9_999_999_999_250_000_000),
    ],
)
def test_times_keep_nanoseconds_and_may_be_negative(tmp_path: Path, written: str, expected: int) -> None:
    archive = tar([member("f", pax_headers={"mtime": written}), member("d", tarfile.DIRTYPE, pax_headers={"mtime": written})])
    seen = only(tmp_path / "l", archive)
    assert (seen[b"f"].mtime_ns, seen[b"d"].mtime_ns) == (expected, expected)


def test_names_of_any_bytes_are_kept(tmp_path: Path) -> None:
    names = [
        b"\xff\xfe",
        b"n" * 255,
        b"a b",
        b"-",
        b"+",
        b"...",
        b"..a",
        b".a",
        b"\n",
        b"\x7f",
        "ü".encode(),
        b"!",
        b"~",
        b"\\",
        b"d/" + b"\xe9" * 200,
    ]
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        seen = only(tmp_path / str(format), tar([(member(name), name) for name in names], format=format))
        assert {name for name, each in seen.items() if stat.S_ISREG(each.mode)} == set(names)
        assert all(seen[name].content == name for name in names)


def test_a_directory_of_100_000_names_is_searched_and_listed(tmp_path: Path) -> None:
    names = [f"{index * 7919 % 100_000:05}-{'x' * (index % 60)}" for index in range(100_000)]
    layer = convert(tmp_path / "l", tar([member(f"d/{name}") for name in names]))
    with layer.mount() as path:
        assert sorted(os.listdir(path / "d")) == sorted(names)
        for name in random.Random(2).sample(names, 3000):
            os.lstat(path / "d" / name)
        for name in ("", "0", "zzz", names[5][:-1] + "y", names[5] + "y"):
            assert name == "" or not (path / "d" / name).exists()


def test_hardlinks_are_one_file_also_through_collapsed_layers(tmp_path: Path) -> None:
    lower = tar([(member("a"), b"one"), member("b", tarfile.LNKTYPE, linkname="a")])
    upper = tar([member("c", tarfile.LNKTYPE, linkname="./b"), member("b", tarfile.SYMTYPE, linkname="x")])
    layer = convert(tmp_path / "l", lower, upper)
    layer.check()
    with layer.mount() as path:
        assert (path / "a").samefile(path / "c")
        assert (path / "a").stat().st_nlink == 2
        assert (path / "c").read_bytes() == b"one"


def test_hardlinks_to_files_of_layers_below_bring_them_along(tmp_path: Path) -> None:
    big = random.Random(1).randbytes(3 << 20)
    lowest = [member("d/", tarfile.DIRTYPE), (member("d/a"), big), member("empty"), (member("gone"), b"x")]
    first = convert(tmp_path / "1", tar(lowest))
    middle = [(member("b"), b"two"), member("e/also-b", tarfile.LNKTYPE, linkname="b"), member(".wh.gone")]
    second = convert(tmp_path / "2", tar(middle), below=[first])
    entries = [
        member("links/", tarfile.DIRTYPE),
        member("links/a", tarfile.LNKTYPE, linkname="d/a", mode=0o600),
        member("links/a2", tarfile.LNKTYPE, linkname="./links/a", mode=0o600),
        member("links/b", tarfile.LNKTYPE, linkname="/b"),
        member("links/empty", tarfile.LNKTYPE, linkname="empty"),
    ]
    third = convert(tmp_path / "3", tar(entries), below=[first, second])
    third.check()
    with stacked([first, second, third], tmp_path / "all") as path:
        assert (path / "links/a").read_bytes() == (path / "d/a").read_bytes() == big
        assert (path / "links/b").read_bytes() == (path / "e/also-b").read_bytes() == b"two"
        for name, other, links in (("links/a", "d/a", 3), ("links/b", "b", 3), ("links/b", "e/also-b", 3), ("links/empty", "empty", 2)):
            assert (path / name).samefile(path / other), name
            assert (path / name).stat().st_nlink == links, name
        assert stat.S_IMODE((path / "d/a").stat().st_mode) == 0o600
    with third.mount() as path:
        assert sorted(os.listdir(path)) == ["b", "d", "e", "empty", "links"], "only what is linked comes along"
    hidden = tar([member("c", tarfile.LNKTYPE, linkname="gone")])
    with pytest.raises(AssertionError, match="neither in the archive nor below"):
        convert(tmp_path / "4", hidden, below=[first, second])


def test_names_that_lead_through_layers_below_stay_where_they_belong(tmp_path: Path) -> None:
    home = member("home/u", tarfile.DIRTYPE, mode=0o750, uid=7)
    lower = [member("usr/lib/", tarfile.DIRTYPE), member("lib", tarfile.SYMTYPE, linkname="usr/lib"), home]
    upper = [(member("lib/x"), b"x"), (member("home/u/f"), b"f")]
    first = convert(tmp_path / "1", tar(lower))
    second = convert(tmp_path / "2", tar(upper), below=[first])
    with stacked([first, second], tmp_path / "all") as path:
        assert os.readlink(path / "lib") == "usr/lib"
        assert (path / "usr/lib/x").read_bytes() == b"x"
        seen = (path / "home/u").stat()
        assert (stat.S_IMODE(seen.st_mode), seen.st_uid) == (0o750, 7)


def test_capabilities_and_user_attributes_are_kept_and_foreign_ones_dropped(tmp_path: Path) -> None:
    capability = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
    headers = {
        "SCHILY.xattr.security.capability": capability.decode("utf-8", "surrogateescape"),
        "SCHILY.xattr.user.binary": b"\xff\0\n=".decode("utf-8", "surrogateescape"),
        "SCHILY.xattr.user.empty": "",
        "SCHILY.xattr.user.with%3Dequals": "v",
        "SCHILY.xattr.user.big": "b" * 60_000,
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "SCHILY.xattr.user.overlay.opaque": "y",
        "SCHILY.xattr.trusted.other": "y",
        "SCHILY.xattr.security.selinux": "label",
    }
    kept = {
        "security.capability": capability,
        "user.binary": b"\xff\0\n=",
        "user.empty": b"",
        "user.with=equals": b"v",
        "user.big": b"b" * 60_000,
    }
    seen = only(tmp_path / "l", tar([(member("f", pax_headers=headers), b"x"), member("d/", tarfile.DIRTYPE, pax_headers=headers)]))
    assert dict(seen[b"f"].xattrs) == kept
    assert dict(seen[b"d"].xattrs) == kept


@pytest.mark.parametrize("format", ["gnu", "pax-0.0", "pax-0.1", "pax-1.0"])
def test_sparse_files_of_every_format_read_back_and_stay_small(tmp_path: Path, format: str) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with (tree / "sparse").open("wb") as file:
        for offset, data in ((0, b"begin"), (5_000_000, b"middle" * 1000), (40_000_000, b"z")):
            file.seek(offset)
            file.write(data)
        file.truncate(64 << 20)
    with (tree / "hole").open("wb") as file:
        file.truncate(10 << 20)
    with (tree / "tail").open("wb") as file:
        file.seek(9 << 20)
        file.write(b"end")
    options = ["--format=gnu"] if format == "gnu" else ["--format=pax", f"--sparse-version={format.removeprefix('pax-')}"]
    subprocess.run(["tar", "--sparse", *options, "-cf", str(tmp_path / "s.tar"), "-C", str(tree), "."], check=True)
    layer = convert(tmp_path / "l", (tmp_path / "s.tar").read_bytes())
    layer.check()
    with layer.mount() as path:
        for name in ("sparse", "hole", "tail"):
            assert (path / name).read_bytes() == (tree / name).read_bytes(), name
    assert isinstance(layer.report["blob_bytes"], int) and layer.report["blob_bytes"] < 200_000


def test_a_sparse_file_with_many_segments_reads_back(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    source = random.Random(3)
    with (tree / "f").open("wb") as file:
        for offset in sorted(source.sample(range(3000), 400)):
            file.seek(offset * 4096)
            file.write(source.randbytes(source.randrange(1, 4097)))
        file.truncate(3000 * 4096 + 17)
    subprocess.run(["tar", "--sparse", "--format=gnu", "-cf", str(tmp_path / "s.tar"), "-C", str(tree), "f"], check=True)
    layer = convert(tmp_path / "l", (tmp_path / "s.tar").read_bytes())
    layer.check()
    with layer.mount() as path:
        assert (path / "f").read_bytes() == (tree / "f").read_bytes()


def test_missing_parents_are_made_as_any_unix_has_them(tmp_path: Path) -> None:
    seen = only(tmp_path / "l", tar([member(name) for name in ("usr/local/f", "tmp/f", "var/tmp/f", "root/f", "home/tmp/f")]))
    for name, mode in ((b"", 0o755), (b"usr/local", 0o755), (b"tmp", 0o1777), (b"var/tmp", 0o1777), (b"root", 0o700), (b"home/tmp", 0o755)):
        assert (seen[name].mode, seen[name].uid) == (stat.S_IFDIR | mode, 0), name


def test_later_entries_replace_earlier_ones(tmp_path: Path) -> None:
    entries = [
        (member("a"), b"first"),
        (member("a"), b"second"),
        (member("d/x"), b"1"),
        (member("d"), b"now a file"),
        (member("f"), b"a file"),
        member("f", tarfile.DIRTYPE),
        (member("f/x"), b"2"),
        member("k", tarfile.DIRTYPE, mode=0o700),
        (member("k/x"), b"3"),
        member("k", tarfile.DIRTYPE, mode=0o750),
    ]
    seen = only(tmp_path / "l", tar(entries))
    assert seen[b"a"].content == b"second"
    assert seen[b"d"].content == b"now a file"
    assert seen[b"f/x"].content == b"2"
    assert (seen[b"k"].mode, seen[b"k/x"].content) == (stat.S_IFDIR | 0o750, b"3")


def test_absolute_names_are_taken_below_the_root(tmp_path: Path) -> None:
    assert set(only(tmp_path / "l", tar([member("/etc/f"), member("//x"), member("./y/./z")]))) == {
        b"",
        b"etc",
        b"etc/f",
        b"x",
        b"y",
        b"y/z",
    }


def test_metadata_and_blob_also_mount_as_one_device(tmp_path: Path) -> None:
    """As a guest gets them: one flat file, the blob where the device slot says."""
    layer = convert(tmp_path / "l", tar([(member("f"), b"content" * 1000)]))
    flat = tmp_path / "flat"
    flat.write_bytes(layer.meta.read_bytes() + layer.blob.read_bytes())
    with mounted("erofs", str(flat), tmp_path / "mnt", "") as path:
        assert (path / "f").read_bytes() == b"content" * 1000


def test_the_device_slot_names_the_blob(tmp_path: Path) -> None:
    layer = convert(tmp_path / "l", tar([(member("f"), b"content")]))
    assert layer.meta.read_bytes()[1152:1216].decode() == layer.report["blob"]


# -- layers on top of each other ----------------------------------------------------------------------------------------------------------

LOWER = tar(
    [
        member("gone", mode=0o600),
        (member("kept"), b"kept"),
        (member("changed"), b"old"),
        member("dir", tarfile.DIRTYPE, mode=0o711),
        (member("dir/old"), b"1"),
        (member("opaque/old"), b"2"),
        (member("recreated/old"), b"3"),
        (member("tofile/old"), b"4"),
        (member("todir"), b"5"),
        member("lib", tarfile.SYMTYPE, linkname="usr/lib"),
        (member("usr/lib/old"), b"6"),
    ]
)
MIDDLE = tar(
    [
        member(".wh.gone"),
        (member("changed"), b"new"),
        (member("dir/new"), b"7"),
        member("dir/.wh.old"),
        (member("opaque/new"), b"8"),
        member("opaque/.wh..wh..opq"),
        member(".wh.recreated"),
        (member("recreated/new"), b"9"),
        (member("tofile"), b"10"),
        (member("todir/new"), b"11"),
        member(".wh..wh.plnk", tarfile.DIRTYPE),
        member(".wh..wh.plnk/1.2"),
    ]
)
UPPER = tar([(member("gone"), b"back"), member("dir/.wh.new"), member("opaque/.wh.new"), (member("recreated/old"), b"12")])


def merged(seen: dict[bytes, Seen]) -> dict[bytes, Seen]:
    return {name: each for name, each in seen.items() if not (stat.S_ISCHR(each.mode) and each.device == 0)}


def test_whiteouts_and_opaque_directories_hide_what_is_below(tmp_path: Path) -> None:
    layers = [convert(tmp_path / name, archive) for name, archive in (("lower", LOWER), ("middle", MIDDLE))]
    for layer in layers:
        layer.check()
    with stacked(layers, tmp_path / "merged") as path:
        seen = look(path)
    assert b"gone" not in seen and b"dir/old" not in seen and b"opaque/old" not in seen and b"recreated/old" not in seen
    assert seen[b"changed"].content == b"new"
    assert {name for name in seen if name.startswith((b"dir", b"opaque", b"recreated", b"to"))} == {
        b"dir", b"dir/new", b"opaque", b"opaque/new", b"recreated", b"recreated/new", b"tofile", b"todir", b"todir/new",
    }  # fmt: skip


def test_a_lone_layer_with_whiteouts_shows_none_of_them(tmp_path: Path) -> None:
    layer = convert(tmp_path / "l", MIDDLE)
    with stacked([layer], tmp_path / "merged") as path:
        assert sorted(os.listdir(path / "dir")) == ["new"]
        assert not any(stat.S_ISCHR(each.mode) for each in look(path).values())


def test_collapsing_changes_nothing_that_a_sandbox_sees(tmp_path: Path) -> None:
    archives = [LOWER, MIDDLE, UPPER]
    views = []
    for groups in ([[0], [1], [2]], [[0, 1], [2]], [[0], [1, 2]], [[0, 1, 2]]):
        name = "-".join("".join(map(str, group)) for group in groups)
        layers = [convert(tmp_path / f"{name}.{position}", *(archives[index] for index in group)) for position, group in enumerate(groups)]
        with stacked(layers, tmp_path / name) as path:
            views.append({key: (each.content, stat.S_IFMT(each.mode)) for key, each in merged(look(path)).items()})
    assert all(view == views[0] for view in views)
    assert views[0][b"gone"][0] == b"back"


def test_names_below_a_symlinked_directory_land_where_it_points(tmp_path: Path) -> None:
    upper = tar([(member("lib/new"), b"n")])
    layer = convert(tmp_path / "l", LOWER, upper)
    with layer.mount() as path:
        assert (path / "usr/lib/new").read_bytes() == b"n"
        assert os.readlink(path / "lib") == "usr/lib"


def test_an_upper_layer_that_only_adds_keeps_the_modes_below(tmp_path: Path) -> None:
    layer = convert(tmp_path / "l", LOWER, tar([member("dir/added")]))
    with layer.mount() as path:
        assert stat.S_IMODE((path / "dir").stat().st_mode) == 0o711


# -- whole trees --------------------------------------------------------------------------------------------------------------------------


def test_the_base_root_comes_through_file_by_file(tmp_path: Path, base_tar: Path) -> None:
    layer = convert(tmp_path / "l", base_tar.read_bytes())
    layer.check()
    with layer.mount() as path, tarfile.open(base_tar) as archive:
        names = 0
        for info in archive:
            file = path / info.name
            status = file.lstat()
            kind = {tarfile.DIRTYPE: stat.S_IFDIR, tarfile.SYMTYPE: stat.S_IFLNK, tarfile.CHRTYPE: stat.S_IFCHR}.get(
                info.type, stat.S_IFREG
            )
            assert stat.S_IFMT(status.st_mode) == kind, info.name
            assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (info.mode, info.uid, info.gid), info.name
            if info.islnk():
                assert file.samefile(path / info.linkname), info.name
            elif info.issym():
                assert os.readlink(file) == info.linkname
            elif info.isreg():
                content = archive.extractfile(info)
                assert content is not None and content.read() == file.read_bytes(), info.name
            assert status.st_mtime_ns == int(Decimal(info.pax_headers.get("mtime", str(info.mtime))) * 10**9), info.name
            names += 1
        assert sum(len(directories) + len(files) for _, directories, files in os.walk(path)) + 1 == names


def grow(root: Path, source: random.Random, files: int) -> None:
    """A random tree with everything that a tree can have."""
    root.mkdir()
    directories = [os.fsencode(root)]
    regular: list[bytes] = []
    for number in range(files):
        name = source.randbytes(source.randrange(1, 40)).translate(None, b"/\0") or b"x"
        if name in (b".", b"..") or name.startswith(b".wh."):
            continue
        path = os.path.join(source.choice(directories), name)
        if os.path.lexists(path):
            continue
        match source.randrange(12):
            case 0 | 1 if len(path) < 3000:
                os.mkdir(path)
                directories.append(path)
            case 2:
                os.symlink(source.randbytes(source.randrange(1, 300)).replace(b"\0", b"x"), path)
            case 3:
                os.mkfifo(path)
            case 4:
                os.mknod(
                    path,
                    source.choice((stat.S_IFCHR, stat.S_IFBLK)) | 0o640,
                    os.makedev(source.randrange(1, 4096), source.randrange(1 << 20)),
                )
            case 5 if regular:
                os.link(source.choice(regular), path)
                continue
            case _:
                with open(path, "wb") as file:
                    for _ in range(source.randrange(3)):
                        file.seek(source.randrange(50_000))
                        file.write(source.randbytes(source.randrange(20_000)))
                regular.append(path)
                if source.random() < 0.2:
                    os.setxattr(path, b"user." + b"k" * source.randrange(1, 200), source.randbytes(source.randrange(500)))
        os.chown(path, source.choice((0, 1000, 65_534, 100_000)), source.choice((0, 33, 70_000)), follow_symlinks=False)
        if not os.path.islink(path):
            os.chmod(path, source.randrange(0o10000))
        os.utime(path, ns=(0, source.randrange(-(2**31), 2**33) * 10**9 + source.randrange(10**9)), follow_symlinks=False)
        if number % 50 == 0:
            os.utime(os.path.dirname(path), ns=(0, number), follow_symlinks=False)


def differences(left: dict[bytes, Seen], right: dict[bytes, Seen]) -> list[str]:
    return [
        f"{name!r}: {left.get(name)} / {right.get(name)}"[:500] for name in sorted({*left, *right}) if left.get(name) != right.get(name)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_come_through_unchanged(tmp_path: Path, seed: int) -> None:
    grow(tmp_path / "tree", random.Random(seed), 1500)
    expected = look(tmp_path / "tree")
    for packer in ("sdk", "gnu", "pax"):
        if packer == "sdk":
            archive = b"".join(pack_tree(tmp_path / "tree"))
        elif packer == "pax":
            command = ["tar", "--format=pax", "--xattrs", "--sparse", "-cf", "-", "-C", str(tmp_path / "tree"), "."]
            archive = subprocess.run(command, capture_output=True, check=True).stdout
        else:
            command = ["tar", "--format=gnu", "--sparse", "-cf", "-", "-C", str(tmp_path / "tree"), "."]
            archive = subprocess.run(command, capture_output=True, check=True).stdout
        layer = convert(tmp_path / packer, archive)
        layer.check()
        with layer.mount() as path:
            seen = look(path)
        if packer == "gnu":
            # This format has neither xattrs nor fractions of a second.
            seen, wanted = ({name: coarse(each) for name, each in view.items()} for view in (seen, expected))
            assert differences(seen, wanted) == []
        else:
            assert differences(seen, expected) == []


def coarse(seen: Seen) -> Seen:
    return Seen(**{**seen.__dict__, "xattrs": (), "mtime_ns": seen.mtime_ns // 10**9 if seen.mtime_ns >= 0 else 0})


@pytest.mark.parametrize("seed", range(3))
def test_random_stacks_collapse_to_what_overlayfs_shows(tmp_path: Path, seed: int) -> None:
    source = random.Random(100 + seed)
    archives = []
    for _ in range(5):
        entries: list[tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]] = []
        made: dict[str, bool] = {}
        for _ in range(source.randrange(5, 40)):
            depth = source.randrange(1, 4)
            parts = [source.choice("abcd") for _ in range(depth)]
            parents = ["/".join(parts[:count]) for count in range(1, depth)]
            name = "/".join(parts)
            if any(made.get(parent) is False for parent in parents) or name in made:
                continue
            made |= dict.fromkeys(parents, True)
            match source.randrange(6):
                case 0:
                    entries.append(member("/".join([*parts[:-1], f".wh.{parts[-1]}"])))
                case 1:
                    entries.append(member(f"{name}/.wh..wh..opq"))
                    made[name] = True
                case 2:
                    entries.append(member(name, tarfile.DIRTYPE))
                    made[name] = True
                case _:
                    entries.append((member(name), source.randbytes(10)))
                    made[name] = False
        archives.append(tar(entries))
    separate = [convert(tmp_path / f"s{index}", archive) for index, archive in enumerate(archives)]
    cut = source.randrange(1, 5)
    collapsed = [convert(tmp_path / "c0", *archives[:cut]), convert(tmp_path / "c1", *archives[cut:])]
    views = []
    for name, layers in (("separate", separate), ("collapsed", collapsed)):
        with stacked(layers, tmp_path / name) as path:
            views.append({key: (each.content, stat.S_IFMT(each.mode)) for key, each in look(path).items()})
    assert views[0] == views[1]


@pytest.mark.parametrize("seed", range(3))
def test_random_stacks_with_links_are_the_same_wherever_they_are_cut(tmp_path: Path, seed: int) -> None:
    source = random.Random(200 + seed)
    archives: list[bytes] = []
    for number in range(5):
        while True:
            entries: list[tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]] = []
            for _ in range(source.randrange(3, 25)):
                name, other = ("/".join(source.choice("abcd") for _ in range(source.randrange(1, 4))) for _ in range(2))
                match source.randrange(7):
                    case 0:
                        entries.append(member("/".join([*name.split("/")[:-1], f".wh.{name[-1]}"])))
                    case 1:
                        entries.append(member(name, tarfile.SYMTYPE, linkname=f"/{other}"))
                    case 2:
                        entries.append(member(name, tarfile.LNKTYPE, linkname=other))
                    case 3:
                        entries.append(member(name, tarfile.DIRTYPE, mode=0o700 + number))
                    case _:
                        entries.append((member(name), source.randbytes(5000)))
            try:
                convert(tmp_path / f"try-{len(os.listdir(tmp_path))}", *archives, tar(entries))
            except AssertionError:
                # A link to nothing, a file among the parents: refused in one piece, so it is no part of this test.
                continue
            archives.append(tar(entries))
            break
    views = []
    whole, apart = [convert(tmp_path / "whole", *archives)], list[Layer]()
    for index, archive in enumerate(archives):
        apart.append(convert(tmp_path / f"apart-{index}", archive, below=apart))
    for name, layers in (("w", whole), ("a", apart)):
        with stacked(layers, tmp_path / name) as path:
            views.append({key: (each.content, each.mode, each.links if stat.S_ISREG(each.mode) else 0) for key, each in look(path).items()})
    assert views[0] == views[1]


def test_a_pipe_as_source_works_too(tmp_path: Path) -> None:
    archive = io.BytesIO(tar([(member("f"), b"x" * 3_000_000)]))
    command = [str(find_program()), "--meta", str(tmp_path / "meta"), "--blob", str(tmp_path / "blob")]
    done = subprocess.run(command, input=archive.getvalue(), capture_output=True, check=True)
    layer = Layer(tmp_path, json.loads(done.stdout))
    with layer.mount() as path:
        assert (path / "f").stat().st_size == 3_000_000
