"""A tensor-parallel decoder that runs by a plan, and the generation of text with it.

It is readable in one sitting: ``model`` leads from tokens to logits, ``stack`` has the layers and ties the devices
together, ``plain`` and ``layers`` compute on one device by torch. ``fused`` is ``plain`` once more, by kernels where
these take what there is; everything is right without it. docs/run-a-model.md has a table of what is where.

Names are imported when they are first used, as in ``tpplan`` itself. Everything here needs torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tpplan.extras import needing

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
