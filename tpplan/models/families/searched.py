"""Tables of decoders in which a search chose for each layer what it has (DeciLM, Nemotron)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.sizes import counted
from tpplan.models.config import MAX_COUNT, Config
from tpplan.models.families.rows import linear, norm, outside
from tpplan.models.families.table import NO_ATTENTION, Family, Row, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Flags of layers: what is normed, and a matrix in place of attention or MLP.
_ATTENTION_NORM, _MLP_NORM = "attention_norm", "mlp_norm"
_AS_MATRIX, _MLP_AS_MATRIX, _NO_MLP = "attention_as_matrix", "mlp_as_matrix", "no_mlp"

#: Widths of MLPs are multiples of it.
_MULTIPLE: Final = 256


def _nemotron_nas_layers(config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell what each of ``block_configs`` has: its KV heads and the width of its MLP, if not nothing or a matrix.

    Raises:
        ModelError: there is none for each layer, or one is not as DeciLM's are.
    """
    blocks = config.raw("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers:
        what = f"has {counted(len(blocks), 'entry')}" if isinstance(blocks, list) else "is no list"
        raise config.error(f"block_configs {what} for {counted(layers, 'layer')} (num_hidden_layers)")
    return tuple(_block(config, block, f"{config.source}: block_configs[{i}]") for i, block in enumerate(blocks))


def _block(config: Config, block: object, source: str) -> Mapping[str, object]:
    own = Config(block if isinstance(block, dict) else {}, source)
    attention, mlp = own.section("attention"), own.section("ffn")
    found: dict[str, object] = {}
    for part, normed, left_out, as_matrix in (
        (attention, _ATTENTION_NORM, NO_ATTENTION, _AS_MATRIX),
        (mlp, _MLP_NORM, _NO_MLP, _MLP_AS_MATRIX),
    ):
        matrix = part.flag("replace_with_linear")
        nothing = part.flag("no_op")
        found |= {as_matrix: matrix and not nothing, left_out: matrix or nothing, normed: not nothing}
    if found[NO_ATTENTION]:
        found["num_key_value_heads"] = None
    else:
        heads, group = config.count("num_attention_heads"), attention.count("n_heads_in_group")
        if heads % group:
            raise attention.error(
                f"{heads} query heads (num_attention_heads) are not a multiple of n_heads_in_group {group}"
            )
        found["num_key_value_heads"] = heads // group
    found["intermediate_size"] = 1 if found[_NO_MLP] else _width(config, mlp)
    return found


def _width(config: Config, mlp: Config) -> int:
    """Return the width of an MLP, by its factor of what is usual for a hidden size."""
    factor = mlp.raw("ffn_mult")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < _MULTIPLE:
        raise mlp.error(f"ffn_mult is {str(factor)[:60]}, expected a number between 0 and {_MULTIPLE}")
    width = int(2 * factor * config.count("hidden_size") / 3)
    return min(MAX_COUNT, -(-width // _MULTIPLE) * _MULTIPLE)


def _nemotron_nas(config: Config, shape: Shape) -> Shape:  # noqa: ARG001 (the flags say it)
    """Leave out what a layer has none of."""
    return evolve(shape, intermediate=0) if _NO_MLP in shape.flags else shape


def _attention(name: str, out: str, inputs: str) -> tuple[Row, ...]:
    return linear(f"self_attn.{name}", out, inputs, "attention_bias", when=f"!{NO_ATTENTION}")


def _mlp(name: str, out: str, inputs: str) -> tuple[Row, ...]:
    return linear(f"mlp.{name}", out, inputs, "mlp_bias", when=f"!{_NO_MLP}")


SEARCHED: Final[dict[str, Family]] = {
    "nemotron-nas": Family(
        architectures=("DeciLMForCausalLM",),
        outside=outside(),
        layer=(
            *norm("input_layernorm", when=_ATTENTION_NORM),
            *_attention("q_proj", "Q", "RS"),
            *_attention("k_proj", "K", "RS"),
            *_attention("v_proj", "V", "RS"),
            *_attention("o_proj", "RS", "O"),
            *linear("self_attn.linear_attn", "RS", "h", "attention_bias", when=_AS_MATRIX),
            *norm("post_attention_layernorm", when=_MLP_NORM),
        ),
        dense=(
            *_mlp("gate_proj", "ID", "RS"),
            *_mlp("up_proj", "ID", "RS"),
            *_mlp("down_proj", "RS", "ID"),
            *linear("mlp.linear_mlp", "RS", "h", "mlp_bias", when=_MLP_AS_MATRIX),
        ),
        flags={
            **dict.fromkeys(("attention_bias", "mlp_bias", NO_ATTENTION, _AS_MATRIX, _NO_MLP, _MLP_AS_MATRIX), False),
            **dict.fromkeys((_ATTENTION_NORM, _MLP_NORM), True),
        },
        own=_nemotron_nas_layers,
        adapt=_nemotron_nas,
    ),
}
