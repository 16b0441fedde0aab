"""One edge put together: the sandboxes, their routes, their figures."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry

from dsec.edge import blobfs, node
from dsec.edge.agents import ConnectChannel, connect_channel
from dsec.edge.cgroups import Cgroups
from dsec.edge.config import EdgeConfig
from dsec.edge.create import Creation
from dsec.edge.deadlines import Clock
from dsec.edge.exec import Commands
from dsec.edge.files import Files
from dsec.edge.forks import Forks
from dsec.edge.info import Information
from dsec.edge.metrics import EdgeMetrics
from dsec.edge.ondemand import ConnectBlobfs, Images
from dsec.edge.packs import Packs, Snapshots
from dsec.edge.ports import Ports, PortSigner
from dsec.edge.routes import EdgeApp, PortsApp, routes
from dsec.edge.sandboxes import ConnectSpawner, Sandboxes
from dsec.edge.spawner import Listener, Spawner
from dsec.images.packing import Packing
from libdsec.schema import NodeInfo


class Edge:
    """The edge of this node. ``app`` serves everything below ``/v1/sandboxes``, ``ports_app`` the ports' own origin."""

    def __init__(
        self,
        config: EdgeConfig,
        images: Images,
        *,
        packing: Packing | None = None,
        connect_spawner: ConnectSpawner | None = None,
        connect_blobfs: ConnectBlobfs | None = None,
        connect_channel: ConnectChannel = connect_channel,
        clock: Clock | None = None,
        cgroups: Cgroups | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """``images`` resolves names to layers, ``packing`` takes new ones made of sandboxes. The other arguments are for tests."""
        self.config = config
        signer = PortSigner.from_file(config.state_dir / "ports.key")
        self.sandboxes = Sandboxes(
            config,
            images,
            connect_spawner=connect_spawner or self._connect_spawner,
            connect_blobfs=connect_blobfs or self._connect_blobfs,
            ports_key=signer.key,
            connect_channel=connect_channel,
            clock=clock,
            cgroups=cgroups,
        )
        self.metrics = EdgeMetrics(registry, self.node_info)
        self.sandboxes.starts.observe = self.metrics.observe_create
        ports = Ports(self.sandboxes, signer)
        snapshots = Snapshots(self.sandboxes.inventory)
        table = routes(
            Information(self.sandboxes),
            Creation(self.sandboxes, self.metrics.count_creation),
            Commands(self.sandboxes, self.metrics.observe_exec),
            Files(self.sandboxes),
            ports,
            Packs(self.sandboxes.inventory, snapshots, images, packing),
            Forks(self.sandboxes, snapshots, self.metrics.count_creation),
        )
        self.app = EdgeApp(self.sandboxes, table)
        self.ports_app = PortsApp(self.sandboxes, ports)

    async def open(self) -> None:
        """Brings journal, memory and kernel into agreement; then requests may come. Raises JournalError, SpawnerError."""
        await self.sandboxes.open()

    async def close(self) -> None:
        """Ends the edge. Sandboxes live on, and are adopted by the next one."""
        await self.sandboxes.close()

    def node_info(self) -> NodeInfo:
        """This node, now."""
        facts = self.sandboxes.inventory.facts
        return NodeInfo(
            edge=self.config.edge_id,
            kernel=facts.kernel,
            cores=facts.cores,
            memory=facts.memory,
            memory_available=node.memory_available(),
            scratch=facts.scratch,
            scratch_used=facts.scratch_used,
            sandboxes=self.sandboxes.counts(),
            features=facts.features,
        )

    def in_use(self) -> set[str]:
        """Digests (hex) of metadata and data of the layers that live sandboxes hold."""
        return self.sandboxes.inventory.layers.in_use()

    async def count_reads(self) -> None:
        """Has the image store told what was read on demand until now, unless blobfs takes more than a second to say it."""
        await self.sandboxes.on_demand.count()

    async def _connect_spawner(self, listener: Listener, on_reconnected: Callable[[], None]) -> Spawner:
        return await Spawner.connect(str(self.config.spawner_socket), listener=listener, on_reconnected=on_reconnected)

    async def _connect_blobfs(self, listener: blobfs.Listener, on_reconnected: Callable[[], None]) -> blobfs.Blobfs:
        return await blobfs.Blobfs.connect(str(self.config.blobfs_socket), listener=listener, on_reconnected=on_reconnected)
