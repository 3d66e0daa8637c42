"""How many heads and columns of each layer a device has, and the keys of a config that say so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from tpplan.core.axes import Axis, Slice, queries_per_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.core.model import Block, Segment
    from tpplan.core.plan import SplitPlan


@frozen
class Counts:
    """What a device has of a layer.

    A device without heads, or without columns of an axis, has the fewest that modules can be built with; their
    parameters are zeros then, which take no memory.

    Attributes:
        sizes: elements of each axis that the layer has; of replicated KV heads, heads.
        whole: the same of the whole layer.
        missing: the axes of which the device has none.
        kv_head_of: for each query head of the device, which of its KV heads it reads, if that does not follow from
            their numbers; else empty.
        groups: groups of linear heads that share a B and a C (Mamba-2) of which the device has any; 1 without.
        group_of: for each linear head of the device, of which of these it is, if they are unlike in size; else empty.
    """

    sizes: tuple[tuple[Axis, int], ...]
    whole: tuple[tuple[Axis, int], ...]
    missing: frozenset[Axis]
    kv_head_of: tuple[int, ...] = ()
    groups: int = 1
    group_of: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: SplitPlan, block: Block, layer: int, device: int) -> Counts:
        """Return what a device has of a layer by a plan."""
        sizes, missing = {}, set()
        heads: tuple[int, ...] = ()
        groups: tuple[int, ...] = (0,)
        for axis, _ in block.sizes():
            split = plan.split(axis, layer)
            part = Slice(device, *split.bounds[device : device + 2])
            sizes[axis] = part.end - part.start
            if not sizes[axis]:
                missing.add(axis)
                sizes[axis] = 1
            elif axis is Axis.KV_HEADS:
                queries = queries_per_key(part, split.replicas, plan.split(Axis.Q_HEADS, layer).size // split.size)
                sizes[axis] = len(queries)
                if len({*queries}) > 1:
                    heads = tuple(head for head, count in enumerate(queries) for _ in range(count))
            elif axis is Axis.LINEAR_HEADS and block.linear and block.linear.shared_keys:
                each = block.linear.group
                groups = tuple(head // each - part.start // each for head in range(part.start, part.end))
        many, even = groups[-1] + 1, len({groups.count(group) for group in groups}) == 1
        own = () if even else groups
        return cls(tuple(sizes.items()), tuple(block.sizes()), frozenset(missing), heads, many, own)

    def size(self, axis: Axis) -> int:
        """Return the elements of an axis; 0 if the layer has no such axis."""
        return dict(self.sizes).get(axis, 0)

    def part(self, segment: Segment) -> int:
        """Return the elements of a segment of one of the layer's tensors that a device has."""
        whole = dict(self.whole)
        if segment.axis not in whole:
            return segment.length
        if segment.shared:
            return segment.length // segment.shared * self.groups
        return segment.length // whole[segment.axis] * self.size(segment.axis)


#: Keys that transformers' configs may have for an axis; ``attribute_map`` knows them by these names where a config has
#: others. A key counts only where its value is the size of the whole axis.
KEYS: Final[Mapping[Axis, tuple[str, ...]]] = {
    Axis.Q_HEADS: ("num_attention_heads",),
    Axis.KV_HEADS: ("num_key_value_heads", "num_kv_heads", "o_groups"),
    Axis.LINEAR_HEADS: ("linear_num_key_heads", "linear_num_heads"),
    Axis.INTERMEDIATE: ("intermediate_size",),
    Axis.EXPERT_INTERMEDIATE: ("moe_intermediate_size", "intermediate_size"),
    Axis.SHARED_INTERMEDIATE: ("shared_expert_intermediate_size",),
}


