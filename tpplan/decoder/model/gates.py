"""Gates of MLPs and experts (GLU variants, arXiv:2002.05202): the activation of one projection times another."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

#: Activation functions by ``hidden_act`` of a config.json; they work in place.
ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": partial(functional.silu, inplace=True),
    "gelu": torch.ops.aten.gelu_,
    "gelu_pytorch_tanh": partial(torch.ops.aten.gelu_, approximate="tanh"),
}

#: The gate of gpt_oss, ``min(gate, 7) · sigmoid(1.702 · gate) · (clamp(up, -7, 7) + 1)``, where the sigmoid is of the
#: limited gate.
SWIGLU_OAI: Final = "swiglu_oai"
ALPHA: Final = 1.702
LIMIT: Final = 7.0


def gated(name: str, gate: Tensor, up: Tensor) -> Tensor:
    """Return the gate of two projections of the same shape; ``gate`` is overwritten with it and returned.

    Args:
        name: name of an activation in :data:`ACTIVATIONS`, or :data:`SWIGLU_OAI`.
        gate: projection that gets the activation.
        up: projection that it is multiplied by.
    """
    if name != SWIGLU_OAI:
        return ACTIVATIONS[name](gate).mul_(up)
    gate.clamp_(max=LIMIT)
    return gate.mul_((gate * ALPHA).sigmoid_()).mul_(up.clamp(-LIMIT, LIMIT).add_(1))
