"""Commands through the channel, run by a real chronus."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from chronus_process import DEADLINE_S, MB, ChronusProcess, in_time, read_all, running_chronus, sh, until

from dsec.edge.channel import (
    LEFTOVERS_KEEP,
    MODE_STREAM,
    STDIN_INLINE,
    STDIN_STREAM,
    Channel,
    ChannelError,
    ChannelLost,
    Start,
    Stream,
)


@pytest.fixture(params=["cgroup", "no cgroup"])
def chronus(request: pytest.FixtureRequest) -> Iterator[ChronusProcess]:
    with running_chronus(cgroup=request.param == "cgroup") as process:
        yield process


@pytest.fixture
async def channel(chronus: ChronusProcess) -> AsyncIterator[Channel]:
    opened = await Channel.connect(chronus.path, on_lost=lambda lost: None)
    yield opened
    opened.close()


async def test_outputs_are_kept_apart_and_byte_exact(channel: Channel) -> None:
    result = await in_time(channel.run(sh(r"printf 'a\377\0b'; printf '\303' >&2; printf '\244' >&2; exit 7")))
    assert (result.exit_code, result.signal, result.stdout, result.stderr) == (7, None, b"a\xff\0b", b"\xc3\xa4")
    assert (result.stdout_total, result.stderr_total, result.truncated) == (4, 2, False)


async def test_a_signalled_leader_reports_the_signal(channel: Channel) -> None:
    result = await in_time(channel.run(sh("kill -TERM $$")))
    assert (result.exit_code, result.signal) == (128 + signal.SIGTERM, signal.SIGTERM)


async def test_captured_output_larger_than_a_frame_comes_whole(channel: Channel) -> None:
    result = await in_time(channel.run(sh("head -c 3000000 /dev/zero; head -c 2000000 /dev/zero | tr '\\0' x >&2")))
    assert (len(result.stdout), result.stderr) == (3_000_000, b"x" * 2_000_000)


async def test_captured_yes_is_cut_and_never_blocks(channel: Channel) -> None:
    result = await in_time(channel.run(sh("yes | head -c 30000000", max_output=1000)))
    assert (result.exit_code, len(result.stdout), result.stdout_total, result.truncated) == (0, 1000, 30_000_000, True)


async def test_max_output_of_nothing_only_counts(channel: Channel) -> None:
    result = await in_time(channel.run(sh("echo hello", max_output=0)))
    assert (result.stdout, result.stdout_total, result.truncated) == (b"", 6, True)


async def test_inline_stdin_of_any_size_arrives_and_ends(channel: Channel) -> None:
    for size in (0, 1, 65_536, 65_537, 900_000):
        result = await in_time(channel.run(sh("wc -c", stdin=STDIN_INLINE, stdin_data=b"x" * size)))
        assert int(result.stdout) == size


async def test_without_stdin_a_command_reads_the_end_at_once(channel: Channel) -> None:
    result = await in_time(channel.run(sh("cat; readlink /proc/self/fd/0")))
    assert result.stdout == b"/dev/null\n"


async def test_a_command_gets_no_descriptor_of_chronus(channel: Channel) -> None:
    result = await in_time(channel.run(sh("ls /proc/self/fd | wc -l")))
    # Its three, and the directory that ls reads.
    assert int(result.stdout) == 4


async def test_start_errors_say_what_and_why(channel: Channel, tmp_path: Path) -> None:
    script = tmp_path / "not-executable"
    script.write_text("x")
    missing = await in_time(channel.run(Start(argv=[b"/bin/nope"])))
    assert (missing.exit_code, missing.start_error, missing.start_errno) == (127, "exec /bin/nope: No such file or directory", 2)
    unfound = await in_time(channel.run(Start(argv=[b"no-such-program"])))
    assert (unfound.exit_code, unfound.start_error) == (127, "exec no-such-program: No such file or directory")
    denied = await in_time(channel.run(Start(argv=[os.fsencode(script)])))
    assert (denied.exit_code, denied.start_errno) == (126, 13)
    lost = await in_time(channel.run(Start(argv=[b"true"], cwd=b"/no/such/place")))
    assert (lost.exit_code, lost.start_error) == (126, "chdir /no/such/place: No such file or directory")
    unknown = await in_time(channel.run(Start(argv=[b"true"], user="no-such-user")))
    assert unknown.exit_code == 126
    assert unknown.start_error == "user no-such-user: not in the sandbox's /etc/passwd"
    nothing = await in_time(channel.run(Start(argv=[])))
    assert nothing.exit_code == 126


async def test_the_environment_is_what_was_given_and_four_defaults(channel: Channel) -> None:
    result = await in_time(channel.run(Start(argv=[b"env", b"-0"], env={b"A": b"\xff=1", b"HOME": b"/mine"}, cwd=b"/tmp", user="0")))
    found = dict(entry.split(b"=", 1) for entry in result.stdout.split(b"\0") if entry)
    assert set(found) == {b"A", b"HOME", b"USER", b"LOGNAME", b"PATH"}
    assert (found[b"A"], found[b"HOME"], found[b"USER"]) == (b"\xff=1", b"/mine", b"root")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
async def test_commands_run_as_the_user_with_what_that_user_may_do(channel: Channel) -> None:
    root = await in_time(channel.run(sh("id -u; grep -E '^Cap(Prm|Eff|Bnd)' /proc/self/status | sort -u | cut -f2")))
    # CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE SYS_CHROOT AUDIT_WRITE SETFCAP
    assert root.stdout.split() == [b"0"] + [b"00000000a00405fb"] * 3
    nobody = await in_time(
        channel.run(sh("id -u; id -g; id -G; grep -E '^Cap(Inh|Prm|Eff|Amb)' /proc/self/status | cut -f2", user="65534:12"))
    )
    assert nobody.stdout.split() == [b"65534", b"12", b"12"] + [b"0" * 16] * 4
    confined = await in_time(channel.run(sh("grep NoNewPrivs /proc/self/status | cut -f2", no_new_privs=True)))
    assert confined.stdout == b"1\n"


async def test_signal_dispositions_and_mask_are_the_default(channel: Channel) -> None:
    result = await in_time(channel.run(sh("grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status | cut -f2")))
    assert result.stdout.split()[:2] == [b"0" * 16, b"0" * 16]


async def test_timeout_kills_grandchildren_that_hold_stdout(chronus: ChronusProcess, channel: Channel) -> None:
    result = await in_time(channel.run(sh("sleep 1000 & (sleep 1000; echo never) & echo begun; sleep 1000", timeout_ms=300)))
    assert (result.timed_out, result.exit_code, result.signal, result.stdout) == (True, 137, 9, b"begun\n")
    await until(lambda: not chronus.commands(), "the tree is dead")


async def test_leftovers_die_with_the_leader(chronus: ChronusProcess, channel: Channel) -> None:
    result = await in_time(channel.run(sh("setsid sleep 1000 & sleep 1000 & echo done")))
    assert (result.exit_code, result.stdout) == (0, b"done\n")
    if chronus.cgroup:
        await until(lambda: not chronus.commands(), "the tree is dead")
        await until(lambda: not chronus.cgroups(), "its cgroup is gone")


async def test_kept_leftovers_live_and_do_not_hold_the_exit_up(chronus: ChronusProcess, channel: Channel) -> None:
    result = await in_time(channel.run(sh("sleep 1000 & echo $!", leftovers=LEFTOVERS_KEEP)))
    survivor = int(result.stdout)
    assert survivor in chronus.commands()
    assert result.duration_us < 10_000_000
    os.kill(survivor, signal.SIGKILL)
    await until(lambda: not chronus.cgroups() and not chronus.commands(), "it is reaped and its cgroup removed")


async def test_a_survivor_may_still_write_for_a_moment(channel: Channel) -> None:
    result = await in_time(channel.run(sh("(sleep 0.05; echo late) & echo early", leftovers=LEFTOVERS_KEEP)))
    assert result.stdout == b"early\nlate\n"


async def test_an_exec_id_that_is_known_attaches_instead_of_running_again(channel: Channel, tmp_path: Path) -> None:
    start = sh(f"echo x >> {tmp_path}/runs; sleep 0.1; echo out", exec_id="once")
    first, second = await asyncio.gather(in_time(channel.run(start)), in_time(channel.run(start)))
    third = await in_time(channel.run(start))
    assert first.stdout == second.stdout == third.stdout == b"out\n"
    assert (tmp_path / "runs").read_text() == "x\n"


async def test_a_lost_connection_leaves_commands_running_and_their_output_whole(chronus: ChronusProcess) -> None:
    first = await Channel.connect(chronus.path, on_lost=lambda lost: None)
    stream = await first.start(
        sh("cat; for i in 1 2 3; do echo line $i; done", exec_id="kept", mode=MODE_STREAM, stdin=STDIN_STREAM), follow=True
    )
    await stream.write(b"before\n")
    assert await stream.read() == (1, 0, b"before\n")
    captured = asyncio.ensure_future(first.run(sh("sleep 0.2; echo whole", exec_id="captured")))
    await asyncio.sleep(0)
    entries = await first.list()
    first.close()
    with pytest.raises(ChannelLost):
        await captured
    second = await Channel.connect(chronus.path, on_lost=lambda lost: None)
    assert second.running == 2
    assert {entry.exec_id for entry in await second.list()} == {entry.exec_id for entry in entries} == {"kept", "captured"}
    again = await second.attach("kept", stdout_from=7, stderr_from=0, stdin=True)
    await again.write(b"after\n")
    await again.write_eof()
    assert (await read_all(again))[0] == b"after\nline 1\nline 2\nline 3\n"
    whole = await second.attach("kept", stdout_from=0)
    assert (await read_all(whole))[0] == b"before\nafter\nline 1\nline 2\nline 3\n"
    assert (await in_time(second.run(sh("", exec_id="captured")))).stdout == b"whole\n"
    assert second.running == 0
    second.close()


async def test_a_new_connection_replaces_the_old_one(chronus: ChronusProcess) -> None:
    lost: asyncio.Future[ChannelLost] = asyncio.get_running_loop().create_future()
    first = await Channel.connect(chronus.path, on_lost=lost.set_result)
    second = await Channel.connect(chronus.path, on_lost=lambda error: None)
    assert isinstance(await asyncio.wait_for(lost, DEADLINE_S), ChannelLost)
    with pytest.raises(ChannelLost):
        await first.run(sh("true"))
    assert (await in_time(second.run(sh("true")))).exit_code == 0
    second.close()


async def test_yes_with_nobody_reading_blocks_at_one_mebibyte(channel: Channel) -> None:
    stream = await channel.start(sh("yes", exec_id="yes", mode=MODE_STREAM), follow=False)
    entry = None
    async with asyncio.timeout(DEADLINE_S):
        while entry is None or entry.stdout_total < MB:
            (entry,) = await channel.list()
    assert (entry.stdout_total, entry.running) == (MB, True)
    reader = await channel.attach("yes", stdout_from=0)
    taken = 0
    while taken < 5 * MB:
        piece = await reader.read()
        assert piece is not None and piece[1] == taken
        taken += len(piece[2])
    reader.detach()
    await stream.signal(signal.SIGKILL, tree=True)
    assert (await in_time(stream.wait())).signal == 9


async def test_a_stream_is_whole_and_in_order_however_large(channel: Channel) -> None:
    stream = await channel.start(sh("seq 1 400000; echo end >&2", mode=MODE_STREAM), follow=True)
    stdout, stderr, exit = await read_all(stream)
    assert stdout == b"".join(b"%d\n" % number for number in range(1, 400_001))
    assert (stderr, exit.exit_code, exit.stdout_total) == (b"end\n", 0, len(stdout))


async def test_an_offset_below_the_window_is_gone_and_one_beyond_the_end_is_wrong(channel: Channel) -> None:
    stream = await channel.start(sh("head -c 20000000 /dev/zero", exec_id="big", mode=MODE_STREAM), follow=True)
    assert len((await read_all(stream))[0]) == 20_000_000
    with pytest.raises(ChannelError) as gone:
        await channel.attach("big", stdout_from=0)
    assert gone.value.code == "offset_gone"
    first = int(gone.value.message.split()[-1])
    assert 20_000_000 - 10 * MB < first <= 20_000_000 - 8 * MB
    rest = await read_all(await channel.attach("big", stdout_from=first))
    assert len(rest[0]) == 20_000_000 - first
    with pytest.raises(ChannelError) as beyond:
        await channel.attach("big", stdout_from=20_000_001)
    assert beyond.value.code == "invalid_argument"


async def test_two_readers_get_the_same_stream(channel: Channel) -> None:
    first = await channel.start(sh("cat", exec_id="shared", mode=MODE_STREAM, stdin=STDIN_STREAM), follow=True)
    second = await channel.attach("shared", stdout_from=0, stderr_from=0)
    await first.write(b"x" * 3 * MB)
    await first.write_eof()
    one, two = await asyncio.gather(read_all(first), read_all(second))
    assert one[0] == two[0] == b"x" * 3 * MB


async def test_stdin_larger_than_the_credit_waits_for_its_reader(channel: Channel) -> None:
    stream = await channel.start(sh("sleep 0.1; md5sum", mode=MODE_STREAM, stdin=STDIN_STREAM), follow=True)
    data = os.urandom(5 * MB + 3)
    await asyncio.wait_for(stream.write(data), DEADLINE_S)
    await stream.write_eof()
    assert (await read_all(stream))[0].split()[0].decode() == hashlib.md5(data).hexdigest()


async def test_stdin_that_nobody_reads_is_swallowed(channel: Channel) -> None:
    stream = await channel.start(sh("exec <&-; sleep 0.2", mode=MODE_STREAM, stdin=STDIN_STREAM), follow=True)
    await asyncio.wait_for(stream.write(b"x" * 5 * MB), DEADLINE_S)
    await stream.write_eof()
    assert (await in_time(stream.wait())).exit_code == 0


async def test_signals_reach_the_process_group(channel: Channel) -> None:
    stream = await channel.start(
        sh("trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.01; done", exec_id="s", mode=MODE_STREAM), follow=True
    )
    assert (await stream.read()) == (1, 0, b"ready\n")
    await channel.signal("s", signal.SIGINT)
    stdout, _, exit = await read_all(stream)
    assert (stdout, exit.exit_code) == (b"caught\n", 5)
    await channel.signal("s", signal.SIGINT)
    with pytest.raises(ChannelError) as error:
        await channel.signal("unknown", signal.SIGINT)
    assert error.value.code == "process_not_found"


async def test_a_cancelled_run_goes_on(channel: Channel, tmp_path: Path) -> None:
    done = tmp_path / "done"
    task = asyncio.ensure_future(channel.run(sh(f"sleep 0.2; touch {done}", exec_id="c")))
    await asyncio.sleep(0)
    await channel.list()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert channel.running == 1
    await until(done.exists, "it has run to its end")
    await until(lambda: channel.running == 0, "its end was noticed")


async def test_a_builtin_that_nobody_follows_is_killed(chronus: ChronusProcess, channel: Channel, tmp_path: Path) -> None:
    stream = await channel.start(
        Start(builtin="write", args={"path": os.fsencode(tmp_path / "half")}, mode=MODE_STREAM, stdin=STDIN_STREAM), follow=True
    )
    await stream.write(b"x" * MB)
    stream.detach()
    await until(lambda: not chronus.commands(), "the writer is gone")
    assert os.listdir(tmp_path) == []


async def test_kill_everything_does_not_reach_chronus(chronus: ChronusProcess, channel: Channel) -> None:
    stream = await channel.start(sh("sleep 1000", exec_id="k", mode=MODE_STREAM), follow=False)
    await channel.signal("k", signal.SIGKILL)
    assert (await in_time(stream.wait())).exit_code == 137
    assert (await in_time(channel.run(sh("echo still here")))).stdout == b"still here\n"


async def test_under_memory_pressure_commands_go_before_chronus(chronus: ChronusProcess, channel: Channel) -> None:
    stream = await channel.start(sh("exec sleep 1000", mode=MODE_STREAM), follow=True)
    assert (await in_time(channel.run(sh("cat /proc/self/oom_score_adj")))).stdout == b"500\n"
    own = Path(f"/proc/{chronus.pid}/oom_score_adj")
    await until(lambda: own.read_text() == "0\n", "chronus has its own score back")
    assert (await in_time(channel.run(sh("cat /proc/self/oom_score_adj")))).stdout == b"500\n"
    await stream.signal(signal.SIGKILL)
    await in_time(stream.wait())


async def test_listing_shows_what_ran_and_what_runs(channel: Channel) -> None:
    await in_time(channel.run(sh("echo out; exit 3", exec_id="ended")))
    stream = await channel.start(sh("sleep 1000", exec_id="running", mode=MODE_STREAM), follow=False)
    ended, running = await channel.list()
    assert (ended.exec_id, ended.running, ended.exit_code, ended.stdout_total, ended.capture) == ("ended", False, 3, 4, True)
    assert (running.exec_id, running.running, running.exit_code, running.capture) == ("running", True, None, False)
    assert running.argv == [b"sh", b"-c", b"sleep 1000"] and running.pid == stream.pid
    assert channel.running == 1


async def test_what_was_listed_as_running_counts_until_it_is_seen_to_end(chronus: ChronusProcess) -> None:
    first = await Channel.connect(chronus.path, on_lost=lambda lost: None)
    for name in ("a", "b"):
        await first.start(sh("sleep 1000", exec_id=name, mode=MODE_STREAM))
    channel = await Channel.connect(chronus.path, on_lost=lambda lost: None)
    assert channel.running == 2
    await channel.list()
    followed = await channel.attach("a")
    assert channel.running == 2
    for name in ("a", "b"):
        await channel.signal(name, signal.SIGKILL)
    await in_time(followed.wait())
    assert channel.running == 1
    await until_ended(channel, "b")
    assert channel.running == 0
    channel.close()


async def until_ended(channel: Channel, exec_id: str) -> None:
    """Until a listing says that a command has ended which the channel doesn't follow."""
    async with asyncio.timeout(DEADLINE_S):
        while any(entry.exec_id == exec_id and entry.running for entry in await channel.list()):
            pass


