"""Tables of decoders with Mamba layers, and the sizes and rows of such layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.model import LinearAttention
from tpplan.models.families.packed import GRANITE_EXPERTS
from tpplan.models.families.rows import BIASED_ATTENTION, NORMS, attention, correction, linear, norm, outside
from tpplan.models.families.shape import FULL, LINEAR, MAX_PARTS, are_of_kind, every_layer, linear_layers
from tpplan.models.families.table import Family, Row, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.models.config import Config

#: The flag of rows that are there only where experts are in a latent.
LATENT: Final = "latent_experts"


def _expanded(config: Config) -> tuple[int, str]:
    """Return how many channels all heads have together, and where the config says so."""
    return config.count("mamba_expand", default=2) * config.count("hidden_size"), "mamba_expand × hidden_size"


def mamba2(
    heads: int = 128,
    groups: int = 1,
    state: int = 256,
    head_dim: int = 0,
    *,
    channels: Callable[[Config], tuple[int, str]] = _expanded,
) -> Callable[[Config], LinearAttention]:
    """Return how a family reads the sizes of Mamba-2, given their defaults.

    Args:
        heads: number of heads.
        groups: number of groups of heads, each with a B and a C.
        state: size of the state of a channel.
        head_dim: channels of a head; 0 if all heads have ``channels`` together.
        channels: reads that number, and says where from.
    """

    def read(config: Config) -> LinearAttention:
        count = config.count("mamba_n_heads", default=heads, maximum=MAX_PARTS)
        number = config.count("mamba_n_groups", default=groups, maximum=MAX_PARTS)
        if count % number:
            raise config.error(f"{count} heads (mamba_n_heads) are not a multiple of {number} groups (mamba_n_groups)")
        if head_dim:
            own = config.count("mamba_d_head", default=head_dim)
        else:
            total, told = channels(config)
            whole = total // count
            own = whole if config.raw("mamba_d_head") == "auto" else config.count("mamba_d_head", default=whole)
            if own * count != total:
                raise config.error(
                    f"{count} heads of {own} (mamba_n_heads, mamba_d_head) are not the {total} of {told}"
                )
        return LinearAttention(
            key_heads=number,
            value_heads=count,
            key_head_dim=config.count("mamba_d_state", default=state),
            value_head_dim=own,
            kernel=config.count("mamba_d_conv", default=4),
            shared_keys=True,
        )

    return read


def mamba2_rows(name: str, bias: str | None, conv_bias: str, normed: str = "") -> tuple[Row, ...]:
    """Return the rows of Mamba-2, which projects to gate, x, B, C and dt at once.

    Args:
        name: how its names start.
        bias: the flag of the biases of its projections, None if they have none.
        conv_bias: the flag of the bias of its convolution.
        normed: the flag of the norm of its output; empty for always.
    """
    return (
        *linear(f"{name}.in_proj", "LV+LV+LK+LK+lh", "RS", bias),
        Row(f"{name}.conv1d.weight", "LV+LK+LK 1 ck"),
        Row(f"{name}.conv1d.bias", "LV+LK+LK", conv_bias),
        Row(f"{name}.dt_bias", "lh"),
        Row(f"{name}.A_log", "lh"),
        Row(f"{name}.D", "lh"),
        *norm(f"{name}.norm", "LV", when=normed),
        *linear(f"{name}.out_proj", "RS", "LV", bias),
    )


def _granite(config: Config, shape: Shape) -> Shape:
    """Add the shared experts, which have a width of their own and are all that models without experts have."""
    width = config.count("shared_intermediate_size", default=1024)
    return evolve(shape, **{"shared_intermediate" if shape.experts else "intermediate": width})


def _any_experts(config: Config, layers: int) -> tuple[bool, ...]:
    """Select all layers, or none if there are no experts."""
    return (config.count("num_experts", default=8, minimum=0, maximum=MAX_PARTS) > 0,) * layers


#: What the pattern of Nemotron-H writes for each kind of layer, and what kinds there are.
_PATTERN: Final = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
_NEMOTRON_KINDS: Final = frozenset(_PATTERN.values())


def _kinds_of(kind: str) -> tuple[str, ...]:
    """Return the kinds of Nemotron-H's layers, this one last."""
    return *sorted(_NEMOTRON_KINDS - {kind}), kind


