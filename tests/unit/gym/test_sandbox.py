"""A sandbox: real folders, shells and processes."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import uvloop

from gym_gunicorn.gym.sandbox import Result, Sandbox
from gym_gunicorn.gym.sandbox_keeper import descendants
from gym_gunicorn.gym.sandbox_shell import SandboxError
from tests.gunicorn_server import is_alive, until

T = TypeVar("T")
Files = dict[str, str]

# Ways to get out of a shell's sight.
DAEMONS = [
    "setsid sleep 1000 >/dev/null & echo $!",
    "nohup sleep 1000 >/dev/null 2>&1 & echo $!",
    "(setsid sleep 1000 >/dev/null & echo $!)",
    "bash -c '(trap \"\" HUP INT TERM; setsid sleep 1000 >/dev/null & echo $!)'",
]


@asynccontextmanager
async def sandbox(root: Path, files: Files | None = None) -> AsyncIterator[Sandbox]:
    made = await Sandbox.create(root, files or {})
    try:
        yield made
    finally:
        await made.close()
        assert not made.folder.exists()


def play(root: Path, scene: Callable[[Sandbox], Awaitable[T]], files: Files | None = None) -> T:
    """Play a scene in a sandbox, which is gone at its end."""

    async def main() -> T:
        async with sandbox(root, files) as made:
            return await scene(made)

    return asyncio.run(main())


def run(root: Path, *commands: str, time_limit: float = 60.0, files: Files | None = None) -> list[Result]:
    """Run commands in a sandbox, and return their results."""

    async def scene(made: Sandbox) -> list[Result]:
        return [await made.run(command, time_limit) for command in commands]

    return play(root, scene, files)


def words(result: Result) -> str:
    """Return what a result says beside the command's own output."""
    return "\n".join(line for line in result.output.splitlines() if line.startswith("["))


# Commands


def test_files_are_in_the_folder_where_the_shell_begins(tmp_path: Path) -> None:
    files = {"a.txt": "first\r\n", "deep/er/b.txt": "zweite ä"}
    (result,) = run(tmp_path, "pwd; cat a.txt deep/er/b.txt", files=files)
    folder, text = result.output.split("\n", 1)
    assert Path(folder).parent == tmp_path and Path(folder).name.startswith("gym-sandbox-")
    assert text == "first\r\nzweite ä"


def test_the_folder_is_nobody_elses(tmp_path: Path) -> None:
    async def scene(made: Sandbox) -> int:
        return stat.S_IMODE(made.folder.stat().st_mode)

    assert play(tmp_path, scene) == 0o700


def test_folder_variables_functions_and_options_stay_for_the_next_command(tmp_path: Path) -> None:
    setting = "mkdir d; cd d; x=1; declare -A m=([k]=2); f() { echo f$x; }; shopt -s nullglob; set -- 7 8"
    _, result = run(tmp_path, setting, 'basename "$PWD"; echo $x ${m[k]} $2 *.none; f')
    assert result.output == "d\n1 2 8\nf1\n"


def test_a_result_has_the_exit_code_and_both_outputs_in_order(tmp_path: Path) -> None:
    (result,) = run(tmp_path, "echo 1; echo 2 >&2; echo 3 >/dev/stderr; echo 4; (exit 7)")
    assert result == Result(output="1\n2\n3\n4\n", exit_code=7, timed_out=False, truncated=False)


@pytest.mark.parametrize(
    "command",
    [
        "echo \"it's\" '!!' $'a\\tb' `echo c` \\\\",
        "cat <<X\nvon Hand\nX",
        "# nothing",
        "",
        "echo 'two\n\nlines'",
        "printf ä",
    ],
)
def test_a_command_means_what_it_means_to_bash(tmp_path: Path, command: str) -> None:
    (tmp_path / "script").write_text(command)
    expected, result = run(tmp_path, f"bash {tmp_path}/script", command)
    assert result == expected
    assert result.exit_code == 0


def test_commands_have_an_empty_standard_input(tmp_path: Path) -> None:
    (result, after) = run(tmp_path, "cat; read line; echo $? $line; readlink /proc/self/fd/0", "echo on")
    assert result.output == "1\n/dev/null\n"
    assert after.output == "on\n"


def test_a_command_longer_than_a_pipe_holds_is_run(tmp_path: Path) -> None:
    (result,) = run(tmp_path, f"echo {'x' * 300_000} | wc -c")
    assert result.output == "300001\n"