async def test_a_start_says_whether_its_command_was_there_before(channel: Channel) -> None:
    start = sh("cat", exec_id="once", stdin=STDIN_STREAM)
    first = await channel.start(start, follow=True)
    second = await channel.start(start, follow=True)
    assert (first.attached, second.attached) == (False, True)
    await first.write(b"in")
    await first.write_eof()
    assert (await read_all(first))[0] == (await read_all(second))[0] == b"in"


async def test_only_the_newest_256_ended_commands_are_kept(channel: Channel) -> None:
    for number in range(300):
        await in_time(channel.run(Start(exec_id=f"n{number}", argv=[b"true"])))
    names = [entry.exec_id for entry in await channel.list()]
    assert names == [f"n{number}" for number in range(44, 300)]
    with pytest.raises(ChannelError):
        await channel.attach("n0", stdout_from=0)


IDLE_CGROUPS = 4
"""Empty cgroups that chronus keeps for the next commands."""


async def test_many_commands_leave_nothing_behind(chronus: ChronusProcess, channel: Channel) -> None:
    for _ in range(20):
        await in_time(channel.run(sh("true")))
    before = chronus.descriptors()
    for _ in range(20):
        exits = await asyncio.gather(*(channel.run(sh("echo x", timeout_ms=3_600_000)) for _ in range(16)))
        assert all(exit.stdout == b"x\n" for exit in exits)
    assert chronus.descriptors() == before
    assert channel.running == 0
    await until(lambda: len(chronus.cgroups()) <= IDLE_CGROUPS and not chronus.commands(), "nothing is left but idle cgroups")


