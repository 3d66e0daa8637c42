"""A tensor-parallel decoder that runs on a compiled plan, and the generation of text with it.

It is readable in one sitting: ``model`` leads from tokens to logits, ``stack`` has the layers and combines the devices'
results, ``plain`` and ``layers`` compute on one device in torch. ``fused`` overrides ``plain`` with kernels where these
take the tensors; results are right without it. docs/run-a-model.md has a table of the modules.

Names are imported when they are first used, as in ``tpplan`` itself: what checks a request needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tpplan.core.missing import needing

if TYPE_CHECKING:
    from tpplan.decoder.generation import generate
    from tpplan.decoder.model import Decoder
    from tpplan.decoder.preparation import prepare
    from tpplan.decoder.prompts import Prompt
    from tpplan.decoder.sampling import Sampling

_MODULE_OF = {
    "Decoder": "model",
    "Prompt": "prompts",
    "Sampling": "sampling",
    "generate": "generation",
    "prepare": "preparation",
}

__all__ = ["Decoder", "Prompt", "Sampling", "generate", "prepare"]


def __getattr__(name: str) -> object:
    """Import a public name from its module.

    Raises:
        MissingError: torch is not installed.
    """
    if name not in _MODULE_OF:
        message = f"module 'tpplan.decoder' has no attribute {name!r}"
        raise AttributeError(message)
    with needing(f"tpplan.decoder.{name}"):
        return getattr(import_module(f"tpplan.decoder.{_MODULE_OF[name]}"), name)
