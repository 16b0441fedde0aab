"""A real S3 for tests: SeaweedFS from its wheel, on loopback and in a directory of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_DEADLINE_S = 60.0
BUCKET = "layers"


@dataclass
class Seaweed:
    """A running server. ``url(prefix)`` is a store in its bucket."""

    home: Path
    port: int
    process: subprocess.Popen[bytes]

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{self.port}&credentials={self.home / 'credentials'}"


def _free_ports(count: int) -> list[int]:
    """Free ports whose number plus 10,000, where SeaweedFS puts gRPC, is a port too."""
    probes, ports = [], []
    while len(ports) < count:
        probe = socket.socket()
        probes.append(probe)
        for port in range(20_000 + len(probes) * 13, 50_000, 97):
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
                break
    for probe in probes:
        probe.close()
    return ports


@contextlib.contextmanager
def seaweed(home: Path) -> Iterator[Seaweed]:
    """Starts the server, makes the bucket, and ends it after the body."""
    master, volume, filer, s3 = _free_ports(4)
    keys = {"accessKey": "tests", "secretKey": "tests-secret"}
    (home / "s3.json").write_text(json.dumps({"identities": [{"name": "tests", "credentials": [keys], "actions": ["Admin"]}]}))
    (home / "credentials").write_text("[default]\naws_access_key_id = tests\naws_secret_access_key = tests-secret\n")
    (home / "data").mkdir()
    command = [
        *(str(Path(sys.executable).parent / "weed"), "server", f"-dir={home / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", "-master.volumeSizeLimitMB=64", "-volume.max=50"),
        *("-s3", f"-s3.port={s3}", f"-s3.config={home / 's3.json'}", "-master.telemetry=false"),
        # These have fixed ports, which only one server can have.
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=home, start_new_session=True)
    try:
        _await_bucket(Seaweed(home, s3, process))
        yield Seaweed(home, s3, process)
    finally:
        process.kill()
        process.wait()


def _await_bucket(server: Seaweed) -> None:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/status", timeout=2):
                break
        except (OSError, urllib.error.URLError) as error:
            if server.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS did not start:\n{(server.home / 'log').read_text()[-2000:]}") from error
            time.sleep(0.1)
    while True:
        # The bucket is made by the first object in it, once the volume server has joined.
        store = S3Store(
            bucket=BUCKET,
            endpoint=f"http://127.0.0.1:{server.port}",
            access_key_id="tests",
            secret_access_key="tests-secret",
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        try:
            obstore.put(store, "ready", b"1")
            return
        except (BaseError, OSError) as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS takes no objects: {error}\n{(server.home / 'log').read_text()[-2000:]}") from error
            time.sleep(0.2)
