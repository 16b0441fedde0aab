"""The converter's cage, looked at from outside; and that nothing hostile makes it, or the import around it, take more than it may."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

from dsec.images.converter import find_program
from tests.unit.images_archives import OCI_LAYER, OciImage, docker_archive, files, member, tar

DEADLINE_S = 20.0
MIB = 1 << 20


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A converter that waits for the first byte of its archive."""
    command = [str(find_program()), "--meta", str(tmp_path / "meta"), "--blob", str(tmp_path / "blob")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        end = time.monotonic() + DEADLINE_S
        while not Path(f"/proc/{process.pid}/wchan").read_text().endswith("pipe_read"):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        yield process
        process.kill()


def test_before_the_first_byte_everything_is_given_up(waiting: subprocess.Popen[bytes]) -> None:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{waiting.pid}/status").read_text().splitlines())
    assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip(), status["Threads"].strip()) == ("1", "2", "1")
    limits = {line[:26].strip(): line[26:].split()[0] for line in Path(f"/proc/{waiting.pid}/limits").read_text().splitlines()[1:]}
    assert limits["Max core file size"] == limits["Max processes"] == "0"
    for name in ("Max address space", "Max file size", "Max cpu time", "Max open files"):
        assert limits[name] != "unlimited", name
    open_files = {os.readlink(path) for path in Path(f"/proc/{waiting.pid}/fd").iterdir()}
    assert {Path(name).name for name in open_files if name.startswith("/")} == {"meta", "blob", "blob.spare"}


# -- measured: what an import of something hostile takes -----------------------------------------------------------------------------------

