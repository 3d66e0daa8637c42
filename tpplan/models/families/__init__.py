"""What differs between architectures: one small declarative table each, and how a config.json is read with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from attrs import frozen

from tpplan.core.entry_points import added
from tpplan.core.model import ModelSpec
from tpplan.core.sizes import listed
from tpplan.errors import ModelError
from tpplan.models.config import COMPARE, ELSEWHERE, OF_DECODERS, OWN_NAMES, Config, are_meant, epsilon_of
from tpplan.models.families.aside import parts_aside
from tpplan.models.families.blockwise import BLOCKWISE
from tpplan.models.families.classic import CLASSIC
from tpplan.models.families.compressed import COMPRESSED
from tpplan.models.families.contexts import longest_context
from tpplan.models.families.convolved import CONVOLVED
from tpplan.models.families.corrected import CORRECTED
from tpplan.models.families.dense import DENSE
from tpplan.models.families.drafts import DRAFTS
from tpplan.models.families.gemma import GEMMA
from tpplan.models.families.hybrid import HYBRID
from tpplan.models.families.latent import LATENT
from tpplan.models.families.layered import LAYERED
from tpplan.models.families.lightning import LIGHTNING
from tpplan.models.families.mamba import MAMBA
from tpplan.models.families.moe import MOE
from tpplan.models.families.packed import PACKED
from tpplan.models.families.parts import PARTS
from tpplan.models.families.remote import REMOTE
from tpplan.models.families.searched import SEARCHED
from tpplan.models.families.seeing import SEEING
from tpplan.models.families.shape import TIED, read_shape
from tpplan.models.families.streams import STREAMS, STREAMS_SEEING
from tpplan.models.families.table import Family
from tpplan.models.families.twofold import TWOFOLD
from tpplan.models.families.ungated import UNGATED
from tpplan.models.families.wrappers import NESTED, WRAPPERS, around_text, text_part
from tpplan.models.families.zamba import ZAMBA

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.models.families.table import Shape

FAMILIES: Final[dict[str, Family]] = {
    **DENSE,
    **GEMMA,
    **UNGATED,
    **CLASSIC,
    **MOE,
    **CORRECTED,
    **PACKED,
    **LATENT,
    **LAYERED,
    **COMPRESSED,
    **SEARCHED,
    **HYBRID,
    **MAMBA,
    **ZAMBA,
    **LIGHTNING,
    **STREAMS,
    **CONVOLVED,
    **TWOFOLD,
    **REMOTE,
}

#: Entry points of packages with families of their own, each named by its ``model_type``.
ENTRY_POINTS: Final = "tpplan.families"

#: All language models, those that are no models of their own too.
LANGUAGE_MODELS: Final = {**FAMILIES, **PARTS, **SEEING, **BLOCKWISE, **STREAMS_SEEING}

#: Those that transformers has classes for: neither code of their own nor another package's.
IN_TRANSFORMERS: Final = frozenset(LANGUAGE_MODELS) - frozenset(REMOTE)

#: ``torch_dtype`` in a config.json, and the same in safetensors.
DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

#: Sections within sections that are looked into for a language model.
_DEEPEST: Final = 3
#: Other names of theirs: torch's own, and those of people.
_DTYPE_NAMES: Final = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}

#: The ``torch_dtype`` that leaves the choice to the weights; without them it is the default.
_AUTO: Final = "auto"

#: Supported names that an error lists.
_NEAREST: Final = 5


@frozen
class Tolerated:
    """How a family's checkpoints may differ from its ModelSpec without contradicting it.

    Attributes:
        ignored: patterns (fnmatch) of names that no plan needs.
        prefix: the start of names that some checkpoints leave out, empty if none does.
        renamed: starts of names (with a dot: parts) that some checkpoints have, and what the tables have there.
        extra_layers: whether layers beyond the config's ``num_hidden_layers`` may be there (multi-token prediction).
        extra_experts: whether experts beyond the config's may be there, which compute nothing.
    """

    ignored: tuple[str, ...]
    prefix: str
    renamed: Mapping[str, str]
    extra_layers: bool
    extra_experts: bool = False


def supported() -> tuple[str, ...]:
    """Return the supported values of ``model_type``, sorted."""
    return tuple(sorted({**FAMILIES, **WRAPPERS}))


def tolerated(model_type: str, text: str = "") -> Tolerated:
    """Return what else checkpoints of a supported ``model_type`` may hold, or leave out.

    Args:
        model_type: of the model.
        text: of a wrapper, the ``model_type`` of the language model in it; the usual one by default.
    """
    wrapper = WRAPPERS.get(model_type)
    own = DRAFTS.get(model_type) or FAMILIES.get(model_type)
    family = wrapper.around(LANGUAGE_MODELS[text or wrapper.text]) if wrapper else own
    assert family  # noqa: S101 - as said
    renamed = wrapper.renamed if wrapper else family.renamed
    return Tolerated(family.ignored, family.prefix, renamed, family.extra_layers, family.extra_experts)


def slides(config: Config, model_type: str, layers: int) -> tuple[bool, ...]:
    """Tell for each layer of a language model with sliding windows whether it has one, however long that is.

    Raises:
        ModelError: what the config says of its layers is wrong.
    """
    read = LANGUAGE_MODELS[model_type].window
    assert read  # noqa: S101 - as said
    return tuple(map(bool, read(Config({**config.data, "sliding_window": 1}, config.source), layers)))


def spec_from_config(config: Config, name: str, *, stacked: bool = False, stored: Family | None = None) -> ModelSpec:
    """Return the unquantised model that a config.json describes.

    Args:
        config: the config.
        name: display name of the model.
        stacked: whether all experts of a layer are in one tensor, where the family has them in either form.
        stored: the family's tables for files that store other tensors than its usual ones; None for those.

    Raises:
        ModelError: the architecture is not supported, a key is missing or of the wrong type, or keys contradict each
            other.
    """
    model_type, family = (config.text("model_type"), stored) if stored else _family(config)
    for key in family.refused:
        if config.flag(key):
            raise config.error(f"{key} is true, which tpplan does not support", "plans are for decoders only")
    inner, text = text_part(config)
    # A wrapper's own default changed between versions of transformers; that of the language model never did.
    own = around_text(config).flag(TIED, default=text.flag(TIED, default=family.tied))
    tied = family.ties and config.flag(TIED, default=own)
    try:
        with text.collecting() as counts:
            shape = read_shape(counts, family, tied=tied, stacked=stacked)
    except ModelError as error:
        slip = next(chain.from_iterable(part.mistaken_keys() for part in (text, config)), None)
        if slip is None or error.hint != COMPARE:
            raise
        raise ModelError(error.message, are_meant(slip)) from error
    context = longest_context(text, inner, shape.context)
    named = _torch_dtype(text) or _torch_dtype(config)
    torch_dtype = named or "bfloat16"
    dtype = DTYPES[torch_dtype]
    blocks = tuple(family.block(shape, layers, dtype) for layers in _groups(shape))
    outside = tuple(p for row in family.outside for p in row.parameters(shape, dtype, family.root))
    inside = sum(p.elements * len(block.layers) for block in blocks for p in block.parameters)
    return ModelSpec(
        name=name,
        architecture=_architecture(config, family, model_type),
        model_type=model_type,
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        max_context=context.tokens,
        context_basis=context.basis,
        tied_embeddings=TIED in shape.flags,
        dtype=torch_dtype,
        weight_format=dtype,
        parameter_count=inside + sum(p.elements for p in outside),
        blocks=blocks,
        parameters=outside,
        not_planned=parts_aside(config, text),
        assumed="" if named else f"dtype {torch_dtype}: {config.source.rpartition('/')[2]} names none",
        notes=tuple(filter(None, (*context.notes, family.note, *_of_keys(config, inner, text)))),
    )


def _of_keys(config: Config, model_type: str, text: Config) -> Iterator[str]:
    """Yield a note on each key that seems to be another's: one that is missing, or one of other families."""
    text.expect({*OF_DECODERS, *filter(None, [epsilon_of(model_type)])})
    for part in dict.fromkeys((config, text)):
        yield from part.slips()
    for key, meant in text.borrowed_keys(model_type) if model_type in IN_TRANSFORMERS else ():
        first, more = OWN_NAMES[key][:_NEAREST], len(OWN_NAMES[key]) - _NEAREST
        others = listed((*first, f"{more} others") if more > 0 else first) if first else ""
        told = f"{text.source} has {key} and no {meant}: tpplan reads it as {meant}"
        told = f"{told}, which it is in models of type {others}" if others else told
        yield f"{told}; in a model of type {model_type} transformers ignores it and takes a default"


