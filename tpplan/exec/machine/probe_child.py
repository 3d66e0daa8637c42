"""The probe in a child process, so that a hang or a crash of a GPU's driver costs a verdict and not the program.

The child streams lines of JSON: the routes it tests next, and verdicts. If it dies, or is killed after the deadline
passes without output, the routes under test count as broken. Routes with a verdict keep it, and a new child tests the
rest. A child tests at most eight GPUs: as many peers as some drivers map for a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from importlib import import_module
from itertools import combinations
from queue import Empty, Queue
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any

from attrs import astuple

from tpplan.exec.machine.link_report import Link, Mechanism, Verdict
from tpplan.exec.machine.probe import probe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tpplan.exec.machine.link_report import Route
    from tpplan.exec.machine.probe import Driver

#: Maximum time for a child to start and import its modules.
START_SECONDS = 180.0

#: Number of children of the same GPUs that may hang, or die, before their remaining links are given up.
MOST_HUNG, MOST_DEAD = 4, 16

#: Maximum number of GPUs that a child tests, an even one.
MOST_GPUS = 8

#: Exit codes of children that somebody else has ended, such as the system for want of memory: SIGINT, SIGKILL, SIGTERM.
_ENDED = (-2, -9, -15)

_EXIT_SECONDS = 10.0


class _FaultError(Exception):
    """The reason why a child ended early, which may be the links' fault."""


class _HungError(_FaultError):
    """The child hung."""


class _EndedError(_FaultError):
    """Somebody else ended the child."""


def load_driver(name: str) -> Driver[Any]:
    """Return a new driver, from ``module:factory``."""
    module, _, factory = name.partition(":")
    driver: Driver[Any] = getattr(import_module(module), factory)()
    return driver


def probe_in_child(
    driver: str,
    gpus: tuple[str, ...],
    routes: Sequence[Route],
    verified: Sequence[Route],
    deadline_s: float,
    *,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Link, ...]:
    """Test links in child processes.

    Args:
        driver: the driver as ``module:factory``, imported by the child.
        gpus: UUIDs that the child must see, in this order.
        routes: routes to test.
        verified: other routes, known to work; those between the same GPUs take part when all are used at once.
        deadline_s: seconds that a step may take; the start of a child may take 180.
        environ: variables that the child has besides those of this process.

    Returns:
        One link per route, in their order, then those of verified routes that have a new verdict. If a child fails
        before it tests any, or too many fail, the routes that are left are untested.
    """
    found: dict[Route, Link] = {}
    for some in _groups(sorted({gpu for _, *pair in (*routes, *verified) for gpu in pair})):
        mine, others = ([r for r in every if {*r[1:]} <= some and r not in found] for every in (routes, verified))
        if mine:
            found |= _probe_group(driver, gpus, mine, others, deadline_s, environ=environ)
    return tuple(found[route] for route in (*routes, *(each for each in verified if each in found)))


def _groups(gpus: Sequence[int]) -> list[set[int]]:
    """Return sets of at most eight GPUs, such that any two are together in one."""
    if len(gpus) <= MOST_GPUS:
        return [{*gpus}]
    half = MOST_GPUS // 2
    halves = [gpus[start : start + half] for start in range(0, len(gpus), half)]
    return [{*a, *b} for a, b in combinations(halves, 2)]


