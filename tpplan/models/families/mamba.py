"""Tables of decoders with Mamba layers, and the sizes and rows of such layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.model import LinearAttention
from tpplan.models.families.packed import GRANITE_EXPERTS
from tpplan.models.families.rows import (
    ALWAYS,
    BIASED_ATTENTION,
    NORMS,
    attention,
    correction,
    gated,
    linear,
    norm,
    outside,
)
from tpplan.models.families.shape import FULL, LINEAR, MAX_PARTS, are_of_kind, every_layer, except_listed, linear_layers
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


def mamba2_rows(
    name: str, bias: str | None, conv_bias: str, normed: str = "", out_bias: str | None = None
) -> tuple[Row, ...]:
    """Return the rows of Mamba-2, which projects to gate, x, B, C and dt at once.

    Args:
        name: how its names start.
        bias: the flag of the biases of its projections.
        conv_bias: the flag of the bias of its convolution.
        normed: the flag of the norm of its output; empty for always.
        out_bias: the flag of the bias of the projection back, if it is another.
    """
    return (
        *linear(f"{name}.in_proj", "LV+LV+LK+LK+lh", "RS", bias),
        Row(f"{name}.conv1d.weight", "LV+LK+LK 1 ck"),
        Row(f"{name}.conv1d.bias", "LV+LK+LK", conv_bias),
        Row(f"{name}.dt_bias", "lh"),
        Row(f"{name}.A_log", "lh"),
        Row(f"{name}.D", "lh"),
        *norm(f"{name}.norm", "LV", when=normed),
        *linear(f"{name}.out_proj", "RS", "LV", out_bias or bias),
    )


def _granite(config: Config, shape: Shape) -> Shape:
    """Add the shared experts, which have a width of their own and are all that models without experts have."""
    width = config.count("shared_intermediate_size", default=1024)
    return evolve(shape, shared_intermediate=width) if shape.experts else evolve(shape, intermediate=width)


def _any_experts(config: Config, layers: int) -> tuple[bool, ...]:
    """Select all layers, or none if there are no experts."""
    return (config.count("num_experts", default=8, minimum=0, maximum=MAX_PARTS) > 0,) * layers


def _channels_of_falcon(config: Config) -> tuple[int, str]:
    """Return ``mamba_d_ssm``, which may be null for what other families have."""
    own = config.optional_count("mamba_d_ssm", default=1024)
    return (own, "mamba_d_ssm") if own else _expanded(config)


def _periodic(kind: str, period: int, offset: int) -> Callable[[Config, int], tuple[bool, ...]]:
    """Return how Jamba selects one layer of each period, given the defaults of both keys."""

    def choose(config: Config, layers: int) -> tuple[bool, ...]:
        every = config.count(f"{kind}_layer_period", default=period)
        first = config.count(f"{kind}_layer_offset", default=offset, minimum=0)
        if first >= every:
            raise config.error(f"{kind}_layer_offset is {first}, not less than the {every} of {kind}_layer_period")
        return tuple(layer % every == first for layer in range(layers))

    return choose


_JAMBA_ATTENTION = _periodic("attn", 8, 4)
_JAMBA_EXPERTS = _periodic("expert", 2, 1)


def _mamba1(config: Config, layers: int) -> tuple[LinearAttention | None, ...]:
    """Read the sizes of Mamba-1, whose channels have a state each and share B, C and what dt is projected from."""
    each = LinearAttention(
        key_heads=1,
        value_heads=_expanded(config)[0],
        key_head_dim=config.count("mamba_d_state", default=16),
        value_head_dim=1,
        kernel=config.count("mamba_d_conv", default=4),
        shared_keys=True,
        plain_keys=True,
    )
    return tuple(None if full else each for full in _JAMBA_ATTENTION(config, layers))


def _jamba_moe(config: Config, layers: int) -> tuple[bool, ...]:
    """Select the layers with experts, none if there is one expert."""
    experts = config.count("num_experts", default=16, maximum=MAX_PARTS)
    return tuple(chosen and experts > 1 for chosen in _JAMBA_EXPERTS(config, layers))


def _jamba(config: Config, shape: Shape) -> Shape:
    """Add the rank of dt."""
    rank = -(-shape.hidden // 16)
    return evolve(
        shape,
        dt_rank=rank if config.raw("mamba_dt_rank") == "auto" else config.count("mamba_dt_rank", default=rank),
    )


#: What all channels share is summed over the devices, and so is each layer's norm of it everywhere.
_MAMBA1 = (
    *linear("mamba.in_proj", "LV+LV", "RS", "mamba_proj_bias"),
    Row("mamba.conv1d.weight", "LV 1 ck"),
    Row("mamba.conv1d.bias", "LV", "mamba_conv_bias"),
    Row("mamba.x_proj.weight", "lr+lk+lk LV", home=Axis.LINEAR_HEADS),
    *linear("mamba.dt_proj", "LV", "lr", ALWAYS),
    Row("mamba.A_log", "LV lk"),
    Row("mamba.D", "LV"),
    *norm("mamba.dt_layernorm", "lr", home=Axis.LINEAR_HEADS),
    *norm("mamba.b_layernorm", "lk", home=Axis.LINEAR_HEADS),
    *norm("mamba.c_layernorm", "lk", home=Axis.LINEAR_HEADS),
    *linear("mamba.out_proj", "RS", "LV", "mamba_proj_bias"),
)

_PRE_FF_NORMS = (*norm("input_layernorm"), *norm("pre_ff_layernorm"))
_FINAL_NORM = norm("model.final_layernorm")

#: What the pattern of Nemotron-H writes for each kind of layer, and what kinds there are.
_PATTERN: Final = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
_NEMOTRON_KINDS: Final = frozenset(_PATTERN.values())


def _kinds_of(kind: str) -> tuple[str, ...]:
    """Return the kinds of Nemotron-H's layers, this one last."""
    return *sorted(_NEMOTRON_KINDS - {kind}), kind


