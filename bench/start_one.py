"""One sandbox at a time: create and first command, against ``docker run``."""

from __future__ import annotations

import time

from bench import memory, ours, peer
from bench.claim import Claim, Outcome, Setting, median, percentile, rounded

SANDBOXES = 60
CONTAINERS = 12
MEMORY_MB = 512
"""Touched before each round."""


async def measure(setting: Setting) -> Outcome:
    count, containers = (5, 2) if setting.quick else (SANDBOXES, CONTAINERS)
    our_p50, our_p99, peer_p50 = [], [], []
    async with ours.running(setting, "start-one") as service, peer.running(setting.root_tar, setting.parent) as docker:
        for _ in range(setting.rounds):
            await memory.warm(setting, MEMORY_MB)
            times = [await _our_time(service) for _ in range(count)]
            our_p50.append(median(times))
            our_p99.append(percentile(times, 0.99))
            peer_p50.append(median([await docker.run_true() for _ in range(containers)]))
    return Outcome(
        figures={
            "ratio_docker_p50": median([b / a for a, b in zip(our_p50, peer_p50, strict=True)]),
            "p50_ms": median(our_p50) * 1e3,
        },
        detail={
            "ours": {"sandboxes": count, "p50_ms": rounded([t * 1e3 for t in our_p50]), "p99_ms": rounded([t * 1e3 for t in our_p99])},
            "peer": {"containers": containers, "p50_ms": rounded([t * 1e3 for t in peer_p50])},
        },
        strange=peer.strange("docker run p50 in ms", median(peer_p50) * 1e3, peer.RUN_MS),
    )


async def _our_time(service: ours.Ours) -> float:
    """Seconds from the create request to the answer of the first command. The stop comes after the clock has stopped."""
    started = time.perf_counter()
    sandbox = await service.client.run_container(service.args())
    await ours.first_command(sandbox)
    took = time.perf_counter() - started
    await sandbox.stop()
    return took


CLAIM = Claim(
    name="start-one",
    what="one sandbox, create + first command, against docker run --rm",
    floors={"ratio_docker_p50": (">=", 20)},
    measure=measure,
)
