"""Tables of decoders with experts whose layers differ in their heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.sizes import counted
from tpplan.models.families.rows import (
    BIASED_ATTENTION,
    EXPERTS,
    NORMS,
    ROUTER,
    attention,
    correction,
    gated,
    head_norms,
    linear,
    outside,
)
from tpplan.models.families.shape import layer_types, no_layer, windows
from tpplan.models.families.sparse import mlp_types, shared_expert
from tpplan.models.families.table import Family, Row, Shape, sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.models.config import Config

_SLIDING: Final = "sliding_attention"
#: Of layers whose scores have sinks.
_SINKS: Final = "sinks"


def _after_first(config: Config, layers: int) -> tuple[bool, ...]:  # noqa: ARG001 (no key changes it)
    """Select all layers but the first."""
    return (False,) + (True,) * (layers - 1)


#: What Laguna's ``gating`` says, one gate for each head or for each of its elements; and whether it is the former.
_GATES: Final = ((None, True), (True, True), ("per_head", True), (False, False), ("per_element", False))


def _laguna_layers(config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell the query heads of each layer, and its gates.

    Raises:
        ModelError: they are listed for another number of layers.
    """
    found: list[dict[str, object]] = [{} for _ in range(layers)]
    listed = {
        ("num_attention_heads_per_layer", "num_attention_heads"): config.numbers("num_attention_heads_per_layer"),
        ("gating_types", "gating"): config.texts("gating_types"),
    }
    for (key, own), values in listed.items():
        if values and len(values) != layers:
            raise config.error(
                f"{key} has {counted(len(values), 'entry')} for {counted(layers, 'layer')} (num_hidden_layers)"
            )
        for layer, value in zip(found, values, strict=False):
            layer[own] = value
    return tuple(found)


def _laguna(config: Config, shape: Shape) -> Shape:
    """Add the shared expert, and tell whether each head has one gate.

    Raises:
        ModelError: the gates are of no known kind.
    """
    given = config.raw("gating")
    told = given.replace("-", "_") if isinstance(given, str) else given
    one = next((one for known, one in _GATES if told == known), None)
    if one is None:
        raise config.error(f"gating is {str(given)[:60]!r}, known are per-head (or true) and per-element (or false)")
    return shared_expert(512)(config, shape.having("gate_per_head") if one else shape)


def _mimo_marked(config: Config, key: str, layers: int) -> tuple[bool, ...]:
    """Select the layers for which ``key`` lists a 1; empty without such a key.

    Raises:
        ModelError: it is no list of as many zeros and ones.
    """
    marks = config.numbers(key)
    if marks and (len(marks) != layers or not {*marks} <= {0, 1}):
        raise config.error(f"{key} is not a list of {layers} zeros and ones, one for each layer (num_hidden_layers)")
    return tuple(map(bool, marks))


def _mimo_sliding(config: Config, layers: int) -> tuple[bool, ...]:
    """Select the layers with windows: those that the config says, or all but the first and every sixth."""
    given = layer_types(config, layers, _SLIDING) or _mimo_marked(config, "hybrid_layer_pattern", layers)
    return given or tuple(layer > 0 and (layer + 1) % 6 != 0 for layer in range(layers))


def _mimo_sparse(config: Config, layers: int) -> tuple[bool, ...]:
    """Select the layers with experts: those that the config marks, or all but the first."""
    return _mimo_marked(config, "moe_layer_freq", layers) or _after_first(config, layers)


def _mimo_windows(config: Config, layers: int) -> tuple[int, ...]:
    """Read the windows; one key counts tokens before the query, another all."""
    before = config.optional_count("sliding_window_size")
    config = config.having("sliding_window", before + 1) if before else config
    return windows(129, _mimo_sliding)(config, layers)


