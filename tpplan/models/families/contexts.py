"""The longest context of a model: what its config says, as far as RoPE scaling extends it.

Servers differ. This is vLLM's rule (``_get_and_verify_max_len`` in vllm/config/model.py): ``yarn`` reaches
``original_max_position_embeddings`` × factor, whatever ``max_position_embeddings`` says; ``linear`` and ``dynamic``
reach ``max_position_embeddings`` × factor; with ``llama3`` and ``longrope`` (``su``), and for Gemma 3,
``max_position_embeddings`` is the extended number already. SGLang (``get_context_length``) multiplies it only where a
scaling has no original context, and transformers has no limit.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from tpplan.models.config import MAX_COUNT, Config, word_meant

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Key of the context before scaling, in tokens.
ORIGINAL: Final = "original_max_position_embeddings"

#: Keys of its parameters, as far as anybody computes with them.
_KEYS: Final = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", ORIGINAL),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "alpha", "llama_4_scaling_beta"),
)

#: Families without RoPE, whose configs may have its keys all the same.
WITHOUT_ROPE: Final = frozenset({"bloom", "gpt2", "gpt_bigcode", "gpt_neo", "mpt", "opt"})

#: Families whose ``max_position_embeddings`` is the extended context with any scaling.
_EXTENDED: Final = frozenset({"gemma3_text"})

#: Scaling that a family's class in transformers has where its config says nothing of RoPE.
SCALED: Final[dict[str, dict[str, object]]] = {
    "gpt_oss": {"rope_type": "yarn", "factor": 32.0, ORIGINAL: 4096},
    "mistral4": {"rope_type": "yarn", "factor": 128.0, ORIGINAL: 8192},
    "mistral_large4_text": {"rope_type": "yarn", "factor": 2048.0, ORIGINAL: 512},
    "ministral3": {"rope_type": "yarn", "factor": 16.0, ORIGINAL: 16384},
}

#: Kinds that multiply ``max_position_embeddings``.
_MULTIPLYING: Final = ("linear", "dynamic")
#: Kinds that are known, to tell slips of.
_KINDS: Final = (*_MULTIPLYING, "yarn", "llama3", "longrope", "su", "default", "mrope", "proportional")


@frozen
class Context:
    """The longest context of a model.

    Attributes:
        tokens: per sequence.
        basis: the RoPE scaling that decides it, such as ``32768 × 4 by yarn``; empty if none does.
        notes: what is assumed of the scaling because the config does not say, or misspells it, in sentences.
    """

    tokens: int
    basis: str = ""
    notes: tuple[str, ...] = ()


def longest_context(config: Config, model_type: str, maximum: int) -> Context:
    """Return the longest context of a language model.

    Args:
        config: the language model's own config.
        model_type: the language model's.
        maximum: tokens per sequence without regard to scaling: ``max_position_embeddings``.

    Raises:
        ModelError: the parameters of RoPE are no object, or a number of them has the wrong type or is out of range.
    """
    if model_type in WITHOUT_ROPE or config.flag("alibi"):
        return Context(maximum)
    if model_type in SCALED and not (config.raw("rope_scaling") or config.raw("rope_parameters")):
        config = config.having("rope_parameters", SCALED[model_type])
    sections = list(_sections(config))
    scaled = [] if model_type in _EXTENDED else sections
    contexts = [_extended(section, original, maximum) for section, original in scaled]
    longest = max(filter(None, contexts), key=lambda context: context.tokens, default=Context(maximum))
    for section, _ in sections:
        section.expect(_KEYS)
    slips = [slip for section, _ in sections for slip in (*section.slips(), *_misspelt_kinds(section))]
    return evolve(longest, notes=(*longest.notes, *dict.fromkeys(slips)))


def _sections(config: Config) -> Iterator[tuple[Config, int | None]]:
    """Yield the parameters of RoPE, for each type of layers that has its own, and the original context beside them."""
    name = "rope_scaling" if config.raw("rope_scaling") else "rope_parameters"
    if not config.raw(name):
        return
    section = config.section(name)
    layers = [key for key, value in section.data.items() if isinstance(value, dict)]
    yield from ((section.section(key), None) for key in layers)
    if not layers:
        yield section, config.optional_count(ORIGINAL)


def _misspelt_kinds(section: Config) -> Iterator[str]:
    """Yield a note on a kind of scaling that is misspelt, so that the context is not extended."""
    kind = section.text("rope_type") or section.text("type")
    if meant := word_meant(kind, _KINDS):
        yield f"{section.source}: rope_type is {reprlib.repr(kind)}, which is not known: is {meant} meant?"


def _extended(section: Config, original: int | None, maximum: int) -> Context | None:
    """Return the context that a scaling decides; None if it decides none."""
    kind = section.text("rope_type") or section.text("type")
    factor = section.raw("factor")
    if factor is None or kind not in {"yarn", *_MULTIPLYING}:
        return None
    start = original or section.optional_count(ORIGINAL) if kind == "yarn" else maximum
    reach = (start or maximum) * factor if isinstance(factor, int | float) and not isinstance(factor, bool) else 0
    if not 1 <= reach <= MAX_COUNT:
        raise section.error(f"factor is {reprlib.repr(factor)}, expected one that makes a context of 1 to {MAX_COUNT}")
    note = f"{kind} without {ORIGINAL}: its factor is taken to multiply max_position_embeddings"
    return Context(int(reach), f"{start or maximum} × {factor:g} by {kind}", () if start else (note,))