IMPORT = """
import asyncio, json, os, sys
from pathlib import Path
from dsec.images import ImageStore, ImportLimits
from dsec.store import Store
from libdsec.errors import DSecError
from tests.unit.test_images_import import request

def peak():
    # Since it was reset. Not ru_maxrss, which begins with the parent's.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))

async def body(path):
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk

async def main(root, archive):
    store = await Store.open_file(root / "store.sqlite")
    images = ImageStore(root / "images", store, limits=ImportLimits(disk_reserve=0, unpacked=64 << 20, metadata=16 << 20))
    await images.open()
    most = 0
    over = asyncio.Event()
    async def watch():
        nonlocal most
        while not over.is_set():
            sizes = 0
            for directory, _, names in os.walk(root / "images"):  # passes over what is removed meanwhile, unlike rglob
                for name in names:
                    try:
                        sizes += os.stat(os.path.join(directory, name)).st_blocks * 512
                    except OSError:
                        pass
            most = max(most, sizes)
            await asyncio.sleep(0.002)
    watching = asyncio.create_task(watch())
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    try:
        await images.import_archive(request(), body(archive), lambda line: None)
        outcome = "taken"
    except DSecError as error:
        outcome = f"{error.code}: {error.message}"
    over.set()
    await watching
    left = [str(path) for path in (root / "images").rglob("*") if path.is_file()]
    grown = peak() - before
    print(json.dumps({"outcome": outcome, "left": left, "disk": most, "memory": grown << 10}))

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


def bomb(pack: Callable[[bytes], bytes], size: int) -> bytes:
    """A tar of zeros, packed: the first block, and the rest by the repetition that each format allows."""
    entry = member("zeros")
    entry.size = size
    head = entry.tobuf(tarfile.PAX_FORMAT)
    return pack(head) + pack(bytes(16 * MIB)) * (size // (16 * MIB)) + pack(bytes(1024))


def declared(name: str, size: int, **attributes: object) -> bytes:
    """An entry that says it has ``size`` bytes, and nothing behind it."""
    info = member(name, **attributes)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def names(count: int, length: int) -> bytes:
    """Many long names: 300 bytes of archive become as many of memory."""
    return tar([member(f"{index:08}" + "n" * (length - 8)) for index in range(count)])


def sparse(size: int, segments: int) -> bytes:
    """A file that is nearly all hole, in as many pieces as one map holds."""
    numbers = [str(segments)] + [str(number) for index in range(segments) for number in (index * (size // segments), 1)]
    body = ("\n".join(numbers) + "\n").encode()
    body += bytes(-len(body) % 512) + bytes(segments)
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(size), "GNU.sparse.name": "s"}
    return tar([(member("s", pax_headers=headers), body)])


def many_layers(count: int) -> bytes:
    return OciImage.of([files({"f": str(index).encode()}) for index in range(count)]).archive()


def nested(times: int) -> bytes:
    data = files({"a": b"x"})
    for _ in range(times):
        data = gzip.compress(data)
    return data


def layer_bomb() -> bytes:
    plain = files({"zeros": bytes(80 * MIB)})
    image = OciImage.of([plain])
    image.layers, image.media_types = [gzip.compress(plain, 1)], [OCI_LAYER + "+gzip"]
    return image.archive()


def repeated_layer() -> bytes:
    """One small layer, listed so often that what it unpacks to is too much."""
    layer = files({"zeros": bytes(20 * MIB)})
    return docker_archive([layer] * 6)


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "gzip bomb": (lambda: bomb(lambda data: gzip.compress(data, 9), 2048 * MIB), "unpacked archive exceeds"),
    "zstd bomb": (lambda: bomb(zstandard.ZstdCompressor(level=3).compress, 4096 * MIB), "unpacked archive exceeds"),
    "bomb in a layer": (layer_bomb, "unpacked archive exceeds"),
    "a layer listed again and again": (repeated_layer, "unpacked archive exceeds"),
    "archive in archives": (lambda: nested(5), "truncated inside a header"),
    "a file of 8 GiB that isn't there": (lambda: declared("f", 8 << 30), "file contents exceed"),
    "a file of 2^60 bytes": (lambda: declared("f", 1 << 60), "too many"),
    "sparse file of 2^44 bytes in 30,000 pieces": (lambda: sparse(1 << 44, 30_000), "exceed"),
    "60,000 long names": (lambda: names(60_000, 100), "names, attributes and extents exceed"),
    "600 layers": (lambda: many_layers(600), "600 layers"),
    "bzip2, which nobody packs layers with": (lambda: bz2.compress(files({"a": os.urandom(9000)})), "no tar archive"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_cost_little_and_leave_nothing(tmp_path: Path, case: str) -> None:
    make, why = HOSTILE[case]
    archive = tmp_path / "archive"
    archive.write_bytes(make())
    root = tmp_path / "root"
    root.mkdir()
    command = [sys.executable, "-c", IMPORT, str(root), str(archive)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["outcome"].startswith("image_error") and why in report["outcome"], report
    assert report["left"] == []
    assert 0 <= report["memory"] < 60 * MIB, report
    assert report["disk"] < 2 * archive.stat().st_size + 200 * MIB, report


@pytest.mark.parametrize("case", ["60,000 long names", "sparse file of 2^44 bytes in 30,000 pieces", "a file of 2^60 bytes"])
def test_the_converter_refuses_within_the_memory_that_it_has(tmp_path: Path, case: str) -> None:
    """With less address space than it would take for itself: a clean refusal, no abort."""
    archive = tmp_path / "archive"
    archive.write_bytes(HOSTILE[case][0]())
    limits = ["--max-meta", str(16 * MIB), "--max-bytes", str(64 * MIB)]
    command = [str(find_program()), "--meta", str(tmp_path / "meta"), "--blob", str(tmp_path / "blob"), *limits, str(archive)]
    done = subprocess.run(["prlimit", f"--as={96 * MIB}", *command], capture_output=True, check=False, timeout=60)
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_a_layer_that_needs_more_memory_than_allowed_fails_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(names(60_000, 100))
    command = [str(find_program()), "--meta", str(tmp_path / "meta"), "--blob", str(tmp_path / "blob"), str(tmp_path / "archive")]
    done = subprocess.run(["prlimit", f"--as={24 * MIB}", *command], capture_output=True, check=False, timeout=60)
    assert done.returncode != 0
    # An allocation that fails aborts: what it had opened is empty, and the workspace around it goes.
    assert not (tmp_path / "meta").exists() or (tmp_path / "meta").stat().st_size == 0


def test_127_layers_are_taken_and_become_one(tmp_path: Path) -> None:
    report = subprocess.run(
        [sys.executable, "-c", IMPORT, str(tmp_path), "/dev/stdin"],
        input=many_layers(127),
        capture_output=True,
        check=True,
        timeout=150,
        cwd=Path(__file__).parents[2],
    )
    assert json.loads(report.stdout)["outcome"] == "taken"
