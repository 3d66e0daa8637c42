"""Tables of decoders with two attentions or two MLPs in a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.models.families.latent import MLA, with_latent
from tpplan.models.families.rows import ALWAYS, EXPERTS, correction, gated, linear, norm, outside
from tpplan.models.families.shape import MAX_PARTS, every_layer, renamed
from tpplan.models.families.table import Family, Shape

if TYPE_CHECKING:
    from tpplan.models.config import Config

_latent = with_latent()


def _longcat(config: Config) -> Config:
    """Read the number of layers and the width of experts by their names."""
    return renamed(config, {"num_layers": "num_hidden_layers", "expert_ffn_hidden_size": "moe_intermediate_size"})


def _two_latents(config: Config, shape: Shape) -> Shape:
    """Add the latent of the second attention, the MLPs through which all tokens go, and experts that do nothing."""
    wide = config.count("intermediate_size", default=12_288)
    shape = evolve(_latent(config, shape), shared_intermediate=wide)
    nothing = config.optional_count("zero_expert_num", default=256, minimum=0, maximum=MAX_PARTS) or 0
    second = shape.kv_rank + shape.rope_dim
    return evolve(shape, compressed_dim=second, ratio=1).having(routed=shape.experts + nothing)


TWOFOLD: Final[dict[str, Family]] = {
    "longcat_flash": Family(
        architectures=("LongcatFlashForCausalLM",),
        outside=outside(),
        layer=(
            *(row for i in (0, 1) for row in norm(f"input_layernorm.{i}")),
            *(row for i in (0, 1) for row in norm(f"post_attention_layernorm.{i}")),
            *(evolve(row, name=row.name.replace("self_attn", f"self_attn.{i}")) for i in (0, 1) for row in MLA),
        ),
        sparse=(
            *(row for i in (0, 1) for row in gated(f"mlps.{i}", "SX")),
            *linear("mlp.router.classifier", "routed", "h", "router_bias", home=Axis.EXPERT_INTERMEDIATE),
            *correction("mlp.router.e_score_correction_bias", "routed", ALWAYS),
            *EXPERTS,
        ),
        ignored=("*.rotary_emb.inv_freq", "model.mtp.*"),
        extra_experts=True,  # so transformers saves what takes the place of those that do nothing
        defaults={
            "head_dim": 64,
            "vocab_size": 131_072,
            "hidden_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 64,
            "max_position_embeddings": 131_072,
            "num_experts": 512,
            "num_experts_per_tok": 12,
            "moe_intermediate_size": 2048,
        },
        flags={"attention_bias": False, "router_bias": False},
        usual=_longcat,
        moe=every_layer,
        adapt=_two_latents,
    ),
}