async def test_running_out_of_descriptors_is_a_start_error(chronus: ChronusProcess, channel: Channel) -> None:
    used = chronus.descriptors()
    resource.prlimit(chronus.pid, resource.RLIMIT_NOFILE, (used + 4, 4096))
    refused = await in_time(channel.run(sh("true")))
    assert (refused.exit_code, refused.start_errno) == (126, 24)
    resource.prlimit(chronus.pid, resource.RLIMIT_NOFILE, (4096, 4096))
    assert (await in_time(channel.run(sh("true")))).exit_code == 0


async def test_a_request_too_large_for_a_frame_is_refused_here(channel: Channel) -> None:
    with pytest.raises(ChannelError) as error:
        await channel.run(Start(argv=[b"true", b"x" * (5 * MB)]))
    assert error.value.code == "invalid_argument"


async def test_an_idle_chronus_is_small(chronus: ChronusProcess, channel: Channel) -> None:
    await in_time(channel.run(sh("true")))
    assert chronus.rss() < 3 * MB


async def test_a_connection_that_ends_right_behind_its_hello_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(make: Callable[[], Channel], path: str) -> None:
        frame = b"\0\0\0\x16\x94\xce\0\0\0\0\x20\xcf\0\0\0\0\0\0\0\x01\xc6\0\0\0\x01\x80"
        protocol = make()
        protocol.get_buffer(-1)[: len(frame)] = frame
        protocol.buffer_updated(len(frame))
        protocol.connection_lost(None)

    monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", connect)
    lost: list[ChannelLost] = []
    with pytest.raises(ChannelLost, match="closed by the other side"):
        await Channel.connect("/nowhere", on_lost=lost.append)
    assert lost == []


