"""The service of one machine: Store, image store, edge and apiserver in one unprivileged process.

``python -m dsec.serve``, as ``dsec-spawner supervise`` starts it. Everything that needs privilege is a verb of the spawner; this process
refuses to run with any capability, or as root.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
import uvloop

from dsec.api.app import ApiServer
from dsec.api.bearer import Seed
from dsec.api.edges import Edges, LocalEdge
from dsec.api.errors import ErrorBoundary
from dsec.api.keys import Keys
from dsec.api.listener import Listener, bind, bound_at, is_loopback, origin
from dsec.edge import Edge, EdgeConfig
from dsec.edge.journal import JournalError
from dsec.images import ImageStore, RegistryPolicy
from dsec.images.retiring import CACHE_BYTES
from dsec.images.shared import open_blobs
from dsec.store import Store
from libdsec.errors import DSecError

READY_FILE = "ready"

_log = structlog.get_logger("dsec.serve")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What the service is told at its start."""

    state_dir: Path
    run_dir: Path
    host: str
    port: int
    ports_port: int
    cgroup: str
    prefetch: bool = True
    store: str | None = None
    """The store that this node shares with others: a directory or an s3:// URL; None: images stay on this node."""
    cache_gb: int = CACHE_BYTES >> 30
    """What whole blobs may take on this node that the shared store has too."""
    ports_url: str | None = None
    """How clients reach the ports listener; None: at the address that it is bound to."""
    first_key: Seed | None = None
    """Becomes the store's first key, if the store has none."""
    local_key: Seed | None = None
    """The key of the local user, for as long as this run of ``dsec up``."""
    allow_registry: Sequence[str] = ()
    """Registries (``host`` or ``host:port``) that the keys of projects may import from."""


class Ready(msgspec.Struct, kw_only=True):
    """The content of ``<run>/ready``, there while the service takes requests."""

    url: str
    ports_url: str
    socket: str
    """Path of the Unix socket on which the API is served, too."""
    pid: int
    first_key: str | None = None
    """Id of the key that was accepted as the store's first one in this run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service until SIGTERM or SIGINT. Returns the exit status."""
    config = _parse(argv)
    refusal = privilege_refusal(os.getuid(), Path("/proc/self/status").read_text())
    if refusal is not None:
        print(f"dsec.serve: {refusal}", file=sys.stderr)
        return 1
    _configure_logs()
    _raise_descriptor_limit()
    os.umask(0o077)
    try:
        uvloop.run(serve(config))
    except (DSecError, JournalError, OSError) as error:
        # Something of this machine that whoever starts the service can mend: how we came to it is of no use to them.
        print(f"dsec.serve: {error}", file=sys.stderr)
        return 1
    return 0


def privilege_refusal(uid: int, status: str) -> str | None:
    """Why a process with this uid and ``/proc/<pid>/status`` must not run the service; None: it may."""
    sets = ("CapEff:", "CapPrm:", "CapInh:", "CapAmb:")
    held = [line for line in status.splitlines() if line.startswith(sets) and int(line.split()[1], 16)]
    if uid == 0:
        return "this process must not be root: start the service with `dsec up`"
    if held:
        return f"this process must not hold capabilities, but has {', '.join(' '.join(line.split()) for line in held)}"
    return None


