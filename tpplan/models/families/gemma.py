"""Tables of Gemma's language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.models.families.rows import BIASED_ATTENTION, NORMS, attention, gated, head_norms, linear, norm, outside
from tpplan.models.families.shape import PER_LAYER, except_every, layer_types, windows
from tpplan.models.families.table import SHARED_KV, Family, Row, Shape, sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tpplan.models.config import Config

#: The flag of models that add an embedding of their own to each layer, and of layers whose values are their keys.
_PLE: Final = "per_layer_inputs"
_K_IS_V: Final = "k_is_v"


def _gemma4_windows(default: int) -> Callable[[Config, int], tuple[int, ...]]:
    """Read the sliding windows, which the last layer never has."""
    read = windows(default, except_every(6, key=""))
    return lambda config, layers: (*read(config, layers)[:-1], 0)


def _shared_kv(config: Config, sliding: tuple[bool, ...], default: int = 0) -> tuple[bool, ...]:
    """Select the last ``num_kv_shared_layers``, which attend to what the last layer of their kind before them cached.

    Raises:
        ModelError: there is no layer of a kind before them.
    """
    layers = len(sliding)
    shared = config.count("num_kv_shared_layers", default=default, minimum=0)
    if shared and {*sliding} != {*sliding[: max(0, layers - shared)]}:
        kinds = "some of them slide, or some do not, and none such is before them"
        raise config.error(
            f"the last {shared} of {layers} layers share keys and values (num_kv_shared_layers): {kinds}"
        )
    return tuple(layer >= layers - shared for layer in range(layers))


def _gemma4_layers(config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell the size of heads and their number in layers with full attention, and what layers that share keys lack."""
    sliding = layer_types(config, layers, "sliding_attention") or except_every(6, key="")(config, layers)
    sliding = (*sliding[:-1], False)
    k_is_v = config.flag("attention_k_eq_v")
    full: dict[str, object] = {_K_IS_V: k_is_v}
    if config.raw(PER_LAYER) is None:
        full["head_dim"] = config.count("global_head_dim", default=512)
        heads = config.optional_count("num_global_key_value_heads") if k_is_v else None
        full.update({"num_key_value_heads": heads} if heads else {})
    shared: dict[str, object] = {SHARED_KV: True}
    if config.flag("use_double_wide_mlp"):
        shared["intermediate_size"] = 2 * config.count("intermediate_size", default=_GEMMA4["intermediate_size"])
    return tuple(
        {**({} if slides else full), **(shared if shares else {})}
        for slides, shares in zip(sliding, _shared_kv(config, sliding), strict=True)
    )


def _per_layer_inputs(config: Config, shape: Shape) -> Shape:
    """Add the embedding that has a vector for each layer, whose vocabulary may be another one."""
    width = config.count("hidden_size_per_layer_input", default=256, minimum=0)
    vocab = config.count("vocab_size_per_layer_input", default=262_144)
    alike = ("same_vocab",) if vocab == shape.vocab else ()
    shape = shape.having(*alike, pv=vocab, pl=width, pls=width * len(shape.windows))
    return shape.having(_PLE) if width else shape


def _gemma4(config: Config, shape: Shape) -> Shape:
    """Add the embeddings of layers, and the MLP beside the experts, through which all tokens go."""
    wide = config.count("intermediate_size", default=_GEMMA4["intermediate_size"]) if shape.experts else 0
    return _per_layer_inputs(config, evolve(shape, shared_intermediate=wide))


