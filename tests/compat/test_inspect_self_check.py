"""Inspect AI's published conformance suite for sandbox providers, run whole against a real sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from dsec.compat.inspect_provider import DSecSandboxEnvironment
from libdsec import DSecClient, DSecContainerRunArgs


@pytest.fixture
async def sandbox_env(client: DSecClient, base_image: str) -> AsyncIterator[SandboxEnvironment]:
    """A sandbox whose user is not root: root may read and write whatever its permission bits say, and the suite checks that they count."""
    args = DSecContainerRunArgs(container_image=base_image, init_user="1000:1000", workdir="/work")
    async with await client.run_container(args, timeout=60) as sandbox:
        yield await DSecSandboxEnvironment.of(sandbox)
