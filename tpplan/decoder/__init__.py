"""A tensor-parallel decoder that runs on a compiled plan, and the generation of text with it.

``decoder`` is what users hold: prompts, decoding steps, and CUDA graphs of both, on top of ``forward``, which computes
logits from tokens. ``layer`` has the layers: it combines the devices' results, and computes on one device in plain
torch, with the ``weights`` and over the KV ``cache``. ``fast`` overrides these computations by fused kernels for the
tensors that they support; results are right without it. ``generation`` generates tokens from prompts, and ``text``
converts between text and tokens.

Names are imported when they are first used, as in ``tpplan`` itself: what checks a request needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.core.missing import on_first_use

if TYPE_CHECKING:
    from tpplan.decoder.decoder import Decoder
    from tpplan.decoder.decoding.sampling import Sampling
    from tpplan.decoder.decoding.steps import Steps
    from tpplan.decoder.generation.generate import generate
    from tpplan.decoder.generation.timing import Startup
    from tpplan.decoder.generation.warmup import prepare
    from tpplan.decoder.prompts import Prompt

_MODULE_OF = {
    "Decoder": "decoder",
    "Prompt": "prompts",
    "Sampling": "decoding.sampling",
    "Startup": "generation.timing",
    "Steps": "decoding.steps",
    "generate": "generation.generate",
    "prepare": "generation.warmup",
}

__all__ = ["Decoder", "Prompt", "Sampling", "Startup", "Steps", "generate", "prepare"]

__getattr__ = on_first_use(__name__, _MODULE_OF)
