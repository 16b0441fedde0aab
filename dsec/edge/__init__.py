"""The edge: the owner of one node's sandboxes, from admission to the record of their end.

Owns: the states and their journal, admission, lifetimes, adoption after a restart, the sweep, and the HTTP routes of a sandbox. It must not
know API keys, quotas or other nodes (the apiserver authenticates and hands over the caller's project), nor how a sandbox is built (the
spawner) or how a command runs in it (chronus, behind :mod:`dsec.edge.channel`). It holds no privilege.
"""

from dsec.edge.config import EdgeConfig
from dsec.edge.edge import Edge

__all__ = ["Edge", "EdgeConfig"]
