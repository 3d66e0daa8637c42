"""Tables of Gemma's language models."""

from __future__ import annotations

from typing import Final

from tpplan.models.families.rows import BIASED_ATTENTION, NORMS, gated, head_norms, norm, outside
from tpplan.models.families.shape import except_every, windows
from tpplan.models.families.table import Family

_FEEDFORWARD_NORMS = (*norm("pre_feedforward_layernorm"), *norm("post_feedforward_layernorm"))

GEMMA: Final[dict[str, Family]] = {
    "gemma": Family(
        architectures=("GemmaForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *BIASED_ATTENTION),
        dense=gated(),
        defaults={"num_key_value_heads": 16, "head_dim": 256},
        flags={"attention_bias": False},
        tied=True,
    ),
    "gemma2": Family(
        architectures=("Gemma2ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_FEEDFORWARD_NORMS, *BIASED_ATTENTION),
        dense=gated(),
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        flags={"attention_bias": False},
        tied=True,
        window=windows(4096, except_every(2)),
    ),
    "gemma3_text": Family(
        architectures=("Gemma3ForCausalLM",),
        outside=outside(),
        layer=(*NORMS, *_FEEDFORWARD_NORMS, *BIASED_ATTENTION, *head_norms()),
        dense=gated(),
        defaults={
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
        },
        flags={"attention_bias": False},
        tied=True,
        window=windows(4096, except_every(6)),
    ),
    "vaultgemma": Family(
        architectures=("VaultGemmaForCausalLM",),
        outside=outside(),
        layer=(*norm("input_layernorm"), *norm("pre_feedforward_layernorm"), *BIASED_ATTENTION),
        dense=gated(),
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        flags={"attention_bias": False},
        tied=True,
        window=windows(4096, except_every(2)),
    ),
}