def _gemma3n_layers(config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell which layers share keys and values, and how wide each MLP is, one number or a list.

    Raises:
        ModelError: the list is of another number of layers.
    """
    sliding = layer_types(config, layers, "sliding_attention") or except_every(5, key="")(config, layers)
    shared = _shared_kv(config, sliding, 15)
    widths: tuple[object, ...] = (config.raw("intermediate_size"),) * layers
    if isinstance(widths[0], list) and len(widths[0]) != layers:
        raise config.error(f"intermediate_size has {len(widths[0])} entries for {layers} layers (num_hidden_layers)")
    if isinstance(widths[0], list):
        widths = config.numbers("intermediate_size")
    own = ({"intermediate_size": width} if width is not None else {} for width in widths)
    return tuple({SHARED_KV: shares, **width} for shares, width in zip(shared, own, strict=True))


def _gemma3n(config: Config, shape: Shape) -> Shape:
    """Add the embeddings of layers, the streams of AltUp, and the rank of LAuReL's residual."""
    streams = config.count("altup_num_inputs", default=4, minimum=2, maximum=64)
    rank = config.count("laurel_rank", default=64)
    shape = _per_layer_inputs(config, shape)
    return shape.having(streams=streams, others=streams - 1, mixed=streams * streams, laurel=rank)


_FEEDFORWARD_NORMS = (*norm("pre_feedforward_layernorm"), *norm("post_feedforward_layernorm"))

#: Attention in which layers may do without keys and values of their own, or without values.
_SHARING_ATTENTION = (
    *attention("attention_bias", "attention_bias", keys=f"!{SHARED_KV}", values=f"!{SHARED_KV} !{_K_IS_V}"),
    *norm("self_attn.q_norm", "d", home=Axis.KV_HEADS),
    *norm("self_attn.k_norm", "d", when=f"!{SHARED_KV}", home=Axis.KV_HEADS),
)
_SHARING_FLAGS = {"attention_bias": False, SHARED_KV: False, _K_IS_V: False}

#: The embedding of layers, ``pls`` wide for ``pl`` of each, and what a layer does with its own. Its ``pv`` rows are cut
#: like the vocabulary if they are as many.
_PLE_OUTSIDE = (
    Row("model.embed_tokens_per_layer.weight", "VC pls", f"{_PLE} same_vocab", lookup=""),
    Row("model.embed_tokens_per_layer.weight", "pv pls", f"{_PLE} !same_vocab", lookup=""),
    *linear("model.per_layer_model_projection", "pls", "h", when=_PLE),
    *norm("model.per_layer_projection_norm", "pl", when=_PLE),
)
_PLE_LAYER = (
    *linear("per_layer_input_gate", "pl", "h", when=_PLE),
    *linear("per_layer_projection", "h", "pl", when=_PLE),
    *norm("post_per_layer_input_norm", when=_PLE),
)

_GEMMA4: Final = sizes(262_144, 2304, 9216, 30, 8, 4, 131_072, head_dim=256)
_GEMMA4_LAYER = (*NORMS, *_FEEDFORWARD_NORMS, *_SHARING_ATTENTION, Row("layer_scalar", "1"))

GEMMA: Final[dict[str, Family]] = {
    "gemma": Family(
        architectures=("GemmaForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION),
        dense=gated(),
        defaults={"num_key_value_heads": 16, "head_dim": 256},
        flags={"attention_bias": False},
        tied=True,
    ),
    "gemma2": Family(
        architectures=("Gemma2ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_FEEDFORWARD_NORMS, *BIASED_ATTENTION),
        dense=gated(),
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        flags={"attention_bias": False},
        tied=True,
        window=windows(4096, except_every(2)),
    ),
    "gemma3_text": Family(
        architectures=("Gemma3ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_FEEDFORWARD_NORMS, *BIASED_ATTENTION, *head_norms()),
        dense=gated(),
        defaults={**_GEMMA4, "vocab_size": 262_208, "num_hidden_layers": 26},
        flags={"attention_bias": False},
        tied=True,
        window=windows(4096, except_every(6)),
    ),
    "gemma3n_text": Family(
        architectures=("Gemma3nForCausalLM",),
        outside=(
            *outside(),
            *_PLE_OUTSIDE,
            Row("model.altup_projections.{head}.weight", "h h", heads="others"),
            Row("model.altup_unembed_projections.{head}.weight", "h h", heads="others"),
        ),
        layer=(
            *NORMS,
            *_FEEDFORWARD_NORMS,
            *_SHARING_ATTENTION,
            *_PLE_LAYER,
            Row("altup.correct_output_scale", "h"),
            *linear("altup.correction_coefs", "streams", "streams"),
            *linear("altup.prediction_coefs", "mixed", "streams"),
            *linear("altup.modality_router", "streams", "h"),
            *norm("altup.router_norm"),
            *linear("laurel.linear_left", "laurel", "h"),
            *linear("laurel.linear_right", "h", "laurel"),
            *norm("laurel.post_laurel_norm"),
        ),
        dense=gated(),
        defaults=sizes(262_400, 2048, 16_384, 35, 8, 2, 32_768, head_dim=256),
        flags=_SHARING_FLAGS,
        tied=True,
        window=windows(512, except_every(5, key="")),
        own=_gemma3n_layers,
        adapt=_gemma3n,
    ),
    "gemma4_text": Family(
        architectures=("Gemma4ForCausalLM",),
        outside=(*outside(), *_PLE_OUTSIDE),
        layer=(*_GEMMA4_LAYER, *_PLE_LAYER),
        dense=gated(),
        sparse=(
            *gated("mlp", "SX"),
            *linear("router.proj", "e", "h", home=Axis.EXPERT_INTERMEDIATE),
            Row("router.scale", "h", home=Axis.EXPERT_INTERMEDIATE),
            Row("router.per_expert_scale", "e", home=Axis.EXPERT_INTERMEDIATE),
            Row("experts.gate_up_proj", "e EX+EX RS", out=1),
            Row("experts.down_proj", "e RS EX", out=1),
            *norm("post_feedforward_layernorm_1"),
            *norm("post_feedforward_layernorm_2"),
            *norm("pre_feedforward_layernorm_2"),
        ),
        defaults=_GEMMA4,
        flags=_SHARING_FLAGS,
        tied=True,
        window=_gemma4_windows(512),
        moe=lambda config, layers: (config.flag("enable_moe_block"),) * layers,
        own=_gemma4_layers,
        adapt=_gemma4,
    ),
    "gemma4_unified_text": Family(
        architectures=("Gemma4UnifiedForCausalLM",),
        outside=outside(),
        layer=_GEMMA4_LAYER,
        dense=gated(),
        defaults={**_GEMMA4, "max_position_embeddings": 262_144},
        flags=_SHARING_FLAGS,
        tied=True,
        window=_gemma4_windows(1024),
        own=_gemma4_layers,
    ),
    "vaultgemma": Family(
        architectures=("VaultGemmaForCausalLM",),
        outside=outside(),
        layer=(*norm("input_layernorm"), *norm("pre_feedforward_layernorm"), *BIASED_ATTENTION),
        dense=gated(),
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        flags={"attention_bias": False},
        tied=True,
        window=windows(4096, except_every(2)),
    ),
}
