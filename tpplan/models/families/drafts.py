"""Tables of heads that draft tokens for another model, of which they read hidden states.

Sources of names and shapes: how vLLM and SGLang load them (``vllm/model_executor/models/``: ``llama_eagle.py``,
``llama_eagle3.py``, ``qwen3_dflash.py``, ``medusa.py``, ``mlp_speculator.py``; ``sglang/srt/models/``:
``llama_eagle.py``, ``dflash.py``) and how the library speculators writes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from tpplan.core.plan import HEADS
from tpplan.models.config import Config
from tpplan.models.families.rows import ALWAYS, NORMS, attention, gated, head_norms, linear, norm
from tpplan.models.families.shape import FULL, no_layer, renamed, windows
from tpplan.models.families.table import NO_ATTENTION, Family, Row

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from tpplan.core.model import ModelSpec
    from tpplan.models.checkpoint import Tensor
    from tpplan.models.families.table import Shape

EAGLE, EAGLE3, PEAGLE, DFLASH, MEDUSA, MLP_SPECULATOR = HEADS


@frozen
class Kind:
    """What people and engines call a kind of head.

    Attributes:
        name: for people, with its article.
        vllm: what vLLM's configuration has for it.
        sglang: SGLang's algorithm, empty if it has none.
        llamacpp: llama.cpp's ``--spec-type``, empty if it has none.
    """

    name: str
    vllm: str
    sglang: str = ""
    llamacpp: str = ""


#: By ``model_type``.
KINDS: Final[dict[str, Kind]] = {
    EAGLE: Kind("an EAGLE-1 or 2 head", '"method": "eagle"', "EAGLE"),
    EAGLE3: Kind("an EAGLE-3 head", '"method": "eagle3"', "EAGLE3", "draft-eagle3"),
    PEAGLE: Kind("a P-EAGLE head", '"method": "eagle3", "parallel_drafting": true'),
    DFLASH: Kind("a DFlash head", '"method": "dflash"', "DFLASH", "draft-dflash"),
    MEDUSA: Kind("a Medusa head", '"method": "medusa"'),
    MLP_SPECULATOR: Kind("an MLP speculator", '"method": "mlp_speculator"'),
}
#: The key with which a config tells that it was taken for a head's by its name.
BY_NAME: Final = "taken_by_name"

#: The section of a config by the library speculators that describes the layers.
_LAYERS: Final = "transformer_layer_config"
_DFLASH_CONFIG: Final = "dflash_config"
#: Classes of the models that the layers of EAGLE heads are of, by whose names their configs call these too.
_PLAIN: Final = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM"})
#: What only a head has of tensors, beside layers.
_FUSES: Final = ("fc.weight", "fusion_fc.weight")

#: Flags of rows: what joins embedding and hidden state, and what some heads have beside.
_JOINS, _STATES, _QK_NORM, _OWN_HEAD, _OWN_EMBEDDING = "joins", "states", "qk_norm", "own_head", "own_embedding"
_BIASED, _BIASED_FC, _SINKS, _MASK = "attention_bias", "fc_bias", "sinks", "mask"
_BIASED_OUT, _BIASED_MLP = "output_bias", "mlp_bias"
_NORMED_STATES, _NORMED_EACH, _NORMED_INPUTS, _MORE = "norm_before_fc", "fc_norm", "layernorms", "more"
#: That the model's embedding is of another width than the head's layers, so that the head has one of its own.
_OTHER_WIDTH: Final = "other_width"
#: Flags of biases in layers.
_BIASES: Final = (_BIASED, _BIASED_OUT, _BIASED_MLP)
#: Flags, and the tensors of which a file has one if its head has what they stand for.
_TOLD: Final = {
    _BIASED_FC: ("fc.bias", "fusion_fc.bias"),
    _BIASED: ("layers.0.self_attn.q_proj.bias", "midlayer.self_attn.q_proj.bias"),
    _BIASED_OUT: ("layers.0.self_attn.o_proj.bias", "midlayer.self_attn.o_proj.bias"),
    _BIASED_MLP: ("layers.0.mlp.down_proj.bias", "midlayer.mlp.down_proj.bias"),
    _NORMED_INPUTS: ("embedding_layernorm.weight",),
    _NORMED_STATES: ("input_norm.weight",),
    _NORMED_EACH: ("fc_norm.0.weight",),
    _OWN_EMBEDDING: ("embed_tokens.weight",),
    _MASK: ("mask_embedding",),
    _OWN_HEAD: ("lm_head.weight",),
    _QK_NORM: ("layers.0.self_attn.q_norm.weight", "midlayer.self_attn.q_norm.weight"),
    _SINKS: ("layers.0.self_attn.attention_sink_bias",),
    "medusa_fc_bias": ("blocks.0.layers.0.bias", "0.0.linear.bias"),
}
#: The tensor that stands for the hidden states of tokens that are not known yet.
_MASKED: Final = "mask_hidden"
#: Hidden states of EAGLE-3 where no config numbers their layers.
_AUXILIARY: Final = 3
#: Dimensions of a matrix.
_MATRIX: Final = 2
#: Most heads of Medusa, and layers in one.
_MOST_HEADS: Final = 16
_MOST_LAYERS: Final = 8


def as_draft(config: Config, tensors: Mapping[str, Tensor], called: str) -> Config:
    """Return a config; that of a head, which names the ``model_type`` of its layers or none, with its own.

    Args:
        config: what a config.json has.
        tensors: those in files beside it, which tell what it does not.
        called: name of the model, by which vLLM knows an EAGLE head without any other sign.
    """
    names = {name.removeprefix("model.") for name in tensors}
    kind, by_name = _kind_of(config, names, called)
    if not kind:
        return config
    architecture = next(iter(config.texts("architectures")), "")
    layers = next((config.section(key).data for key in (_LAYERS, "model") if isinstance(config.raw(key), dict)), {})
    of_layers = str(layers.get("model_type") or config.raw("model_type") or "")
    family = DRAFTS[kind]
    named = architecture if architecture in family.architectures else family.architectures[0]
    told: dict[str, object] = {flag: not names.isdisjoint(own) for flag, own in _TOLD.items()} if names else {}
    if not names and kind in {EAGLE3, PEAGLE}:
        told[_QK_NORM] = of_layers.startswith("qwen3")
    if kind == MEDUSA and (matrices := [tensor.shape for tensor in tensors.values() if len(tensor.shape) == _MATRIX]):
        vocab, hidden = max(matrices)
        layers = {"vocab_size": vocab, "hidden_size": hidden}  # which first configs leave out
    # What the first heads have; others say so.
    usual: dict[str, object] = {_BIASED: of_layers == "qwen2", "fusion_bias": not layers}
    usual[_BIASED_OUT] = config.data.get(_BIASED, layers.get(_BIASED))
    data = {**usual, **layers, **config.data, **told, BY_NAME: by_name}
    data |= {"model_type": kind, "architectures": [named]}
    return Config(data, config.source)


def _kind_of(config: Config, names: AbstractSet[str], called: str) -> tuple[str, bool]:
    """Return the kind of a head, empty of other models, and whether nothing but its name tells it."""
    architecture, model_type = next(iter(config.texts("architectures")), ""), config.raw("model_type")
    kind = next((kind for kind, family in DRAFTS.items() if architecture in family.architectures), "")
    if kind == EAGLE3 and (_MASKED in names or config.raw("parallel_drafting") is True):
        return PEAGLE, False
    if not kind and isinstance(model_type, str) and model_type in {EAGLE, MEDUSA, MLP_SPECULATOR}:
        return model_type, False
    if not kind and config.raw("medusa_num_heads") is not None:
        return MEDUSA, False
    if not kind and architecture in _PLAIN and config.raw("num_hidden_layers") == 1:
        by_name = not names and "eagle-" in called.casefold()
        return EAGLE if by_name or not names.isdisjoint(_FUSES) else "", by_name
    return kind, False


def _eagle(config: Config) -> Config:
    """Read by their names whether the matrix that joins has a bias, and whether what it joins is normed."""
    biases = ("fc_bias", "eagle_fc_bias", "bias", "fusion_bias")
    config = config.having(_BIASED_FC, next((config.raw(key) for key in biases if config.raw(key) is not None), False))
    return config if _NORMED_INPUTS in config else renamed(config, {"add_para_norm": _NORMED_INPUTS})


def _usual(config: Config) -> Config:
    """Read the vocabulary of what the head proposes, which is smaller than the model's."""
    config = config.having("tokens", config.raw("vocab_size"))
    proposed = config.optional_count("draft_vocab_size")
    return config.having("vocab_size", proposed) if proposed else config


