"""Terminals and ports of a real chronus."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from chronus_process import DEADLINE_S, MB, ChronusProcess, in_time, read_all, running_chronus, sh, until

from dsec.edge.channel import MODE_STREAM, STDIN_INLINE, STDIN_NONE, STDIN_STREAM, Channel, ChannelError, Stream


@pytest.fixture
def chronus() -> Iterator[ChronusProcess]:
    with running_chronus() as process:
        yield process


@pytest.fixture
async def channel(chronus: ChronusProcess) -> AsyncIterator[Channel]:
    opened = await Channel.connect(chronus.path, on_lost=lambda lost: None)
    yield opened
    opened.close()


async def read_until(stream: Stream, wanted: bytes) -> bytes:
    seen = b""
    async with asyncio.timeout(DEADLINE_S):
        while wanted not in seen:
            piece = await stream.read()
            assert piece is not None, seen
            seen += piece[2]
    return seen


async def test_a_terminal_has_its_size_and_follows_a_resize(channel: Channel) -> None:
    script = "trap 'stty size; exit 3' WINCH; tty; stty size; while :; do sleep 0.01; done"
    stream = await channel.start(sh(script, exec_id="t", mode=MODE_STREAM, pty=(24, 81)), follow=True)
    seen = await read_until(stream, b"24 81\r\n")
    assert re.match(rb"/dev/pts/\d+\r\n24 81\r\n", seen)
    await channel.resize("t", 50, 132)
    stdout, stderr, exit = await read_all(stream)
    assert (stdout, stderr, exit.exit_code) == (b"50 132\r\n", b"", 3)


async def test_a_terminal_echoes_and_its_interrupt_character_signals(channel: Channel) -> None:
    stream = await channel.start(sh("echo ready; cat", mode=MODE_STREAM, pty=(24, 80), stdin=STDIN_STREAM), follow=True)
    await read_until(stream, b"ready\r\n")
    await stream.write(b"typed\n")
    await read_until(stream, b"typed\r\ntyped\r\n")
    await stream.write(b"\x03")
    assert (await read_all(stream))[2].signal == signal.SIGINT


async def test_the_end_of_stdin_is_an_end_of_file_for_the_terminal(channel: Channel) -> None:
    stream = await channel.start(sh("wc -l", mode=MODE_STREAM, pty=(24, 80), stdin=STDIN_STREAM), follow=True)
    await stream.write(b"a\nb\n")
    await stream.write_eof()
    stdout, _, exit = await read_all(stream)
    assert stdout.endswith(b"2\r\n") and exit.exit_code == 0


@pytest.mark.parametrize("data", [b"", b"hello", b"hello\n", b"one\ntwo", b"hello\x04", b"a\r"])
async def test_what_a_terminal_is_given_ends_within_a_line_too(channel: Channel, data: bytes) -> None:
    # The second cat would end by an end that is one too many.
    script = "stty -echo; echo ready; cat; echo first; cat; echo second"
    stream = await channel.start(sh(script, mode=MODE_STREAM, pty=(24, 80), stdin=STDIN_STREAM), follow=True)
    await read_until(stream, b"ready\r\n")
    await stream.write(data)
    await stream.write_eof()
    expected = data.replace(b"\x04", b"").replace(b"\r", b"\n").replace(b"\n", b"\r\n")
    assert await read_until(stream, b"first\r\n") == expected + b"first\r\n"
    await stream.write(b"more\n")
    assert await read_until(stream, b"\n") == b"more\r\n"
    await stream.write_eof()
    stdout, _, exit = await read_all(stream)
    assert (stdout, exit.exit_code) == (b"second\r\n", 0)


@pytest.mark.parametrize("data", [b"hello", b"hello\n"])
async def test_inline_input_of_a_terminal_ends(channel: Channel, data: bytes) -> None:
    result = await in_time(channel.run(sh("cat; echo end", pty=(24, 80), stdin=STDIN_INLINE, stdin_data=data)))
    assert result.exit_code == 0 and result.stdout.count(b"hello") == 2 and result.stdout.endswith(b"end\r\n")


async def test_a_terminal_without_input_is_at_its_end(channel: Channel) -> None:
    result = await in_time(channel.run(sh("cat; echo end", pty=(24, 80), stdin=STDIN_NONE)))
    assert (result.exit_code, result.stdout) == (0, b"end\r\n")


async def test_a_terminal_in_raw_mode_gets_one_byte_at_the_end(channel: Channel) -> None:
    script = "stty raw -echo; echo ready; head -c 6 | od -An -c; timeout 0.2 cat | od -An -c"
    stream = await channel.start(sh(script, mode=MODE_STREAM, pty=(24, 80), stdin=STDIN_STREAM), follow=True)
    await read_until(stream, b"ready\n")
    await stream.write(b"hello")
    await stream.write_eof()
    stdout, _, _ = await read_all(stream)
    assert stdout.split() == [b"h", b"e", b"l", b"l", b"o", b"004"]


async def test_the_end_waits_for_a_terminal_that_is_full(channel: Channel) -> None:
    data = b"x" * 63 + b"\n"
    script = "stty -echo; echo ready; read -r go; sleep 0.2; wc -c"
    stream = await channel.start(sh(script, mode=MODE_STREAM, pty=(24, 80), stdin=STDIN_STREAM), follow=True)
    await read_until(stream, b"ready\r\n")
    await stream.write(b"go\n" + data * 4096 + b"rest")
    await stream.write_eof()
    stdout, _, exit = await read_all(stream)
    assert (int(stdout), exit.exit_code) == (64 * 4096 + 4, 0)


async def test_output_written_right_before_the_end_is_not_lost(channel: Channel) -> None:
    for _ in range(10):
        stream = await channel.start(sh("seq 1 2000", mode=MODE_STREAM, pty=(24, 80)), follow=True)
        stdout, _, exit = await read_all(stream)
        assert stdout == b"".join(b"%d\r\n" % number for number in range(1, 2001)) and exit.exit_code == 0


async def test_a_captured_command_may_have_a_terminal(channel: Channel) -> None:
    result = await in_time(channel.run(sh("test -t 0 && test -t 1 && echo yes", pty=(24, 80))))
    assert result.stdout == b"yes\r\n"


async def test_a_start_error_with_a_terminal_is_reported(channel: Channel) -> None:
    start = sh("", mode=MODE_STREAM, pty=(24, 80))
    start.argv = [b"/bin/nope"]
    stream = await channel.start(start, follow=True)
    assert (await read_all(stream))[2].start_error == "exec /bin/nope: No such file or directory"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
async def test_a_terminal_belongs_to_its_user(channel: Channel) -> None:
    result = await in_time(channel.run(sh("stat -c %u $(tty); echo x > $(tty)", pty=(24, 80), user="65534")))
    assert (result.exit_code, result.stdout) == (0, b"65534\r\nx\r\n")


async def test_terminals_leave_no_descriptor_behind(chronus: ChronusProcess, channel: Channel) -> None:
    before = chronus.descriptors()
    for _ in range(5):
        await in_time(channel.run(sh("echo", pty=(24, 80))))
    assert chronus.descriptors() == before


@pytest.fixture
async def echo_port() -> AsyncIterator[int]:
    """A TCP server that sends back what it gets, and ends when its client does."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.write(b"end")
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_a_port_is_a_stream_both_ways(chronus: ChronusProcess, channel: Channel, echo_port: int) -> None:
    before = chronus.descriptors()
    stream = await channel.open_port(echo_port)
    data = os.urandom(4 * MB)

    async def send() -> None:
        await stream.write(data)
        await stream.write_eof()

    sending = asyncio.ensure_future(send())
    stdout, _, exit = await read_all(stream)
    await sending
    assert (stdout, exit.exit_code) == (data + b"end", 0)
    await until(lambda: chronus.descriptors() == before, "the socket is closed")


async def test_the_other_side_s_end_is_the_end(channel: Channel) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    stream = await channel.open_port(server.sockets[0].getsockname()[1], b"127.0.0.1")
    assert (await read_all(stream))[0] == b"hello"
    server.close()


async def test_a_port_without_a_listener_is_refused_with_its_errno(channel: Channel) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(ChannelError) as refused:
            await channel.open_port(port)
    assert (refused.value.code, refused.value.errno) == ("not_found", 111)
    for wrong in ((0, b""), (70_000, b""), (80, b"example.org")):
        with pytest.raises(ChannelError) as error:
            await channel.open_port(*wrong)
        assert error.value.code == "invalid_argument"


async def test_letting_go_of_a_port_closes_it(chronus: ChronusProcess, channel: Channel, echo_port: int) -> None:
    before = chronus.descriptors()
    stream = await channel.open_port(echo_port)
    stream.detach()
    await until(lambda: chronus.descriptors() == before, "the socket is closed")
    again = await channel.open_port(echo_port)
    replacement = await Channel.connect(chronus.path, on_lost=lambda lost: None)
    with pytest.raises(Exception, match="broke"):
        await read_all(again)
    await until(lambda: chronus.descriptors() == before, "the socket is closed with its connection")
    replacement.close()
