"""The guest's disks: a Debian with a kernel of its own (made seldom), and the project's code (made whenever it changed).

Both are made from directories, without mounting anything. The root is never written: QEMU keeps what the guest changes in a file that goes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsec.cli.instance import binary
from dsec.images.debian import debian_root_tar

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "guest"
INSIDE = Path(__file__).resolve().parent / "inside"

SUITE = "bookworm"
"""Debian 12, whatever the host is: its kernel is 6.1."""
PYTHON = "3.11"
"""Of that suite: the packages are chosen for it."""
PACKAGES = ("python3", "btrfs-progs", "kmod", "iproute2", "linux-image-cloud-amd64")
TEST_PACKAGES = ("pytest", "pytest-asyncio", "pytest-timeout")
ROOT_RECIPE = "1"
"""Part of the root's key. Change it when the same inputs should give another disk than before."""
ROOT_BYTES = 4 << 30
"""A sparse file. The guest's state directory is on it too."""
LABEL = "guest-root"
CODE_AT = "/opt/opendsec"
VENV_AT = "/opt/venv"
CODE_SERIAL = "code"
"""By which the guest knows the disk: the order of virtio disks is the machine's affair."""

FIRST_INIT = f"""#!/bin/sh
# The first program of the guest: finds the disk with the code, whose own init goes on.
for disk in /sys/block/vd*; do
    [ "$(cat "$disk/serial")" != {CODE_SERIAL} ] || mount -t erofs -o ro "/dev/${{disk##*/}}" {CODE_AT}
done
exec {CODE_AT}/tests/inside/init
"""


@dataclass(frozen=True)
class RootDisk:
    """A disk to boot from, with what QEMU is given of it directly."""

    image: Path
    kernel: Path
    initrd: Path


def root_disk() -> RootDisk:
    """Debian, and a virtual environment with what the project needs. Made (3 min) unless the cache has it for these inputs."""
    inputs = [
        ROOT_RECIPE,
        SUITE,
        *PACKAGES,
        *TEST_PACKAGES,
        FIRST_INIT,
        *((ROOT / name).read_text() for name in ("requirements.lock", "pyproject.toml")),
    ]
    home = CACHE / f"root-{hashlib.sha256(chr(0).join(inputs).encode()).hexdigest()[:16]}"
    with _locked():
        if not home.exists():
            tar = debian_root_tar(PACKAGES, cache=ROOT / ".cache" / "roots", suite=SUITE)
            for earlier in CACHE.glob("root-*"):
                shutil.rmtree(earlier)
            with _scratch() as scratch:
                _make_root(tar, scratch / "tree", scratch / "made")
                (scratch / "made").rename(home)
    return RootDisk(home / "root.ext4", home / "vmlinuz", home / "initrd")


def code_disk(target: Path) -> None:
    """Writes the disk with the code, the built programs and the tests that run in the guest. Takes a second or two."""
    with _scratch() as scratch:
        tree = scratch / "opendsec"
        ignored = shutil.ignore_patterns("__pycache__")
        for name in ("libdsec", "dsec"):
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        shutil.copytree(INSIDE, tree / "tests" / "inside", ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", tree)
        programs = tree / ".cache" / "native" / "bin"
        programs.mkdir(parents=True)
        for name in ("dsec-spawner", "chronus", "dsec-mklayer", "dsec-blobfs"):
            shutil.copy(binary(name), programs)
        # Compiling takes the guest twenty times longer. Where this Python is another version than the guest's it has to, in memory.
        _run(sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", str(tree), "-p", CODE_AT, str(tree))
        _run("mkfs.erofs", "--all-root", str(target), str(tree))


def _make_root(tar: Path, tree: Path, made: Path) -> None:
    tree.mkdir()
    made.mkdir()
    _run("tar", "--extract", "--preserve-permissions", "--numeric-owner", "--file", str(tar), "--directory", str(tree))
    (kernel,) = (tree / "boot").glob("vmlinuz-*")
    (initrd,) = (tree / "boot").glob("initrd.img-*")
    shutil.copy(kernel, made / "vmlinuz")
    shutil.copy(initrd, made / "initrd")
    _make_venv(tree)
    (tree / CODE_AT[1:]).mkdir()
    first = tree / "sbin" / "first-init"
    first.write_text(FIRST_INIT)
    first.chmod(0o755)
    image = made / "root.ext4"
    with image.open("wb") as file:
        file.truncate(ROOT_BYTES)
    _run("mkfs.ext4", "-q", "-F", "-L", LABEL, "-E", "lazy_itable_init=0,lazy_journal_init=0", "-d", str(tree), str(image))


def _make_venv(tree: Path) -> None:
    """A virtual environment of the guest's Python, filled from here: with the locked versions, for that Python."""
    venv = tree / VENV_AT[1:]
    packages = venv / "lib" / f"python{PYTHON}" / "site-packages"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to("/usr/bin/python3")
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\n")
    uv = (str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--only-binary", ":all:", "--python-version", PYTHON)
    chosen = ("--requirements", str(ROOT / "pyproject.toml"), "--extra", "platform", *TEST_PACKAGES)
    _run(*uv, "--target", str(packages), *chosen, "--constraints", str(ROOT / "requirements.lock"))
    (packages / "opendsec.pth").write_text(f"{CODE_AT}\n")
    _run("chroot", str(tree), f"{VENV_AT}/bin/python", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", VENV_AT)


def _run(*command: str) -> None:
    """Raises RuntimeError with what the program said if it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory on the cache's filesystem, for what is renamed into it when it is whole."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=CACHE, ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextmanager
def _locked() -> Iterator[None]:
    """One process at a time makes disks."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
