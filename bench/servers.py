"""The servers that images come from in the cold benchmarks: docker-registry for the peer, SeaweedFS as S3 for ours. Both keep what they
hold."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import link
from bench.claim import WrongAnswer

BUCKET = "layers"
PREFIX = "node"
READY_DEADLINE_S = 60.0
_S3_KEYS = {"accessKey": "bench", "secretKey": "bench-secret"}
_SEAWEED_PORTS = {"master": 29_333, "volume": 28_080, "filer": 28_888}
"""Beside the S3 port; each is wanted plus 10,000 as well, for gRPC."""


@dataclass(frozen=True)
class Registry:
    """A docker-registry without authentication over a directory."""

    directory: Path

    def holds(self, name: str) -> bool:
        return (self.directory / "docker/registry/v2/repositories" / name / "_manifests/tags/latest/current/link").exists()

    def command(self, port: int) -> Sequence[str | Path]:
        """Serves on the loopback."""
        self.directory.mkdir(parents=True, exist_ok=True)
        config = {
            "version": 0.1,
            "log": {"level": "error", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": str(self.directory)}},
            "http": {"addr": f"127.0.0.1:{port}"},
        }
        path = self.directory / "config.yml"
        path.write_text(json.dumps(config))  # JSON is YAML
        return ("docker-registry", "serve", path)

    @asynccontextmanager
    async def running(self, port: int) -> AsyncIterator[None]:
        """Serves on this machine's loopback."""
        async with link.process(self.command(port), self.directory.with_suffix(".log")):
            await _answers(f"http://127.0.0.1:{port}/v2/")
            yield


@dataclass(frozen=True)
class S3:
    """SeaweedFS over a directory, with one bucket."""

    directory: Path

    def holds(self, name: str) -> bool:
        return (self.directory / "held" / name).exists()

    def note(self, name: str) -> None:
        """It holds that image now."""
        (self.directory / "held" / name).touch()

    def url(self, address: str) -> str:
        """The store at this address, as ``dsec up --store`` takes it."""
        return f"s3://{BUCKET}/{PREFIX}?endpoint=http://{address}&credentials={self._credentials}"

    @property
    def _credentials(self) -> Path:
        return self.directory / "credentials"

    def command(self, port: int) -> Sequence[str | Path]:
        """Serves on the loopback."""
        for part in ("data", "held"):
            (self.directory / part).mkdir(parents=True, exist_ok=True)
        config = self.directory / "s3.json"
        config.write_text(json.dumps({"identities": [{"name": "bench", "credentials": [_S3_KEYS], "actions": ["Admin"]}]}))
        self._credentials.write_text(
            f"[default]\naws_access_key_id = {_S3_KEYS['accessKey']}\naws_secret_access_key = {_S3_KEYS['secretKey']}\n"
        )
        return (
            *(Path(sys.executable).with_name("weed"), "server", f"-dir={self.directory / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-{server}.port={number}" for server, number in _SEAWEED_PORTS.items()),
            *("-master.volumeSizeLimitMB=1024", "-volume.max=50", "-filer.maxMB=1", "-master.telemetry=false"),
            *("-s3", f"-s3.port={port}", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        )

    @asynccontextmanager
    async def running(self, port: int) -> AsyncIterator[None]:
        """Serves on this machine's loopback."""
        async with link.process(self.command(port), self.directory / "log"):
            await self.ready(f"127.0.0.1:{port}")
            yield

    async def ready(self, address: str) -> None:
        """Waits until it takes objects. Raises WrongAnswer."""
        from dsec.images.shared import open_blobs

        await _answers(f"http://{address}/status")
        deadline = time.monotonic() + READY_DEADLINE_S
        while True:
            try:
                await open_blobs(self.url(address)).put("ready", b"1")
                return
            except Exception as error:
                if time.monotonic() > deadline:
                    raise WrongAnswer(f"SeaweedFS takes no objects: {error}") from error
                await asyncio.sleep(0.2)


async def _answers(url: str) -> None:
    """Waits for a server's first answer. Raises WrongAnswer."""
    deadline = time.monotonic() + READY_DEADLINE_S
    while True:
        try:
            await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=2).close())
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise WrongAnswer(f"nobody answers at {url}: {error}") from error
            await asyncio.sleep(0.1)
