"""Tables of decoders with lightning attention, linear attention with fixed decays (arXiv:2401.04658)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import MAX_LAYERS, Axis
from tpplan.core.model import LinearAttention, Segment
from tpplan.core.sizes import counted
from tpplan.models.families.rows import MIXTRAL_EXPERTS, NORMS, attention, linear, norm, outside
from tpplan.models.families.shape import FULL, LINEAR, MAX_PARTS, every_layer, except_first_of, linear_layers
from tpplan.models.families.table import Family, Row, Shape

if TYPE_CHECKING:
    from tpplan.models.config import Config

#: The key of MiniMax's own code for the kinds of layers, and what its numbers mean.
_KINDS: Final = "attn_type_list"
_MEANING: Final = {0: LINEAR, 1: FULL}


def _lightning(config: Config) -> LinearAttention:
    """Read the sizes of lightning attention, whose heads are those of the queries, each with a key and a value."""
    heads = config.count("num_attention_heads", maximum=MAX_PARTS)
    size = config.optional_count("head_dim") or config.count("hidden_size") // heads
    return LinearAttention(heads, heads, size, size, kernel=0, rounded=True)


def _with_decays(config: Config, shape: Shape) -> Shape:
    """Add what all heads project to, and the tokens of a block, between which decays are stored."""
    heads = shape.q_heads * shape.head_dim
    return shape.having(LQKV=Segment(Axis.LINEAR_HEADS, 3 * heads), block=config.count("block_size", default=256))


def _listed(config: Config) -> Config:
    """Read the kinds of layers from a list of numbers.

    Raises:
        ModelError: there is none, or not one number for each layer, or a number has no meaning; or there are shared
            experts.
    """
    if shared := config.optional_count("shared_intermediate_size", default=0, minimum=0):
        raise config.error(f"shared_intermediate_size is {shared}, which tpplan does not support")
    kinds = config.numbers(_KINDS)
    if not kinds:
        raise config.error(f"{_KINDS} is missing")
    layers = config.count("num_hidden_layers", default=len(kinds), maximum=MAX_LAYERS)
    if len(kinds) != layers:
        raise config.error(f"{_KINDS} has {counted(len(kinds), 'entry')} for {counted(layers, 'layer')}")
    if unknown := [kind for kind in kinds if kind not in _MEANING]:
        raise config.error(f"{_KINDS} has {unknown[0]}, known are 0 (lightning attention) and 1 (full attention)")
    return config.having("layer_types", [_MEANING[kind] for kind in kinds])


#: Each head has a query, a key and a value side by side.
_LIGHTNING: Final = (
    *linear("self_attn.qkv_proj", "LQKV", "RS"),
    *linear("self_attn.output_gate", "LV", "RS"),
    *norm("self_attn.norm", "LV"),
    *linear("self_attn.out_proj", "RS", "LV"),
)

#: What transformers saves of the decays, which follow from the number of the head and of the layer.
_DECAYS: Final = (
    Row("self_attn.slope_rate", "lh 1 1"),
    Row("self_attn.query_decay", "lh block 1"),
    Row("self_attn.key_decay", "lh block 1"),
    Row("self_attn.diagonal_decay", "1 lh block block", out=1),
)

_MINIMAX: Final = Family(
    architectures=("MiniMaxForCausalLM",),
    outside=outside(),
    layer=(*NORMS, *attention()),
    linear_layer=(*NORMS, *_LIGHTNING, *_DECAYS),
    sparse=MIXTRAL_EXPERTS,
    defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2},
    moe=every_layer,
    linear=linear_layers(_lightning, except_first_of(2)),
    expert_key="intermediate_size",
    adapt=_with_decays,
)
#: The same as it is on the hub, with code of its own.
MINIMAX_TEXT_01: Final = evolve(
    _MINIMAX, architectures=("MiniMaxText01ForCausalLM",), linear_layer=(*NORMS, *_LIGHTNING), usual=_listed
)

LIGHTNING: Final[dict[str, Family]] = {"minimax": _MINIMAX}
