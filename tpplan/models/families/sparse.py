"""Which layers of a mixture have experts, and how wide the experts are that all tokens share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.models.families.shape import MAX_PARTS, are_of_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpplan.models.config import Config
    from tpplan.models.families.table import Shape

#: The flag of rows that are there only with shared experts.
SHARED: Final = "shared_experts"


def sparse_steps(config: Config, layers: int) -> tuple[bool, ...]:
    """Select every ``decoder_sparse_step``-th layer, except ``mlp_only_layers`` (Qwen's mixtures of experts)."""
    step = config.count("decoder_sparse_step", default=1)
    dense = frozenset(config.numbers("mlp_only_layers"))
    experts = config.count("num_experts", minimum=0, maximum=MAX_PARTS)
    return tuple(experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def after_dense(default: int, key: str = "first_k_dense_replace") -> Callable[[Config, int], tuple[bool, ...]]:
    """Select every ``moe_layer_freq``-th layer after the dense ones, which ``key`` counts (DeepSeek)."""

    def choose(config: Config, layers: int) -> tuple[bool, ...]:
        experts = config.optional_count("num_experts", default=1, minimum=0, maximum=MAX_PARTS)
        first = config.count(key, default=default, minimum=0)
        step = config.count("moe_layer_freq", default=1)
        return tuple(bool(experts) and layer >= first and layer % step == 0 for layer in range(layers))

    return choose


def mlp_types(otherwise: Callable[[Config, int], tuple[bool, ...]]) -> Callable[[Config, int], tuple[bool, ...]]:
    """Select the layers that ``mlp_layer_types`` calls sparse; without such a key, as ``otherwise`` does."""

    def choose(config: Config, layers: int) -> tuple[bool, ...]:
        return are_of_kind(config, "mlp_layer_types", layers, ("dense", "sparse")) or otherwise(config, layers)

    return choose


def moe_layers(config: Config, layers: int) -> tuple[bool, ...]:
    """Select ``moe_layers``; without such a key, every ``interleave_moe_layer_step``-th layer (Llama 4)."""
    step = config.count("interleave_moe_layer_step", default=1)
    chosen = config.numbers("moe_layers") if config.raw("moe_layers") is not None else range(step - 1, layers, step)
    return tuple(layer in chosen for layer in range(layers))


def moe_interval(config: Config, layers: int) -> tuple[bool, ...]:
    """Select every ``moe_layer_interval``-th layer between the indices of the first and the last (ERNIE 4.5)."""
    first = config.count("moe_layer_start_index", default=1, minimum=0)
    last = config.count("moe_layer_end_index", default=-1, minimum=-1)
    step = config.count("moe_layer_interval", default=1)
    end = layers if last < 0 else last + 1
    return tuple(first <= layer < end and (layer + 1) % step == 0 for layer in range(layers))


def shared_expert(
    default: int | None = None, key: str = "shared_expert_intermediate_size"
) -> Callable[[Config, Shape], Shape]:
    """Add the shared expert, which has a width of its own (Qwen's mixtures)."""

    def adapt(config: Config, shape: Shape) -> Shape:
        width = config.count(key, default=default) if shape.experts else 0
        return evolve(shape, shared_intermediate=width)

    return adapt


def shared_experts(key: str = "n_shared_experts", default: int = 0) -> Callable[[Config, Shape], Shape]:
    """Add the shared experts, which are stored as one; ``key`` counts them, each as wide as a routed one."""

    def adapt(config: Config, shape: Shape) -> Shape:
        number = (
            (config.optional_count(key, default=default, minimum=0, maximum=MAX_PARTS) or 0) if shape.experts else 0
        )
        flags = shape.flags | ({SHARED} if number else set())
        return evolve(shape, shared_intermediate=number * shape.expert_intermediate, flags=flags)

    return adapt