def _family(config: Config) -> tuple[str, Family]:
    """Return the config's ``model_type`` and its family."""
    model_type = config.text("model_type")
    wrapper = WRAPPERS.get(model_type)
    inner = text_part(config)[0]
    families = LANGUAGE_MODELS if wrapper else DRAFTS if model_type in DRAFTS else FAMILIES
    if inner and inner not in LANGUAGE_MODELS:
        for other in added(ENTRY_POINTS, Family, ModelError, inner):
            FAMILIES[inner] = LANGUAGE_MODELS[inner] = other
    if family := families.get(inner):
        return model_type, wrapper.around(family) if wrapper else family
    architecture = next(iter(config.texts("architectures")), "")
    if not model_type:
        if config.meant_as("model_type") or "architectures" in config:
            error = config.missing("model_type")
            error.hint = error.hint if error.hint != COMPARE else _types_of(architecture) or COMPARE
            raise error
        problem = "model_type is missing, so this is probably no config.json of a language model"
        raise config.error(problem, ELSEWHERE)
    known = _known(inner, sorted(families) if wrapper else supported())
    if wrapper:
        raise text_part(config)[1].error(f"model_type {inner[:60]!r} is not supported", known)
    of = f" ({architecture[:60]!r})" if architecture else ""
    hint = _types_of(architecture) or _text_part(config) or known
    raise config.error(f"model_type {model_type[:60]!r}{of} is not supported", hint)


