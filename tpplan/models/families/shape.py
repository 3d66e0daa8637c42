"""From a config.json to the numbers that the family tables refer to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import MAX_LAYERS
from tpplan.core.sizes import counted
from tpplan.models.config import STAND_IN
from tpplan.models.families.table import Family, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tpplan.core.model import LinearAttention
    from tpplan.models.config import Config

#: More heads or experts than this is a mistake or an attack.
MAX_PARTS: Final = 2**16

#: What ``layer_types`` calls layers that cache all tokens.
FULL: Final = "full_attention"

#: And those that keep a state.
LINEAR: Final = "linear_attention"

#: What both were called before (transformers renames them).
_OLD_KINDS: Final = {"attention": FULL, "mamba": LINEAR}

#: The flag that every family has: the output matrix is the embedding.
TIED: Final = "tie_word_embeddings"

#: And that its checkpoint has all experts of a layer in one tensor, of families that have it either way.
STACKED: Final = "stacked_experts"


#: The key with what layers have of their own, as transformers saves it: by the numbers of layers, keys and values.
PER_LAYER: Final = "per_layer_config"


def read_shape(config: Config, family: Family, *, tied: bool, stacked: bool) -> Shape:
    """Read what the tables of ``family`` need from the language model's own ``config``, and which form it is stored in.

    Raises:
        ModelError: a key is missing, is of the wrong type or out of range, or two of them contradict each other.
    """
    config = family.usual(config) if family.usual else config
    layers = _layer_count(config, family)
    known: dict[str, Shape] = {}
    shapes = []
    for own in _own_keys(config, family, layers):
        kind = repr(sorted(own.items()))
        if kind not in known:
            known[kind] = _read(config.overlaid(own), family, tied=tied, stacked=stacked)
        shapes.append(known[kind])
    if len({(shape.hidden, shape.vocab, shape.context) for shape in shapes}) > 1:
        raise config.error(f"layers differ in hidden_size, vocab_size or max_position_embeddings ({PER_LAYER})")
    windows = tuple(shape.windows[i] for i, shape in enumerate(shapes))
    sparse = tuple(shape.sparse[i] for i, shape in enumerate(shapes))
    linear = tuple(shape.linear[i] for i, shape in enumerate(shapes))
    first, *others = shapes = [evolve(shape, windows=windows, sparse=sparse, linear=linear) for shape in shapes]
    return first if all(shape == first for shape in others) else evolve(first, layers=tuple(shapes))


def layer_count(config: Config, family: Family) -> int:
    """Return how many layers the language model's own ``config`` describes.

    Raises:
        ModelError: it does not say, or the number is none, or out of range.
    """
    return _layer_count(family.usual(config) if family.usual else config, family)


def _layer_count(config: Config, family: Family) -> int:
    default = family.defaults.get("num_hidden_layers")
    listed = (value for key, value in config.data.items() if "layer" in key or key.endswith("types"))
    fitting = max((len(value) for value in listed if isinstance(value, list)), default=STAND_IN)
    return config.count("num_hidden_layers", default=default, maximum=MAX_LAYERS, stand_in=fitting)


def _own_keys(config: Config, family: Family, layers: int) -> list[dict[str, object]]:
    """Return for each layer the keys of which it has values of its own: those of its family, then :data:`PER_LAYER`.

    Raises:
        ModelError: there is no such layer, its keys are no object, or it lacks a part of a layer.
    """
    found = [dict(own) for own in family.own(config, layers)] if family.own else [{} for _ in range(layers)]
    given = config.section(PER_LAYER).data if config.raw(PER_LAYER) else {}
    for name, values in given.items():
        layer = int(name) if name.isascii() and name.isdecimal() and len(name) <= len(str(MAX_LAYERS)) else layers
        if layer >= layers or not isinstance(values, dict):
            what = (
                "is no object" if layer < layers else f"is none of the {counted(layers, 'layer')} (num_hidden_layers)"
            )
            raise config.error(f"{PER_LAYER}: {name[:60]!r} {what}")
        if values.get("skip"):
            raise config.error(f"{PER_LAYER}: layer {layer} skips a part of itself", "that is not supported")
        found[layer].update(values)
    return found


def _read(config: Config, family: Family, *, tied: bool, stacked: bool) -> Shape:
    """Read the shape of a model whose layers are all as the config says; see :func:`read_shape`."""
    given = family.defaults
    for key in family.uniform:
        config = config.level(key)
    layers = _layer_count(config, family)
    kv_heads = config.optional_count("num_key_value_heads", default=given.get("num_key_value_heads"), maximum=MAX_PARTS)
    q_heads = config.count(
        "num_attention_heads", default=given.get("num_attention_heads"), maximum=MAX_PARTS, stand_in=kv_heads or 1
    )
    kv_heads = kv_heads or q_heads
    hidden = config.count("hidden_size", default=given.get("hidden_size"), stand_in=STAND_IN * q_heads)
    if q_heads % kv_heads:
        raise config.error(
            f"{q_heads} query heads (num_attention_heads) are not a multiple of {kv_heads} key/value heads"
        )
    head_dim = _head_dim(config, family, hidden, q_heads)
    # Null is not the default, but as good as false.
    flags = {key for key, default in family.flags.items() if config.flag(key, default=default and key not in config)}
    sparse = family.moe(config, layers) if family.moe else (False,) * layers
    experts = config.count("num_experts", default=given.get("num_experts"), maximum=MAX_PARTS) if any(sparse) else 0
    per_token = config.count("num_experts_per_tok", default=given.get("num_experts_per_tok")) if experts else 0
    if per_token > experts:
        key = config.own_name("num_experts_per_tok")
        raise config.error(f"{key} is {per_token}, more than there are: {counted(experts, 'expert')}")
    width = family.mlp_ratio * hidden or given.get("intermediate_size")
    shape = Shape(
        hidden=hidden,
        vocab=config.count("vocab_size", default=given.get("vocab_size")),
        context=config.count("max_position_embeddings", default=given.get("max_position_embeddings")),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        intermediate=0 if all(sparse) else config.count("intermediate_size", default=width),
        experts=experts,
        experts_per_token=per_token,
        expert_intermediate=config.count(family.expert_key, default=given.get(family.expert_key)) if experts else 0,
        windows=family.window(config, layers) if family.window else (0,) * layers,
        sparse=sparse,
        linear=family.linear(config, layers) if family.linear else (None,) * layers,
        alone=family.alone(config, layers) if family.alone else (),
        flags=frozenset(flags | ({TIED} if tied else set()) | ({STACKED} if stacked else set())),
    )
    return family.adapt(config, shape) if family.adapt else shape


def _head_dim(config: Config, family: Family, hidden: int, q_heads: int) -> int:
    """Return the head size: the config's, the family's, or hidden size over query heads."""
    own = config.optional_count("head_dim", default=family.defaults.get("head_dim"))
    if own and not family.fixed_head:
        return own
    if hidden % q_heads:
        raise config.error(f"hidden_size {hidden} is not a multiple of {q_heads} query heads (num_attention_heads)")
    if own and own != hidden // q_heads:
        raise config.error(f"head_dim is {own}, but hidden_size / num_attention_heads is {hidden // q_heads}")
    return hidden // q_heads


def windows(
    default: int | None,
    sliding: Callable[[Config, int], tuple[bool, ...]],
    *,
    switch: str = "",
    key: str = "sliding_window",
    kind: str = "sliding_attention",
) -> Callable[[Config, int], tuple[int, ...]]:
    """Return how a family with sliding windows reads them.

    Args:
        default: the window where the config has no ``key``; None for none.
        sliding: which layers have one where the config has no ``layer_types``.
        switch: the key that must be true for any layer to have one; empty if there is no such key.
        key: the key with the tokens of a window.
        kind: what ``layer_types`` calls the layers that have one; the others have full attention.
    """

    def read(config: Config, layers: int) -> tuple[int, ...]:
        window = config.optional_count(key, default=default, minimum=0) or 0
        given = layer_types(config, layers, kind)
        if switch and not config.flag(switch):
            if window and any(given):
                raise config.error(f"layer_types has {kind}, but {switch} is not true", "change one of them")
            window = 0
        bounded = given or sliding(config, layers)
        return tuple(window if layer else 0 for layer in bounded)

    return read


def renamed(config: Config, names: Mapping[str, str], *, keep: bool = False) -> Config:
    """Return the config with the values of keys under their usual names.

    Args:
        config: the config.
        names: the usual name of each key.
        keep: whether a value that is already there under the usual name stays.
    """
    for own, usual in names.items():
        if config.raw(own) is not None and not (keep and config.raw(usual) is not None):
            config = config.having(usual, config.raw(own))
    return config


def layer_types(config: Config, layers: int, kind: str) -> tuple[bool, ...]:
    """Return for each layer whether ``layer_types`` says that it is of this kind; empty without such a key.

    Raises:
        ModelError: the key has another number of layers, or one that is neither of this kind nor has full attention.
    """
    return are_of_kind(config, "layer_types", layers, (FULL, kind))


def are_of_kind(config: Config, key: str, layers: int, kinds: tuple[str, ...]) -> tuple[bool, ...]:
    """Return for each layer whether ``key`` lists the last of several kinds for it; empty without such a key.

    Raises:
        ModelError: the key has another number of layers, or one of no such kind.
    """
    types = [_OLD_KINDS.get(found, found) for found in config.texts(key)]
    if types and len(types) != layers:
        raise config.error(
            f"{key} has {counted(len(types), 'entry')} for {counted(layers, 'layer')} (num_hidden_layers)"
        )
    unknown = next((found for found in types if found not in kinds), None)
    if unknown is not None:
        raise config.error(f"{key} has {unknown[:60]!r}, known are {', '.join(kinds[:-1])} and {kinds[-1]}")
    return tuple(found == kinds[-1] for found in types)


def linear_layers(
    sizes: Callable[[Config], LinearAttention],
    otherwise: Callable[[Config, int], tuple[bool, ...]],
    kinds: tuple[str, ...] = (FULL, LINEAR),
) -> Callable[[Config, int], tuple[LinearAttention | None, ...]]:
    """Return how a family reads the linear attention of its layers.

    Args:
        sizes: of each of the layers that have it.
        otherwise: which layers have it where the config has no ``layer_types``.
        kinds: what these may call a layer; those that they call the last have it.
    """

    def read(config: Config, layers: int) -> tuple[LinearAttention | None, ...]:
        chosen = are_of_kind(config, "layer_types", layers, kinds) or otherwise(config, layers)
        each = sizes(config) if any(chosen) else None
        return tuple(each if is_linear else None for is_linear in chosen)

    return read


def no_layer(_config: Config, layers: int) -> tuple[bool, ...]:
    """Select none."""
    return (False,) * layers


def every_layer(_config: Config, layers: int) -> tuple[bool, ...]:
    """Select all layers."""
    return (True,) * layers


def except_every(default: int, key: str = "sliding_window_pattern") -> Callable[[Config, int], tuple[bool, ...]]:
    """Select all but every n-th layer, where n is the number under ``key``; ``default`` without such a key."""

    def choose(config: Config, layers: int) -> tuple[bool, ...]:
        period = config.count(key, default=default) if key else default
        return tuple((layer + 1) % period != 0 for layer in range(layers))

    return choose


def except_listed(key: str, *, otherwise: bool) -> Callable[[Config, int], tuple[bool, ...]]:
    """Select all layers but those whose numbers are under ``key``; without such a key all or none, as told."""

    def choose(config: Config, layers: int) -> tuple[bool, ...]:
        if config.raw(key) is None:
            return (otherwise,) * layers
        listed = frozenset(config.numbers(key))
        return tuple(layer not in listed for layer in range(layers))

    return choose


def except_first_of(period: int) -> Callable[[Config, int], tuple[bool, ...]]:
    """Select all but the first of every ``period`` layers."""

    def choose(config: Config, layers: int) -> tuple[bool, ...]:  # noqa: ARG001 (no key changes it)
        return tuple(layer % period != 0 for layer in range(layers))

    return choose


def last_of_four(config: Config, layers: int) -> tuple[bool, ...]:  # noqa: ARG001 (no key changes it)
    """Select all layers but every fourth, counted backwards from the last (Muse)."""
    return tuple((layers - 1 - layer) % 4 != 0 for layer in range(layers))


def every_other(config: Config, layers: int) -> tuple[bool, ...]:  # noqa: ARG001 (no key changes it)
    """Select the first layer, the third, and so on (gpt_oss)."""
    return tuple(layer % 2 == 0 for layer in range(layers))


def from_max_window_layers(default: int) -> Callable[[Config, int], tuple[bool, ...]]:
    """Select the layers from ``max_window_layers`` on (Qwen2); ``default`` applies if the key is absent."""

    def choose(config: Config, layers: int) -> tuple[bool, ...]:
        first = config.count("max_window_layers", default=default, minimum=0)
        return tuple(layer >= first for layer in range(layers))

    return choose


def even_before_max_window_layers(config: Config, layers: int) -> tuple[bool, ...]:
    """Select the even layers before ``max_window_layers`` (Qwen2-MoE, as transformers reads its config)."""
    end = config.count("max_window_layers", default=28, minimum=0)
    return tuple(layer % 2 == 0 and layer < end for layer in range(layers))


def without_rope(config: Config, layers: int) -> tuple[bool, ...]:
    """Select the layers without rotary embedding (SmolLM3, Llama 4)."""
    interval = config.count("no_rope_layer_interval", default=4)
    rope = config.numbers("no_rope_layers") or [(layer + 1) % interval for layer in range(layers)]
    if len(rope) != layers:
        raise config.error(
            f"no_rope_layers has {counted(len(rope), 'entry')} for {counted(layers, 'layer')} (num_hidden_layers)"
        )
    return tuple(not turns for turns in rope)


def with_rope(config: Config, layers: int) -> tuple[bool, ...]:
    """Select the layers with rotary embedding (Llama 4)."""
    return tuple(not bare for bare in without_rope(config, layers))