def _first_joins(_config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell which layer is the first, which reads embedding and hidden state side by side, or what joins both."""
    return tuple({_JOINS: layer == 0} for layer in range(layers))


def _listed(config: Config, *keys: str) -> int:
    """Return how many layers of the model the first of several keys numbers; 0 without any."""
    return next((len(found) for key in keys if (found := config.numbers(key))), 0)


def _eagle3(config: Config, shape: Shape) -> Shape:
    """Add the hidden states of the model, which are of its width, and are joined by one matrix.

    Raises:
        ModelError: the head proposes more tokens than there are.
    """
    width = config.optional_count("target_hidden_size") or shape.hidden
    is_alone = isinstance(config.raw("eagle_config"), dict) and (
        config.section("eagle_config").flag("use_aux_hidden_state", default=True) is False
    )
    count = _listed(config, "eagle_aux_hidden_state_layer_ids") or _AUXILIARY
    shape = _own_tokens(config, shape, width)
    return shape.having(*(() if is_alone else (_STATES,)), n=count, states=width, all_states=count * width)


def _own_tokens(config: Config, shape: Shape, width: int) -> Shape:
    """Add how many tokens the head knows beside those that it proposes, and whether its model's states are as wide.

    Raises:
        ModelError: the head proposes more tokens than there are.
    """
    more = config.count("tokens") - shape.vocab
    if more < 0:
        raise config.error(f"draft_vocab_size is {shape.vocab}, more than the {config.count('tokens')} of vocab_size")
    flags = (*((_MORE,) if more else ()), *((_OTHER_WIDTH,) if width != shape.hidden else ()))
    return shape.having(*flags, states=width, more=more)


def _dflash(config: Config, shape: Shape) -> Shape:
    """Add the hidden states of the model that become keys and values, and its own vocabulary if it has one.

    Raises:
        ModelError: the head proposes more tokens than there are.
    """
    inner = config.section(_DFLASH_CONFIG) if isinstance(config.raw(_DFLASH_CONFIG), dict) else config
    width = config.optional_count("target_hidden_size") or shape.hidden
    count = _listed(inner, "target_layer_ids", "layer_ids") or _listed(
        config, "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
    )
    sinks = inner.flag("attention_sink_bias", default=config.flag("add_swa_attention_sink_bias"))
    own = config.optional_count("draft_vocab_size") is not None
    told = (*((_SINKS,) if sinks else ()), *((_OWN_HEAD,) if own else ()))
    return _own_tokens(config, shape, width).having(*told, n=count or len(shape.windows))


def _dflash_windows(config: Config, layers: int) -> tuple[int, ...]:
    """Read the windows of its layers, which a section may give all of them."""
    inner = config.section(_DFLASH_CONFIG) if isinstance(config.raw(_DFLASH_CONFIG), dict) else None
    if inner is not None and (wide := inner.optional_count("swa_window_size")):
        config = config.having("sliding_window", wide)
    if inner is not None and inner.flag("use_swa") and set(config.texts("layer_types")) <= {FULL}:
        config = config.having("layer_types", ["sliding_attention"] * layers)
    return windows(None, no_layer)(config, layers)


def _medusa(config: Config) -> Config:
    """Read the numbers of heads and of their layers by any name, and sizes that first configs leave out.

    Raises:
        ModelError: a head has more layers than any known, or the model's sizes are missing.
    """
    heads = next((config.raw(key) for key in ("medusa_num_heads", "num_heads") if config.raw(key) is not None), 5)
    layers = next(
        (config.raw(key) for key in ("medusa_num_layers", "num_hidden_layers") if config.raw(key) is not None), 1
    )
    if missing := [key for key in ("hidden_size", "vocab_size") if config.raw(key) is None]:
        hint = "add to it what the config.json of the model that it drafts for has of them"
        raise config.error(f"{' and '.join(missing)} missing, as in configs of the first Medusa heads", hint)
    config = config.overlaid({"num_hidden_layers": 1, "heads": heads, "head_layers": layers})
    proposed = config.optional_count("truncated_vocab_size")
    return config.having("vocab_size", proposed) if proposed else config


def _medusa_heads(config: Config, shape: Shape) -> Shape:
    """Add the heads and their layers, and one output matrix for all of them, or for each."""
    layers = config.count("head_layers", minimum=0, maximum=_MOST_LAYERS)
    shared = config.flag("original_lm_head")
    flags = (NO_ATTENTION, *(f"layer{i}" for i in range(layers)), "one_head" if shared else "head_each")
    return shape.having(*flags, n=config.count("heads", maximum=_MOST_HEADS))


def _mlp_speculator(config: Config) -> Config:
    """Read its sizes by their names."""
    state = config.count("emb_dim", default=4096)
    inner = config.count("inner_dim", default=0, minimum=0) or state
    return config.overlaid({"hidden_size": inner, "states": state, "num_hidden_layers": 1})


def _mlp_stages(config: Config, shape: Shape) -> Shape:
    """Add its stages, one for each token that it proposes, whose weights may be the same.

    Raises:
        ModelError: weights are the same, but there is one stage alone.
    """
    stages, tied = config.count("n_predict", default=3, maximum=64), config.flag("tie_weights")
    if tied and stages == 1:
        raise config.error("tie_weights is true, but n_predict is 1", "a single stage shares its weights with none")
    own = 1 if tied else stages
    further = (1 if tied else stages - 1) if stages > 1 else 0
    flags = (NO_ATTENTION, *(("further",) if further else ()))
    return shape.having(*flags, n=own, one=1, further=further, states=config.count("states"))


def _projection(name: str, out: str) -> tuple[Row, ...]:
    """Return the rows of a projection of what the first layer joins, or of the hidden state."""
    return (
        *linear(f"self_attn.{name}", out, "RS+RS", _BIASED, when=_JOINS),
        *linear(f"self_attn.{name}", out, "RS", _BIASED, when=f"!{_JOINS}"),
    )


def _embedding(when: str) -> tuple[Row, ...]:
    """Return the row of an embedding of the head's own, of all tokens, not only of those that it proposes."""
    return tuple(
        Row("embed_tokens.weight", f"{tokens} RS", f"{_OWN_EMBEDDING} {mark}{_MORE} {when}", lookup=ALWAYS)
        for tokens, mark in (("VC+more", ""), ("VC", "!"))
    )


_ROTARY: Final = "*.rotary_emb.inv_freq"
#: Sizes that no such head has.
_NO_LAYERS: Final = {"num_attention_heads": 1, "max_position_embeddings": 2**20, "intermediate_size": 1}
#: What a head has in no layer, for whose room a layer stands that has nothing.
_NOTHING: Final = Family(
    architectures=(),
    outside=(),
    layer=(),
    layers="layers.{layer}.",
    prefix="",
    ties=False,
    defaults=_NO_LAYERS,
    flags={NO_ATTENTION: True},
)

_EAGLE3: Final = Family(
    architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
    outside=(
        *linear("fc", "RS", "n*states", when=_STATES),
        *norm("input_norm", "all_states", when=f"{_STATES} {_NORMED_STATES}"),
        *norm("fc_norm.{head}", "states", when=f"{_STATES} {_NORMED_EACH}", heads="n"),
        *norm("norm"),
        *linear("lm_head", "VC", "RS"),
        *_embedding(_OTHER_WIDTH),
    ),
    layer=(
        *NORMS,
        *norm("hidden_norm", when=_JOINS),
        *_projection("q_proj", "Q"),
        *_projection("k_proj", "K"),
        *_projection("v_proj", "V"),
        *linear("self_attn.o_proj", "RS", "O", _BIASED_OUT),
        *head_norms(when=_QK_NORM),
    ),
    dense=gated(bias=_BIASED_MLP),
    layers="layers.{layer}.",
    prefix="",
    renamed={"midlayer.": "layers.0."},
    ignored=("d2t", "t2d", "embed_tokens.weight", "verifier_*", _ROTARY),
    flags={
        **dict.fromkeys((*_BIASES, _QK_NORM, _NORMED_STATES, _NORMED_EACH), False),
        **dict.fromkeys((_JOINS, _OWN_EMBEDDING), True),
    },
    ties=False,
    usual=_usual,
    own=_first_joins,
    adapt=_eagle3,
)

#: Starts of names of Medusa's heads as they were first saved, and with a start before that.
_MEDUSA_NAMES: Final = {
    "medusa_heads.": "",
    **{f"{h}.{i}.linear.": f"blocks.{h}.layers.{i}." for h in range(_MOST_HEADS) for i in range(_MOST_LAYERS)},
    **{f"{h}.{i}.weight": f"lm_heads.{h}.weight" for h in range(_MOST_HEADS) for i in range(_MOST_LAYERS + 1)},
}

DRAFTS: Final[dict[str, Family]] = {
    # The embedding and the output matrix are the model's, wherever they are stored once more.
    EAGLE: Family(
        architectures=("EagleLlamaForCausalLM", "EAGLEModel", "EagleSpeculator", "LlamaForCausalLMEagle"),
        outside=(
            *linear("fc", "RS", "RS+RS", _BIASED_FC),
            *norm("embedding_layernorm", when=_NORMED_INPUTS),
            *norm("hidden_states_layernorm", when=_NORMED_INPUTS),
        ),
        layer=(
            *norm("input_layernorm", when=f"!{_JOINS}"),
            *norm("post_attention_layernorm"),
            *attention(_BIASED, _BIASED_OUT),
        ),
        dense=gated(bias=_BIASED_MLP),
        layers="layers.{layer}.",
        prefix="",
        renamed={
            "model.": "",
            "fusion_fc.": "fc.",
            "transformer.": "layers.0.",
            "pre_lm_head_layernorm.": "hidden_states_layernorm.",
        },
        ignored=("embed_tokens.weight", "lm_head.weight", _ROTARY),
        flags={**dict.fromkeys((*_BIASES, _NORMED_INPUTS), False), _JOINS: True, _BIASED_FC: True},
        ties=False,
        usual=_eagle,
        own=_first_joins,
    ),
    EAGLE3: _EAGLE3,
    # It drafts all tokens at once, and was trained with an embedding of its own.
    PEAGLE: evolve(
        _EAGLE3,
        architectures=("PEagleSpeculator", "PEagleDraftModel", *_EAGLE3.architectures),
        outside=(*_EAGLE3.outside, *_embedding(f"!{_OTHER_WIDTH}")),
        ignored=("d2t", "t2d", "verifier_*", _MASKED, _ROTARY),
    ),
    # Its layers attend to keys and values of the model's hidden states, which are cached for every token.
    DFLASH: Family(
        architectures=("DFlashDraftModel", "DFlashSpeculator"),
        outside=(
            *linear("fc", "RS", "n*states"),
            *norm("hidden_norm"),
            Row("mask_embedding", "h", _MASK),
            *norm("norm"),
            *linear("lm_head", "VC", "RS", when=_OWN_HEAD),
            *_embedding(_OTHER_WIDTH),
        ),
        layer=(
            *NORMS,
            *attention(_BIASED, _BIASED_OUT),
            *head_norms(),
            Row("self_attn.attention_sink_bias", "q", _SINKS),
        ),
        dense=gated(),
        layers="layers.{layer}.",
        prefix="",
        renamed={"model.": "", "midlayer.": "layers.0."},
        ignored=("d2t", "t2d", "embed_tokens.weight", "verifier_*", _ROTARY),
        flags={**dict.fromkeys((_BIASED, _BIASED_OUT, _SINKS, _OWN_HEAD, _MASK), False), _OWN_EMBEDDING: True},
        ties=False,
        window=_dflash_windows,
        usual=_usual,
        adapt=_dflash,
    ),
    # A head is some layers of the hidden state's width and an output matrix.
    MEDUSA: evolve(
        _NOTHING,
        architectures=("MedusaModel",),
        outside=(
            *(
                evolve(row, heads="n")
                for i in range(_MOST_LAYERS)
                for row in linear(f"blocks.{{head}}.layers.{i}", "RS", "RS", "medusa_fc_bias", when=f"layer{i}")
            ),
            *(evolve(row, heads="n") for row in linear("lm_heads.{head}", "VC", "RS", when="head_each")),
            *linear("lm_head", "VC", "RS", when="one_head"),
        ),
        renamed=_MEDUSA_NAMES,
        ignored=("token_map",),
        flags={NO_ATTENTION: True, "medusa_fc_bias": False},
        usual=_medusa,
        adapt=_medusa_heads,
    ),
    MLP_SPECULATOR: evolve(
        _NOTHING,
        architectures=("MLPSpeculatorPreTrainedModel",),
        outside=(
            Row("emb.{head}.weight", "VC RS", heads="n", lookup=ALWAYS),
            Row("proj.0.weight", "RS states"),
            Row("proj.{head}.weight", "RS RS", "further", heads="further", first="one"),
            *norm("ln.{head}", bias=True, heads="n"),
            Row("head.{head}.weight", "VC RS", heads="n"),
        ),
        renamed={"speculator.": ""},
        usual=_mlp_speculator,
        adapt=_mlp_stages,
    ),
}


def states_of(draft: ModelSpec) -> int | None:
    """Return how wide the hidden states are that a head reads of its model; None for models that read none."""
    if draft.model_type not in DRAFTS:
        return None
    inputs = {parameter.name: parameter.dims[-1] for parameter in draft.parameters}
    name = next((name for name in ("fc.weight", "blocks.0.layers.0.weight", "proj.0.weight") if name in inputs), "")
    return inputs[name][-1].length if name else None


def is_head(architecture: str) -> bool:
    """Tell whether an architecture is that of a head, which cannot run without the model that it drafts for."""
    return any(architecture in family.architectures for family in DRAFTS.values())
