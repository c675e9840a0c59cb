"""Guards one sandbox, so that nothing of it outlives its worker: ``python -I -S sandbox_keeper.py FOLDER``.

It makes FOLDER, and as a child subreaper (prctl(2)) it stays the ancestor of all that is
started there, daemons included. Each message on the Unix socket that is its standard
input brings a socket and a pipe, for a bash to read from and write to in the place of
the one before. At the socket's end, which comes from a killed worker too, it kills all
its descendants, removes FOLDER and ends. It needs Linux, with /proc/*/task/*/children.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from select import select
from subprocess import DEVNULL, Popen, run

# Interactive, for such a bash goes on after SIGINT.
BASH = ("bash", "--norc", "--noprofile", "--noediting", "-i", "+H", "+o", "history")
PR_SET_CHILD_SUBREAPER = 36


def descendants(pid: int, without: Collection[int] = ()) -> Iterator[int]:
    """Yield the pids of all processes below one, but for those ``without`` and what is below these."""
    parents = [pid]
    while parents:
        parent = parents.pop()
        with suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    children = [child for child in map(int, file.read().split()) if child not in without]
                parents += children
                yield from children


def send(signum: signal.Signals, pid: int) -> None:
    """Send a signal to a process, unless that has ended or is another user's."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def keep(control: socket.socket, woken: int, folder: str) -> None:
    """Run a bash in ``folder`` until ``control`` ends; ``woken`` can be read whenever a child may have ended."""
    bash, commands = None, -1
    while True:
        ready, _, _ = select([control.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            for pid, status in reap():
                if bash and pid == bash.pid:
                    bash = None
                    with suppress(OSError):  # nobody reads it any more
                        os.write(commands, b"ended %d\n" % os.waitstatus_to_exitcode(status))
        if control.fileno() in ready:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 2, socket.MSG_CMSG_CLOEXEC)
            if not descriptors:
                return
            if bash:
                send(signal.SIGKILL, bash.pid)
            if commands >= 0:
                os.close(commands)
            commands, output = descriptors
            os.makedirs(folder, exist_ok=True)  # a command may have removed it
            bash = Popen(BASH, stdin=commands, stdout=output, stderr=DEVNULL, cwd=folder)
            os.close(output)


def reap() -> Iterator[tuple[int, int]]:
    """Yield pid and wait status of each child that has ended."""
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            yield child


def main(folder: str) -> None:
    """Guard the sandbox in ``folder`` until the standard input ends."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, lambda signum, frame: None)  # not SIG_IGN, which bash would inherit
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    os.mkdir(folder, 0o700)
    control = socket.socket(fileno=0)  # open to the end, which tells the worker that all is gone
    try:
        keep(control, woken, folder)
    finally:
        while pids := list(descendants(os.getpid())):
            for pid in pids:
                send(signal.SIGKILL, pid)
            time.sleep(0.005)
            list(reap())
        remove = ["rm", "-rf", folder]
        if run(remove, stderr=DEVNULL).returncode != 0:  # it can't enter what a command has closed with chmod
            run(["find", folder, "-type", "d", "-exec", "chmod", "u+rwx", "{}", ";"])
            run(remove)


if __name__ == "__main__":
    main(sys.argv[1])
