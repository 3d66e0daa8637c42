"""What ``tpplan inspect`` tells of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from tpplan.core.axes import format_layers
from tpplan.core.model import NotPlanned
from tpplan.core.plan import CACHE_KINDS
from tpplan.files.codec import document
from tpplan.models.families.drafts import DRAFTS, KINDS
from tpplan.planfile.codec import fingerprint
from tpplan.planner.ledger import cache_bytes_per_token, sequence_cache_bytes, state_bytes

if TYPE_CHECKING:
    from tpplan.core.model import ModelSpec


@frozen
class CacheCosts:
    """Bytes in the cache, all layers together, for each of its kinds.

    Attributes:
        fp16: 16 bits per element.
        fp8: 8 bits per element.
        q8: 8.5 bits per element.
        q6: 6.5 bits per element.
        q4: 4.5 bits per element.
    """

    fp16: int
    fp8: int
    q8: int
    q6: int
    q4: int


@frozen(kw_only=True)
class LayerKind:
    """Layers of the same shape; numbers are left out where the layers do not have it.

    Attributes:
        layers: inclusive ranges.
        q_heads: query heads.
        kv_heads: key/value heads.
        head_dim: elements of one query or key head.
        window: tokens of the sliding window; left out for full attention.
        linear_key_heads: key heads of linear attention.
        linear_value_heads: value heads of linear attention.
        intermediate_size: width of the dense MLP.
        experts: routed experts.
        expert_intermediate_size: width of one of them.
        shared_intermediate_size: width of all shared experts together.
    """

    layers: str
    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    window: int = 0
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    intermediate_size: int = 0
    experts: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0


@document("inspection")
@frozen(kw_only=True)
class Inspection:
    """A model's shapes and sizes. Where layers differ, the largest number of any layer.

    Attributes:
        architecture: the config's.
        model_type: the config's.
        layers: how many.
        layer_kinds: the shapes of layers, by the first one of each; left out if all layers are alike.
        hidden_size: width of the residual stream.
        intermediate_size: width of the dense MLP; of one expert where no layer has a dense one.
        q_heads: query heads.
        kv_heads: key/value heads.
        head_dim: elements of one query or key head.
        linear_key_heads: key heads of linear attention, 0 without it.
        linear_value_heads: value heads of linear attention, 0 without it.
        vocab_size: rows of the output matrix, as stored.
        tied_embeddings: whether the output matrix is the embedding.
        experts: routed experts, 0 without them.
        parameters: as the unquantised model has them.
        weight_bytes: of all tensors as they are stored.
        weight_format: how most of them are stored: ``BF16``, ``AWQ 4-bit g128``, …
        assumed: what is assumed of the weights because no file says; left out if their bytes are exact.
        not_planned: parts of the files that are not counted; left out for none.
        cache_bytes_per_token: what one more token takes, while no sliding window is full; of what takes the place of
            several tokens a part.
        state_bytes_per_sequence: what linear attention keeps of a sequence of any length, and a compressed cache of
            tokens that are not compressed yet; 0 without either.
        max_context: tokens per sequence that the model was made for.
        context_basis: the RoPE scaling that decides it, such as ``32768 × 4 by yarn``; empty if none does.
        max_context_cache_bytes: what one sequence of so many tokens takes, with its state, and of sliding windows what
            they keep.
        fingerprint: ``sha256:`` and the hash of the model as tpplan sees it.
        notes: what else there is to know, a sentence each; left out for none.
    """

    architecture: str
    model_type: str
    layers: int
    layer_kinds: tuple[LayerKind, ...] = ()
    hidden_size: int
    intermediate_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    linear_key_heads: int
    linear_value_heads: int
    vocab_size: int
    tied_embeddings: bool
    experts: int
    parameters: int
    weight_bytes: int
    weight_format: str
    assumed: str = ""
    not_planned: tuple[NotPlanned, ...] = ()
    cache_bytes_per_token: CacheCosts
    state_bytes_per_sequence: int
    max_context: int
    context_basis: str
    max_context_cache_bytes: CacheCosts
    fingerprint: str
    notes: tuple[str, ...] = ()


def inspect(model: ModelSpec) -> Inspection:
    """Return what there is to tell of a model."""
    attention = [block.attention for block in model.blocks if block.attention]
    linear = [block.linear for block in model.blocks if block.linear]
    dense = max((block.intermediate for block in model.blocks), default=0)
    return Inspection(
        architecture=model.architecture,
        model_type=model.model_type,
        layers=model.layer_count,
        layer_kinds=_kinds(model),
        hidden_size=model.hidden_size,
        intermediate_size=dense or max((block.expert_intermediate for block in model.blocks), default=0),
        q_heads=max((a.q_heads for a in attention), default=0),
        kv_heads=max((a.kv_heads for a in attention), default=0),
        head_dim=max((a.head_dim for a in attention), default=0),
        linear_key_heads=max((a.key_heads for a in linear), default=0),
        linear_value_heads=max((a.value_heads for a in linear), default=0),
        vocab_size=model.vocab_size,
        tied_embeddings=model.tied_embeddings,
        experts=max((block.experts for block in model.blocks), default=0),
        parameters=model.parameter_count,
        weight_bytes=model.weight_bytes,
        weight_format=model.weight_format,
        assumed=model.assumed,
        not_planned=model.not_planned,
        cache_bytes_per_token=CacheCosts(**{kind: cache_bytes_per_token(model, kind) for kind in CACHE_KINDS}),
        state_bytes_per_sequence=state_bytes(model),
        max_context=model.max_context,
        context_basis=model.context_basis,
        max_context_cache_bytes=CacheCosts(
            **{kind: sequence_cache_bytes(model, kind, model.max_context) for kind in CACHE_KINDS}
        ),
        fingerprint=fingerprint(model),
        notes=(*model.notes, *_head_notes(model)),
    )


def _head_notes(model: ModelSpec) -> tuple[str, ...]:
    """Return what to say of a model that is a head; nothing of any other."""
    if model.model_type not in DRAFTS:
        return ()
    kind = KINDS[model.model_type].name
    return (f"{model.name} is {kind}, which cannot run without the model that it drafts for; --draft names it",)


def _kinds(model: ModelSpec) -> tuple[LayerKind, ...]:
    """Return the shapes of a model's layers; nothing if all are alike."""
    layers: dict[LayerKind, list[int]] = {}
    for block in model.blocks:
        attention, linear = block.attention, block.linear
        heads = (attention.q_heads, attention.kv_heads, attention.head_dim, attention.window) if attention else (0,) * 4
        kind = LayerKind(
            layers="",
            **dict(zip(("q_heads", "kv_heads", "head_dim", "window"), heads, strict=True)),
            linear_key_heads=linear.key_heads if linear else 0,
            linear_value_heads=linear.value_heads if linear else 0,
            intermediate_size=block.intermediate,
            experts=block.experts,
            expert_intermediate_size=block.expert_intermediate,
            shared_intermediate_size=block.shared_intermediate,
        )
        layers.setdefault(kind, []).extend(block.layers)
    found = sorted(layers.items(), key=lambda each: min(each[1]))
    return tuple(evolve(kind, layers=format_layers(at)) for kind, at in found) if len(found) > 1 else ()