async def serve(config: ServeConfig) -> None:
    """Bring everything up in order, run until a signal, and take it down in reverse. Raises what any part raises while it opens."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with contextlib.AsyncExitStack() as closing:
        api_socket = closing.enter_context(bind(config.host, config.port))
        ports_socket = closing.enter_context(bind(config.host, config.ports_port))
        local_socket = closing.enter_context(bound_at(config.run_dir / "api.sock"))
        store = await Store.open_file(config.state_dir / "store.sqlite")
        closing.push_async_callback(store.close)
        keys = Keys(store)
        await keys.open()
        shared = None if config.store is None else open_blobs(config.store)
        registries = RegistryPolicy.of(config.allow_registry)
        cache_bytes = config.cache_gb << 30
        images = ImageStore(config.state_dir / "images", store, shared=shared, registries=registries, cache_bytes=cache_bytes)
        await images.open()
        closing.push_async_callback(images.close)
        ports_url = config.ports_url or origin(ports_socket)
        edge_config = EdgeConfig(
            state_dir=config.state_dir, run_dir=config.run_dir, cgroup=config.cgroup, ports_url=ports_url, prefetch=config.prefetch
        )
        edge = Edge(edge_config, images, packing=images.packing)
        images.in_use = edge.in_use
        images.count_reads = edge.count_reads
        await edge.open()
        closing.push_async_callback(edge.close)
        images.start()
        api = ApiServer(
            keys,
            Edges([LocalEdge(edge_config.edge_id, edge)]),
            images.routes(),
            state_dir=config.state_dir,
            metrics_public=is_loopback(api_socket),
        )
        # Last: the key of a start that failed before would be in the store, and shown to nobody.
        first_key = await _plant_keys(keys, config)
        listeners = [Listener(api, api_socket), Listener(api, local_socket), Listener(ErrorBoundary(edge.ports_app), ports_socket)]
        ready = Ready(url=origin(api_socket), ports_url=ports_url, socket=local_socket.getsockname(), pid=os.getpid(), first_key=first_key)
        await _run(listeners, api, ready, config.run_dir, stopping)


async def _run(listeners: list[Listener], api: ApiServer, ready: Ready, run_dir: Path, stopping: asyncio.Event) -> None:
    """Accept requests until ``stopping`` is set or a listener breaks; then finish the short ones."""
    running = [asyncio.create_task(listener.run_until_stopped()) for listener in listeners]
    for listener, task in zip(listeners, running, strict=True):
        await _first_of(listener.listening, task)
    # What is alive now stays alive: the collector need not walk it again and again.
    gc.collect()
    gc.freeze()
    with _ready_file(run_dir / READY_FILE, ready):
        _log.info("ready", url=ready.url, ports_url=ready.ports_url)
        await _first_of(stopping, *running)
    _log.info("stopping")
    api.begin_stop()
    for listener in listeners:
        listener.stop()
    await asyncio.gather(*running)


async def _first_of(event: asyncio.Event, *tasks: asyncio.Task[None]) -> None:
    """Wait for the event, or for one of the tasks to end, which then is looked at by whoever awaits it."""
    waiting = asyncio.create_task(_wait(event))
    await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


@contextlib.contextmanager
def _ready_file(path: Path, ready: Ready) -> Iterator[None]:
    """Keep ``path`` there, whole from the first moment, while the body runs."""
    partial = path.with_suffix(".part")
    partial.write_bytes(msgspec.json.encode(ready))
    partial.chmod(0o644)
    partial.rename(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


async def _plant_keys(keys: Keys, config: ServeConfig) -> str | None:
    if config.local_key is not None:
        await keys.plant_local(config.local_key)
    if config.first_key is not None and await keys.plant_first(config.first_key):
        return config.first_key.id
    return None


def _parse(argv: Sequence[str] | None) -> ServeConfig:
    parser = argparse.ArgumentParser(prog="python -m dsec.serve", description="The service of one machine; started by `dsec up`.")
    parser.add_argument("--state-dir", type=Path, required=True, help="what survives a restart: keys, images, the journal")
    parser.add_argument("--run-dir", type=Path, required=True, help="sockets and the ready file")
    parser.add_argument("--host", default="127.0.0.1", help="address of both listeners")
    parser.add_argument("--port", type=int, default=7070, help="of the API; 0: any free one")
    parser.add_argument("--ports-port", type=int, default=7071, help="of the listener for ports inside sandboxes; 0: any free one")
    parser.add_argument("--no-prefetch", dest="prefetch", action="store_false", help="don't fetch ahead what earlier runs read of an image")
    parser.add_argument("--store", help="store to share images through: a directory, or s3://BUCKET/PREFIX?endpoint=URL&credentials=FILE")
    parser.add_argument(
        "--cache-gb", type=int, default=ServeConfig.cache_gb, help="what layers may take that the shared store has too (%(default)s)"
    )
    parser.add_argument("--ports-url", help="how clients reach that listener, where it isn't its own address (behind a proxy, say)")
    parser.add_argument("--cgroup", default="dsec", help="name of the root cgroup that the spawner was started with")
    parser.add_argument("--first-key", type=Seed.parse, help="<id>:<sha256> of a key to accept if the store has none")
    parser.add_argument("--local-key", type=Seed.parse, help="<id>:<sha256> of the local user's key for this run")
    parser.add_argument(
        "--allow-registry", action="append", default=[], metavar="HOST[:PORT]", help="a registry that keys of projects may import from"
    )
    return ServeConfig(**vars(parser.parse_args(argv)))


def _configure_logs() -> None:
    """One JSON object a line on stderr. Only errors and what happens to the service are logged, never a request that went well."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _raise_descriptor_limit() -> None:
    """As many descriptors as the system lets this process have: a few for each sandbox, and one for each client connection."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