def _types_of(architecture: str) -> str:
    """Return which types a model of a class may be of, empty if none is supported."""
    named = {name: family.architectures for name, family in FAMILIES.items()}
    named |= {name: wrapper.architectures for name, wrapper in WRAPPERS.items()}
    types = [name for name, classes in named.items() if architecture == classes[0]]
    types = types or [name for name, classes in named.items() if architecture in classes]
    return f"the model_type of a {architecture} is {' or '.join(sorted(types))}" if types else ""


def _known(model_type: str, names: Sequence[str]) -> str:
    """Return the supported names that are nearest, and where all of them are.

    None is proposed: who takes mistral for mixtral or qwen3 for qwen3_next plans for another model.
    """
    from difflib import get_close_matches  # noqa: PLC0415 - only for the message

    near = get_close_matches(model_type[:60].casefold(), names, n=_NEAREST)
    like = f"supported names like it are {', '.join(near)}" if near else "no supported name is like it"
    return f"{like}; the README lists all, as does tpplan.models.families.supported() in Python"


def _text_part(config: Config) -> str:
    """Return what to do about a model around a language model that is supported, empty if there is none in it."""
    for path, part in _parts(config):
        inner = part.raw("model_type")
        if isinstance(inner, str) and inner in FAMILIES:
            hint = f"its {path} is of the type {inner}, which is supported"
            try:
                spec_from_config(part, inner)
            except ModelError as error:
                return f"{hint}, but not as it is: {error.message}"
            alone = "save it as a config.json of its own to plan for that part; what is around it is then not counted"
            return f"{hint}: {alone}"
    return ""


def _parts(config: Config, path: str = "", depth: int = 0) -> Iterator[tuple[str, Config]]:
    """Yield the sections of a config, and those within, that may describe a language model, with their paths."""
    for key in NESTED if depth < _DEEPEST else ():
        if isinstance(config.data.get(key), dict):
            part = config.section(key)
            yield f"{path}{key}", part
            yield from _parts(part, f"{path}{key}.", depth + 1)


def _architecture(config: Config, family: Family, model_type: str) -> str:
    """Return the class that the config names, which must be one that the tables describe."""
    architecture = next(iter(config.texts("architectures")), family.architectures[0])
    if architecture not in family.architectures:
        problem = f"the architecture {architecture[:60]!r} of model type {model_type} is not supported"
        raise config.error(problem, f"supported for {model_type}: {', '.join(family.architectures)}")
    return architecture


def _torch_dtype(config: Config) -> str:
    """Return the dtype that the config names, empty if none or ``auto``."""
    text = config.text("torch_dtype").removeprefix("torch.")
    name = _DTYPE_NAMES.get(text, text)
    if name and name != _AUTO and name not in DTYPES:
        raise config.error(f"torch_dtype is {text[:60]!r}", f"known are {', '.join((*DTYPES, *_DTYPE_NAMES, _AUTO))}")
    return "" if name == _AUTO else name


def _groups(shape: Shape) -> list[tuple[int, ...]]:
    """Group the layers that are equal in window, kind of MLP, linear attention, parts and shape, by their first."""
    groups: dict[tuple[object, ...], list[int]] = {}
    own, alone = shape.layers or (None,) * len(shape.windows), shape.alone or ("",) * len(shape.windows)
    for layer, kind in enumerate(zip(shape.windows, shape.sparse, shape.linear, alone, own, strict=True)):
        groups.setdefault(kind, []).append(layer)
    return [tuple(layers) for layers in groups.values()]
