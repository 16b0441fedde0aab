"""What an edge is told at its start, and the named limits that it holds to."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from dsec.edge.admission import AdmissionPolicy

DAY_S = 24 * 3600.0


def _start_slots() -> int:
    # A start spends its time in the kernel: a few per core keep every core busy, and more would only make each start slower. 32 also covers
    # the waits that use no core (journal commits, the first answer of the agent inside).
    return max(32, 8 * (os.cpu_count() or 1))


@dataclass(kw_only=True, frozen=True)
class EdgeConfig:
    """The configuration of one edge. Times are seconds, sizes bytes."""

    state_dir: Path
    """Holds ``journal.sqlite`` and ``ports.key``."""
    run_dir: Path
    """Holds ``spawner.sock`` and ``blobfs.sock``."""
    edge_id: str = "e1"
    """Part of every sandbox id that this edge makes."""
    cgroup: str = "dsec"
    """Name of the root cgroup that the spawner was started with."""
    ports_url: str = "http://127.0.0.1:7071"
    """Where clients reach :attr:`dsec.edge.Edge.ports_app`."""
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    start_slots: int = field(default_factory=_start_slots)
    """Starts in progress at once; further ones wait in the queue."""
    start_queue: int = 64_000
    """Starts that may wait: two of the largest batches. Beyond it a request is refused."""
    sweep_every_s: float = 60.0
    """Period of the comparison of kernel objects with the journal."""
    orphan_grace_s: float = 120.0
    """How long a sandbox of which nobody was told waits to be asked for by its idempotency key. Longer than libdsec goes on asking: it
    notices a silent connection that broke within ``libdsec.keepalive.NOTICED_S`` (45 s), repeats the call for ``RETRY_FOR_S`` (60 s), and
    the last attempt may take ``CONNECT_TIMEOUT_S`` (10 s) to connect."""
    layer_idle_s: float = 600.0
    """A layer without a sandbox is unmounted after this long; until then it saves the next sandbox a mount."""
    prefetch: bool = True
    """Whether what an earlier run read of an image is fetched ahead when the image is used first on this node."""
    records_keep_s: float = DAY_S
    """How long the record of an ended sandbox answers."""
    records_max: int = 100_000
    """How many records of ended sandboxes are kept at most."""

    @property
    def journal_path(self) -> Path:
        return self.state_dir / "journal.sqlite"

    @property
    def spawner_socket(self) -> Path:
        return self.run_dir / "spawner.sock"

    @property
    def blobfs_socket(self) -> Path:
        return self.run_dir / "blobfs.sock"

    @property
    def blobs_kept(self) -> Path:
        """Where blobfs keeps what it has fetched."""
        return self.state_dir / "blobfs"
