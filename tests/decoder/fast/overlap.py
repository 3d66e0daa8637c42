"""Launches that begin early, as the PTX of kernels has them."""

from __future__ import annotations

import re

from tpplan.exec.toolchain.kernel_cache import OVERLAPS

_INSTRUCTION = re.compile(r"griddepcontrol\.(wait|launch_dependents);")


def check_overlap(name: str, text: str, capability: tuple[int, int]) -> None:
    """Make sure that a kernel lets the next begin only when all work before has ended: two of a stream are there then.

    One that waits for other devices does so only where it was told that it may: behind a branch.
    """
    found = [each[1] for each in _INSTRUCTION.finditer(text)]
    if capability < OVERLAPS:
        assert not found
        return
    assert found[0] == "wait", found
    assert found.count("wait") == 1
    assert "launch_dependents" in found
    waited, first = (text.index(f"griddepcontrol.{what};") for what in ("wait", "launch_dependents"))
    assert bool(re.search(r"@%p\d+\s+bra", text[waited:first])) == ("joint" in name)
