"""Tables of decoders that have a short convolution in place of attention in most layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.model import LinearAttention
from tpplan.models.config import MAX_COUNT
from tpplan.models.families.rows import attention, correction, head_norms, linear, norm, numbered, outside
from tpplan.models.families.shape import FULL, are_of_kind, except_listed, linear_layers
from tpplan.models.families.sparse import after_dense
from tpplan.models.families.table import Family, Row, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.models.config import Config

#: What ``layer_types`` calls the layers with a convolution, and with a sliding window.
_CONV, _SLIDING = "conv", "sliding_attention"


def _convolution(kernel: int, hidden: int) -> Callable[[Config], LinearAttention]:
    """Return how a family reads the sizes of a convolution, given its default: each channel is on its own."""

    def read(config: Config) -> LinearAttention:
        channels = config.count("hidden_size", default=hidden)
        return LinearAttention(1, channels, 0, 1, config.count("conv_L_cache", default=kernel), shared_keys=True)

    return read


def _unknown(config: Config, layers: int) -> tuple[bool, ...]:  # noqa: ARG001 (there is no rule)
    raise config.error("layer_types is missing")


def _lfm2(config: Config, shape: Shape) -> Shape:
    """Adjust the width of the MLP, which the config gives as if it had no gate."""
    width = shape.intermediate
    if config.flag("block_auto_adjust_ff_dim", default=True):
        width = 2 * width // 3
        factor = config.data.get("block_ffn_dim_multiplier", 1.0)
        if factor is not None:
            if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < MAX_COUNT:
                raise config.error(f"block_ffn_dim_multiplier is {str(factor)[:60]!r}, expected a number above 0")
            multiple = config.count("block_multiple_of", default=256)
            width = -(-int(factor * width) // multiple) * multiple
    if not 0 < width <= MAX_COUNT:
        raise config.error(f"the MLP is {width} wide, as intermediate_size and the keys with block_ have it")
    return evolve(shape, intermediate=width)


def _lfm3_kinds(config: Config, layers: int, kind: str) -> tuple[bool, ...]:
    """Tell for each layer whether it is of this kind: each fourth from the third is full, from the fifth sliding."""
    kinds = (*sorted({FULL, _SLIDING, _CONV} - {kind}), kind)
    rule = {0: _SLIDING, 2: FULL}
    otherwise = tuple((rule.get(layer % 4, _CONV) if layer else _CONV) == kind for layer in range(layers))
    return are_of_kind(config, "layer_types", layers, kinds) or otherwise


def _lfm3_windows(config: Config, layers: int) -> tuple[int, ...]:
    window = config.optional_count("sliding_window", default=256, minimum=0) or 0
    return tuple(window * sliding for sliding in _lfm3_kinds(config, layers, _SLIDING))


_CONVOLUTION = (
    *linear("conv.in_proj", "LV+LV+LV", "RS", "conv_bias"),
    Row("conv.conv.weight", "LV 1 ck"),
    Row("conv.conv.bias", "LV", "conv_bias"),
    *linear("conv.out_proj", "RS", "LV", "conv_bias"),
)
_NORMS = (*norm("operator_norm"), *norm("ffn_norm"))
_MLP = numbered("feed_forward", "ID")

_LFM2 = Family(
    architectures=("Lfm2ForCausalLM",),
    outside=outside(final=norm("model.embedding_norm")),
    layer=(*_NORMS, *attention(out="out_proj"), *head_norms("q_layernorm", "k_layernorm")),
    linear_layer=(*_NORMS, *_CONVOLUTION),
    dense=_MLP,
    defaults={"num_key_value_heads": 8, "intermediate_size": 12_288},
    flags={"conv_bias": False},
    tied=True,
    fixed_head=True,
    linear=linear_layers(_convolution(3, 2560), except_listed("full_attn_idxs", otherwise=False), (FULL, _CONV)),
    adapt=_lfm2,
)

_SANDWICH: Final = "use_sandwich_norm"

CONVOLVED: Final[dict[str, Family]] = {
    "lfm2": _LFM2,
    "lfm2_moe": evolve(
        _LFM2,
        architectures=("Lfm2MoeForCausalLM",),
        sparse=(
            *linear("feed_forward.gate", "e", "h", home=Axis.EXPERT_INTERMEDIATE),
            *correction("feed_forward.expert_bias", when="use_expert_bias"),
            *numbered("feed_forward.experts.{expert}", "EX"),
        ),
        defaults={
            "num_key_value_heads": 8,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_experts": 32,
            "num_experts_per_tok": 4,
        },
        flags={"conv_bias": False, "use_expert_bias": True},
        moe=after_dense(2, "num_dense_layers"),
        linear=linear_layers(_convolution(3, 2048), _unknown, (FULL, _CONV)),
        adapt=None,
    ),
    "lfm3": evolve(
        _LFM2,
        architectures=("Lfm3ForCausalLM",),
        layer=(
            *_NORMS,
            *norm("post_operator_norm", when=_SANDWICH),
            *attention("attention_bias", "attention_bias"),
            *linear("self_attn.gate_proj", "q", "RS", when="use_attention_gate"),
            *head_norms(),
        ),
        linear_layer=(*_NORMS, *norm("post_operator_norm", when=_SANDWICH), *_CONVOLUTION),
        dense=(*_MLP, *norm("post_ffn_norm", when=_SANDWICH)),
        defaults={"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 7680},
        flags={"conv_bias": False, "attention_bias": False, _SANDWICH: True, "use_attention_gate": True},
        fixed_head=False,
        window=_lfm3_windows,
        linear=linear_layers(
            _convolution(7, 2048),
            lambda config, layers: _lfm3_kinds(config, layers, _CONV),
            (FULL, _SLIDING, _CONV),
        ),
        adapt=None,
    ),
}
