"""Docker Hub, the one registry that isn't where its name says: where it is, how its repositories and its logins are called.

Source: normalize.go of github.com/distribution/reference, and registry/config.go of docker.
"""

from __future__ import annotations

HOST = "registry-1.docker.io"
"""Where the registry is. Its other names answer as a website and as an index of old."""
NAMES = frozenset({"docker.io", "index.docker.io", HOST})
LOGIN_KEY = "https://index.docker.io/v1/"
"""Under which docker keeps a login, in its file and with its credential helpers."""


def registry_host(host: str) -> str:
    """Where the registry named ``host`` (with its port, if any) is, in lower case."""
    lowered = host.lower()
    return HOST if lowered in NAMES else lowered


def full_repository(host: str, repository: str) -> str:
    """The whole name of a repository: one without a slash is in ``library/`` on Docker Hub."""
    return f"library/{repository}" if registry_host(host) == HOST and "/" not in repository else repository
