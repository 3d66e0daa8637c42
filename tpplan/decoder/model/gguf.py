"""What the decoder reads of a GGUF file beside its metadata, the factors of RoPE that are tensors; what it refuses."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from tpplan.errors import ModelError
from tpplan.files.content import ContentError, opened
from tpplan.models.families.contexts import ORIGINAL

if TYPE_CHECKING:
    from collections.abc import Collection

    from tpplan.models.config import Config
    from tpplan.models.gguf.reader import GgufModel

#: Divisors of the frequencies, such as Llama 3.1's, and LongRoPE's for texts beyond the original context, and within.
_DIVISORS: Final = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
#: Range of their numbers.
_LEAST, _MOST = 1e-6, 1e6
_AGAIN: Final = "convert the model again with llama.cpp's tools"
_EXPORT: Final = "tpplan export PLAN --for llama.cpp says how llama.cpp runs it"
_HINT: Final = f"compute from the model's safetensors files; {_EXPORT}"

#: Types of models whose GGUF files say all that the decoder needs.
COMPUTED: Final = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text", "phi3", "granite"),
    *("smollm3", "glm4", "seed_oss", "ernie4_5", "hunyuan_v1_dense", "gpt_oss", "exaone4", "ministral3"),
)


def check_gguf(model: GgufModel, families: Collection[str]) -> None:
    """Check that a GGUF file says all that the decoder needs to know of a model that it computes.

    Args:
        model: the file's header.
        families: types of models that the decoder computes, from safetensors files at least.

    Raises:
        ModelError: the architecture has settings that are not read from it, or positions are those in images.
    """
    source, prefix = model.file.path.name, model.file.metadata["general.architecture"]
    if model.spec.model_type not in COMPUTED:
        what = f"the decoder does not compute models of type {model.spec.model_type} from GGUF"
        hint = _HINT if model.spec.model_type in families else _EXPORT
        raise ModelError(f"{source}: {what}, but {', '.join(COMPUTED)}", hint)
    if model.file.metadata.get(f"{prefix}.rope.dimension_sections"):
        what = "its RoPE has a section for each direction in images (rope.dimension_sections)"
        raise ModelError(f"{source}: {what}, whose order of rows the decoder does not know", _HINT)


def config_with_factors(model: GgufModel) -> Config:
    """Return the config of a GGUF file, with the factors of RoPE that the file has as tensors.

    Raises:
        ModelError: they are not as llama.cpp writes them, or cannot be read.
    """
    tensors, config = model.file.tensors, model.config
    scaling = config.section("rope_scaling").data if config.raw("rope_scaling") else {}
    if _DIVISORS in tensors:
        if scaling:
            what = f"has {_DIVISORS} and a RoPE that is scaled by {scaling['rope_type']!s:.40}"
            raise ModelError(f"{model.file.path.name} {what}", _HINT)
        factors = _read(model, _DIVISORS)
        scaling = {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, ORIGINAL: model.spec.max_context}
        return config.having("rope_scaling", {**scaling, "long_factor": factors, "short_factor": factors})
    if _LONG not in tensors or _SHORT not in tensors:
        return config
    both = {"long_factor": _read(model, _LONG), "short_factor": _read(model, _SHORT)}
    return config.having("rope_scaling", {**scaling, "rope_type": "longrope", **both})


def _read(model: GgufModel, name: str) -> list[float]:
    """Return the divisors of frequencies that a tensor holds.

    Raises:
        ModelError: they are not one for each pair of elements that RoPE turns, or no such numbers, or cannot be read.
    """
    tensor, turned = model.file.tensors[name], model.config.raw("rotary_dim")
    width = next(block.attention.head_dim for block in model.spec.blocks if block.attention)
    pairs = (turned if isinstance(turned, int) and 0 < turned < width else width) // 2
    if tensor.kind != "F32" or tensor.shape != (pairs,):
        what = f"{name} is {tensor.kind} of shape {list(tensor.shape)}, expected F32 of shape [{pairs}]"
        raise ModelError(f"{tensor.file}: {what}, one for each pair that RoPE turns", _AGAIN)
    form = Struct(f"<{tensor.shape[0]}f")
    try:
        with opened(model.file.path.with_name(tensor.file)) as (file, _):
            file.seek(tensor.start)
            data = file.read(form.size)
    except (OSError, ContentError) as problem:
        raise ModelError(f"{tensor.file} cannot be read: {problem}", "check the path and its permissions") from problem
    if len(data) < form.size:
        raise ModelError(f"{tensor.file} became shorter while it was read", "fetch the file again")
    factors = list(form.unpack(data))
    if wrong := [each for each in factors if not _LEAST <= each <= _MOST]:
        raise ModelError(
            f"{tensor.file}: {name} has {wrong[0]:g}, expected numbers from {_LEAST:g} to {_MOST:g}", _AGAIN
        )
    return factors
