"""A sandbox provider for Inspect AI: ``sandbox="dsec"`` in a task runs its samples in sandboxes of this platform.

Registered by the entry point group ``inspect_ai``. Which server is used, and with which key, is what :class:`libdsec.DSecClient` finds in
the environment. The contract is that of ``inspect_ai.util.SandboxEnvironment``, whose docstrings name every exception; its published self
check is run in ``tests/compat``.
"""

from __future__ import annotations

import errno
import os
import posixpath
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, overload

import yaml  # type: ignore[import-untyped]
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import override

from libdsec import (
    CommandResult,
    DSecClient,
    DSecError,
    Sandbox,
    SandboxFailed,
    SandboxGone,
    SandboxNotFound,
    Unavailable,
)
from libdsec.schema import MAX_OUTPUT_LIMIT

LABEL = "inspect.task"
"""The label that marks sandboxes of this provider; its value is the task's name."""
LABEL_VALUE_MAX = 128
"""Characters of a task's name that are kept in the label."""
POLLING_INTERVAL_S = 0.2
"""A command costs a millisecond or two, so sandbox services may be asked often."""
CREATE_TIMEOUT_S = 600.0
"""An evaluation may ask for more sandboxes than the node takes at once; each waits this long for its turn."""
_NO_SANDBOX = (SandboxNotFound, SandboxGone, SandboxFailed, Unavailable)


class DSecSandboxConfig(BaseModel):
    """What a sample's sandbox is made of; the fields of ``DSecContainerRunArgs`` that make sense here. Also the form of a ``dsec.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str
    """Base image, as the image store names it."""
    backend: Literal["container", "microvm"] = "container"
    workspace: str | None = None
    toolkits: tuple[str, ...] = ()
    memory_limit_mb: int = 2048
    cpu_cores_limit: float = 2.0
    disk_limit_mb: int = 10240
    pids_limit: int = 1024
    network: Literal["aether", "none", "bridged"] = "aether"
    network_rules: dict[str, bool] | None = None
    user: str = "root"
    """Who commands run as, and who reads and writes files, unless a call says otherwise."""
    workdir: str | None = None
    """Where relative paths begin; default: the image's working directory."""
    env: dict[str, str] = {}


