"""Measure whole processes on this machine: what somebody waits for who calls a command, against its aim.

Peak memory is the resident set. The kernel never reports less for a child than its parent had when it started it, so
this file imports next to nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.rows import GPUS, MODEL, TOKENS, Row, measure, rounds_wanted

if TYPE_CHECKING:
    from collections.abc import Callable

KIB = 1 if sys.platform == "darwin" else 2**10  # macOS counts ru_maxrss in bytes


def process(*args: object, expect: int = 0) -> Callable[[], int]:
    """Return a function that runs a Python program to its end and returns its peak memory."""
    command = [sys.executable, *map(str, args)]

    def run() -> int:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != expect:
            sys.exit(f"{' '.join(command)} exited with {child.returncode}, expected {expect}")
        return usage.ru_maxrss * KIB

    return run


def main() -> None:
    """Measure the floor, and the commands as somebody calls them."""
    rounds = rounds_wanted(__doc__)
    script = Path(sys.executable).with_name("tpplan")
    planning = ("plan", MODEL, "--cache", "q8", "--context", TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "a.json"), Path(folder, "b.json")
        process(script, *planning, "--gpus", GPUS, "-o", first)()
        process(script, *planning, "--gpus", "8xRTX4090", "-o", second)()
        rows = [
            Row("python -c pass", process("-c", "pass")),
            Row("python -c 'import attrs, cattrs, json'", process("-c", "import attrs, cattrs, json")),
            Row("tpplan show", process(script, "show", first), 0.20),
            Row("tpplan diff", process(script, "diff", first, second, expect=1), 0.20),
            Row("tpplan validate", process(script, "validate", first), 0.20),
            Row("tpplan plan, 70B on 8 GPUs", process(script, *planning, "--gpus", GPUS, "-o", "-"), 0.35),
        ]
        measure(rows, rounds)


if __name__ == "__main__":
    main()
