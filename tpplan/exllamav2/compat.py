"""The names of ExLlamaV2's ``compat`` module."""

from __future__ import annotations

from itertools import pairwise

from tpplan.exec.move import gpu_peer_copy, safe_move_tensor, test_gpu_peer_copy

__all__ = ["gpu_peer_copy", "pairwise", "safe_move_tensor", "test_gpu_peer_copy"]
