"""The edge's figures for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from libdsec.schema import NodeInfo

CREATE_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
EXEC_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1, 10, 60, 600)


class EdgeMetrics(Collector):
    """Counters of what the edge did; gauges are read from it when they are asked for."""

    def __init__(self, registry: CollectorRegistry, node_info: Callable[[], NodeInfo]) -> None:
        self._node_info = node_info
        creations = Counter(
            "dsec_edge_creations", "Sandboxes asked for, by outcome (ok or the error's code)", ["outcome"], registry=registry
        )
        self.count_creation: Callable[[str], None] = lambda outcome: creations.labels(outcome).inc()
        seconds = Histogram(
            "dsec_edge_create_seconds", "From a sandbox's turn to start until it runs", buckets=CREATE_BUCKETS, registry=registry
        )
        self.observe_create: Callable[[float], None] = seconds.observe
        commands = Histogram(
            "dsec_edge_exec_seconds", "Captured commands as their callers saw them", buckets=EXEC_BUCKETS, registry=registry
        )
        self.observe_exec: Callable[[float], None] = commands.observe
        registry.register(self)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing: the registry would else collect at registration, before the edge is open."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        node = self._node_info()
        states = GaugeMetricFamily("dsec_edge_sandboxes", "Live sandboxes by state", labels=["state"])
        for state, count in node.sandboxes.items():
            states.add_metric([state], count)
        yield states
        yield GaugeMetricFamily("dsec_edge_memory_available_bytes", "MemAvailable of the node", value=node.memory_available)
        yield GaugeMetricFamily("dsec_edge_scratch_used_bytes", "Used part of the scratch filesystem", value=node.scratch_used)
        yield GaugeMetricFamily("dsec_edge_scratch_bytes", "Size of the scratch filesystem", value=node.scratch)