#: Families whose modules take the size of a head from the hidden size and the number of heads, so that a config cannot
#: say that there are fewer. Their attributes are set instead, by what they count.
BY_ATTRIBUTE: Final = frozenset(
    {
        *(
            "bloom",
            "dbrx",
            "falcon",
            "gpt2",
            "gpt_bigcode",
            "gpt_neo",
            "gpt_neox",
            "gptj",
            "mpt",
            "opt",
            "persimmon",
            "stablelm",
        ),
        *("glm4v_text", "qwen2_5_vl_text", "qwen2_vl_text"),
        *("gemma4_text", "gemma4_unified_text", "mimo_v2_flash", "step3p5"),  # of which layers differ in their heads
    }
)
_ATTRIBUTES: Final[Mapping[Axis, tuple[str, ...]]] = {
    Axis.Q_HEADS: ("num_heads", "num_attention_heads", "n_heads"),
    Axis.KV_HEADS: ("num_kv_heads", "num_key_value_heads", "kv_heads"),
}
#: And those that count the columns of all query heads.
_COLUMNS: Final = ("split_size", "embed_dim")


def count_heads(layer: Any, counts: Counts, block: Block) -> None:
    """Set the attributes of a layer's attention that count heads to what a device has.

    Args:
        layer: a module of transformers, of a family in :data:`BY_ATTRIBUTE`.
        counts: what the device has of the layer.
        block: the layer's.
    """
    whole = dict(block.sizes())
    for module in layer.modules():
        if getattr(module, "ffn_hidden_size", None) == whole.get(Axis.EXPERT_INTERMEDIATE, 0):  # DBRX
            module.ffn_hidden_size = counts.size(Axis.EXPERT_INTERMEDIATE)
        if not any(name.endswith("proj") or name in _FUSED for name, _ in module.named_children()):
            continue
        for axis, names in _ATTRIBUTES.items():
            for name in names:
                if getattr(module, name, None) == whole[axis]:
                    setattr(module, name, counts.size(axis))
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = max(1, counts.size(Axis.Q_HEADS) // counts.size(Axis.KV_HEADS))
        for name in (*_COLUMNS, "hidden_size") if hasattr(module, "Wqkv") else _COLUMNS:
            if block.attention and getattr(module, name, None) == block.attention.q_heads * block.attention.head_dim:
                setattr(module, name, counts.size(Axis.Q_HEADS) * block.attention.head_dim)


def count_channels(layer: Any, counts: Counts, block: Block) -> None:
    """Set the attributes of a layer's Mamba-2 that count heads, groups and channels to what a device has.

    Args:
        layer: a module of transformers.
        counts: what the device has of the layer.
        block: the layer's.
    """
    linear = block.linear
    if not linear or not linear.shared_keys:
        return
    for module in layer.modules():
        if not hasattr(module, "n_groups") or not hasattr(module, "conv_dim"):
            continue
        module.num_heads, module.n_groups = counts.size(Axis.LINEAR_HEADS), counts.groups
        module.intermediate_size = module.num_heads * linear.value_head_dim
        module.conv_dim = module.intermediate_size + 2 * counts.groups * linear.key_head_dim


_FUSED: Final = ("query_key_value", "c_attn")


def settings(counts: Counts, block: Block, config: Any) -> dict[str, int]:
    """Return the keys of a config that say what a device has of a layer, with their values.

    Args:
        counts: what it has.
        block: the layer's.
        config: that of the whole model, of transformers.
    """
    whole, found = dict(block.sizes()), {}
    by_attribute = config.model_type in BY_ATTRIBUTE
    for axis, size in counts.sizes:
        if by_attribute and axis in _ATTRIBUTES:
            continue
        for key in KEYS[axis]:
            if getattr(config, key, None) == whole[axis]:
                found[key] = size
                break
    if block.attention and not by_attribute and getattr(config, "head_dim", None) in {None, block.attention.head_dim}:
        found["head_dim"] = block.attention.head_dim  # which no longer follows from the number of heads
    if block.linear:
        found["linear_num_value_heads"] = counts.size(Axis.LINEAR_HEADS) * block.linear.group
    return found
