"""Settings of a model's config.json that the decoder needs and a plan does not.

What the models of an architecture have in common, as far as the decoder computes them, is one :class:`Family` each.
"""

from __future__ import annotations

from functools import partial
from math import inf, sqrt
from typing import TYPE_CHECKING, Final, Self

from attrs import asdict, evolve, field, frozen

from tpplan.core.axes import Axis
from tpplan.decoder.cache.store import check_kind
from tpplan.decoder.model.gates import ACTIVATIONS, ALPHA, LIMIT, SWIGLU_OAI
from tpplan.decoder.model.gguf import check_gguf, config_with_factors
from tpplan.decoder.model.ropes import Ropes
from tpplan.decoder.model.router import Key, Router
from tpplan.decoder.model.stored import check_formats
from tpplan.errors import ModelError
from tpplan.exec.rope.scaling import Default, Yarn
from tpplan.models.config import read_config
from tpplan.models.families.wrappers import WRAPPERS, text_part
from tpplan.models.formats import Scheme, read_scheme
from tpplan.models.formats.storage import split_name
from tpplan.weights.source import directory_of, gguf_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tpplan.core.model import Block, ModelSpec
    from tpplan.core.plan import SplitPlan
    from tpplan.models.config import Config
    from tpplan.weights.source import Source


