"""Tables of decoders with Mamba-2 in all layers, and few blocks of attention and MLP that several layers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.models.families.mamba import mamba2, mamba2_rows
from tpplan.models.families.rows import ALWAYS, attention, linear, norm, outside
from tpplan.models.families.shape import LINEAR, MAX_PARTS, TIED, are_of_kind
from tpplan.models.families.table import NO_ATTENTION, Family, Row, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.models.config import Config

_HYBRID: Final = "hybrid"
#: The flag of layers whose files have the block that later ones share, and that of a block with adapters.
_OWNS: Final = "owns_block"
_ADAPTED: Final = "use_shared_attention_adapter"
#: Numbers of the first layer with a block among those that share it, and of these layers.
_BLOCK: Final = "block_number"
_USES: Final = "block_uses"

#: The layers with a block where a config lists no kinds, which only models of so many layers may leave out.
_USUAL: Final = frozenset((*range(6, 43, 6), 47, 51))
_USUAL_LAYERS: Final = 54


def _hybrids(config: Config, layers: int) -> tuple[bool, ...]:
    """Tell which layers have a block of attention and an MLP before Mamba-2.

    Raises:
        ModelError: the config does not list kinds for the layers, or others than these two.
    """
    if kinds := are_of_kind(config, "layer_types", layers, (LINEAR, _HYBRID)):
        return kinds
    if layers != _USUAL_LAYERS:
        raise config.error(f"layers_block_type is missing, which {layers} layers (num_hidden_layers) need")
    return tuple(layer in _USUAL for layer in range(layers))


def _layers(config: Config, layers: int) -> tuple[Mapping[str, object], ...]:
    """Tell which layers have a block, which have it in their files, and how many share that.

    As in transformers, nothing is shared where the output matrix is not the embedding.
    """
    hybrids = _hybrids(config, layers)
    blocks = config.count("num_mem_blocks", default=1, maximum=MAX_PARTS)
    shares = config.flag(TIED, default=True)
    number, own = 0, []
    for hybrid in hybrids:
        owns = hybrid and (number < blocks or not shares)
        first = number % blocks
        uses = len(range(first, sum(hybrids), blocks))
        own.append({NO_ATTENTION: not hybrid, _OWNS: owns, _BLOCK: first * owns, _USES: uses * owns})
        number += hybrid
    return tuple(own)


def _zamba2(config: Config, shape: Shape) -> Shape:
    """Add what adapters are numbered by and their rank; heads are parts of twice the hidden size.

    Raises:
        ModelError: twice the hidden size does not divide into heads, or adapters are of fewer keys than queries.
    """
    width = 2 * shape.hidden
    if width % shape.q_heads:
        raise config.error(f"2 × hidden_size is {width}, not a multiple of {shape.q_heads} query heads")
    if _ADAPTED in shape.flags and shape.kv_heads != shape.q_heads:
        heads = f"{shape.kv_heads} key/value heads (num_key_value_heads) for {shape.q_heads} query heads"
        raise config.error(f"{heads}, which {_ADAPTED} does not allow")
    size = width // shape.q_heads
    context = 16_384 if config.flag("use_long_context") else shape.context
    return evolve(shape, head_dim=size, v_head_dim=size, context=context).having(
        adapter=config.count("adapter_rank", default=128),
        block=config.count(_BLOCK, default=0, minimum=0),
        blocks=config.count("num_mem_blocks", default=1, maximum=MAX_PARTS),
        uses=config.count(_USES, default=0, minimum=0),
    )


def _of(rows: tuple[Row, ...], when: str) -> tuple[Row, ...]:
    """Return rows of layers for which a flag holds."""
    return tuple(evolve(row, when=f"{row.when} {when}".strip()) for row in rows)


def _adapters(name: str, inputs: str, out: str, when: str, home: Axis) -> tuple[Row, ...]:
    """Return the rows of what each layer that shares a matrix adds to its products, through a rank."""
    rows = (
        Row(f"{name}.{{head}}.0.weight", f"adapter {inputs}", f"{_OWNS} {when}", home),
        Row(f"{name}.{{head}}.1.weight", f"{out} adapter", f"{_OWNS} {when}"),
    )
    return tuple(evolve(row, heads="uses", first="block", step="blocks") for row in rows)


_BLOCK_NAME: Final = "shared_transformer"
_MAMBA: Final = (*norm("input_layernorm"), *mamba2_rows("mamba", "add_bias_linear", ALWAYS))

#: The block takes the hidden state joined with the embedding.
_ATTENTION: Final = (
    *norm(f"{_BLOCK_NAME}.input_layernorm", "h+h"),
    *norm(f"{_BLOCK_NAME}.pre_ff_layernorm"),
    *(
        evolve(row, dims=row.dims if "o_proj" in row.name else f"{row.dims}+RS")
        for row in attention(name=f"{_BLOCK_NAME}.self_attn")
    ),
)

ZAMBA: Final[dict[str, Family]] = {
    "zamba2": Family(
        architectures=("Zamba2ForCausalLM",),
        outside=outside(final=norm("model.final_layernorm")),
        layer=(),
        linear_layer=(
            *_of(_MAMBA, NO_ATTENTION),
            *_of(tuple(evolve(row, name=f"mamba_decoder.{row.name}") for row in _MAMBA), f"!{NO_ATTENTION}"),
            *linear("linear", "RS", "RS", when=f"!{NO_ATTENTION}"),
            *_of(_ATTENTION, _OWNS),
            *(
                row
                for letter, out in zip("qkv", ("Q", "K", "V"), strict=True)
                for row in _adapters(
                    f"{_BLOCK_NAME}.self_attn.linear_{letter}_adapter_list", "h+h", out, _ADAPTED, Axis.KV_HEADS
                )
            ),
        ),
        dense=(
            *linear(f"{_BLOCK_NAME}.feed_forward.gate_up_proj", "ID+ID", "RS", "add_bias_linear", when=_OWNS),
            *linear(f"{_BLOCK_NAME}.feed_forward.down_proj", "RS", "ID", "add_bias_linear", when=_OWNS),
            *_adapters(f"{_BLOCK_NAME}.feed_forward.gate_up_proj_adapter_list", "h", "ID+ID", "", Axis.INTERMEDIATE),
        ),
        defaults={"max_position_embeddings": 4096},
        flags={
            "add_bias_linear": False,
            _ADAPTED: False,
            NO_ATTENTION: False,
            _OWNS: False,
        },
        tied=True,
        mlp_ratio=4,
        parallel=True,
        linear=lambda config, layers: (mamba2(8, 1, 64)(config),) * layers,
        alone=lambda config, layers: tuple("" if hybrid else "mixer" for hybrid in _hybrids(config, layers)),
        own=_layers,
        adapt=_zamba2,
        note="blocks of attention and MLP are stored once and read by several layers; an estimate counts them once",
    ),
}
