"""Child processes that do one task after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def work_off(tasks: Iterable[str], command: Sequence[str], most: int) -> None:
    """Run tasks in child processes until each is done, or was given up because a process died of it.

    A process reads tasks from its standard input, a line each, answers each with a line, and ends with its input. A
    process that is free gets the next task. A task that a process died of is not repeated; a new process does the rest.

    Args:
        tasks: tasks without line breaks.
        command: arguments of Python, which finds the same modules as this process.
        most: maximum number of processes. If fewer can be started, these do all tasks; without any, none is done.
    """
    left, processes, lock = deque(tasks), list[subprocess.Popen[bytes]](), Lock()
    # the same modules as here, and -P: none from the working directory that are not known here
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments, pipe, quiet = [sys.executable, "-P", *command], subprocess.PIPE, subprocess.DEVNULL

    def start() -> subprocess.Popen[bytes] | None:
        with lock:
            if not left:
                return None
            try:
                process = subprocess.Popen(  # noqa: S603 - ourselves
                    arguments, bufsize=0, stdin=pipe, stdout=pipe, stderr=quiet, env=environ
                )
            except OSError:
                return None
            processes.append(process)
            return process

    def take() -> str | None:
        with lock:
            return left.popleft() if left else None

    def work() -> None:
        while process := start():
            with process:  # which closes its input and waits for its end
                while (task := take()) and _does(process, task):
                    pass

    with ThreadPoolExecutor(most) as pool:
        try:
            for each in [pool.submit(work) for _ in range(min(most, len(left)))]:
                each.result()
        finally:  # of an interrupt too, behind which none is started
            with lock:
                left.clear()
            for process in processes:
                process.kill()


def _does(process: subprocess.Popen[bytes], task: str) -> bool:
    """Give a process a task, and return whether it lived to answer."""
    assert process.stdin  # noqa: S101 - of mypy
    assert process.stdout  # noqa: S101
    try:
        process.stdin.write(f"{task}\n".encode())
    except OSError:  # it has died already
        return False
    return bool(process.stdout.readline())
