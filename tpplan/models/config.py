"""Type-checked access to a model's ``config.json``, an untrusted file."""

from __future__ import annotations

import re
from contextlib import contextmanager
from difflib import SequenceMatcher, get_close_matches
from functools import partial
from operator import itemgetter
from pathlib import Path
from reprlib import Repr
from typing import TYPE_CHECKING, Final, cast

from attrs import field, frozen

from tpplan.core.sizes import listed
from tpplan.errors import ModelError
from tpplan.files.content import ContentError, read
from tpplan.files.jsontext import NotJSONError, read_json, visible
from tpplan.files.kinds import CONFIG, mistaken
from tpplan.files.text import nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

#: Size limit of a config.json; real ones have a few KiB, a larger one is a mistake or an attack.
MAX_CONFIG_BYTES: Final = 16 * 2**20

#: Default limit of counts; a larger one is a mistake or an attack.
MAX_COUNT: Final = 2**31

#: What stands in for a missing count while further ones are looked for, where nothing fits the others better.
STAND_IN: Final = 64

#: Other names of keys in Hugging Face configs; values under different names of a key must not contradict each other.
ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "hidden_size": ("n_embd", "n_embed"),
    "layer_types": ("layers_block_type",),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_d_head": ("mamba_head_dim",),
    "mamba_d_state": ("ssm_state_size",),
    "mamba_n_groups": ("n_groups", "mamba_ngroups"),
    "mamba_n_heads": ("mamba_num_heads", "n_mamba_heads"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "ffn_dim", "block_ff_dim"),
    "max_position_embeddings": ("n_positions",),
    "num_attention_heads": ("n_head",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        *("experts_per_token", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"),
    ),
    "n_shared_experts": ("num_shared_experts",),
    "num_hidden_layers": ("n_layer",),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "num_attention_groups"),
    "share_expert_dim": ("share_expert_dims",),
    "tie_word_embeddings": ("tie_embedding",),
    "torch_dtype": ("dtype",),
}