def _mimo_heads(config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell the heads of layers with windows, whose KV heads are twice as many if no key says so, and who has sinks."""
    slides: dict[str, object] = {"num_key_value_heads": 2 * config.count("num_key_value_heads", default=4)}
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"):
        own = config.optional_count(f"swa_{key}")
        slides |= {key: own} if own else {}
    slides[_SINKS] = config.flag("add_swa_attention_sink_bias", default=True)
    full = {_SINKS: config.flag("add_full_attention_sink_bias")}
    return tuple(slides if each else full for each in _mimo_sliding(config, layers))


def _mimo(config: Config, shape: Shape) -> Shape:
    """Take the size of value heads, which is another one than that of keys."""
    return evolve(shape, v_head_dim=config.count("v_head_dim", default=128))


def _without_prediction(config: Config, layers: int) -> Config:
    """Return a config whose lists of layers leave out the layers that predict further tokens, if they have those."""
    further = config.count("num_nextn_predict_layers", default=0, minimum=0)
    for key in ("layer_types", "mlp_layer_types"):
        types = config.texts(key)
        if further and len(types) == layers + further:
            config = config.having(key, list(types[:layers]))
    return config


def _step_sliding(config: Config, layers: int) -> tuple[bool, ...]:
    """Select the layers that ``layer_types`` says have a window."""
    return layer_types(_without_prediction(config, layers), layers, _SLIDING) or no_layer(config, layers)


def _step_sparse(config: Config, layers: int) -> tuple[bool, ...]:
    """Select the layers with experts: those that are called so, or whose numbers are listed, or from the fourth on.

    Raises:
        ModelError: the list is no list of numbers.
    """
    listed = config.raw("moe_layers_enum")
    if isinstance(listed, str):
        numbers = [number.strip() for number in listed.split(",") if number.strip()]
        if not all(number.isascii() and number.isdecimal() for number in numbers):
            raise config.error(f"moe_layers_enum is {listed[:60]!r}, expected numbers of layers, separated by commas")
        config = config.having("moe_layers_enum", [int(number) for number in numbers])
    chosen = config.numbers("moe_layers_enum") if listed is not None else range(3, layers)
    otherwise = tuple(layer in chosen for layer in range(layers))
    return mlp_types(lambda _config, _layers: otherwise)(_without_prediction(config, layers), layers)


def _step_heads(config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell the query heads of layers with windows, which may be others than those of full attention."""
    heads = config.optional_count("num_sliding_attention_heads")
    if heads is None and config.raw("attention_other_setting"):
        heads = config.section("attention_other_setting").optional_count("num_attention_heads")
    slides = {"num_attention_heads": heads} if heads else {}
    return tuple(slides if each else {} for each in _step_sliding(config, layers))


LAYERED: Final[dict[str, Family]] = {
    "laguna": Family(
        architectures=("LagunaForCausalLM",),
        outside=outside(),
        layer=(
            *NORMS,
            *BIASED_ATTENTION,
            *head_norms(),
            *linear("self_attn.g_proj", "q", "RS", when="gate_per_head"),
            *linear("self_attn.g_proj", "Q", "RS", when="!gate_per_head"),
        ),
        dense=gated(),
        sparse=(
            *ROUTER,
            *correction("mlp.experts.e_score_correction_bias"),
            *EXPERTS,
            *gated("mlp.shared_expert", "SX"),
        ),
        defaults={"num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 8},
        flags={"attention_bias": False},
        window=windows(512, no_layer),
        moe=mlp_types(_after_first),
        own=_laguna_layers,
        adapt=_laguna,
    ),
    "mimo_v2_flash": Family(
        architectures=("MiMoV2FlashForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *attention("attention_bias"), Row("self_attn.attention_sink_bias", "q", _SINKS)),
        dense=gated(),
        sparse=(*ROUTER, *correction("mlp.gate.e_score_correction_bias"), *EXPERTS),
        ignored=("*.rotary_emb.inv_freq", "model.mtp.*"),
        defaults={"num_key_value_heads": 4, "head_dim": 192, "num_experts_per_tok": 8},
        flags={"attention_bias": False, _SINKS: False},
        window=_mimo_windows,
        moe=mlp_types(_mimo_sparse),
        own=_mimo_heads,
        adapt=_mimo,
    ),
    "step3p5": Family(
        architectures=("Step3p5ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION, *head_norms(), *linear("self_attn.g_proj", "q", "RS")),
        dense=gated(),
        sparse=(
            *linear("moe.gate", "e", "h", home=Axis.EXPERT_INTERMEDIATE),
            *correction("moe.router_bias"),
            Row("moe.gate_proj.weight", "e EX RS", out=1),
            Row("moe.up_proj.weight", "e EX RS", out=1),
            Row("moe.down_proj.weight", "e RS EX", out=1),
            *gated("share_expert", "SX"),
        ),
        extra_layers=True,
        defaults={
            **sizes(128_815, 4096, 11_264, 45, 64, 8, 128_000, head_dim=128),
            "num_experts": 288,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
        },
        flags={"attention_bias": False},
        window=lambda config, layers: windows(None, no_layer)(_without_prediction(config, layers), layers),
        moe=_step_sparse,
        own=_step_heads,
        adapt=shared_expert(1280, "share_expert_dim"),
    ),
}