def _nemotron(config: Config) -> Config:
    """Read the kinds of layers from ``hybrid_override_pattern``, and the number of layers from the kinds."""
    pattern = config.text("hybrid_override_pattern")
    types = config.texts("layer_types") or [_PATTERN.get(letter, letter) for letter in pattern]
    types = types or [LINEAR, "moe", FULL, "mlp"]
    return config.having("layer_types", list(types)).having("num_hidden_layers", len(types))


def _nemotron_moe(config: Config, layers: int) -> tuple[bool, ...]:
    return are_of_kind(config, "layer_types", layers, _kinds_of("moe"))


def _nemotron_alone(config: Config, layers: int) -> tuple[str, ...]:
    """Tell that each layer has one part."""
    mlps = zip(*(are_of_kind(config, "layer_types", layers, _kinds_of(kind)) for kind in ("mlp", "moe")), strict=True)
    return tuple("mlp" if any(of) else "mixer" for of in mlps)


def _nemotron_experts(config: Config, shape: Shape) -> Shape:
    """Add the shared experts, which have a width of their own, and the latent that the routed ones may be in."""
    if not shape.experts:
        return shape
    rank = config.optional_count("moe_latent_size") or 0
    return evolve(
        shape,
        shared_intermediate=config.count("moe_shared_expert_intermediate_size", default=7688),
        expert_rank=rank,
        flags=shape.flags | ({LATENT} if rank else set()),
    )


#: Experts without gates, in a latent that one matrix leads to and another from, on every device that has any of them.
_LATENT_EXPERTS = (
    *linear("mixer.gate", "e", "h", home=Axis.EXPERT_INTERMEDIATE),
    *correction("mixer.gate.e_score_correction_bias"),
    *linear("mixer.experts.{expert}.up_proj", "EX", "ER"),
    *linear("mixer.experts.{expert}.down_proj", "ER", "EX"),
    *linear("mixer.shared_experts.up_proj", "SX", "RS", "mlp_bias"),
    *linear("mixer.shared_experts.down_proj", "RS", "SX", "mlp_bias"),
    *linear("mixer.fc1_latent_proj", "ER", "RS", "mlp_bias", when=LATENT, home=Axis.EXPERT_INTERMEDIATE),
    *linear("mixer.fc2_latent_proj", "RS", "ER", "mlp_bias", when=LATENT, home=Axis.EXPERT_INTERMEDIATE),
)

MAMBA: Final[dict[str, Family]] = {
    "granitemoehybrid": Family(
        architectures=("GraniteMoeHybridForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION),
        linear_layer=(*NORMS, *mamba2_rows("mamba", "mamba_proj_bias", "mamba_conv_bias")),
        dense=(
            *linear("shared_mlp.input_linear", "ID+ID", "RS"),
            *linear("shared_mlp.output_linear", "RS", "ID"),
        ),
        sparse=(
            *GRANITE_EXPERTS,
            *linear("shared_mlp.input_linear", "SX+SX", "RS"),
            *linear("shared_mlp.output_linear", "RS", "SX"),
        ),
        defaults={"num_experts": 8, "num_experts_per_tok": 2},
        flags={"attention_bias": False, "mamba_proj_bias": False, "mamba_conv_bias": True},
        moe=_any_experts,
        linear=linear_layers(mamba2(), every_layer),
        expert_key="intermediate_size",
        adapt=_granite,
    ),
    # A layer is Mamba-2, attention, an MLP or experts.
    "nemotron_h": Family(
        architectures=("NemotronHForCausalLM",),
        outside=outside("backbone.embeddings", norm("backbone.norm_f")),
        layer=(*norm("norm"), *attention(name="mixer")),
        linear_layer=(*norm("norm"), *mamba2_rows("mixer", "use_bias", "use_conv_bias")),
        dense=(
            *norm("norm"),
            *linear("mixer.up_proj", "ID", "RS", "mlp_bias"),
            *linear("mixer.down_proj", "RS", "ID", "mlp_bias"),
        ),
        sparse=(*norm("norm"), *_LATENT_EXPERTS),
        layers="backbone.layers.{layer}.",
        prefix="backbone.",
        ties=False,
        ignored=("mtp.*",),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21504,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
        },
        flags={"use_bias": False, "use_conv_bias": True, "mlp_bias": False},
        usual=_nemotron,
        moe=_nemotron_moe,
        alone=_nemotron_alone,
        linear=linear_layers(mamba2(128, 8, 128, 64), every_layer, _kinds_of(LINEAR)),
        adapt=_nemotron_experts,
    ),
}
