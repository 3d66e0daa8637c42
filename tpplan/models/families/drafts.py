"""Tables of heads that draft tokens for another model, of which they read hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tpplan.core.model import Segment
from tpplan.models.config import Config
from tpplan.models.families.rows import NORMS, gated, linear, norm
from tpplan.models.families.table import Family, Row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.core.model import ModelSpec
    from tpplan.models.families.table import Shape

EAGLE3: Final = "eagle3"

#: The section of a config by the library speculators that describes the layers.
_LAYERS: Final = "transformer_layer_config"
_JOINS: Final = "joins"
#: Hidden states that a step reads, of three layers of the model.
_STATES: Final = 3


def as_draft(config: Config) -> Config:
    """Return a config; that of an EAGLE-3 head, which names the ``model_type`` of its layers or none, with its own."""
    architecture = next(iter(config.texts("architectures")), "")
    if architecture not in DRAFTS[EAGLE3].architectures:
        return config
    layers = config.section(_LAYERS).data if isinstance(config.raw(_LAYERS), dict) else {}
    return Config({**layers, **config.data, "model_type": EAGLE3}, config.source)


def _usual(config: Config) -> Config:
    """Read the vocabulary of what the head proposes, which is smaller than the model's."""
    proposed = config.optional_count("draft_vocab_size")
    return config.having("vocab_size", proposed) if proposed else config


def _first_joins(_config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell that the first layer reads embedding and hidden state side by side."""
    return tuple({_JOINS: layer == 0} for layer in range(layers))


def _eagle3(config: Config, shape: Shape) -> Shape:
    """Add the hidden states of the model, which are of its width, and are joined by one matrix."""
    width = config.optional_count("target_hidden_size") or shape.hidden
    is_alone = isinstance(config.raw("eagle_config"), dict) and (
        config.section("eagle_config").flag("use_aux_hidden_state", default=True) is False
    )
    return shape.having(*() if is_alone else ("states",), states=Segment(None, _STATES * width))


def _projection(name: str, out: str) -> tuple[Row, ...]:
    """Return the rows of a projection of what the first layer joins, or of the hidden state."""
    return (
        *linear(f"self_attn.{name}", out, "RS+RS", "attention_bias", when=_JOINS),
        *linear(f"self_attn.{name}", out, "RS", "attention_bias", when=f"!{_JOINS}"),
    )


DRAFTS: Final[dict[str, Family]] = {
    # Names as SGLang, vLLM and speculators read them; the embedding is the model's, wherever it is stored once more.
    EAGLE3: Family(
        architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
        outside=(*linear("fc", "RS", "states", when="states"), *norm("norm"), *linear("lm_head", "VC", "RS")),
        layer=(
            *NORMS,
            *norm("hidden_norm"),
            *_projection("q_proj", "Q"),
            *_projection("k_proj", "K"),
            *_projection("v_proj", "V"),
            *linear("self_attn.o_proj", "RS", "O"),
        ),
        dense=gated(),
        layers="layers.{layer}.",
        prefix="",
        renamed={"midlayer.": "layers.0."},
        ignored=("d2t", "t2d", "embed_tokens.weight", "*.rotary_emb.inv_freq"),
        flags={"attention_bias": False, _JOINS: True},
        ties=False,
        usual=_usual,
        own=_first_joins,
        adapt=_eagle3,
    ),
}


def states_of(draft: ModelSpec) -> int | None:
    """Return how wide the hidden states are that a head reads of its model; None for models that read none."""
    found = (parameter.shape[1] // _STATES for parameter in draft.parameters if parameter.name == "fc.weight")
    return next(found, None) if draft.model_type in DRAFTS else None


def is_head(architecture: str) -> bool:
    """Tell whether an architecture is that of a head, which cannot run without the model that it drafts for."""
    return any(architecture in family.architectures for family in DRAFTS.values())