@sandboxenv(name="dsec")
class DSecSandboxEnvironment(SandboxEnvironment):
    """One sandbox, as Inspect sees it."""

    def __init__(self, sandbox: Sandbox, workdir: str) -> None:
        """``workdir``: absolute path in the sandbox from which relative paths count."""
        super().__init__()
        self.sandbox = sandbox
        self._workdir = workdir

    @classmethod
    async def of(cls, sandbox: Sandbox) -> DSecSandboxEnvironment:
        """The environment of a sandbox that exists already."""
        return cls(sandbox, (await sandbox.info()).workdir)

    @override
    @classmethod
    def config_files(cls) -> list[str]:
        return ["dsec.yaml", "dsec.yml"]

    @override
    @classmethod
    def config_deserialize(cls, config: dict[str, object]) -> BaseModel:
        return DSecSandboxConfig.model_validate(config)

    @override
    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        wanted = _config_of(config)
        sandbox = await Sandbox.create(
            wanted.image,
            backend=wanted.backend,
            timeout=CREATE_TIMEOUT_S,
            workspace=wanted.workspace,
            toolkits=wanted.toolkits,
            memory_limit_mb=wanted.memory_limit_mb,
            cpu_cores_limit=wanted.cpu_cores_limit,
            disk_limit_mb=wanted.disk_limit_mb,
            pids_limit=wanted.pids_limit,
            network=wanted.network,
            network_rules=wanted.network_rules,
            init_user=wanted.user,
            workdir=wanted.workdir,
            env=wanted.env,
            labels={LABEL: task_name[:LABEL_VALUE_MAX]},
        )
        return {"default": await cls.of(sandbox)}

    @override
    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            with suppress(SandboxNotFound, SandboxGone):
                await environment.as_type(DSecSandboxEnvironment).sandbox.stop()

    @override
    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Stop the sandbox ``id``, or every sandbox of this provider that the key can see."""
        async with DSecClient() as client:
            ids = [id] if id is not None else [info.id async for info in client.list() if LABEL in info.labels]
            for sandbox_id in ids:
                with suppress(SandboxNotFound, SandboxGone):
                    await (await client.attach(sandbox_id)).stop()

    @override
    def default_polling_interval(self) -> float:
        return POLLING_INTERVAL_S

    @override
    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """See ``SandboxEnvironment.exec``. A timeout kills the command's whole tree and is never retried: the sandbox enforces it, so it
        is the command that was slow."""
        limit = min(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE, MAX_OUTPUT_LIMIT)
        with _unavailable():
            result = await self.sandbox.exec(
                cmd, stdin=input, cwd=self._absolute(cwd or "."), env=env, user=user, timeout=timeout, max_output=limit
            )
        if result.timed_out:
            raise _timeout(result, timeout)
        if result.truncated:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, result.stdout or result.stderr)
        if result.start_error is not None and result.start_error.endswith(os.strerror(errno.EACCES)):
            raise PermissionError(errno.EACCES, result.start_error, cmd[0])
        return ExecResult(
            success=result.exit_code == 0,
            returncode=result.exit_code,
            stdout=result.stdout,
            stderr=result.stderr + (result.start_error or ""),
        )

    @override
    async def write_file(self, file: str, contents: str | bytes) -> None:
        with _as_os_error(file), _unavailable():
            await self.sandbox.files.write(self._absolute(file), contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    @override
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        content = bytearray()
        with _as_os_error(file), _unavailable():
            async for chunk in self.sandbox.files.read_stream(self._absolute(file), length=limit + 1):
                content += chunk
        if len(content) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return content.decode("utf-8") if text else bytes(content)

    @override
    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        try:
            info = await self.sandbox.info()
        except _NO_SANDBOX as error:
            raise ConnectionError(str(error)) from error
        if info.state != "running":
            raise ConnectionError(f"{info.id} is {info.state}")
        command = ["dsec", "shell", info.id, *(["--user", user] if user else [])]
        return SandboxConnection(type="dsec", command=shlex.join(command), container=info.id)

    def _absolute(self, path: str) -> str:
        return posixpath.join(self._workdir, path)


def _config_of(config: SandboxEnvironmentConfigType | None) -> DSecSandboxConfig:
    """The configuration given as a model, as the name of a YAML file, or as the name of an image. Raises ValueError for anything else."""
    if isinstance(config, DSecSandboxConfig):
        return config
    if isinstance(config, str) and not config.endswith((".yaml", ".yml")):
        return DSecSandboxConfig(image=config)
    if isinstance(config, str):
        try:
            return DSecSandboxConfig.model_validate(yaml.safe_load(Path(config).read_text(encoding="utf-8")))
        except (OSError, yaml.YAMLError, ValidationError) as error:
            raise ValueError(f"{config} can't be used as the configuration of a dsec sandbox: {error}") from error
    raise ValueError('a dsec sandbox needs an image: sandbox=("dsec", "python:3.11"), a dsec.yaml, or a DSecSandboxConfig')


def _timeout(result: CommandResult, seconds: int | None) -> TimeoutError:
    error = TimeoutError(f"the command was killed after {seconds} s")
    # What Inspect shows of a command that timed out.
    error.truncated_output = result.stdout + result.stderr  # type: ignore[attr-defined]
    return error


@contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except _NO_SANDBOX as error:
        raise SandboxUnavailableError(str(error)) from error


@contextmanager
def _as_os_error(file: str) -> Iterator[None]:
    """File errors as the built-in exceptions that Inspect documents."""
    try:
        yield
    except DSecError as error:
        if error.errno is None:
            raise
        # OSError picks the subclass that belongs to the number.
        raise OSError(error.errno, os.strerror(error.errno), file) from error
