"""What the models of an architecture have in common, as far as the decoder computes them: one record each."""

from __future__ import annotations

from math import inf
from typing import Final

from attrs import evolve, frozen


@frozen
class Experts:
    """Names of the matrices of a layer's experts, relative to the layer; ``{expert}`` is the number of the expert.

    Without ``{expert}``, a name stands for the matrices of all experts.

    Attributes:
        router: router matrix, which scores the experts.
        gate: gate matrix, whose output gets the activation.
        up: up matrix.
        down: down matrix.
        fused: tensor in which gate and up matrices are interleaved, see :mod:`tpplan.decoder.weights.interleaved`;
            empty if they are separate.
    """

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{expert}.gate_proj"
    up: str = "mlp.experts.{expert}.up_proj"
    down: str = "mlp.experts.{expert}.down_proj"
    fused: str = ""


@frozen(kw_only=True)
class Norms:
    """Names of a layer's norms, relative to the layer; empty where there is none.

    Attributes:
        before_attention: norm of the residual stream before attention.
        after_attention: norm of the output of attention.
        before_mlp: norm of the residual stream before the MLP.
        after_mlp: norm of the output of the MLP.
        queries: norm of each query head; a checkpoint may lack it, and that of keys.
        keys: norm of each key head.
        behind_rope: whether the norms of heads come behind RoPE.
    """

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    queries: str = "self_attn.q_norm"
    keys: str = "self_attn.k_norm"
    behind_rope: bool = False

    @property
    def of_outputs(self) -> bool:
        """Whether the outputs of attention and MLP are normed."""
        return bool(self.after_attention)


@frozen(kw_only=True)
class Family:
    """What the models of an architecture have in common, and defaults for keys that a config.json leaves out.

    Attributes:
        norm_eps: default of ``rms_norm_eps``.
        activation_key: key of the activation's name.
        activation: default name of the activation.
        offset: number added to the stored weights of a norm (Gemma stores them minus 1).
        norms: names of a layer's norms.
        scaled_embedding: whether the embedding is multiplied by the square root of the hidden size, rounded.
        multipliers: whether a config.json has factors of the embedding, the scores, what a layer adds, and the logits.
        attention_scalar: default of ``query_pre_attn_scalar``; None if scores are divided by the square root of the
            head size.
        attention_cap: default of ``attn_logit_softcapping``; None if the family has no such cap.
        logit_cap: default of ``final_logit_softcapping``, infinity for no cap; None if the family has no such cap.
        experts: names of the experts' matrices.
        normalised: whether the weights of a token's experts add up to 1; None if ``norm_topk_prob`` decides.
    """

    norm_eps: float = 1e-6
    activation_key: str = "hidden_act"
    activation: str = "silu"
    offset: float = 0.0
    norms: Norms = Norms()
    scaled_embedding: bool = False
    multipliers: bool = False
    attention_scalar: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    experts: Experts = Experts()
    normalised: bool | None = None


_MIXTRAL: Final = Experts(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{expert}.w1",
    up="block_sparse_moe.experts.{expert}.w3",
    down="block_sparse_moe.experts.{expert}.w2",
)

_GPT_OSS: Final = Experts(
    router="mlp.router",
    gate="mlp.experts.gate_proj",
    up="mlp.experts.up_proj",
    down="mlp.experts.down_proj",
    fused="mlp.experts.gate_up_proj",
)

_SANDWICH: Final = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)

_GLM: Final = Family(norm_eps=1.5625e-7)
_GLM4: Final = evolve(_GLM, norms=Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"))

_GEMMA: Final = Family(
    activation_key="hidden_activation", activation="gelu_pytorch_tanh", offset=1.0, scaled_embedding=True
)

FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma": _GEMMA,
    "gemma2": evolve(_GEMMA, norms=_SANDWICH, attention_scalar=256.0, attention_cap=50.0, logit_cap=30.0),
    "gemma3_text": evolve(_GEMMA, norms=_SANDWICH, attention_scalar=256.0, logit_cap=inf),
    "phi3": Family(norm_eps=1e-5),
    "granite": Family(multipliers=True),
    "smollm3": Family(),
    "mixtral": Family(norm_eps=1e-5, experts=_MIXTRAL, normalised=True),
    "qwen3_moe": Family(),
    "gpt_oss": Family(norm_eps=1e-5, experts=_GPT_OSS, normalised=True),
    "ministral": Family(),
    "ministral3": Family(norm_eps=1e-5),
    "seed_oss": Family(),
    "cwm": Family(norm_eps=1e-5),
    "internlm3": Family(norm_eps=1e-5),
    "ernie4_5": Family(norm_eps=1e-5),
    "helium": Family(norm_eps=1e-8),
    "glm": _GLM,
    "glm4": _GLM4,
    "glm4v_text": evolve(_GLM4, norm_eps=1e-5),
    "exaone4": Family(norm_eps=1e-5, norms=evolve(_SANDWICH, before_attention="", before_mlp="")),
    "hunyuan_v1_dense": Family(
        norm_eps=1e-5,
        norms=Norms(queries="self_attn.query_layernorm", keys="self_attn.key_layernorm", behind_rope=True),
    ),
    "qwen2_vl_text": Family(norm_eps=1e-5),
    "qwen2_5_vl_text": Family(norm_eps=1e-5),
    "qwen3_vl_text": Family(),
}