async def test_no_chronus_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ChannelLost):
        await Channel.connect(str(tmp_path / "nothing"), on_lost=lambda lost: None)


async def test_a_dead_chronus_fails_everything_that_is_pending(chronus: ChronusProcess) -> None:
    lost: asyncio.Future[ChannelLost] = asyncio.get_running_loop().create_future()
    channel = await Channel.connect(chronus.path, on_lost=lost.set_result)
    stream = await channel.start(sh("sleep 1000", exec_id="a", mode=MODE_STREAM), follow=True)
    pending = [asyncio.ensure_future(work) for work in (channel.run(sh("sleep 1000", exec_id="b")), stream.read(), stream.wait())]
    await channel.list()
    chronus.process.kill()
    await asyncio.wait_for(lost, DEADLINE_S)
    for outcome in await asyncio.gather(*pending, return_exceptions=True):
        assert isinstance(outcome, ChannelLost)
    assert channel.running == 0


@contextlib.asynccontextmanager
async def unconnected_stream() -> AsyncIterator[Stream]:
    """A stream whose frames come by hand."""
    ours, theirs = socket.socketpair()
    with theirs:
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: Channel(loop, lambda lost: None), sock=ours)
        stream = Stream(channel, 1, "x")
        channel._streams[1] = stream
        try:
            yield stream
        finally:
            channel.close()


async def test_output_that_comes_byte_by_byte_takes_little_more_than_its_bytes() -> None:
    count = 20_000
    async with unconnected_stream() as stream:
        for number in range(count):
            for kind in (34, 35) if number % 3 else (34, 34):
                stream.receive(kind, 0, memoryview(b"%c" % (number % 251)))
        # Nobody has read: 40,000 pieces of one byte would take 5 MB.
        assert len(stream._chunks) < 64
        got: dict[int, bytes] = {1: b"", 2: b""}
        while stream._chunks:
            piece = await stream.read()
            assert piece is not None
            got[piece[0]] += piece[2]
    assert got[1] == b"".join(b"%c" % (number % 251) * (1 if number % 3 else 2) for number in range(count))
    assert got[2] == b"".join(b"%c" % (number % 251) for number in range(count) if number % 3)


async def test_a_reader_that_is_behind_leaves_turns_to_others() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with unconnected_stream() as stream:
        for number in range(256):
            stream.receive(34, number * 4096, memoryview(bytes(4096)))
        counting = asyncio.create_task(count())
        for number in range(256):
            assert await stream.read() == (1, number * 4096, bytes(4096))
        counting.cancel()
    assert turns >= 4