_EXPERTS: Final = "num_experts"
#: Types of models by the names of their number of experts: first their own, then those that transformers reads as well.
_NAMES_OF_EXPERTS: Final[dict[tuple[str, ...], tuple[str, ...]]] = {
    ("num_experts",): (
        *("afmoe", "bailing_moe", "cohere2_moe", "exaone_moe", "flint", "gemma4_text", "laguna", "lfm2_moe", "minicpm"),
        *("qwen2_moe", "qwen3_5_moe_text", "qwen3_next", "qwen3_omni_moe_text", "qwen4_exp_text"),
    ),
    ("num_experts", "num_local_experts"): (
        *("flex_olmo", "hunyuan_v1_moe", "hy_v3", "jamba", "kolibri1", "mellum", "olmoe", "qwen3_moe"),
        "qwen3_vl_moe_text",
    ),
    ("num_local_experts",): (
        *("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "llama4_text", "minimax_m1"),
        *("minimax_text_01", "muse_spark_text", "phimoe"),
    ),
    ("num_local_experts", "num_experts"): (
        *("bailing_hybrid", "gpt_oss", "kimi_linear", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral"),
    ),
    ("n_routed_experts",): ("deepseek",),
    ("n_routed_experts", "num_experts"): ("deepseek_ocr2_text", "deepseek_v2"),
    ("n_routed_experts", "num_local_experts"): (
        *("axk1", "axk2", "deepseek_v3", "deepseek_v4", "dots1", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text"),
        *("glm5_next_text", "hy_v4", "kimi_k2", "longcat_flash", "mimo_v2_flash", "mistral4", "nemotron_h"),
        "solar_open",
    ),
    ("n_routed_experts", "num_local_experts", "num_experts"): ("deepseek_v32", "glm_moe_dsa", "mistral_large4_text"),
    ("n_routed_experts", "num_local_experts", "moe_num_experts"): ("step3p5",),
    ("moe_num_experts",): ("aria_text",),
    ("moe_num_experts", "num_experts"): ("ernie4_5_moe", "ernie4_5_vl_moe_text"),
}
_EXPERTS_OF: Final = {kind: names for names, kinds in _NAMES_OF_EXPERTS.items() for kind in kinds}
_GPT: Final = ("gpt2", "gpt_bigcode", "gptj")
#: Of these names, those of sizes that only some families have. In a config of another one transformers ignores them and
#: takes a default.
OWN_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "block_ff_dim": ("lfm2",),
    "conv_kernel": ("nemotron_h",),
    "experts_per_token": (),
    "ffn_dim": ("opt",),
    "ffn_hidden_size": ("falcon", "longcat_flash"),
    "mamba_head_dim": ("nemotron_h",),
    "mamba_ngroups": ("zamba2",),
    "mamba_num_heads": ("nemotron_h",),
    "moe_k": ("ernie4_5_moe", "ernie4_5_vl_moe_text"),
    "moe_top_k": ("step3p5",),
    "moe_topk": ("aria_text", "hunyuan_v1_moe", "longcat_flash"),
    "n_embd": _GPT,
    "n_embed": ("bloom", "falcon"),
    "n_groups": ("nemotron_h",),
    "n_head": (*_GPT, "bloom"),
    "n_inner": _GPT,
    "n_layer": (*_GPT, "bloom"),
    "n_mamba_heads": ("zamba2",),
    "n_positions": _GPT,
    "num_attention_groups": ("step3p5",),
    "num_experts_per_token": ("bailing_hybrid", "kimi_linear"),
    "num_kv_heads": ("falcon",),
    "num_shared_experts": (
        *("afmoe", "bailing_hybrid", "bailing_moe", "cohere2_moe", "exaone_moe", "hy_v3", "kimi_linear"),
    ),
    "share_expert_dims": ("step3p5",),
    "ssm_state_size": ("nemotron_h",),
    "top_k_experts": ("gemma4_text",),
    **{
        name: tuple(kind for kind, names in _EXPERTS_OF.items() if name in names)
        for name in (_EXPERTS, *ALIASES[_EXPERTS])
    },
}

#: What types of models call the epsilon of their norms, if not rms_norm_eps; nothing where there is none, or several.
_EPSILON: Final = "rms_norm_eps"
_EPSILONS: Final[dict[str, tuple[str, ...]]] = {
    "layer_norm_eps": ("cohere", "cohere2", "gpt_neox", "jais2", "persimmon", "phi", "stablelm"),
    "layer_norm_epsilon": (
        *("bloom", "exaone", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "nemotron_h", "qwen"),
        "telechat",
    ),
    "norm_eps": ("lfm2", "lfm2_moe", "nemotron"),
    "norm_epsilon": ("starcoder2",),
    "": ("chatglm", "cohere2_moe", "dbrx", "lfm3", "molmo2_text", "olmo", "opt", "stablelm_epoch"),
}
_EPSILON_NAMES: Final = (_EPSILON, *filter(None, _EPSILONS))

#: What some families call a key; nothing reads these names in the configs of others.
FOREIGN_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "bits": ("num_bits", "w_bit"),
    "hidden_size": ("d_model",),
    "intermediate_size": ("d_ff",),
    "max_position_embeddings": ("max_seq_len", "max_sequence_length", "seq_length", "model_max_length"),
    "num_attention_heads": ("n_heads", "num_heads"),
    "num_bits": ("bits", "w_bit"),
    "num_hidden_layers": ("n_layers", "num_layers"),
    "num_key_value_heads": ("kv_n_heads", "multi_query_group_num", "n_kv_heads", "num_query_groups"),
    "quantization_config": ("quant_config",),
    "vocab_size": ("padded_vocab_size",),
    **{
        name: (*(other for other in _EPSILON_NAMES if other != name), "layernorm_epsilon", "rms_norm_epsilon")
        for name in _EPSILON_NAMES
    },
}

#: Keys that differ by a letter or two from another one, and are no slips of it: of models of some types, or of all.
DISTINCT: Final[dict[str, tuple[str, ...]]] = {
    "compress_ratios": ("deepseek_v4",),
    **dict.fromkeys(("indexer_head_dim", "indexer_kv_heads", "indexer_n_heads"), ("qwen4_exp_text",)),
    "mamba_headdim": ("zamba2",),
    "mtp_layer_types": ("mellum", "step3p5"),
    "n_groups": ("nemotron_h",),
    "o_lora_rank": ("deepseek_v4",),
    "swiglu_limits": ("step3p5",),
    **dict.fromkeys(("index_head_dim", "mlp_layer_types", "n_group", "projector_bias"), ()),
    **dict.fromkeys(("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), ()),
}

#: Keys on which what the decoder computes depends, and mostly no plan: a slip of one changes that without a word.
OF_DECODERS: Final = frozenset(
    (
        *("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"),
        *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "clip_qkv"),
        *("hidden_act", "hidden_activation", "swiglu_alpha", "swiglu_limit"),
        *("is_causal", "use_bidirectional_attention"),
        *("moe_norm_min", "n_group", "norm_topk_prob", "topk_group", "topk_method"),
        *("routed_scaling_factor", "router_scaling_factor"),
        *("partial_rotary_factor", "rope_interleave", "rope_local_base_freq", "rope_theta", "layer_rope_theta"),
        *("rotary_dim", "rotary_emb_base", "rotary_pct", "no_rope_layers", "no_rope_layer_interval"),
    )
)

#: Hint where a file is another one than a model's config.json.
ELSEWHERE: Final = "point to a model's directory, or to the config.json that came with the model"
#: Where a directory of models has them, and one of Hugging Face's cache.
_DEEPER: Final = ("*/config.json", "snapshots/*/config.json")
#: Hint where nothing better is known.
COMPARE: Final = "compare it with the config.json that the model came with"
_MISSING: Final = object()
#: Sections of an object in which slips are looked for: one for each module of a model may be 200,000.
_MOST_SECTIONS: Final = 64
#: How much alike a long key and a slip of it are.
_NEAR: Final = 0.9
#: Letters of a long key, of the shortest in which a changed letter is told, and of the shortest that slips are told of:
#: short ones are alike by chance.
_LONG: Final = 8
_CHANGED: Final = 6
_SHORT: Final = 4


def _repr(value: object) -> str:
    """Format an untrusted value for a message, shortened."""
    short = Repr()
    short.maxstring = short.maxother = 60
    return short.repr(value)


def names_of(key: str, model_type: object) -> tuple[str, ...]:
    """Return the names of a key that transformers reads in models of a type, its own first."""
    all_names = (key, *ALIASES.get(key, ()))
    if _EXPERTS in all_names and isinstance(model_type, str) and model_type in _EXPERTS_OF:
        return _EXPERTS_OF[model_type]
    names = [name for name in all_names if model_type in OWN_NAMES.get(name, (model_type,))]
    return tuple(sorted(names, key=lambda name: name not in OWN_NAMES)) or all_names


def are_meant(*pairs: tuple[str, str]) -> str:
    """Ask whether keys of a file are meant as others, each with its own."""
    told = [f"{visible(key)} as {other}" for key, other in pairs]
    return f"is {listed(told).replace(' as ', ' meant as ', 1)}?"


def epsilon_of(model_type: str) -> str:
    """Return what models of a type call the epsilon of their norms; empty for those that have none or several."""
    return next((name for name, kinds in _EPSILONS.items() if model_type in kinds), _EPSILON)


def _is_distinct(name: str, model_type: object) -> bool:
    """Return whether a key is one that models of a type have, and no slip of another one."""
    kinds = DISTINCT.get(name)
    return kinds is not None and (not kinds or not isinstance(model_type, str) or model_type in kinds)


def _folded(name: str) -> str:
    """Return a key without what differs between hiddenSize, hidden-size and hidden_size."""
    return name.casefold().replace("_", "").replace("-", "")


def _slip(key: str, names: Collection[str]) -> str:
    """Return which of several names is a key misspelt, empty if none is.

    A slip has a letter more, less or changed, or two swapped; that of a long key may have several. A name with a word
    more or less is another key, such as ``q_group_size`` beside ``group_size``.
    """
    folded = _folded(key)
    if same := next((name for name in names if _folded(name) == folded), ""):
        return same
    near = [name for name in names if abs(len(name) - len(key)) <= 1 and _differs_by_a_letter(name, key)]
    if not near and len(key) >= _LONG:
        alike = [name for name in names if len(name) >= _LONG and _may_be_near(name, key)]
        near = get_close_matches(key, alike, 3, _NEAR) if alike else []
    words = _words(key) if near else set()
    return next((name for name in near if not words <= _words(name) and not words >= _words(name)), "")


def word_meant(word: object, known: Collection[str]) -> str:
    """Return which of several words is one misspelt, empty if none is; one with another number is another word."""
    if not isinstance(word, str) or word in known:
        return ""
    return _slip(word, [other for other in known if re.findall(r"\d", other) == re.findall(r"\d", word)])


def _likeness(one: str, other: str) -> float:
    """Return how much alike two keys are, from 0 to 1."""
    return SequenceMatcher(None, one, other).ratio()


def _may_be_near(name: str, key: str) -> bool:
    """Return whether two names may be as much alike as slips are, by their lengths and letters, which takes no time."""
    shorter, least = min(len(name), len(key)), _NEAR * (len(name) + len(key)) / 2
    return shorter >= least and min(len(key) - len({*key} - {*name}), len(name) - len({*name} - {*key})) >= least


def _words(name: str) -> set[str]:
    return set(re.split("[_-]", name)) - {""}


def _differs_by_a_letter(name: str, key: str) -> bool:
    """Return whether a name has a letter more or less than a key, two swapped, or one changed if it is not short."""
    start = next((i for i, (letter, other) in enumerate(zip(name, key, strict=False)) if letter != other), None)
    start = min(len(name), len(key)) if start is None else start
    ours, theirs = name[start:], key[start:]
    swapped = ours[:2] == theirs[:2][::-1] and ours[2:] == theirs[2:]
    shifted = swapped or ours[1:] == theirs or ours == theirs[1:]
    changed = shifted or (len(key) >= _CHANGED and ours[1:] == theirs[1:])
    return changed if len(key) >= _LONG else len(key) >= _SHORT and start > 0 and changed


@frozen
class _Seen:
    """What was looked up in a config, by whatever copy of it.

    Attributes:
        keys: keys that are there or not.
        sections: objects in it by the names of their keys, the first ones.
    """

    keys: set[str] = field(factory=set)
    sections: dict[str, Config] = field(factory=dict)


class InvalidConfigError(ModelError):
    """A config.json is wrong for whoever reads it: keys without a default are missing, or values cannot be right."""


class Config:
    """An object in a config.json, whose values are checked as they are read.

    Absent and null keys are distinguished only where model families need it (:meth:`optional_count`); elsewhere both
    mean the default.
    """

    def __init__(
        self,
        data: Mapping[str, object],
        source: str,
        seen: _Seen | None = None,
        filled: frozenset[str] = frozenset(),
        lacking: dict[str, int] | None = None,
    ) -> None:
        """Wrap ``data``, a JSON object.

        Args:
            data: the object.
            source: name of the file in messages.
            seen: what was looked up in a config of which this is a copy.
            filled: keys that the file lacks, whose values are defaults.
            lacking: keys of counts without a value, and what stands in for them, see :meth:`collecting`; None where
                they are errors.
        """
        self._data = data
        self.source = source
        self._seen = seen or _Seen()
        self._filled = filled
        self._lacking = lacking

    def error(self, problem: str, hint: str = "") -> ModelError:
        """Return an error that names this file and the ``problem``."""
        return ModelError(f"{self.source}: {problem}", hint or COMPARE)

    def invalid(self, problem: str, hint: str = "") -> InvalidConfigError:
        """Return an error that names this file and a value that nobody can compute with."""
        return InvalidConfigError(f"{self.source}: {problem}", hint or COMPARE)

    def __contains__(self, key: str) -> bool:
        """Return whether the key is present under any of its names, null or not."""
        self._seen.keys.add(key)
        return any(name in self._data for name in (key, *ALIASES.get(key, ())))

    def missing(self, *keys: str) -> InvalidConfigError:
        """Return the error for keys without a value; the hint names the keys that were probably meant as them."""
        found = {"missing": [key for key in keys if key not in self], "null": [key for key in keys if key in self]}
        told = [
            f"{listed([self._told_names(key) for key in which])} {'are' if which[1:] else 'is'} {what}"
            for what, which in found.items()
            if which
        ]
        pairs = [(near, self.own_name(key)) for key in keys if (near := self.meant_as(key))]
        others = f" for the others, {COMPARE}" if len(pairs) < len(keys) else ""
        hint = are_meant(*pairs) + others if pairs else COMPARE
        return InvalidConfigError(f"{self.source}: {'; '.join(told)}", hint)

    def own_name(self, key: str) -> str:
        """Return what models of this type call a key."""
        return names_of(key, self._data.get("model_type"))[0]

    def _told_names(self, key: str) -> str:
        """Return the names of a key that the model's type has, its own ones first: ``n_embd (or hidden_size)``."""
        first, *others = names_of(key, self._data.get("model_type"))
        return f"{first} (or {', '.join(others)})" if others else first

    def meant_as(self, key: str) -> str:
        """Return the key that was probably meant as one that is missing, empty if none is or that is there."""
        return "" if key in self else self._meant_as(key, self._data)

    def _meant_as(self, key: str, names: Collection[str]) -> str:
        """Return which of several names was probably meant as a key: another family's, or a misspelt one; or none."""
        foreign = (name for name in FOREIGN_NAMES.get(key, ()) if name in names and self._data[name] is not None)
        if name := next(foreign, ""):
            return name
        kind = self._data.get("model_type")
        others = [name for name in names if not name.startswith("_") and not _is_distinct(name, kind)]
        slips = (slip for own in (key, *ALIASES.get(key, ())) if (slip := _slip(own, others)))
        return next(slips, "")

    def expect(self, keys: Collection[str]) -> None:
        """Take keys as looked up, as others do, so that slips of them are told."""
        self._seen.keys.update(keys)

    def mistaken_keys(self) -> Iterator[tuple[str, str]]:
        """Yield keys that nobody has looked up, each with the name of one that was looked up in vain, probably meant.

        They are what other families call it, or misspelt. Of several that one may be meant as, it is the most alike.
        """
        return ((meant, self.own_name(key)) for meant, key in self._mistaken())

    def _mistaken(self) -> Iterator[tuple[str, str]]:
        """Yield them with the keys as they were looked up."""
        known = {name for key in self._seen.keys for name in (key, *ALIASES.get(key, ()))}
        unread, found = [key for key in self._data if key not in known], dict[str, str]()
        for key in sorted(self._seen.keys):
            lacking = self._filled.issuperset(name for name in (key, *ALIASES.get(key, ())) if name in self._data)
            if lacking and (meant := self._meant_as(key, unread)):
                found[meant] = max(found.get(meant, key), key, key=partial(_likeness, meant))
        for meant, key in sorted(found.items(), key=itemgetter(1)):
            yield meant, key

    def slips(self) -> Iterator[str]:
        """Yield a note on each of them, as text for people."""
        return iter(self._slip_notes().values())

    def _slip_notes(self) -> dict[tuple[str, str], str]:
        notes = {}
        for key, meant in self._mistaken():
            default = f" ({_repr(self._data[meant])})" if meant in self._filled else ""
            name = self.own_name(meant)
            told = f"{self.source} has {visible(key)}, which is not read, and no {name}"
            notes[key, name] = f"{told}, whose default{default} is taken: {are_meant((key, name))}"
        return notes

    def slips_within(self) -> dict[tuple[str, str], str]:
        """Return notes on slips here and in the sections that were read, by the key and what is meant, each once."""
        found = self._slip_notes()
        for section in self._seen.sections.values():
            for pair, note in section.slips_within().items():
                found.setdefault(pair, note)
        return found

    def borrowed_keys(self, model_type: str) -> Iterator[tuple[str, str]]:
        """Yield keys that were read by a name that only other families have than ``model_type``, each with its own."""
        for key in sorted(self._seen.keys):
            names = [name for name in (key, *ALIASES.get(key, ())) if self._data.get(name) is not None]
            if not self._filled.issuperset(names) and not {*names} & {*names_of(key, model_type)}:
                yield names[0], self.own_name(key)

    def _find(self, key: str) -> tuple[str, object]:
        """Return the key's name in the file and its value; values take precedence over null and must agree."""
        self._seen.keys.add(key)
        there = [(name, self._data[name]) for name in (key, *ALIASES.get(key, ())) if name in self._data]
        if not there:
            return key, _MISSING
        values = [(name, value) for name, value in there if value is not None]
        if not values:
            return there[0]
        (first, value), *others = values
        for name, other in others:
            if other != value:
                raise self.error(f"{first} is {_repr(value)} but {name}, which means the same, is {_repr(other)}")
        return first, value

    def optional_count(
        self, key: str, *, default: int | None = None, minimum: int = 1, maximum: int = MAX_COUNT
    ) -> int | None:
        """Return a whole number, None for null, or ``default`` if the key is absent.

        Raises:
            ModelError: the value is not a whole number (``7.0``, ``"7"`` and ``true`` are not), or it is out of range.
        """
        name, value = self._find(key)
        if value is _MISSING:
            return default
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.invalid(f"{name} is {_repr(value)}, which is not a whole number")
        if not minimum <= value <= maximum:
            raise self.invalid(f"{name} is {_repr(value)}, outside {minimum} to {maximum}")
        return value

    def count(
        self,
        key: str,
        *,
        default: int | None = None,
        minimum: int = 1,
        maximum: int = MAX_COUNT,
        stand_in: int = STAND_IN,
    ) -> int:
        """Return a whole number, or ``default`` if the key is absent or null; ``stand_in`` is for :meth:`collecting`.

        Raises:
            ModelError: as for :meth:`optional_count`, or there is neither a value nor a default.
        """
        value = self.optional_count(key, default=default, minimum=minimum, maximum=maximum)
        value = default if value is None else value
        if value is None and self._lacking is not None:
            return self._lacking.setdefault(key, max(minimum, min(maximum, stand_in)))
        if value is None:
            raise self.missing(key)
        return value

    def number(self, key: str, least: float, most: float) -> float | None:
        """Return a number, or None if the key is absent or null.

        Raises:
            ModelError: the value is not a number, or it is out of range.
        """
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.invalid(f"{key} is {_repr(value)}, expected a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return true or false, or ``default`` if the key is absent or null.

        Raises:
            ModelError: the value is neither ``true`` nor ``false``.
        """
        name, value = self._find(key)
        if value is _MISSING or value is None:
            return default
        if not isinstance(value, bool):
            raise self.invalid(f"{name} is {_repr(value)}, expected true or false")
        return value

    def text(self, key: str) -> str:
        """Return a string, empty if the key is absent or null.

        Raises:
            ModelError: the value is not a string.
        """
        name, value = self._find(key)
        if value is _MISSING or value is None:
            return ""
        if not isinstance(value, str):
            raise self.invalid(f"{name} is {_repr(value)}, expected a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the strings of a list, empty if the key is absent or null.

        Raises:
            ModelError: the value is not a list of strings.
        """
        return cast("tuple[str, ...]", self._list(key, str, "strings"))

    def numbers(self, key: str) -> tuple[int, ...]:
        """Return the whole numbers of a list, empty if the key is absent or null.

        Raises:
            ModelError: the value is not a list of whole numbers.
        """
        return cast("tuple[int, ...]", self._list(key, int, "whole numbers"))

    def _list(self, key: str, kind: type, what: str) -> tuple[object, ...]:
        name, value = self._find(key)
        if value is _MISSING or value is None:
            return ()
        if not isinstance(value, list):
            raise self.invalid(f"{name} is {_repr(value)}, expected a list of {what}")
        for i, item in enumerate(value):
            if isinstance(item, bool) or not isinstance(item, kind):
                raise self.invalid(f"{name}[{i}] is {_repr(item)}, expected a list of {what}")
        return tuple(value)

    @property
    def data(self) -> Mapping[str, object]:
        """All keys and values of the object, unchecked."""
        return self._data

    def raw(self, key: str) -> object:
        """Return the value of ``key``, unchecked; None if it is absent."""
        _, value = self._find(key)
        return None if value is _MISSING else value

    def having(self, key: str, value: object) -> Config:
        """Return a copy of the config with ``key`` set to ``value``."""
        return self._copy({**self._data, key: value})

    def filled(self, defaults: Mapping[str, object]) -> Config:
        """Return a copy of the config with these values for those keys that it lacks."""
        lacking = {key: value for key, value in defaults.items() if key not in self}
        filled = self._filled | lacking.keys()
        return Config({**lacking, **self._data}, self.source, self._seen, filled, self._lacking)

    def overlaid(self, values: Mapping[str, object]) -> Config:
        """Return a copy of the config with these values in place of those under any name of their keys."""
        others = {name for key in values for name in ALIASES.get(key, ())}
        kept = {key: value for key, value in self._data.items() if key not in others}
        return self._copy({**kept, **values})

    @contextmanager
    def collecting(self) -> Iterator[Config]:
        """Give a copy of the config that reads any number for missing counts, and tell all of those in the end.

        Raises:
            ModelError: counts are missing; what else was wrong may follow from the numbers that stood in for them.
        """
        lacking: dict[str, int] = {}
        try:
            yield Config(self._data, self.source, self._seen, self._filled, lacking)
        except ModelError:
            if not lacking:
                raise
        if lacking:
            raise self.missing(*lacking)

    def _copy(self, data: Mapping[str, object]) -> Config:
        return Config(data, self.source, self._seen, self._filled, self._lacking)

    def level(self, key: str) -> Config:
        """Return a copy of the config with one number under ``key`` if it lists the same number several times.

        Raises:
            ModelError: it is a list of anything else.
        """
        name, value = self._find(key)
        if not isinstance(value, list):
            return self
        numbers = self.numbers(key)
        if len(set(numbers)) != 1:
            raise self.error(f"{name} is {_repr(value)}, which is not the same for all layers", "that is not supported")
        return self.having(name, numbers[0])

    def section(self, key: str) -> Config:
        """Return the object under ``key``.

        Raises:
            ModelError: it is missing or not an object.
        """
        name, value = self._find(key)
        if value is _MISSING or value is None:
            raise self.missing(key)
        if not isinstance(value, dict):
            raise self.invalid(f"{name} is {_repr(value)}, expected an object")
        known = self._seen.sections.get(name)
        if known is None or known.data is not value:
            known = Config(value, f"{self.source}: {name}")
            if len(self._seen.sections) < _MOST_SECTIONS:
                self._seen.sections[name] = known
        return known


def read_config(path: str | Path) -> Config:
    """Read ``path``, a config.json or a directory that holds one.

    Raises:
        ModelError: there is no such file, it is larger than 16 MiB, or it is not an object in JSON without duplicate
            keys.
    """
    path = Path(path)
    try:
        asked, path = path, path / "config.json" if path.is_dir() else path
        if not path.exists():
            here = "there is no config.json in the current directory"
            raise ModelError(here if asked == Path() else f"{_name(path)} does not exist", _instead(asked))
        content = read(path, MAX_CONFIG_BYTES, pipes=path == asked)
    except ContentError as error:
        raise ModelError(f"{_name(path)} {error}", error.hint or ELSEWHERE) from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"{_name(path)} cannot be read: {reason}", ELSEWHERE) from error
    return parse_config(content, _name(path))


def _instead(path: Path) -> str:
    """Return the hint for a missing config.json: the directory has none, or the path is wrong."""
    if path.exists():
        inside = next((found for pattern in _DEEPER for found in sorted(path.glob(pattern))), None)
        return f"{ELSEWHERE}, such as {_name(inside.parent)}" if inside else ELSEWHERE
    if meant := nearest(path):
        return f"did you mean {visible(meant)}?"
    is_url = path.parts[:1] in {("https:",), ("http:",)}
    model = Path(*path.parts[2:4]) if is_url else path  # behind the host
    if not path.is_absolute() and not path.parent.is_dir() and len(model.parts) == len(("organisation", "model")):
        name, _, revision = _name(model).partition("@")
        fetch = f"hf download {name} config.json{f' --revision {revision}' if revision else ''}"
        return f"tpplan fetches nothing; {fetch} fetches a config from the Hugging Face Hub, and tpplan then finds it"
    return ELSEWHERE


def parse_config(content: bytes, source: str) -> Config:
    """Parse the bytes of a config.json; ``source`` names the file in messages.

    Raises:
        ModelError: they are not an object in JSON without duplicate keys.
    """
    try:
        data = read_json(content, constants=True)  # as Python, and so transformers, writes them
    except NotJSONError as error:
        raise ModelError(f"{source} {error}", error.hint or ELSEWHERE) from error
    if not isinstance(data, dict):
        raise ModelError(f"{source} holds {_repr(data)}, expected an object", ELSEWHERE)
    if message := mistaken(data, CONFIG):
        raise ModelError(f"{source} {message}", ELSEWHERE)
    return Config(data, source)


def _name(path: Path) -> str:
    """Format a path for messages, with invisible characters escaped."""
    text = re.sub(r"^(https?:)/(?=[^/])", r"\1//", str(path))  # a Path keeps one of the slashes of an address
    return visible(text.replace("\0", "\\0"))[-200:]
