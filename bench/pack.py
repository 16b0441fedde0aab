"""A sandbox that wrote 100 MB becomes an image: how long that takes, how long it stands still, and what a start from that image costs."""

from __future__ import annotations

import time

import msgspec

from bench import ours
from bench.claim import Claim, Outcome, Setting, median, percentile, rounded
from libdsec import DSecContainerRunArgs

WRITTEN_MB = 100
PACKS = 5
"""A round's packs, each of a sandbox of its own: what was packed before is in the store already."""
STARTS = 30
PACKED = "bench-packed"
WRITE = """
set -e
mkdir -p /work/many
head -c {bytes} /dev/urandom > /work/big
for i in $(seq 500); do echo $i > /work/many/$i; done
rm -r /usr/share/doc
"""


async def measure(setting: Setting) -> Outcome:
    packs, starts = (1, 3) if setting.quick else (PACKS, STARTS)
    pack_s: list[float] = []
    freeze_ms: list[float] = []
    base_ms: list[float] = []
    packed_ms: list[float] = []
    async with ours.running(setting, "pack") as service:
        packed = msgspec.structs.replace(service.args(), container_image=PACKED)
        for _ in range(setting.rounds):
            for _ in range(packs):
                took, frozen = await _pack(service, setting)
                pack_s.append(took)
                freeze_ms.append(frozen)
            await _start_ms(service, packed)
            # In turn, so that whatever else the machine does falls on both.
            for _ in range(starts):
                base_ms.append(await _start_ms(service, service.args()))
                packed_ms.append(await _start_ms(service, packed))
    return Outcome(
        figures={
            "pack_s": median(pack_s),
            "freeze_ms": median(freeze_ms),
            "start_ratio": median(packed_ms) / median(base_ms),
        },
        detail={
            "ours": {
                "pack_s": rounded(pack_s),
                "freeze_ms": rounded(freeze_ms),
                "freeze_p90_ms": round(percentile(freeze_ms, 0.9), 2),
                "start_base_ms": round(median(base_ms), 2),
                "start_packed_ms": round(median(packed_ms), 2),
            }
        },
    )


async def _pack(service: ours.Ours, setting: Setting) -> tuple[float, float]:
    """Writes, packs; the seconds that the pack took, and the milliseconds that the sandbox stood still."""
    sandbox = await service.client.run_container(service.args())
    size = (4 if setting.quick else WRITTEN_MB) << 20
    ours.check(await sandbox.exec(WRITE.format(bytes=size)))
    started = time.perf_counter()
    result = await sandbox.pack_diff(PACKED)
    took = time.perf_counter() - started
    await sandbox.stop()
    return took, result.freeze_ms


async def _start_ms(service: ours.Ours, args: DSecContainerRunArgs) -> float:
    """From the create request to the answer of the first command."""
    started = time.perf_counter()
    sandbox = await service.client.run_container(args)
    await ours.first_command(sandbox)
    took = time.perf_counter() - started
    await sandbox.stop()
    return took * 1e3


CLAIM = Claim(
    name="pack",
    what=f"a sandbox that wrote {WRITTEN_MB} MB becomes an image; freeze; start from it against start from its base",
    floors={"pack_s": ("<=", 1.5), "freeze_ms": ("<=", 20), "start_ratio": ("<=", 1.2)},
    measure=measure,
)
