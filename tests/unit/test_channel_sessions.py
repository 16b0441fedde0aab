"""Shell sessions of a real chronus."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from chronus_process import ENV, ChronusProcess, in_time, running_chronus, until

from dsec.edge.channel import Channel, ChannelError, Exit, Shell


@pytest.fixture
def chronus() -> Iterator[ChronusProcess]:
    with running_chronus() as process:
        yield process


@pytest.fixture
async def channel(chronus: ChronusProcess) -> AsyncIterator[Channel]:
    opened = await Channel.connect(chronus.path, on_lost=lambda lost: None)
    yield opened
    opened.close()


@pytest.fixture(params=["bash", "sh"])
def base_env(request: pytest.FixtureRequest, tmp_path: Path) -> dict[bytes, bytes]:
    """An environment in which sessions find bash, or only sh."""
    if request.param == "bash":
        return ENV
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "cat", "sleep", "seq", "head", "env", "ls", "setsid", "readlink", "yes", "wc", "id"):
        found = shutil.which(name)
        if found is not None:
            (tools / name).symlink_to(found)
    return {b"PATH": os.fsencode(tools)}


class Session:
    """Calls in one session."""

    def __init__(self, channel: Channel, base_env: dict[bytes, bytes]) -> None:
        self.channel = channel
        self.base_env = base_env

    async def __call__(self, command: str | bytes, session: str = "default", **more: object) -> Exit:
        data = command.encode() if isinstance(command, str) else command
        return await in_time(self.channel.shell(Shell(session=session, command=data, base_env=self.base_env, **more)))  # type: ignore[arg-type]


@pytest.fixture
def shell(channel: Channel, base_env: dict[bytes, bytes]) -> Session:
    return Session(channel, base_env)


async def test_directory_variables_and_functions_stay(shell: Session) -> None:
    await shell("cd /tmp; mine='a  b'; export THEIRS=c; greet() { echo \"hello $1\"; }")
    result = await shell('pwd; echo "$mine"; env | cat | while read -r l; do case $l in THEIRS=*) echo $l;; esac; done; greet you')
    assert result.stdout == b"/tmp\na  b\nTHEIRS=c\nhello you\n"
    assert not result.session_restarted


async def test_sessions_do_not_see_each_other(shell: Session) -> None:
    await shell("x=1", session="one")
    assert (await shell("echo ${x-unset}", session="two")).stdout == b"unset\n"


async def test_the_exit_code_is_the_last_command_s(shell: Session) -> None:
    assert (await shell("(exit 3)")).exit_code == 3
    assert (await shell("sh -c 'kill -9 $$'")).exit_code == 137
    assert (await shell("true")).exit_code == 0


async def test_syntax_errors_leave_the_session_alive(shell: Session) -> None:
    await shell("x=kept")
    broken = await shell("if then fi (")
    assert broken.exit_code != 0 and broken.stderr
    unclosed = await shell("echo 'never closed")
    assert unclosed.exit_code != 0
    assert (await shell("echo $x")).stdout == b"kept\n"


async def test_exit_ends_the_session_and_the_next_call_says_so(shell: Session) -> None:
    await shell("x=1")
    ended = await shell("echo bye; exit 4")
    assert (ended.exit_code, ended.stdout, ended.session_restarted) == (4, b"bye\n", False)
    after = await shell("echo ${x-unset}")
    assert (after.stdout, after.session_restarted) == (b"unset\n", True)
    assert not (await shell("true")).session_restarted


async def test_exec_replaces_the_shell_and_ends_the_session_with_it(shell: Session) -> None:
    ended = await shell("exec sh -c 'echo replaced; exit 6'")
    assert (ended.exit_code, ended.stdout) == (6, b"replaced\n")
    assert (await shell("true")).session_restarted


async def test_a_timeout_kills_the_session_with_its_children(chronus: ChronusProcess, shell: Session) -> None:
    timed_out = await shell("sleep 1000 & echo begun; sleep 1000", timeout_ms=300)
    assert (timed_out.timed_out, timed_out.exit_code, timed_out.stdout) == (True, 137, b"begun\n")
    await until(lambda: not chronus.commands(), "its children are dead")
    assert (await shell("echo new")).session_restarted


async def test_a_timeout_counts_the_wait_for_the_session(channel: Channel, shell: Session, tmp_path: Path) -> None:
    running = asyncio.ensure_future(shell(f"while ! [ -e {tmp_path}/go ]; do sleep 0.01; done; x=kept; echo $x"))
    await asyncio.sleep(0)
    waiting = await shell(f": > {tmp_path}/never", timeout_ms=100)
    assert (waiting.timed_out, waiting.exit_code, waiting.stdout) == (True, 137, b"")
    assert not running.done()
    (tmp_path / "go").touch()
    assert (await running).stdout == b"kept\n"
    after = await shell("echo $x", timeout_ms=10_000)
    assert (after.stdout, after.session_restarted) == (b"kept\n", False)
    assert not (tmp_path / "never").exists()


async def test_a_signal_to_a_call_that_waits_is_its_own(channel: Channel, shell: Session, tmp_path: Path) -> None:
    running = asyncio.ensure_future(shell(f"while ! [ -e {tmp_path}/go ]; do sleep 0.01; done; x=kept; echo $x", exec_id="running"))
    waiting = {name: asyncio.ensure_future(shell(f"echo {name} $x", exec_id=name)) for name in ("told", "killed", "spared")}
    await asyncio.sleep(0)
    await channel.signal("told", signal.SIGTERM)
    await channel.signal("killed", signal.SIGKILL, tree=True)
    await channel.signal("spared", signal.SIGCONT)
    for name, number in (("told", signal.SIGTERM), ("killed", signal.SIGKILL)):
        ended = await in_time(waiting[name])
        assert (ended.signal, ended.stdout, ended.timed_out) == (number, b"", False)
    assert not running.done()
    (tmp_path / "go").touch()
    assert (await running).stdout == b"kept\n"
    assert (await waiting["spared"]).stdout == b"spared kept\n"
    assert not (await shell("echo on")).session_restarted


async def test_a_shell_that_executes_nothing_any_more_is_replaced_after_a_timeout(shell: Session) -> None:
    # The shell doesn't even tell the exit code of this call: the later ones queue behind it.
    stuck, waiting = await asyncio.gather(shell("set -o noexec", timeout_ms=300), shell("echo never", timeout_ms=100))
    assert (stuck.timed_out, waiting.timed_out) == (True, True)
    after = await shell("echo back")
    assert (after.stdout, after.session_restarted) == (b"back\n", True)


async def test_a_call_that_was_cancelled_before_its_turn_is_not_carried_out(channel: Channel, shell: Session, tmp_path: Path) -> None:
    running = asyncio.ensure_future(shell(f"while ! [ -e {tmp_path}/go ]; do sleep 0.01; done"))
    cancelled = [asyncio.ensure_future(shell(f": > {tmp_path}/never", exec_id=name)) for name in ("", "named")]
    await asyncio.sleep(0)
    await channel.list()
    for call in cancelled:
        call.cancel()
    await asyncio.wait(cancelled)
    assert "named" not in [entry.exec_id for entry in await channel.list()]
    again = asyncio.ensure_future(shell("echo again", exec_id="named"))
    (tmp_path / "go").touch()
    assert [(await call).stdout for call in (running, again)] == [b"", b"again\n"]
    assert not (tmp_path / "never").exists()


async def test_calls_queue_first_come_first_served(shell: Session) -> None:
    results = await asyncio.gather(*(shell(f"n=$((${{n-0}} + 1)); echo {number} $n") for number in range(8)))
    assert [result.stdout for result in results] == [b"%d %d\n" % (number, number + 1) for number in range(8)]


async def test_cwd_env_and_user_count_only_when_the_session_opens(shell: Session) -> None:
    opened = await shell("pwd; echo $GIVEN", cwd=b"/tmp", env={b"GIVEN": b"yes"})
    assert opened.stdout == b"/tmp\nyes\n"
    for more in ({"cwd": b"/"}, {"env": {b"A": b"b"}}, {"user": "root"}):
        with pytest.raises(ChannelError) as error:
            await shell("true", **more)
        assert error.value.code == "invalid_argument"


async def test_a_session_that_can_not_be_opened_says_why(shell: Session) -> None:
    refused = await shell("true", cwd=b"/no/such/place")
    assert (refused.exit_code, refused.start_error) == (126, "chdir /no/such/place: No such file or directory")
    assert (await shell("echo fine")).stdout == b"fine\n"


async def test_without_any_shell_the_result_says_so(channel: Channel) -> None:
    refused = await in_time(channel.shell(Shell(session="s", command=b"true", base_env={b"PATH": b"/nowhere"})))
    assert (refused.exit_code, refused.start_error) == (127, "exec sh: No such file or directory")


async def test_output_can_not_forge_an_exit_code(shell: Session) -> None:
    result = await shell("printf '0123456789abcdef0123456789abcdef 0\\n' >&2; echo \"$$ 0\"; (echo x 0 >&9) 2>/dev/null; (exit 5)")
    assert result.exit_code == 5


async def test_children_get_neither_control_nor_status(shell: Session) -> None:
    result = await shell("ls /proc/self/fd | wc -l; readlink /proc/self/fd/0; cat")
    # Its three, and the directory that ls reads.
    assert result.stdout.split() == [b"4", b"/dev/null"]


async def test_background_children_live_until_the_session_closes(chronus: ChronusProcess, channel: Channel, shell: Session) -> None:
    await shell("sleep 1000 & setsid sleep 1000 &")
    assert (await shell("echo on")).stdout == b"on\n"
    await until(lambda: len(chronus.commands()) >= 3, "both run")
    await channel.close_session("default")
    if chronus.cgroup:
        await until(lambda: not chronus.commands() and not chronus.cgroups(), "all are dead and the cgroup is gone")
    assert not (await shell("echo again")).session_restarted
    await channel.close_session("never opened")


async def test_closing_ends_the_call_that_runs_and_those_that_wait(channel: Channel, shell: Session) -> None:
    running, waiting = (asyncio.ensure_future(shell(command)) for command in ("sleep 1000", "echo never"))
    await asyncio.sleep(0)
    await channel.list()
    await channel.close_session("default")
    assert [(await call).exit_code for call in (running, waiting)] == [137, 137]


async def test_output_between_calls_belongs_to_the_next(shell: Session, tmp_path: Path) -> None:
    await shell(f"(while ! [ -e {tmp_path}/go ]; do sleep 0.01; done; echo late; : > {tmp_path}/done) &")
    (tmp_path / "go").touch()
    await until((tmp_path / "done").exists, "the background child has written")
    result = await shell("echo now")
    assert result.stdout == b"late\nnow\n"


async def test_noisy_background_children_do_not_drown_the_next_call(shell: Session, tmp_path: Path) -> None:
    first = await shell(f"(yes | head -c 5000000; : > {tmp_path}/done) &")
    await until((tmp_path / "done").exists, "the background child has written")
    result = await shell("echo mine")
    assert result.stdout.endswith(b"\nmine\n") and result.truncated
    # What it had written before the first call ended is that one's.
    assert first.stdout_total + result.stdout_total == 5_000_005


async def test_output_beyond_the_limit_is_counted_and_dropped(shell: Session) -> None:
    result = await shell("seq 1 1000000; echo end >&2", max_output=10)
    assert (result.stdout, result.stdout_total, result.truncated, result.stderr) == (b"1\n2\n3\n4\n5\n", 6_888_896, True, b"end\n")
    assert (await shell("echo whole")).stdout == b"whole\n"


async def test_a_command_of_a_megabyte_works(shell: Session) -> None:
    text = "x'y" * 300_000
    quoted = text.replace("'", "'\\''")
    result = await shell(f"v='{quoted}'; echo ${{#v}}")
    assert result.stdout == b"900000\n"


async def test_bytes_that_are_no_text_pass(shell: Session) -> None:
    assert (await shell(b"printf %s '\xff\xfe\n\t'")).stdout == b"\xff\xfe\n\t"
    with pytest.raises(ChannelError):
        await shell(b"echo \0")


async def test_options_that_trace_do_not_show_the_status_line(shell: Session) -> None:
    await shell("set -x")
    result = await shell("echo traced")
    assert result.stdout == b"traced\n"
    assert b"printf" not in result.stderr


async def test_errexit_ends_the_session_as_it_ends_a_script(shell: Session) -> None:
    await shell("set -e")
    result = await shell("false; echo not reached")
    assert (result.exit_code, result.stdout) == (1, b"")
    assert (await shell("echo back")).session_restarted


async def test_a_killed_shell_is_reported_and_replaced(shell: Session) -> None:
    killed = await shell("kill -9 $$")
    assert (killed.exit_code, killed.signal) == (137, signal.SIGKILL)
    assert (await shell("echo back")).session_restarted


async def test_a_known_exec_id_attaches_to_the_call(shell: Session) -> None:
    first = await shell("n=$((${n-0} + 1)); echo $n", exec_id="call")
    second = await shell("n=$((${n-0} + 1)); echo $n", exec_id="call")
    assert first.stdout == second.stdout == b"1\n"


async def test_a_session_survives_the_loss_of_the_connection(chronus: ChronusProcess, channel: Channel, shell: Session) -> None:
    await shell("x=kept")
    again = await Channel.connect(chronus.path, on_lost=lambda lost: None)
    result = await in_time(again.shell(Shell(session="default", command=b"echo $x")))
    assert (result.stdout, result.session_restarted) == (b"kept\n", False)
    again.close()


async def test_many_calls_leave_no_descriptor_behind(chronus: ChronusProcess, shell: Session) -> None:
    await shell("true")
    before = chronus.descriptors()
    for _ in range(5):
        await asyncio.gather(*(shell("echo x | cat") for _ in range(10)))
        await shell("exit 0")
    await shell("true")
    assert chronus.descriptors() == before