@frozen
class Experts:
    """Names of the matrices of a layer's experts, relative to the layer; ``{expert}`` is the number of the expert.

    Without ``{expert}``, a name stands for the matrices of all experts.

    Attributes:
        router: router matrix, which scores the experts.
        gate: gate matrix, whose output gets the activation.
        up: up matrix.
        down: down matrix.
        fused: tensor in which gate and up matrices are interleaved, see :mod:`tpplan.decoder.weights.fuse`;
            empty if they are separate.
        stacked: tensors that some checkpoints have instead: one of all gate matrices, each with its up matrix behind
            it, and one of all down matrices; empty if no checkpoint does.
        correction: selection bias, see :func:`tpplan.decoder.layer.experts.choose`; empty if there is none.
        shared: gated MLP of the experts that all tokens share; empty if there is none. A model may lack it.
        shared_gate: matrix of one row that gives the logit of the shared experts' weight; empty if that is 1.
    """

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{expert}.gate_proj"
    up: str = "mlp.experts.{expert}.up_proj"
    down: str = "mlp.experts.{expert}.down_proj"
    fused: str = ""
    stacked: tuple[str, ...] = ()
    correction: str = ""
    shared: str = ""
    shared_gate: str = ""

    def names(self, block: Block) -> tuple[str, ...]:
        """Return the names of all matrices and of the selection bias that a layer has."""
        projections: tuple[str, ...] = (self.fused,) if self.fused else (self.gate, self.up)
        projections = (*projections, self.down)
        if self.stacked and any(each.name.endswith(self.stacked) for each in block.parameters):
            projections = self.stacked
        shared = [f"{self.shared}.{each}_proj" for each in ("gate", "up", "down")] if block.shared_intermediate else ()
        further = (self.correction, *shared, self.shared_gate if shared else "")
        return (self.router, *projections, *filter(None, further))


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
        of_all_heads: whether all query heads are normed together, and all key heads, before RoPE.
    """

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    queries: str = "self_attn.q_norm"
    keys: str = "self_attn.k_norm"
    behind_rope: bool = False
    of_all_heads: bool = False

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
        latent_eps: epsilon of the norms of the latents of attention (MLA), whatever that of other norms is.
        router: how tokens are routed to experts, with the defaults of the keys below.
        router_keys: keys by which a config.json may change the router.
        gated_attention: whether the outputs of attention are gated, by gates that the projection of the queries gives
            behind each of them.
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
    latent_eps: float = 1e-6
    router: Router = field(factory=Router)
    router_keys: tuple[Key, ...] = ()
    gated_attention: bool = False


_MIXTRAL: Final = Experts(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{expert}.w1",
    up="block_sparse_moe.experts.{expert}.w3",
    down="block_sparse_moe.experts.{expert}.w2",
)

_QWEN2_MOE: Final = Experts(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")

#: Experts, routers and their keys as in DeepSeek-V3.
_CORRECTED: Final = Experts(correction="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts")
_SIGMOID: Final = Router(sigmoid=True, best=2, normalised=True, wide=True)
_GROUPED: Final[tuple[Key, ...]] = ("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group")

_GLM4_MOE: Final = Family(norm_eps=1e-5, experts=_CORRECTED, router=_SIGMOID, router_keys=_GROUPED)

_GPT_OSS: Final = Experts(
    router="mlp.router",
    gate="mlp.experts.gate_proj",
    up="mlp.experts.up_proj",
    down="mlp.experts.down_proj",
    fused="mlp.experts.gate_up_proj",
)

_ERNIE: Final = Experts(correction="mlp.moe_statics.e_score_correction_bias", shared="mlp.shared_experts")
_EXAONE_MOE: Final = evolve(_CORRECTED, correction="mlp.e_score_correction_bias")
_HUNYUAN: Final = Experts(router="mlp.gate.wg", shared="mlp.shared_mlp")
_HY_V3: Final = Experts(router="mlp.router.gate", correction="mlp.expert_bias", shared="mlp.shared_mlp")
_MINIMAX_M2: Final = evolve(_MIXTRAL, correction="block_sparse_moe.e_score_correction_bias")

_SANDWICH: Final = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)

_POST: Final = evolve(_SANDWICH, before_attention="", before_mlp="")
_HUNYUAN_NORMS: Final = Norms(queries="self_attn.query_layernorm", keys="self_attn.key_layernorm", behind_rope=True)
_OF_ALL_HEADS: Final = Norms(of_all_heads=True)

_GLM: Final = Family(norm_eps=1.5625e-7)
_GLM4: Final = evolve(_GLM, norms=Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"))

_GEMMA: Final = Family(
    activation_key="hidden_activation", activation="gelu_pytorch_tanh", offset=1.0, scaled_embedding=True
)

_QWEN3_5_MOE: Final = evolve(_QWEN2_MOE, stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
_QWEN_HYBRID: Final = Family(offset=1.0, gated_attention=True)
_DEEPSEEK_V3: Final = Family(
    experts=_CORRECTED, router=evolve(_SIGMOID, groups=8, eligible=4, factor=2.5), router_keys=_GROUPED
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
    "mixtral": Family(norm_eps=1e-5, experts=_MIXTRAL, router=Router(normalised=True)),
    "qwen3_moe": Family(router_keys=("norm_topk_prob",)),
    "qwen2_moe": Family(experts=_QWEN2_MOE, router_keys=("norm_topk_prob",)),
    "glm4_moe": _GLM4_MOE,
    "dots1": Family(experts=_CORRECTED, router=evolve(_SIGMOID, normalised=False), router_keys=_GROUPED),
    "hy_v3": Family(
        norm_eps=1e-5, experts=_HY_V3, router=evolve(_SIGMOID, factor=2.826), router_keys=("router_scaling_factor",)
    ),
    "solar_open": _GLM4_MOE,
    "exaone_moe": Family(norm_eps=1e-5, experts=_EXAONE_MOE, router=evolve(_SIGMOID, factor=2.5), router_keys=_GROUPED),
    "ernie4_5_moe": Family(
        norm_eps=1e-5,
        experts=_ERNIE,
        router=Router(normalised=True, least=1e-12, wide=True),
        router_keys=("moe_norm_min",),
    ),
    "hunyuan_v1_moe": Family(
        norm_eps=1e-5, norms=_HUNYUAN_NORMS, experts=_HUNYUAN, router=Router(normalised=True, wide=True)
    ),
    "minimax_m2": Family(norms=_OF_ALL_HEADS, experts=_MINIMAX_M2, router=Router(sigmoid=True, normalised=True)),
    "olmoe": Family(norm_eps=1e-5, norms=_OF_ALL_HEADS, router_keys=("norm_topk_prob",)),
    "flex_olmo": Family(norms=evolve(_POST, of_all_heads=True), router_keys=("norm_topk_prob",)),
    "olmo2": Family(norm_eps=1e-5, norms=evolve(_POST, of_all_heads=True)),
    "gpt_oss": Family(norm_eps=1e-5, experts=_GPT_OSS, router=Router(normalised=True)),
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
    "exaone4": Family(norm_eps=1e-5, norms=_POST),
    "hunyuan_v1_dense": Family(norm_eps=1e-5, norms=_HUNYUAN_NORMS),
    "qwen2_vl_text": Family(norm_eps=1e-5),
    "qwen2_5_vl_text": Family(norm_eps=1e-5),
    "qwen3_vl_text": Family(),
    "deepseek_v2": Family(
        experts=Experts(shared="mlp.shared_experts"),
        router=Router(wide=True),
        router_keys=(*_GROUPED[1:], "topk_method"),
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": evolve(_DEEPSEEK_V3, norm_eps=1e-5, router=evolve(_SIGMOID, factor=1.8)),
    "glm4v_moe_text": _GLM4_MOE,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_next": evolve(
        _QWEN_HYBRID, experts=_QWEN2_MOE, router=Router(normalised=True), router_keys=("norm_topk_prob",)
    ),
    "qwen3_5_moe_text": evolve(_QWEN_HYBRID, experts=_QWEN3_5_MOE, router=Router(normalised=True)),
}


#: Range of numbers in a config.json, such as factors and epsilon; their squares and quotients are far from overflowing.
_LEAST: Final = 1e-12
_MOST: Final = 1e9

#: Experts that GGUF files have apart, and checkpoints in one tensor.
_GGUF_EXPERTS: Final = {"gpt_oss": Experts(router="mlp.router")}

#: Models of text and images whose language model the decoder computes. In PaliGemma, prompts see what comes behind.
AROUND: Final = (
    *("gemma3", "glm4v", "glm4v_moe", "internvl", "kimi_k25", "llava", "llava_next", "llava_onevision", "mistral3"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "vipllava"),
)


@frozen(kw_only=True)
class Settings:
    """Settings of one model.

    Attributes:
        family: settings common to its architecture.
        root: start of all names of its tensors in the checkpoint.
        norm_eps: epsilon that norms of the residual stream add to the mean square.
        activation: name of the gate's activation, see :func:`tpplan.decoder.model.gates.gated`.
        embedding_scale: factor of the embedding.
        attention_scale: factor of the attention scores; None for 1 divided by the square root of the head size.
        attention_cap: soft cap: scores ``s`` become ``cap · tanh(s / cap)``; None if there is none.
        logit_scale: factor of the logits.
        logit_cap: soft cap of the logits.
        latent_rank: elements of the latent of a token's keys and values (MLA); 0 without.
        router: how tokens are routed to experts.
        ropes: RoPE of the layers.
        scheme: how the checkpoint stores quantised matrices.
    """

    family: Family
    root: str
    norm_eps: float
    activation: str
    embedding_scale: float
    attention_scale: float | None
    attention_cap: float | None
    logit_scale: float
    logit_cap: float | None
    latent_rank: int
    router: Router
    ropes: Ropes
    scheme: Scheme

    @classmethod
    def read(cls, config: Config, model: ModelSpec, directory: Path | None = None) -> Self:
        """Read the settings of a model from its config.json.

        Args:
            config: the config.json.
            model: the model.
            directory: where other files may describe the quantisation; None if none is to be read.

        Raises:
            ModelError: the decoder does not know the architecture, the activation or the kind of RoPE, or a number is
                invalid.
        """
        outer, scheme = config.text("model_type"), read_scheme(config, directory)
        is_part, whole = outer in AROUND, config
        model_type, config = text_part(config)
        family = FAMILIES.get(model_type) if is_part or outer == model_type else None
        if family is None:
            problem = f"the decoder does not compute models of type {(model_type if is_part else outer)[:60]!r}"
            hint = f"it computes {', '.join(FAMILIES)}, and the text part of {', '.join(AROUND)}"
            raise (config if is_part else whole).error(problem, hint)
        _check_causal(config)
        _check_unclipped(config)
        _check_linear(config, model)
        multiplied = partial(_number, config, default=1.0 if family.multipliers else None)
        # The stream without the factor of what layers add is as much larger; norms divide by its size, but for epsilon.
        added = multiplied("residual_multiplier") or 1.0
        embedding = sqrt(model.hidden_size) if family.scaled_embedding else multiplied("embedding_multiplier") or 1.0
        scalar = _number(config, "query_pre_attn_scalar", family.attention_scalar)
        logit_cap = _number(config, "final_logit_softcapping", family.logit_cap)
        ropes = Ropes.read(config, model_type, model)
        has_latents = any(block.attention and block.attention.latent_dim for block in model.blocks)
        scale = 1 / sqrt(scalar) if scalar else multiplied("attention_multiplier")
        return cls(
            family=family,
            root=WRAPPERS[outer].root if is_part else "",
            norm_eps=(_number(config, "rms_norm_eps", family.norm_eps) or family.norm_eps) / added**2,
            activation=_activation(config, model_type, family),
            embedding_scale=embedding / added,
            attention_scale=_latent_scale(config, model, ropes) if has_latents else scale,
            attention_cap=_number(config, "attn_logit_softcapping", family.attention_cap),
            # The whole model has an output matrix of its own, behind which transformers does nothing.
            logit_scale=1.0 if is_part else 1 / (multiplied("logits_scaling") or 1.0),
            logit_cap=None if is_part or logit_cap == inf else logit_cap,
            latent_rank=config.count("kv_lora_rank") if has_latents else 0,
            router=family.router.read(config, family.router_keys, model.blocks),
            ropes=ropes,
            scheme=scheme,
        )


def settings_of(checkpoint: str | Path | Source, model: ModelSpec) -> Settings:
    """Return the settings of a model, and check that the decoder supports it.

    Args:
        checkpoint: the model's directory, with a config.json or a GGUF file, or that file; or what was read of them.
        model: the model, from :func:`tpplan.read_model`.

    Raises:
        ModelError: the decoder does not know the architecture, the activation or the kind of RoPE, a number is invalid,
            or weights have a format that the decoder does not support, see
            :func:`tpplan.decoder.model.stored.check_formats`.
    """
    if found := gguf_of(checkpoint):
        check_gguf(found, FAMILIES)
        settings = Settings.read(config_with_factors(found), model)
        experts = _GGUF_EXPERTS.get(model.model_type, settings.family.experts)
        return evolve(settings, family=evolve(settings.family, experts=experts))
    directory = directory_of(checkpoint)
    config = read_config(directory)
    settings = Settings.read(config, model, directory)
    experts = settings.family.experts
    check_formats(
        model, settings.scheme, str(directory), fused=experts.fused, wide=(experts.router, experts.correction)
    )
    _check_experts(model, experts, str(directory))
    return settings


def _check_experts(model: ModelSpec, experts: Experts, source: str) -> None:
    """Check that experts and routers have the names that the decoder looks for; checkpoints may have other forms.

    Raises:
        ModelError: some have others.
    """
    for block in model.blocks:
        stems = [split_name(parameter.name)[0] for parameter in block.parameters]
        for name in experts.names(block) if block.experts else ():
            if not any(stem.endswith(f".{name}") for stem in stems):
                found = next((stem for stem in stems if "expert" in stem or "switch" in stem), "other tensors")
                what = f"{source}: the decoder looks for {name}, the checkpoint has {found} in the layers"
                hint = f"it computes experts that are stored as transformers' {model.architecture} names them"
                raise ModelError(what, hint)


def check_model(checkpoint: str | Path | Source, model: ModelSpec, plan: SplitPlan) -> None:
    """Check that the decoder supports a model and its plan; this can be done before the weights are loaded.

    Args:
        checkpoint: see :func:`settings_of`.
        model: the model, from :func:`tpplan.read_model`.
        plan: a plan for the model.

    Raises:
        ModelError: see :func:`settings_of`.
        ExecutionError: the decoder has no cache of the plan's kind.
    """
    rank, kind = settings_of(checkpoint, model).latent_rank, plan.request.cache.kind
    for block in model.blocks:
        if block.attention and block.attention.latent_dim:
            check_kind(kind, block.attention.latent_dim, rank)
        elif block.attention:
            check_kind(kind, plan.split(Axis.KV_HEADS, block.layers[0]).width)


def facts_of(settings: Settings) -> dict[str, str]:
    """Return the settings that no plan has, by name, for processes to compare."""
    scheme = {"rules": settings.scheme.rules, "zeros_less_one": settings.scheme.zeros_less_one}
    return dict(_flat({**asdict(settings), "scheme": scheme}))


def _flat(data: Mapping[str, object], start: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every value, also of those within others."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{start}{name}.")
        else:
            yield f"{start}{name}", str(value)


def _latent_scale(config: Config, model: ModelSpec, ropes: Ropes) -> float:
    """Return the factor of the scores of latent attention: YaRN's weight of all elements of a head makes it larger.

    Raises:
        ModelError: another scaling has that weight.
    """
    sections = (config.raw(key) for key in ("rope_parameters", "rope_scaling"))
    weighted = any(isinstance(each, dict) and each.get("mscale_all_dim") for each in sections)
    if weighted and not isinstance(ropes.rope.scaling, Default | Yarn):
        raise config.error(
            "mscale_all_dim is given, which the decoder computes with YaRN only", "run it by transformers"
        )
    head_dim, scaling = next(each.attention.head_dim for each in model.blocks if each.attention), ropes.rope.scaling
    return (scaling.of_scores if isinstance(scaling, Yarn) else 1.0) / sqrt(head_dim)


def _check_causal(config: Config) -> None:
    """Check that no token attends to later ones.

    Raises:
        ModelError: the config says that tokens do.
    """
    for key, usual in (("use_bidirectional_attention", False), ("is_causal", True)):
        if config.flag(key, default=usual) is not usual:
            raise config.error(f"{key} is {str(not usual).lower()}", "the decoder generates texts token by token")


def _check_unclipped(config: Config) -> None:
    """Check that queries, keys and values have no limit (OLMoE).

    Raises:
        ModelError: the config names a limit.
    """
    if config.raw("clip_qkv") is not None:
        what = f"clip_qkv is {str(config.raw('clip_qkv'))[:60]}"
        raise config.error(what, "the decoder computes attention without limits; --engine transformers has them")


def _check_linear(config: Config, model: ModelSpec) -> None:
    """Check the activation behind the convolution of linear attention, and in front of its outputs.

    Raises:
        ModelError: it is not the one that such models have.
    """
    name = config.text("hidden_act") or "silu"
    if any(block.linear for block in model.blocks) and name not in {"silu", "swish"}:
        raise config.error(f"hidden_act is {name[:60]!r}", "models with linear attention have silu")


def _activation(config: Config, model_type: str, family: Family) -> str:
    """Return the name of the gate's activation.

    Raises:
        ModelError: it is unknown, or not that of Gemma or gpt_oss.
    """
    if model_type == "gemma":  # versions of transformers read one key or the other, and take gelu for the approximation
        for key in ("hidden_act", "hidden_activation"):
            if (name := config.text(key)) not in {"", "gelu", family.activation}:
                raise config.error(f"{key} is {name[:60]!r}", f"models of type gemma have {family.activation}")
        return family.activation
    if model_type == "gpt_oss":
        for key, usual in (("hidden_act", "silu"), ("swiglu_alpha", ALPHA), ("swiglu_limit", LIMIT)):
            if key in config and config.raw(key) != usual:
                raise config.error(f"{key} is {str(config.raw(key))[:60]!r}", f"models of type gpt_oss have {usual}")
        return SWIGLU_OAI
    name = config.text(family.activation_key) or family.activation
    if name not in ACTIVATIONS:
        raise config.error(f"{family.activation_key} is {name[:60]!r}", f"known are {', '.join(ACTIVATIONS)}")
    return name


def _number(config: Config, key: str, default: float | None) -> float | None:
    """Return a positive number of a config.json, or None for null; a key without a default is ignored."""
    return config.number(key, _LEAST, _MOST) if default is not None and key in config else default
