"""Commands, sessions, terminals and streams in a real sandbox."""

from __future__ import annotations

import asyncio

import pytest

from libdsec import CommandFailed, DSecClient, InvalidArgument, ProcessNotFound, PtySize, Sandbox
from libdsec.schema import MAX_ARG_BYTES


async def test_argv_and_shell_strings_give_exit_code_and_streams_apart(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert (await sandbox.exec("echo $((6 * 7))")).stdout == "42\n"


async def test_cwd_env_and_user_reach_the_command(sandbox: Sandbox) -> None:
    result = await sandbox.exec("pwd; echo $COLOR; id -u; id -g", cwd="/tmp", env={"COLOR": "blå"}, user="nobody")
    assert result.stdout == "/tmp\nblå\n65534\n65534\n"
    assert (await sandbox.exec("id -u; id -g", user="1234:77")).stdout == "1234\n77\n"


async def test_bytes_pass_unchanged_both_ways(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 4096
    result = await sandbox.exec(["cat"], stdin=data)
    assert result.stdout_bytes == data


async def test_large_standard_input_is_streamed(sandbox: Sandbox) -> None:
    async def chunks():
        for number in range(64):
            yield bytes([number]) * 100_000

    result = await sandbox.exec(["wc", "-c"], stdin=chunks())
    assert result.stdout.split() == ["6400000"]


async def test_a_program_that_is_missing_or_not_executable_says_so(sandbox: Sandbox) -> None:
    missing = await sandbox.exec(["/bin/nope"])
    assert missing.exit_code == 127 and "nope" in (missing.start_error or "")
    refused = await sandbox.exec(["/etc/passwd"])
    assert refused.exit_code == 126 and refused.start_error


async def test_check_raises_with_the_whole_result(sandbox: Sandbox) -> None:
    with pytest.raises(CommandFailed) as failed:
        await sandbox.exec("echo why >&2; exit 9", check=True)
    assert failed.value.result.exit_code == 9 and failed.value.result.stderr == "why\n"


async def test_timeout_kills_grandchildren_that_hold_stdout(sandbox: Sandbox) -> None:
    result = await sandbox.exec("(setsid sleep 1000 &) ; sleep 1000 & echo started; wait", timeout=0.5)
    assert result.timed_out and result.stdout == "started\n"
    assert (await sandbox.exec(["pgrep", "-x", "sleep"])).exit_code == 1


async def test_leftovers_are_killed_or_kept_as_asked(sandbox: Sandbox) -> None:
    await sandbox.exec("sleep 1001 >/dev/null 2>&1 &")
    assert (await sandbox.exec(["pgrep", "-xf", "sleep 1001"])).exit_code == 1
    await sandbox.exec("sleep 1002 >/dev/null 2>&1 &", leftovers="keep")
    assert (await sandbox.exec(["pgrep", "-xf", "sleep 1002"])).exit_code == 0


async def test_output_beyond_the_bound_is_counted_not_kept(sandbox: Sandbox) -> None:
    result = await sandbox.exec("head -c 3000000 /dev/zero", max_output=1_000_000)
    assert result.truncated and len(result.stdout_bytes) == 1_000_000 and result.stdout_total == 3_000_000


async def test_output_that_splits_a_character_arrives_whole(sandbox: Sandbox) -> None:
    script = "import os,time\nfor b in 'å€😀'.encode():\n os.write(1, bytes([b])); time.sleep(0.01)"
    assert (await sandbox.exec(["python3", "-c", script])).stdout == "å€😀"


async def test_memory_limit_kills_the_hog_and_says_so(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["python3", "-c", "x = bytearray(900 << 20); print(len(x))"])
    assert result.exit_code == 137 and result.oom_killed
    assert (await sandbox.exec(["true"])).exit_code == 0


async def test_a_reader_that_stops_blocks_the_writer_and_loses_nothing(sandbox: Sandbox) -> None:
    process = await sandbox.start("i=0; while [ $i -lt 400000 ]; do echo $i; i=$((i+1)); done")
    first = await anext(aiter(process.stdout))
    data = bytearray(first)
    async for chunk in process.stdout(from_offset=len(first)):
        data += chunk
    assert bytes(data) == b"".join(b"%d\n" % number for number in range(400_000))
    assert (await process.wait()).exit_code == 0


async def test_another_client_finds_a_background_command(sandbox: Sandbox, client: DSecClient) -> None:
    process = await sandbox.start("echo hello; cat; echo bye", stdin=True)
    async with DSecClient(client.url, client.api_key) as other:
        again = await (await other.attach(sandbox.id)).process(process.exec_id)
        await again.write_stdin(b"between\n")
        await again.close_stdin()
        assert b"".join([chunk async for chunk in again.stdout]) == b"hello\nbetween\nbye\n"
        assert (await again.wait()).exit_code == 0


async def test_an_unknown_process_is_not_found(sandbox: Sandbox) -> None:
    with pytest.raises(ProcessNotFound):
        await sandbox.process("ex-nothing")


async def test_signals_reach_the_command(sandbox: Sandbox) -> None:
    process = await sandbox.start("trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.05; done")
    stream = aiter(process.stdout)
    assert await anext(stream) == b"ready\n"
    await process.signal("TERM")
    assert (await process.wait()).exit_code == 5


async def test_a_session_keeps_directory_variables_and_functions(sandbox: Sandbox) -> None:
    await sandbox.run_shell("cd /usr; x=5; f() { echo f$1; }")
    result = await sandbox.run_shell("pwd; echo $x; f 7")
    assert result.stdout == "/usr\n5\nf7\n"
    assert (await sandbox.run_shell("echo ${x:-none}", session="other")).stdout == "none\n"


async def test_exit_ends_a_session_and_the_next_call_says_so(sandbox: Sandbox) -> None:
    await sandbox.run_shell("x=1")
    assert (await sandbox.run_shell("exit 4")).exit_code == 4
    again = await sandbox.run_shell("echo ${x:-gone}")
    assert again.session_restarted and again.stdout == "gone\n"


async def test_output_cannot_forge_an_exit_code(sandbox: Sandbox) -> None:
    result = await sandbox.run_shell('for fd in 3 4 5 6 7 8 9; do sh -c "echo 0 >&$fd" 2>/dev/null; done; (exit 6)')
    assert result.exit_code == 6


async def test_directory_of_an_open_session_cannot_be_given(sandbox: Sandbox) -> None:
    await sandbox.run_shell("true", session="s", cwd="/tmp")
    with pytest.raises(InvalidArgument):
        await sandbox.run_shell("true", session="s", cwd="/")


async def test_a_terminal_has_a_size_and_takes_a_new_one(sandbox: Sandbox) -> None:
    process = await sandbox.start(["sh", "-c", "stty size; read line; stty size"], pty=PtySize(30, 100))
    output = aiter(process.stdout)
    assert b"30 100" in await anext(output)
    await process.resize(40, 120)
    await process.write_stdin(b"\n")
    rest = b"".join([chunk async for chunk in output])
    assert b"40 120" in rest


async def test_two_hundred_commands_at_once_each_get_their_own_output(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sandbox.exec(["echo", str(number)]) for number in range(200)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(200)]


async def test_a_command_after_a_killed_one_lives(sandbox: Sandbox) -> None:
    for _ in range(6):
        assert (await sandbox.exec("sleep 1000", timeout=0.05)).timed_out
        assert (await sandbox.exec(["echo", "alive"])).stdout == "alive\n"


async def test_what_one_string_may_hold_works_and_more_is_refused_by_name(sandbox: Sandbox) -> None:
    longest = "x" * (MAX_ARG_BYTES - 1)
    assert (await sandbox.exec(["sh", "-c", "echo ${#1}", "sh", longest])).stdout == f"{len(longest)}\n"
    assert (await sandbox.exec("echo ${#B}", env={"B": longest[2:]})).stdout == f"{len(longest) - 2}\n"
    for named in ({"command": ["echo", longest + "x"]}, {"command": longest + "x"}, {"command": "true", "env": {"B": longest[1:]}}):
        with pytest.raises(InvalidArgument) as refused:
            await sandbox.exec(**named)
        assert refused.value.field == ("env" if "env" in named else "argv" if isinstance(named["command"], list) else "command")
    assert (await sandbox.run_shell(f": {longest}{longest}; echo ran")).stdout == "ran\n"
