"""A model of ExLlamaV2 as tpplan sees it: what its TPContext reads of the config, and the bytes of its modules."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from attrs import frozen

from tpplan.core.axes import DEFAULT_UNIT, MAX_LAYERS, Axis, unit_count
from tpplan.core.limits import LONGEST_NAME
from tpplan.core.model import Attention, Block, ModelSpec, Parameter, Segment
from tpplan.errors import ModelError, RequestError
from tpplan.files.jsontext import UNSEEN

if TYPE_CHECKING:
    from collections.abc import Iterator

#: ExLlamaV2 computes in half precision; weights of unknown size are counted so too.
DTYPE = "float16"
_ITEM_BYTES = 2

#: Larger numbers in a config are a mistake.
_MOST = 2**31
#: The planner's limit.
MOST_ROWS = 2**24

#: tpplan's cache kinds by the names of ExLlamaV2's cache classes.
_CACHES = {
    "ExLlamaV2Cache": "fp16",
    "ExLlamaV2Cache_8bit": "fp8",
    "ExLlamaV2Cache_Q8": "q8",
    "ExLlamaV2Cache_Q6": "q6",
    "ExLlamaV2Cache_Q4": "q4",
}

#: The classes of ExLlamaV2's modules whose weights are known, by what they are.
_MODULES = {"attention": "ExLlamaV2Attention", "mlp": "ExLlamaV2MLP", "head": "ExLlamaV2Linear"}


@frozen
class Numbers:
    """What is read of ``model.config``.

    Attributes:
        hidden: ``hidden_size``.
        intermediate: ``intermediate_size``.
        vocab: ``vocab_size`` up to the next multiple of 32, as ExLlamaV2 pads its output matrix.
        q_heads: ``num_key_value_groups`` times the KV heads, or ``num_attention_heads``.
        kv_heads: ``num_key_value_heads``.
        head_dim: ``head_dim``, or what the query heads leave of the hidden size.
        layers: ``num_hidden_layers``.
        context: ``max_seq_len``, in tokens.
        batch: ``max_batch_size``.
        rows: ``max_input_len`` times the batch, in tokens.
        output_rows: ``max_output_len``, or ``max_input_len``, times the batch.
        dequantised: ``max_dq_size``, elements of a matrix that are dequantised at once.
    """

    hidden: int
    intermediate: int
    vocab: int
    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    context: int
    batch: int
    rows: int
    output_rows: int
    dequantised: int

    @property
    def widest(self) -> int:
        """Columns of the widest input of a matrix."""
        return max(self.q_heads * self.head_dim, self.intermediate)


def read_numbers(config: Any) -> Numbers:
    """Read a config.

    Args:
        config: anything with the attributes of an ExLlamaV2Config; None if the model has none.

    Raises:
        ModelError: there is no config, an attribute is missing, is no whole number or out of range, or ExLlamaV2 does
            not split such a model.
    """
    if config is None:
        raise ModelError("the model has no config", "pass an ExLlamaV2 model, or an object with such a config")
    arch = getattr(config, "arch", None)
    if getattr(getattr(arch, "lm", arch), "supports_tp", True) is False:
        name = getattr(arch, "arch_string", "this architecture")
        raise ModelError(f"ExLlamaV2 has no tensor parallelism for {name}", "use tpplan.plan, which may support it")
    kv_heads = _count(config, "num_key_value_heads")
    groups = _count(config, "num_key_value_groups", 0)
    q_heads = groups * kv_heads or _count(config, "num_attention_heads")
    if q_heads % kv_heads:
        raise ModelError(f"model.config: {q_heads} query heads are no multiple of {kv_heads} KV heads", "check them")
    hidden, batch = _count(config, "hidden_size"), _count(config, "max_batch_size", 1)
    length = _count(config, "max_input_len", 2048)
    if length * batch > MOST_ROWS:
        message = f"model.config: max_input_len {length} times max_batch_size {batch} is more than {MOST_ROWS} rows"
        raise ModelError(message, "set smaller ones")
    return Numbers(
        hidden=hidden,
        intermediate=_count(config, "intermediate_size"),
        vocab=unit_count(_count(config, "vocab_size"), DEFAULT_UNIT[Axis.VOCAB]) * DEFAULT_UNIT[Axis.VOCAB],
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=_count(config, "head_dim", hidden // q_heads),
        layers=_count(config, "num_hidden_layers", most=MAX_LAYERS),
        context=_count(config, "max_seq_len"),
        batch=batch,
        rows=length * batch,
        output_rows=_count(config, "max_output_len", length) * batch,
        dequantised=_count(config, "max_dq_size", 2**29),
    )


def cache_kind(base: type | None) -> str:
    """Return tpplan's name for a cache class of ExLlamaV2, found by its name or a base class's; ``fp16`` for None.

    Raises:
        RequestError: it is none of them.
    """
    names = [cls.__name__ for cls in base.__mro__] if isinstance(base, type) else [str(base)]
    if base is None:
        return "fp16"
    found = next((kind for name in names if (kind := _CACHES.get(name.removesuffix("_TP")))), None)
    if found is None:
        known = ", ".join(_CACHES)
        raise RequestError(f"expect_cache_base is {names[0][:60]}, which is no cache of ExLlamaV2", f"known: {known}")
    return found


def read_spec(model: Any, numbers: Numbers, context: int) -> ModelSpec:
    """Return the model for planning.

    The bytes of weights are those that the model's modules tell (``weight_footprint()`` of attention, MLP and output
    matrix, found by the names of their classes); those of modules that are not there are counted in 16 bits. The
    embedding has none: ExLlamaV2 keeps it in host memory.

    Args:
        model: ExLlamaV2's model, with ``config`` and perhaps ``modules``.
        numbers: numbers of its config.
        context: tokens per sequence to plan for.

    Raises:
        ModelError: the modules are not one attention and one MLP for each layer.
    """
    n, config = numbers, model.config
    sizes = {
        "attention": (n.layers, 2 * n.hidden * n.head_dim * (n.q_heads + n.kv_heads) * _ITEM_BYTES),
        "mlp": (n.layers, 3 * n.hidden * n.intermediate * _ITEM_BYTES),
        "head": (1, n.hidden * n.vocab * _ITEM_BYTES),
    }
    stored = {part: _footprints(model, part, *size) for part, size in sizes.items()}
    groups: dict[tuple[int, int], list[int]] = {}
    for layer, pair in enumerate(zip(stored["attention"], stored["mlp"], strict=True)):
        groups.setdefault(pair, []).append(layer)
    norm = Parameter("norm", "F16", ((Segment(None, n.hidden),),))
    blocks = tuple(
        Block(
            layers=tuple(layers),
            attention=Attention(n.q_heads, n.kv_heads, n.head_dim, n.head_dim),
            parameters=(
                *_parameters(
                    "attention",
                    attention,
                    (Axis.KV_HEADS, n.q_heads + 2 * n.kv_heads, n.kv_heads),
                    (Axis.RESIDUAL, n.q_heads, n.hidden),
                ),
                *_parameters("mlp", mlp, (Axis.INTERMEDIATE, 2, n.intermediate), (Axis.RESIDUAL, 1, n.hidden)),
                norm,
                norm,
            ),
            intermediate=n.intermediate,
        )
        for (attention, mlp), layers in groups.items()
    )
    return ModelSpec(
        name=_name(config),
        architecture=str(getattr(config, "architecture", None) or "ExLlamaV2"),
        model_type="exllamav2",
        hidden_size=n.hidden,
        vocab_size=n.vocab,
        max_context=context,
        tied_embeddings=False,
        dtype=DTYPE,
        weight_format="EXL2",
        parameter_count=sum(count * size for count, size in sizes.values()) // _ITEM_BYTES,
        blocks=blocks,
        parameters=(*_parameters("head", stored["head"][0], (Axis.VOCAB, 1, n.vocab)), norm),
        gather_only="ExLlamaV2 cuts every matrix by its outputs",
    )


def _footprints(model: Any, part: str, count: int, size: int) -> list[int]:
    """Return the bytes of each module of a kind, in the model's order; ``size`` for each if there is none."""
    modules = [
        module
        for module in getattr(model, "modules", None) or ()
        if _MODULES[part] in {cls.__name__ for cls in type(module).__mro__}
    ]
    if not modules:
        return [size] * count
    if len(modules) != count:
        message = f"model.modules has {len(modules)} of {_MODULES[part]}, expected {count}"
        raise ModelError(message, "tpplan splits models with one attention and one MLP in every layer")
    return [int(module.weight_footprint()) for module in modules]


