"""ExLlamaV2's ``TPContext`` and ``compat`` over tpplan: the original's names and signatures, for code written for it.

``from exllamav2.tensor_p import …`` becomes ``from tpplan.exllamav2 import …`` (or ``from tpplan.exllamav2.tensor_p``),
and likewise ``exllamav2.compat``. What differs, and why, is in docs/exllamav2.md. Needs torch.
"""

from __future__ import annotations

from tpplan.exllamav2.compat import gpu_peer_copy, pairwise, safe_move_tensor, test_gpu_peer_copy
from tpplan.exllamav2.extension import install, uninstall
from tpplan.exllamav2.tensor_p import BROADCAST_ID, BROADCAST_KV, BROADCAST_Q, BROADCAST_RS, BROADCAST_VC, TPContext

__all__ = [
    "BROADCAST_ID",
    "BROADCAST_KV",
    "BROADCAST_Q",
    "BROADCAST_RS",
    "BROADCAST_VC",
    "TPContext",
    "gpu_peer_copy",
    "install",
    "pairwise",
    "safe_move_tensor",
    "test_gpu_peer_copy",
    "uninstall",
]
