"""The names of ExLlamaV2's ``compat`` module.

``tested_peer_copy`` is what is known now of peer copies; see :func:`tpplan.exec.machine.move.tested_peer_copies`.
"""

from __future__ import annotations

from itertools import pairwise

from tpplan.exec.machine.move import gpu_peer_copy, safe_move_tensor, test_gpu_peer_copy, tested_peer_copies

__all__ = ["gpu_peer_copy", "pairwise", "safe_move_tensor", "test_gpu_peer_copy", "tested_peer_copy"]

tested_peer_copy: list[list[int]] | None


def __getattr__(name: str) -> object:
    if name == "tested_peer_copy":
        return tested_peer_copies()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
