"""A virtual machine that runs once: boots, does what its init does, leaves its results on a disk, ends."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

from tests.guest.disks import CODE_SERIAL, LABEL, RootDisk

QEMU = "qemu-system-x86_64"
MEMORY_MB = 3072
PROCESSORS = 2
LIFE_S = 480.0
"""From power on to power off: three times what it takes on two idle cores, without KVM."""
RESULTS_BYTES = 16 << 20
RESULTS_SERIAL = "results"
"""The name of a disk that the guest writes a tar to."""
KERNEL_OPTIONS = f"console=ttyS0 quiet root=LABEL={LABEL} rw init=/sbin/first-init panic=-1"


class GuestFailed(Exception):
    """The guest didn't come up, didn't end in time or left no results. The message ends with what it wrote to its console."""


def run(root: RootDisk, code: Path, home: Path) -> dict[str, str]:
    """Boots the guest with the disk ``code`` and waits for its end. Returns its results: what each file says, by name.

    No network, no display, no KVM (so that it runs anywhere). The machine ends with this process, however that ends. Raises GuestFailed.
    """
    console, disk = home / "console.log", home / "results.raw"
    with disk.open("wb") as file:
        file.truncate(RESULTS_BYTES)
    if shutil.which(QEMU) is None:
        raise GuestFailed(f"{QEMU} is not installed: `apt-get install --no-install-recommends qemu-system-x86`")
    # Not microvm, which boots faster: without an HPET the kernel hangs where it can't measure its clock by the PIT, on a busy host.
    machine = ["-machine", "pc", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", str(PROCESSORS), "-m", str(MEMORY_MB)]
    bare = ["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", f"file:{console}"]
    kernel = ["-kernel", str(root.kernel), "-initrd", str(root.initrd), "-append", KERNEL_OPTIONS]
    disks = [
        *_disk("root", root.image, "snapshot=on"),
        *_disk(CODE_SERIAL, code, "read-only=on"),
        *_disk(RESULTS_SERIAL, disk, "cache=unsafe"),
    ]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", QEMU, *machine, *bare, *kernel, *disks],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=LIFE_S)
    except subprocess.TimeoutExpired:
        raise GuestFailed(f"the guest did not end within {LIFE_S:.0f} s{_last_words(console)}") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise GuestFailed(f"{QEMU} ended with status {process.returncode}: {said}{_last_words(console)}")
    results = _read(disk)
    if not results:
        raise GuestFailed(f"the guest left no results{_last_words(console)}")
    return results


def _read(disk: Path) -> dict[str, str]:
    # Of nothing but zeros it is an empty archive.
    with tarfile.open(disk) as archive:
        files = ((member.name.removeprefix("./"), archive.extractfile(member)) for member in archive)
        return {name: file.read().decode(errors="replace") for name, file in files if file is not None}


def _disk(serial: str, image: Path, option: str) -> list[str]:
    # A comma in an option's value is doubled.
    path = str(image).replace(",", ",,")
    drive = f"id={serial},file={path},if=none,format=raw,{option}"
    return ["-drive", drive, "-device", f"virtio-blk-pci,drive={serial},serial={serial}"]


def _last_words(console: Path, size: int = 6_000) -> str:
    if not console.exists():
        return ""
    return f"; its console ends with:\n{console.read_bytes()[-size:].decode(errors='replace')}"
