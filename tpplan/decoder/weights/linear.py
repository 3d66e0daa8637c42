"""The weights of linear attention: which projections become one matrix, and what is prepared for its computation.

Shapes: C channels of the convolution, T tokens that it spans, H key heads, G value heads of each, K and V elements of a
key and of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tpplan.decoder.weights.convert import begin_overwriting, convert_once

if TYPE_CHECKING:
    from tpplan.core.model import Block, LinearAttention

#: Projections of the input, which become one matrix if they are adjacent: where all queries, keys and values lie one
#: behind the other, and where they lie key head by key head (Qwen3-Next).
JOINED: Final = {
    "linear_attn.in_proj": tuple(f"linear_attn.in_proj_{each}" for each in ("qkv", "z", "b", "a")),
    "linear_attn.in_proj_by_head": tuple(f"linear_attn.in_proj_{each}" for each in ("qkvz", "ba")),
}
ONE_BEHIND_THE_OTHER, BY_HEAD = JOINED


def prepare_linear(
    start: str, block: Block, sizes: LinearAttention, tensors: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Prepare a layer's linear attention: float32 where its decays are made, and weights in the order of its inputs.

    Args:
        start: start of the names of its tensors.
        block: the block that it belongs to.
        sizes: its sizes.
        tensors: the device's tensors; nothing is done if it has no heads of the layer.
        dtype: dtype of the activations.
    """
    rates = tensors.get(f"{start}A_log")
    if rates is None:
        return
    tensors[f"{start}A_log"] = -rates.float().exp()
    tensors[f"{start}dt_bias"] = tensors[f"{start}dt_bias"].float()
    tensors[f"{start}norm.weight"] = tensors[f"{start}norm.weight"].to(dtype)
    name = f"{start}conv1d.weight"
    if not any(JOINED[BY_HEAD][0] in parameter.name for parameter in block.parameters):
        return
    whole, keys = tensors[name], len(rates) // sizes.group

    def reorder() -> bool:
        ordered = _by_head(whole, (keys, sizes.group, sizes.key_head_dim, sizes.value_head_dim))
        begin_overwriting(whole)
        whole.copy_(ordered)
        return True

    convert_once(whole, name, reorder)


def _by_head(weight_C1T: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """Return the convolution's weights of all queries, keys and values in the order of key heads.

    Args:
        weight_C1T: weights of the device.
        sizes: H, G, K and V.
    """
    keys, group, key_dim, value_dim = sizes
    widths = (key_dim, key_dim, group * value_dim)
    parts = torch.split_with_sizes(weight_C1T, [keys * width for width in widths])
    return torch.cat([torch.unflatten(part, 0, (keys, -1)) for part in parts], dim=1).flatten(0, 1)