def _parameters(name: str, size: int, *cuts: tuple[Axis, int, int]) -> Iterator[Parameter]:
    """Yield ``size`` bytes of weights.

    Args:
        name: name of the part.
        size: bytes of the part.
        cuts: the axes that cut it, each with its share of the bytes and its elements, which divide these bytes.
    """
    rest, shares, home = size, sum(share for _, share, _ in cuts), cuts[0][0]
    for axis, share, elements in cuts:
        part = size * share // shares // elements * elements
        rest -= part
        if part:
            yield Parameter(f"{name}.{axis}", "U8", ((Segment(axis, part),),), out=0, home=home)
    if rest:
        yield Parameter(f"{name}.rest", "U8", ((Segment(None, rest),),), home=home)


def _count(config: Any, name: str, default: int | None = None, *, most: int = _MOST) -> int:
    """Return a whole number of a config; a missing one, and None, is the default."""
    value = getattr(config, name, None)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"model.config has no {name}", "pass a model whose config is like an ExLlamaV2Config")
    if type(value) is not int or not (0 if default == 0 else 1) <= value <= most:
        message = f"model.config.{name} is {str(value)[:60]}, expected a whole number from 1 to {most}"
        raise ModelError(message, "models whose layers differ in it are planned with tpplan.plan")
    return value


def _name(config: Any) -> str:
    """Return what to call the model: its directory's name."""
    directory = PurePath(str(getattr(config, "model_dir", None) or "")).name
    return UNSEEN.sub("", directory)[:LONGEST_NAME].strip() or "model"