def test_commands_see_a_small_clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SESSION_SECRET", "not for them")
    (result,) = run(tmp_path, "env; tr '\\0' '\\n' </proc/$PPID/environ")
    assert "not for them" not in result.output
    names = {line.partition("=")[0] for line in result.output.splitlines()}
    assert names == {"PATH", "HOME", "LANG", "PWD", "SHLVL", "_"}


def test_commands_and_keeper_hold_no_descriptors_of_the_server(tmp_path: Path) -> None:
    with (tmp_path / "held").open("w") as held:
        os.set_inheritable(held.fileno(), True)
        command = "for fd in /proc/self/fd/* /proc/$PPID/fd/*; do readlink $fd; done; ls /proc/$PPID/fd | wc -l"
        (result,) = run(tmp_path, command)
    assert "held" not in result.output
    # Standard input and outputs, two ends of a wake-up pipe, and the way to tell of the shell's end.
    assert result.output.splitlines()[-1] == "6"


def test_commands_have_default_signals(tmp_path: Path) -> None:
    (result,) = run(tmp_path, "grep -E 'Sig(Ign|Blk)' /proc/self/status")
    masks = dict(line.split(":") for line in result.output.splitlines())
    # Signals 32 and 33 are the C library's own.
    own = 1 << 31 | 1 << 32
    assert {name: int(mask, 16) & ~own for name, mask in masks.items()} == {"SigBlk": 0, "SigIgn": 0}


def test_output_beyond_the_limit_is_dropped_and_the_command_ends(tmp_path: Path) -> None:
    big, small = run(tmp_path, "head -c 3000000 /dev/zero | tr '\\0' x; echo end >&2; exit_code=0", "echo small")
    assert big == Result(output="x" * Sandbox.output_limit, exit_code=0, timed_out=False, truncated=True)
    assert small == Result(output="small\n", exit_code=0, timed_out=False, truncated=False)


def test_output_of_just_the_limit_is_whole(tmp_path: Path) -> None:
    (result,) = run(tmp_path, f"head -c {Sandbox.output_limit} /dev/zero | tr '\\0' x")
    assert (len(result.output), result.truncated) == (Sandbox.output_limit, False)


def test_output_that_is_no_text_is_returned_all_the_same(tmp_path: Path) -> None:
    (result,) = run(tmp_path, r"printf '\xff\x00a'")
    assert result.output == "\ufffd\0a"


def test_a_background_job_goes_on_and_is_heard_later(tmp_path: Path) -> None:
    # The job waits in opening the pipe, until the second command opens it as well.
    first, second = run(tmp_path, "mkfifo p; { cat p; echo job; } & echo started", "echo told >p; wait; echo on")
    assert first == Result(output="started\n", exit_code=0, timed_out=False, truncated=False)
    assert second.output == "told\njob\non\n"


def test_concurrent_commands_run_one_after_another(tmp_path: Path) -> None:
    async def scene(made: Sandbox) -> list[Result]:
        commands = ["n=$((n + 1)); echo in $n; sleep 0.01; echo out $n"] * 10
        return await asyncio.gather(*(made.run(command, 60) for command in commands))

    assert [result.output for result in play(tmp_path, scene)] == [f"in {n}\nout {n}\n" for n in range(1, 11)]


# Commands that are ended


@pytest.mark.parametrize(
    "command",
    [
        "sleep 1000; echo late",
        "while :; do :; done; echo late",
        "while :; do sleep 0.001; done; echo late",
        "for i in $(seq 1000); do sleep 1000; done; echo late",
        "(sleep 1000; echo late) | cat; echo late",
        "y=$(sleep 1000; echo late); echo late",
        "bash -c 'sleep 1000; echo late'; echo late",
        "read <> <(sleep 1000); echo late",
        "python3 -c 'while True: pass'; echo late",
        "sleep 1000 & wait; echo late",
    ],
)
def test_at_its_time_limit_a_command_is_ended_and_the_shell_goes_on(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sandbox, "ending_time", 60.0)

    async def scene(made: Sandbox) -> tuple[Result, Result]:
        await made.run("mkdir d; cd d; x=5", 60)
        return await made.run(f"echo early; {command}", 2.0), await made.run('echo $x "${PWD##*/}"', 60)

    ended, after = play(tmp_path, scene)
    assert (ended.exit_code, ended.timed_out, words(ended)) == (None, True, "[ended after 2 s]")
    assert "early" in ended.output and "late" not in ended.output
    assert after == Result(output="5 d\n", exit_code=0, timed_out=False, truncated=False)


