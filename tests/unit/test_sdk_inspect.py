"""The Inspect AI provider against the fake server: configuration, results, and the exceptions that Inspect documents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironmentSpec, SandboxUnavailableError
from inspect_ai.util._sandbox.limits import override_max_exec_output_size, override_max_read_file_size
from sdk_server import FakeServer

from dsec.compat.inspect_provider import LABEL, DSecSandboxConfig, DSecSandboxEnvironment
from libdsec import CommandResult, InvalidArgument


@pytest.fixture
async def environment(server: FakeServer) -> AsyncIterator[DSecSandboxEnvironment]:
    environments = await DSecSandboxEnvironment.sample_init("task", DSecSandboxConfig(image="python:3.11", workdir="/work"), {})
    yield environments["default"].as_type(DSecSandboxEnvironment)
    await DSecSandboxEnvironment.sample_cleanup("task", None, environments, False)
    assert all(info.state == "stopped" for info in server.sandboxes.values())


def test_it_is_registered_by_entry_point() -> None:
    assert any(entry.value == "dsec.compat.inspect_provider" for entry in entry_points(group="inspect_ai"))


def test_inspect_makes_the_configuration_from_plain_data() -> None:
    spec = SandboxEnvironmentSpec.model_validate({"type": "dsec", "config": {"image": "x", "user": "me"}})
    assert spec.config == DSecSandboxConfig(image="x", user="me")


async def test_a_configuration_may_be_a_file_or_an_image_and_is_needed(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "dsec.yaml").write_text("image: from-file\nworkdir: /w\n")
    (tmp_path / "bad.yaml").write_text("immage: typo\n")
    await DSecSandboxEnvironment.sample_init("t", str(tmp_path / "dsec.yaml"), {})
    await DSecSandboxEnvironment.sample_init("t", "by-name", {})
    assert [(info.image, info.labels) for info in server.sandboxes.values()] == [("from-file", {LABEL: "t"}), ("by-name", {LABEL: "t"})]
    for config in (None, str(tmp_path / "bad.yaml"), str(tmp_path / "none.yaml")):
        with pytest.raises(ValueError, match="dsec"):
            await DSecSandboxEnvironment.sample_init("t", config, {})
    await DSecSandboxEnvironment.cli_cleanup(None)
    assert {info.state for info in server.sandboxes.values()} == {"stopped"}


async def test_everything_of_a_call_is_passed_on(server: FakeServer, environment: DSecSandboxEnvironment) -> None:
    server.result = CommandResult(exit_code=3, stdout_bytes=b"out", stderr_bytes=b"err")
    result = await environment.exec(["cat"], input="", cwd="sub", env={"A": "1"}, user="root", timeout=9)
    assert (result.success, result.returncode, result.stdout, result.stderr) == (False, 3, "out", "err")
    [request] = server.execs.values()
    assert (request.argv, request.stdin, request.cwd, request.env, request.user, request.timeout_s) == (
        ["cat"],
        b"",
        "/work/sub",
        {"A": "1"},
        "root",
        9,
    )


async def test_failures_are_the_exceptions_that_inspect_documents(server: FakeServer, environment: DSecSandboxEnvironment) -> None:
    server.result = CommandResult(exit_code=137, timed_out=True, stdout_bytes=b"so far")
    with pytest.raises(TimeoutError) as late:
        await environment.exec(["sleep"], timeout=1)
    assert getattr(late.value, "truncated_output", None) == "so far"
    server.result = CommandResult(exit_code=126, start_error="exec /etc/passwd: Permission denied")
    with pytest.raises(PermissionError):
        await environment.exec(["/etc/passwd"])
    server.result = CommandResult(exit_code=0, stdout_bytes=b"x" * 10, truncated=True)
    with override_max_exec_output_size(10), pytest.raises(OutputLimitExceededError, match="10 bytes"):
        await environment.exec(["yes"])
    server.result = CommandResult(exit_code=127, start_error="exec nope: No such file or directory")
    result = await environment.exec(["nope"])
    assert not result.success and "No such file" in result.stderr


async def test_files_are_read_and_written_below_the_working_directory(server: FakeServer, environment: DSecSandboxEnvironment) -> None:
    await environment.write_file("a/b", "grün\r\n")
    assert server.files == {b"/work/a/b": "grün\r\n".encode()}
    assert await environment.read_file("a/b") == "grün\r\n"
    assert await environment.read_file("a/b", text=False) == "grün\r\n".encode()
    with pytest.raises(FileNotFoundError, match="nothing"):
        await environment.read_file("nothing")
    with override_max_read_file_size(3), pytest.raises(OutputLimitExceededError):
        await environment.read_file("a/b")
    await environment.write_file("binary", b"\xff")
    with pytest.raises(UnicodeDecodeError):
        await environment.read_file("binary")
    server.error = InvalidArgument("a directory", errno=21)
    with pytest.raises(IsADirectoryError):
        await environment.write_file("a", "x")
    server.error = None


async def test_a_sandbox_that_is_gone_is_unavailable_and_cannot_be_connected_to(
    server: FakeServer, environment: DSecSandboxEnvironment
) -> None:
    assert (await environment.connection(user="me")).command == f"dsec shell {environment.sandbox.id} --user me"
    server.sandboxes[environment.sandbox.id].state = "stopped"
    with pytest.raises(SandboxUnavailableError):
        await environment.exec(["true"])
    with pytest.raises(ConnectionError):
        await environment.connection()
