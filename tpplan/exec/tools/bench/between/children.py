"""Processes that measure, side by side: their lines as they come, and an end for those that hang."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread
from types import MappingProxyType
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: What NVLink multicast is turned off by: it needs more of a machine than GPUs and links.
_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
#: What a table says of that.
NO_MULTICAST = "NVLS is off for all (NCCL_NVLS_ENABLE=0)."
_POLL_SECONDS = 0.05
#: What a process that hangs gets to say where.
_LAST_SECONDS = 3.0
#: Characters of what a process has said on standard error, its last ones.
_MOST_SAID = 20_000
#: What faulthandler begins with where it tells of a fault, or of a time that is up; it ends with what nobody asked for.
_FAULTS = ("Fatal Python error: ", "Timeout (")
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')
#: Frames of a fault that are told, the innermost.
_FRAMES = 4


def end_when_asked() -> None:
    """Let SIGTERM end this process like an error: without leaving processes or files behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))


def run(
    command: Sequence[str],
    world: int,
    seconds: float,
    tell: Callable[[str], None],
    cwd: str | os.PathLike[str],
    *,
    more: Mapping[str, str] = MappingProxyType({}),
    started: Callable[[Sequence[subprocess.Popen[str]]], object] = lambda _: None,
) -> str:
    """Run a command in as many processes, each told by its environment which one it is, as torch.distributed wants it.

    NVLink multicast is off in them.

    Args:
        command: the command to run.
        world: number of processes.
        seconds: time after which they are ended; Python's fault handler then says where they were.
        tell: called with each line that the first process prints.
        cwd: directory of the processes.
        more: further variables of their environment.
        started: called with the processes, which get no Ctrl-C of a terminal by themselves.

    Returns:
        Why they failed, and behind that what they said; empty if they did not.
    """
    port = _free_port()
    with ExitStack() as files:
        noise = [files.enter_context(TemporaryFile()) for _ in range(world)]
        processes = [
            subprocess.Popen(  # noqa: S603 - of who calls this
                command,
                cwd=cwd,
                env={**_environment(rank, world, port), **more},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=noise[rank],
                text=True,
                start_new_session=True,
            )
            for rank in range(world)
        ]
        assert processes[0].stdout  # noqa: S101 - a pipe
        reader = Thread(target=_pass_on, args=(processes[0].stdout, tell), daemon=True)
        reader.start()
        try:
            started(processes)
            late = _wait(processes, time.monotonic() + seconds)
            codes = [process.poll() or 0 for process in processes]  # before any is ended from here
            if late:
                for process in processes:
                    process.send_signal(signal.SIGABRT)
                _wait(processes, time.monotonic() + _LAST_SECONDS)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):  # nothing is left of it
                    os.killpg(process.pid, signal.SIGKILL)  # what it has started may have outlived it
                process.wait()
        reader.join(_LAST_SECONDS)
        said = [_read(file) for file in noise]
    failed = range(world) if late else [rank for rank, code in enumerate(codes) if code]
    ends = [f"not done after {seconds:.0f} s"] if late else [f"process {rank} {_end(codes[rank])}" for rank in failed]
    return "\n".join(filter(None, ["; ".join(ends), *(said[rank] for rank in failed)]))


def cause(said: str) -> str:
    """Return the useful part of what a process that failed said, in a line: a fault and where, or its last line.

    Of a fault, Python tells the frames of all threads, then the names of all modules in C.
    """
    lines = [line for line in map(str.strip, said.splitlines()) if line and not line.startswith("Extension modules: ")]
    at = next((i for i, line in enumerate(lines) if line.startswith(_FAULTS)), None)
    if at is None:
        return lines[-1] if lines else ""
    before = [line for line in lines[:at] if line.startswith("what():")][-1:]  # why C++ aborts
    current = next((i for i, line in enumerate(lines) if i > at and line.startswith("Current thread ")), at)
    frames = []
    for line in lines[current + 1 :]:
        if found := _FRAME.match(line):
            where = "/".join(Path(found["file"]).parts[-2:])
            frames.append(f"{found['name']} ({where}:{found['line']})")
        elif frames:
            break
    return "; ".join([*before, lines[at], *(["in " + ", ".join(frames[:_FRAMES])] if frames else [])])


def _read(file: IO[bytes]) -> str:
    """Return what a process has said, without the beginning of a lot."""
    file.seek(0)
    return file.read().decode(errors="replace")[-_MOST_SAID:].strip()


def _end(code: int) -> str:
    """Return how a process ended, a signal by its name."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = -code in {each.value for each in signal.Signals}
    return f"was ended by {signal.Signals(-code).name if known else f'signal {-code}'}"


def _environment(rank: int, world: int, port: int) -> Mapping[str, str]:
    group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    more = {name: str(value) for name, value in group.items()}
    return {**os.environ, **more, **_MULTICAST, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    return port


def _pass_on(lines: IO[str], tell: Callable[[str], None]) -> None:
    with lines:
        for line in lines:
            tell(line.rstrip("\n"))


def _wait(processes: Sequence[subprocess.Popen[str]], deadline: float) -> bool:
    """Return whether the deadline came first; a process that fails ends the waiting, for the others miss it."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return False
        time.sleep(_POLL_SECONDS)
    return True