@pytest.mark.parametrize("daemon", DAEMONS)
def test_at_its_time_limit_all_that_a_command_started_is_killed(tmp_path: Path, daemon: str) -> None:
    async def scene(made: Sandbox) -> None:
        result = await made.run(f"{daemon}; sleep 1000", 3.0)
        assert result.timed_out
        assert not is_alive(int(result.output.split()[0]))

    play(tmp_path, scene)


def test_at_its_time_limit_what_ignores_signals_is_killed(tmp_path: Path) -> None:
    async def scene(made: Sandbox) -> None:
        result = await made.run("bash -c 'trap \"\" INT TERM HUP; echo $$; while :; do sleep 1000; done'", 3.0)
        assert result.timed_out
        assert not is_alive(int(result.output.split()[0]))

    play(tmp_path, scene)


@pytest.mark.parametrize("daemon", DAEMONS)
def test_at_a_time_limit_what_earlier_commands_started_lives_on(tmp_path: Path, daemon: str) -> None:
    async def scene(made: Sandbox) -> None:
        pid = int((await made.run(daemon, 60)).output)
        assert (await made.run("sleep 1000", 0.2)).timed_out
        assert is_alive(pid)

    play(tmp_path, scene)


def test_a_shell_that_can_not_go_on_is_replaced_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "ending_time", 0.5)

    async def scene(made: Sandbox) -> tuple[Result, Result]:
        ended = await made.run("x=5; trap '' INT; while :; do :; done", 3.0)
        return ended, await made.run("echo a$x; pwd", 60)

    ended, after = play(tmp_path, scene)
    assert (ended.exit_code, ended.timed_out) == (None, True)
    assert "a new shell begins" in words(ended)
    assert after.output.startswith(f"a\n{tmp_path}/gym-sandbox-")


@pytest.mark.parametrize(
    ("command", "exit_code", "said"),
    [
        ("echo bye; exit 3", 3, "exit status 3"),
        ("exec sh -c 'echo bye; exit 4'", 4, "exit status 4"),
        ("echo bye; kill -9 $$", None, "SIGKILL"),
        ("echo bye; set -e; (exit 5)", 5, "exit status 5"),
    ],
)
def test_a_command_that_ends_the_shell_is_answered_in_words(
    tmp_path: Path, command: str, exit_code: int | None, said: str
) -> None:
    ended, after = run(tmp_path, command, "echo on; pwd")
    assert (ended.exit_code, ended.timed_out) == (exit_code, False)
    assert ended.output.startswith("bye\n")
    assert said in words(ended) and "a new shell begins" in words(ended)
    assert after.output.startswith(f"on\n{tmp_path}/gym-sandbox-") and not words(after)


@pytest.mark.parametrize("command", ["if then", "echo 'open", ")", "echo $(", 'x="', "fi; }"])
def test_broken_syntax_is_answered_in_words_and_the_shell_goes_on(tmp_path: Path, command: str) -> None:
    _, broken, after = run(tmp_path, "x=5", command, "echo $x")
    assert broken.exit_code != 0 and not broken.timed_out
    assert "syntax error" in broken.output or "unexpected" in broken.output
    assert after.output == "5\n"


def test_the_folder_comes_back_for_a_new_shell_when_a_command_removed_it(tmp_path: Path) -> None:
    _, after = run(tmp_path, "rm -rf ~; exit", "pwd; ls -A")
    assert after.output.count("\n") == 1


def test_a_call_that_is_given_up_ends_its_command(tmp_path: Path) -> None:
    def sleeping() -> bool:
        return any("sleep" in Path(f"/proc/{pid}/comm").read_text() for pid in descendants(os.getpid()))

    async def scene(made: Sandbox) -> None:
        await made.run("x=5", 60)
        call = asyncio.create_task(made.run("sleep 1000; touch late", 60))
        await asyncio.to_thread(until, sleeping, "the command has begun")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not sleeping()
        # A line feed for each SIGINT.
        assert (await made.run("echo $x; ls", 60)).output.lstrip("\n") == "5\n"

    play(tmp_path, scene)


# The check


def test_a_check_runs_in_a_fresh_shell_in_the_folder(tmp_path: Path) -> None:
    async def scene(made: Sandbox) -> Result:
        await made.run("cd /; x=5; test() { true; }; bash() { true; }; echo seen >~/f; alias echo=true; PATH=/none", 60)
        return await made.check('cat f; echo "x=$x"; test 1 = 2', 60)

    assert play(tmp_path, scene) == Result(output="seen\nx=\n", exit_code=1, timed_out=False, truncated=False)