def nemotron_kinds(config: Config, key: str, pattern: str) -> tuple[str, ...]:
    """Return the kinds of Nemotron-H's layers that one key lists, or another has letters for; empty without both."""
    return config.texts(key) or tuple(_PATTERN.get(letter, letter) for letter in config.text(pattern))


def _nemotron(config: Config) -> Config:
    """Read the kinds of layers from ``hybrid_override_pattern``, and the number of layers from the kinds."""
    types = nemotron_kinds(config, "layer_types", "hybrid_override_pattern") or (LINEAR, "moe", FULL, "mlp")
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
    "bamba": Family(
        architectures=("BambaForCausalLM",),
        outside=outside(final=_FINAL_NORM),
        layer=(*_PRE_FF_NORMS, *BIASED_ATTENTION),
        linear_layer=(*_PRE_FF_NORMS, *mamba2_rows("mamba", "mamba_proj_bias", "mamba_conv_bias")),
        dense=gated("feed_forward", bias="mlp_bias"),
        defaults={"num_key_value_heads": 8},
        flags={"attention_bias": False, "mlp_bias": False, "mamba_proj_bias": False, "mamba_conv_bias": True},
        linear=linear_layers(mamba2(), except_listed("attn_layer_indices", otherwise=True)),
    ),
    # Each layer has attention and Mamba-2 side by side.
    "falcon_h1": Family(
        architectures=("FalconH1ForCausalLM",),
        outside=outside(final=_FINAL_NORM),
        layer=(),
        linear_layer=(
            *_PRE_FF_NORMS,
            *BIASED_ATTENTION,
            *mamba2_rows("mamba", "mamba_proj_bias", "mamba_conv_bias", "mamba_rms_norm", "projectors_bias"),
        ),
        dense=gated("feed_forward", bias="mlp_bias"),
        defaults={"num_key_value_heads": 8},
        flags={
            "attention_bias": False,
            "mlp_bias": False,
            "mamba_proj_bias": False,
            "mamba_conv_bias": True,
            "mamba_rms_norm": False,
            "projectors_bias": False,
        },
        parallel=True,
        linear=lambda config, layers: (mamba2(channels=_channels_of_falcon)(config),) * layers,
    ),
    "jamba": Family(
        architectures=("JambaForCausalLM",),
        outside=outside(final=_FINAL_NORM),
        layer=(*_PRE_FF_NORMS, *attention()),
        linear_layer=(*_PRE_FF_NORMS, *_MAMBA1),
        dense=gated("feed_forward"),
        sparse=(
            *linear("feed_forward.router", "e", "h", home=Axis.EXPERT_INTERMEDIATE),
            *gated("feed_forward.experts.{expert}", "EX"),
        ),
        defaults={"num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2},
        flags={"mamba_proj_bias": False, "mamba_conv_bias": True},
        moe=_jamba_moe,
        linear=_mamba1,
        expert_key="intermediate_size",
        adapt=_jamba,
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