def _probe_group(
    driver: str,
    gpus: tuple[str, ...],
    routes: Sequence[Route],
    verified: Sequence[Route],
    deadline_s: float,
    *,
    environ: Mapping[str, str],
) -> dict[Route, Link]:
    """Test links between at most eight GPUs; see :func:`probe_in_child`."""
    found: dict[Route, Link] = {}
    end, hung, dead = "", 0, 0
    while hung < MOST_HUNG and dead < MOST_DEAD:
        left = [route for route in routes if route not in found]
        if not left:
            break
        testing: list[Route] = []
        seconds = START_SECONDS
        try:
            work = [route for route, link in found.items() if link.verdict == Verdict.WORKS]
            work += [route for route in verified if route not in found]
            with _child(driver, [gpus, left, work], environ) as lines:
                while line := _next(lines, seconds):
                    seconds = deadline_s
                    testing = [_route(route) for route in line.get("testing", testing)]
                    for link in (_link(fields) for fields in line.get("found", ())):
                        if link.verdict != Verdict.UNTESTED or link.route not in work:  # which are known to work
                            found[link.route] = link
        except (_FaultError, OSError) as error:
            end = str(error)
            if not testing or isinstance(error, _EndedError):
                break
            at_once = f" with {len(testing)} links at once" if len(testing) > 1 else ""
            broken = {route: Link(*route, Verdict.BROKEN, f"{error}{at_once}") for route in testing}
            found = broken | found  # a verdict stands
            hung, dead = (hung + 1, dead) if isinstance(error, _HungError) else (hung, dead + 1)
            end = f"not finished before too many probes had failed, the last one so: {error}"
    return {route: Link(*route, Verdict.UNTESTED, end) for route in routes} | found


@contextmanager
def _child(driver: str, job: list[Any], environ: Mapping[str, str]) -> Iterator[Queue[dict[str, Any] | _FaultError]]:
    """Start a child and yield the queue of its messages; kill it on exit."""
    # the same modules as here, and -P: none from the working directory that are not known here
    environ = os.environ | environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-m", __name__, driver, json.dumps(job)]
    with TemporaryFile() as errors:
        process = subprocess.Popen(  # noqa: S603 - ourselves
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environ, encoding="utf-8"
        )
        lines: Queue[dict[str, Any] | _FaultError] = Queue()
        reader = threading.Thread(target=_listen, args=(process, errors, lines), daemon=True)
        reader.start()
        try:
            yield lines
        finally:
            process.kill()
            reader.join(_EXIT_SECONDS)  # a process that hangs inside the kernel outlives even that
            for pipe in (process.stdin, process.stdout):
                if pipe and not reader.is_alive():
                    pipe.close()


def _listen(process: subprocess.Popen[str], errors: IO[bytes], lines: Queue[dict[str, Any] | _FaultError]) -> None:
    """Forward a child's messages, and finally its exit status."""
    for line in process.stdout or ():
        lines.put(json.loads(line))
    if code := process.wait():
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        kind = _EndedError if code in _ENDED else _FaultError
        lines.put(kind(f"the probe died with exit code {code}{f': {last[:300]}' if last else ''}"))
    else:
        lines.put({})


def _next(lines: Queue[dict[str, Any] | _FaultError], seconds: float) -> dict[str, Any]:
    """Return the child's next message; empty if it has finished."""
    try:
        line = lines.get(timeout=seconds)
    except Empty:
        raise _HungError(f"the probe hung for {seconds:g} s") from None
    if isinstance(line, _FaultError):
        raise line
    return line


def _route(fields: Sequence[Any]) -> Route:
    mechanism, source, target = fields
    return Mechanism(mechanism), source, target


def _link(fields: Sequence[Any]) -> Link:
    *route, verdict, reason = fields
    return Link(*_route(route), Verdict(verdict), reason)


def main(driver_name: str, job: str) -> None:
    """Run the child: test routes and report on standard output; ``job`` is JSON of GPUs, routes and verified routes."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    gpus, *groups = json.loads(job)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # keeps library output away from the parent
        driver = load_driver(driver_name)
        if (seen := list(driver.gpus())) != gpus:
            sys.exit(f"it sees other GPUs than it is asked about: {', '.join(seen) or 'none'}")
        driver.prepare()
        routes, verified = ([_route(fields) for fields in each] for each in groups)
        for event in probe(driver, routes, verified):
            line = {"found": [astuple(event)]} if isinstance(event, Link) else {"testing": event}
            print(json.dumps(line), file=out, flush=True)


def _die_with_parent() -> None:
    """End this process when its standard input ends: its parent is gone, and a hung GPU would keep it for ever."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