def test_what_commands_left_running_is_there_for_the_check(tmp_path: Path) -> None:
    async def scene(made: Sandbox) -> Result:
        await made.run("sleep 1000 & echo $! >pid", 60)
        return await made.check("kill -0 $(cat pid)", 60)

    assert play(tmp_path, scene).exit_code == 0


@pytest.mark.parametrize(("check", "exit_code"), [("exit 0", 0), ("false", 1), ("exit 3", 3), ("if then", 2)])
def test_a_check_has_an_exit_code(tmp_path: Path, check: str, exit_code: int) -> None:
    async def scene(made: Sandbox) -> Result:
        return await made.check(check, 60)

    result = play(tmp_path, scene)
    assert (result.exit_code, words(result)) == (exit_code, "")


def test_a_check_has_a_time_limit(tmp_path: Path) -> None:
    async def scene(made: Sandbox) -> Result:
        return await made.check("sleep 1000", 0.5)

    result = play(tmp_path, scene)
    assert (result.exit_code, result.timed_out) == (None, True)


# The end


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_after_close_no_process_and_no_folder_is_left(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> set[int]:
        async with sandbox(tmp_path, {"a/b": "c"}) as made:
            for daemon in DAEMONS:
                await made.run(daemon, 60)
            before = {*descendants(os.getpid())}
            assert len(before) >= 2 + len(DAEMONS)
        return before

    with asyncio.Runner(loop_factory=loop) as runner:
        before = runner.run(main())
    assert [pid for pid in before if is_alive(pid)] == []
    assert list(tmp_path.iterdir()) == []


def test_close_ends_a_command_that_runs(tmp_path: Path) -> None:
    async def scene(made: Sandbox) -> None:
        call = asyncio.create_task(made.run("touch begun; sleep 1000", 60))
        await asyncio.to_thread(until, (made.folder / "begun").exists, "the command has begun")
        await made.close()
        with pytest.raises(SandboxError, match="closed"):
            await call

    play(tmp_path, scene)


def test_a_closed_sandbox_runs_nothing_and_can_be_closed_again(tmp_path: Path) -> None:
    async def scene(made: Sandbox) -> None:
        await made.close()
        with pytest.raises(SandboxError, match="closed"):
            await made.run("true", 60)
        with pytest.raises(SandboxError, match="closed"):
            await made.check("true", 60)

    play(tmp_path, scene)


def test_a_folder_that_forbids_to_be_entered_is_removed(tmp_path: Path) -> None:
    run(tmp_path, "mkdir -p a/b/c; touch a/b/c/d; chmod 0 a/b/c a/b a .")
    assert list(tmp_path.iterdir()) == []


def test_what_a_folder_links_to_is_left_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch(0o400)
    outside.chmod(0o500)
    run(tmp_path, f"ln -s {outside} a; ln {outside}/file b; mkdir c; chmod 0 c .")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (outside, outside / "file")] == [0o500, 0o400]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_keeper_keeps_on_when_told_to_stop(tmp_path: Path, signum: signal.Signals) -> None:
    _, result = run(tmp_path, f"kill -{signum.name} $PPID; x=5", "echo $x")
    assert result.output == "5\n"


def test_a_sandbox_whose_keeper_was_killed_says_so_and_its_folder_goes(tmp_path: Path) -> None:
    async def scene(made: Sandbox) -> None:
        with pytest.raises(SandboxError, match="closed"):
            await made.run("kill -9 $PPID", 60)
            while True:
                await made.run("true", 60)

    play(tmp_path, scene)


def test_nothing_is_left_of_the_sandbox_of_a_killed_process(tmp_path: Path) -> None:
    script = f"""
import asyncio, os
from gym_gunicorn.gym.sandbox import Sandbox

async def main():
    made = await Sandbox.create({str(tmp_path)!r}, {{}})
    print((await made.run({"; ".join(DAEMONS)!r}, 60)).output, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""
    killed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE)
    pids = [int(pid) for pid in killed.stdout.split()]
    assert len(pids) == len(DAEMONS)
    until(lambda: not any(map(is_alive, pids)) and not list(tmp_path.iterdir()), "processes and folder are gone")


# What can't be


@pytest.mark.parametrize("path", ["", ".", "/etc/passwd", "../a", "a/../../b", "a\0b", "a/" + "x" * 256])
def test_a_path_that_is_none_in_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="no path of a file"):
        run(tmp_path, "true", files={path: ""})
    assert list(tmp_path.iterdir()) == []


def test_files_that_can_not_be_written_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="a"):
        run(tmp_path, "true", files={"a": "", "a/b": ""})
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SandboxError):
        run(tmp_path / "none", "true")
