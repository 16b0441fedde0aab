"""Commands: ``true`` through the SDK against ``docker exec``, and many clients at once."""

from __future__ import annotations

import asyncio
import time

from bench import memory, ours, peer
from bench.claim import Claim, Outcome, Setting, median, percentile, rounded
from libdsec import DSecClient, Sandbox

COMMANDS = 300
EXECS = 20
CLIENTS = 64
COMMANDS_A_CLIENT = 60
CONTAINER = "exec"
MEMORY_MB = 512
"""Touched before each round."""


async def measure(setting: Setting) -> Outcome:
    commands, execs, each = (20, 3, 3) if setting.quick else (COMMANDS, EXECS, COMMANDS_A_CLIENT)
    our_p50, our_p99, peer_p50, concurrent = [], [], [], []
    async with ours.running(setting, "exec") as service, peer.running(setting.root_tar, setting.parent) as docker:
        await docker.start(CONTAINER)
        sandboxes = await service.start_many(CLIENTS)
        ids = [sandbox.id for sandbox in sandboxes]
        for _ in range(setting.rounds):
            await memory.warm(setting, MEMORY_MB)
            times = []
            for _ in range(commands):
                started = time.perf_counter()
                await ours.first_command(sandboxes[0])
                times.append(time.perf_counter() - started)
            our_p50.append(median(times))
            our_p99.append(percentile(times, 0.99))
            peer_p50.append(median([await docker.exec_true(CONTAINER) for _ in range(execs)]))
            concurrent.append(await _concurrent_rate(service, ids, each))
    return Outcome(
        figures={
            "ratio_docker_p50": median([b / a for a, b in zip(our_p50, peer_p50, strict=True)]),
            "p50_ms": median(our_p50) * 1e3,
            "concurrent_per_s": median(concurrent),
        },
        detail={
            "ours": {
                "commands": commands,
                "p50_ms": rounded([t * 1e3 for t in our_p50]),
                "p99_ms": rounded([t * 1e3 for t in our_p99]),
                "clients": CLIENTS,
                "concurrent_per_s": rounded(concurrent),
            },
            "peer": {"execs": execs, "p50_ms": rounded([t * 1e3 for t in peer_p50])},
        },
        strange=peer.strange("docker exec p50 in ms", median(peer_p50) * 1e3, peer.EXEC_MS),
    )


async def _concurrent_rate(service: ours.Ours, ids: list[str], each: int) -> float:
    """Commands a second when every sandbox has a client of its own that runs one command after the other."""
    clients = [DSecClient(url=service.instance.nearest, api_key=service.instance.api_key) for _ in ids]
    try:
        await asyncio.gather(*(client.open() for client in clients))
        attached = await asyncio.gather(*(client.attach(id_) for client, id_ in zip(clients, ids, strict=True)))

        async def commands(sandbox: Sandbox) -> None:
            for _ in range(each):
                await ours.first_command(sandbox)

        started = time.perf_counter()
        await asyncio.gather(*map(commands, attached))
        return each * len(ids) / (time.perf_counter() - started)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


CLAIM = Claim(
    name="exec",
    what=f"true through the SDK against docker exec; {CLIENTS} clients over {CLIENTS} sandboxes",
    floors={"ratio_docker_p50": (">=", 35), "concurrent_per_s": (">=", 1200)},
    measure=measure,
)
