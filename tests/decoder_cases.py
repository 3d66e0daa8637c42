"""Small random models of every family that the decoder computes, plans that cut them anyhow, and what is right."""

from __future__ import annotations

import json
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

import tpplan
from tests.family_models import SAME
from tests.kept import digest_of, kept
from tests.later import transformers
from tests.published import sizes
from tpplan.core.axes import Axis, bounds_of
from tpplan.core.device import Device
from tpplan.core.plan import Cache, Request
from tpplan.decoder import Decoder, generate
from tpplan.decoder.prompts import Prompt
from tpplan.exec import compile as compile_plan
from tpplan.planner.attempt import Attempt
from tpplan.planner.ledger import demands, ledger
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpplan.core.plan import SplitPlan
    from tpplan.planner.costs import Demand

VOCAB, LENGTH, BATCH, MAX_ROWS, NEW = 203, 96, 2, 6, 64

SIZES: dict[str, Any] = {
    **sizes(vocab=VOCAB, hidden=48, dense=72, layers=3, q=8, kv=4, head_dim=8, context=LENGTH),
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}

_PARTLY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

#: Three layers of linear attention and one of attention, and experts beside one that all tokens share.
_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}

#: Heads whose keys and values are products of latents (MLA).
_MLA: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "kv_lora_rank": 20,
}

#: Experts of DeepSeek's models, behind a dense layer.
_SHARING: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}

#: What is special about a family, and what of that its config may turn on. Windows end within the prompts.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {"sliding_window": 9},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "hidden_size": 64,
    },
    "qwen3": {"head_dim": 32},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 12, "head_dim": 32},
    "gemma": {},
    "gemma3_text": {
        "sliding_window": 5,
        "query_pre_attn_scalar": 12,
        "head_dim": 32,
        "final_logit_softcapping": 20.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
        "sliding_window_pattern": 2,
    },
    "granite": {
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.4,
        "logits_scaling": 2.5,
    },
    "smollm3": {"no_rope_layer_interval": 2, "hidden_size": 64},
    "phi3": {"sliding_window": 11, "hidden_size": 64, "partial_rotary_factor": 0.5},
    "mixtral": {"num_local_experts": 5, "sliding_window": None},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        **_SHARING,
        "num_hidden_layers": 3,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_mtp_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "minimax_m2": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "head_dim": 32,
        "rotary_dim": 16,
    },
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3_5_text": {**_DELTA_NET, "rope_parameters": {**_PARTLY, "mrope_section": [4, 2, 2]}},
    "qwen3_next": {**_DELTA_NET, **_SHARED_EXPERT, "mlp_only_layers": [2], "rope_parameters": _PARTLY},
    "qwen3_5_moe_text": {
        **_DELTA_NET,
        **_SHARED_EXPERT,
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 3,
        "attention_bias": True,
        "rope_parameters": {**_PARTLY, "mrope_section": [4, 2, 2]},
    },
    "deepseek_v2": {  # most prompts cost less with keys and values, of which there are few elements for each latent
        **_MLA,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "attention_bias": True,
        **_SHARING,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {
        **_MLA,
        "q_lora_rank": 12,
        **_SHARING,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "original_max_position_embeddings": 32,
        },
    },
}


#: Those of them with linear attention.
HYBRIDS = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")

#: Experts in two groups, of which one is eligible.
_TWO_GROUPS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}

#: Families that differ from those above in few things, or in none but their names and defaults.
FURTHER: dict[str, dict[str, Any]] = {
    "ministral": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 2,
        "hidden_size": 64,
    },
    "dots1": {
        **_TWO_GROUPS,
        "first_k_dense_replace": 2,
        "attention_bias": True,
        "norm_topk_prob": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "use_sliding_window": True,
    },
    "hy_v3": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "num_shared_experts": 2,
        "mlp_bias": True,
        "router_scaling_factor": 1.6,
    },
    "solar_open": {**_TWO_GROUPS, "attention_bias": True, "norm_topk_prob": False, "routed_scaling_factor": 0.6},
    "exaone_moe": {
        **_TWO_GROUPS,
        "num_experts": 8,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "sliding_window": 7,
        "sliding_window_pattern": 2,
    },
    "ernie4_5_moe": {
        "use_bias": True,
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "hidden_size": 64,
    },
    "hunyuan_v1_moe": {"num_experts": 6, "moe_topk": 3, "attention_bias": True},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "hidden_size": 64},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "olmo2": {"attention_bias": True, "hidden_size": 64},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    "cwm": {"sliding_window": 9, "mlp_bias": True, "bos_token_id": 0},
    "internlm3": {"attention_bias": True, "mlp_bias": True},
    "ernie4_5": {"use_bias": True},
    "helium": {"hidden_size": 64, "attention_bias": True},
    "glm": {"rope_parameters": _PARTLY},
    "glm4": {"rope_parameters": _PARTLY, "head_dim": 16},
    "exaone4": {"sliding_window": 7, "sliding_window_pattern": 2, "head_dim": 32},
    "glm4_moe_lite": {
        **_MLA,
        "q_lora_rank": 12,
        "v_head_dim": 16,
        **_SHARING,
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "rope_interleave": False,
        "attention_bias": True,
    },
    "kimi_k2": {**_MLA, **_SHARING, "q_lora_rank": None, "norm_topk_prob": False, "num_mtp_layers": 0},
    "hunyuan_v1_dense": {
        "attention_bias": True,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "alpha": 50.0, "factor": 1.0},
    },
}

#: Families of either whose attention is to latents.
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")

#: Those of them for which a decoder issues other steps than for any family above.
OWN_STEPS = ("ministral3", "glm4", "exaone4", "hunyuan_v1_dense", "qwen2_moe", "ernie4_5_moe", "flex_olmo")


@frozen
class Model:
    """A model of transformers, saved.

    Attributes:
        directory: where it is.
        prompts: some tokens, of texts of different length.
        logits: of what follows each prompt, ``[B, V]``.
        tokens: the likeliest ones that follow each prompt.
    """

    directory: Path
    prompts: tuple[list[int], ...]
    logits: torch.Tensor
    tokens: tuple[list[int], ...]


_KEPT: list[TemporaryDirectory[str]] = []


@cache
def model_of(model_type: str) -> Model:
    """Make a family's model, once, and let transformers compute what is right."""
    torch.manual_seed(sum(map(ord, model_type)))
    model = random_model(model_type, SIZES | (CONFIGS | FURTHER)[model_type])
    _KEPT.append(TemporaryDirectory())
    model.save_pretrained(_KEPT[-1].name)
    if model_type in SAME:
        edited = (path := Path(_KEPT[-1].name, "config.json")).read_text(encoding="utf-8")
        path.write_text(json.dumps(json.loads(edited) | {"model_type": model_type}), encoding="utf-8")
    return answered(model, Path(_KEPT[-1].name), NEW)


def random_model(model_type: str, config: dict[str, Any]) -> Any:
    """Return a model of transformers with random weights, of torch's generator."""
    config = transformers.AutoConfig.for_model(SAME.get(model_type, model_type), **config)
    return with_random_weights(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def with_random_weights(model: Any) -> Any:
    """Return a model of transformers in float32 after giving it random weights, of torch's generator."""
    with torch.no_grad():
        for parameter in model.float().eval().parameters():
            spread = 0.2 if parameter.dim() > 1 else 0.3
            parameter.normal_(0 if parameter.dim() > 1 else 0.5, spread)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
    return model


def answered(model: Any, directory: Path, new: int) -> Model:
    """Return what a model of transformers makes of two random prompts.

    Args:
        model: in float32.
        directory: where the decoder finds it.
        new: tokens that follow each prompt.
    """
    prompts = torch.randint(0, VOCAB, (5,)).tolist(), torch.randint(0, VOCAB, (13,)).tolist()
    parts = [(name, tensor.dtype, tensor.numpy().tobytes()) for name, tensor in model.state_dict().items()]
    versions = torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability()
    known = digest_of(
        parts,
        model.config.to_json_string(use_diff=False),
        model.config._attn_implementation,
        prompts,
        new,
        versions,
        Path(__file__).read_bytes(),
    )
    found = kept(known, lambda: _answers(model, prompts, new))
    logits, tokens = torch.load(BytesIO(found))
    return Model(directory, prompts, logits, tuple(tokens))


def _answers(model: Any, prompts: Sequence[list[int]], new: int) -> bytes:
    """Return the logits of what follows each prompt, and the likeliest tokens, as torch saves them."""
    logits, tokens = [], []
    with torch.no_grad():
        for prompt in prompts:
            logits.append(model(torch.tensor([prompt])).logits[0, -1])
            whole = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, use_cache=True)
            tokens.append(whole[0, len(prompt) :].tolist())
    saved = BytesIO()
    torch.save((torch.stack(logits), tokens), saved)
    return saved.getvalue()


def request_of(
    layout: str = "reduce", kv: str = "idle", kind: str = "fp16", batch: int = BATCH, rows: int = MAX_ROWS
) -> Request:
    """Return a request for the room that the prompts and what follows them take."""
    return Request(layout, "balanced", Cache(kind, batch * LENGTH), batch, rows, kv)


def plan_of(directory: Path, devices: int, request: Request, cut: dict[Axis, tuple[int, ...]], seed: int) -> SplitPlan:
    """Return a plan that cuts some axes as told and the others at random; some devices may have no part of an axis."""
    model, random = tpplan.read_model(directory), Random(seed)
    wanted = demands(model, request, devices)

    def cuts(demand: Demand) -> tuple[int, ...]:
        points = sorted(random.choices(range(demand.units + 1), k=devices - 1))
        units = [b - a for a, b in zip([0, *points], [*points, demand.units], strict=True)]
        return cut.get(demand.axis) or bounds_of(units, demand.unit, demand.size)

    bounds: Sequence[tuple[int, ...]] = tuple(map(cuts, wanted.axes))
    gpus = tuple(Device(name=f"GPU {i}", budget_bytes=2**40) for i in range(devices))
    return Attempt(model, gpus, request, wanted, tuple(bounds), ledger(bounds, wanted, gpus, request)).plan()


@contextmanager
def decoding(plan: SplitPlan, model_type: str, kind: str = "") -> Iterator[Decoder]:
    """Load a family's model by a plan, on virtual devices."""
    directory = model_of(model_type).directory
    with compile_plan(plan, backend="cpu", scratch=False) as ctx:
        yield Decoder(ctx, directory, load_weights(plan, directory, ctx), cache=kind)


#: Logits have a standard deviation of about 2; kinds of CPUs differ by up to 1.5e-4 in the order of their sums.
_LOGITS = 3e-4


def check(model: Model, plan: SplitPlan, transport: str, new: int = NEW, *, backend: str = "cpu") -> None:
    """Compare what a decoder says of a model's prompts with what transformers says."""
    with compile_plan(plan, backend=backend, model=model.directory, transport=transport, scratch=False) as context:
        weights = load_weights(plan, model.directory, context)
        decoder = Decoder(context, model.directory, weights, cache="fp32")
        for sequence, prompt in enumerate(model.prompts):
            logits = context.gather(decoder.prefill(prompt, sequence), Axis.VOCAB).tensor
            torch.testing.assert_close(logits[0], model.logits[sequence], atol=_LOGITS, rtol=1e-4)
        for logits in read_and_stepped(decoder, model.prompts):
            torch.testing.assert_close(logits, model.logits, atol=_LOGITS, rtol=1e-4)
        found = list(zip(*generate(decoder, model.prompts, new), strict=True))
        assert [list(tokens) for tokens in found] == [tokens[:new] for tokens in model.tokens]


def read_and_stepped(decoder: Decoder, prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of what follows prompts, ``[B, V]``: of reading them, and of a step with their last tokens."""
    context = decoder.context
    read = decoder.read([Prompt(prompt, i) for i, prompt in enumerate(prompts)])
    found = context.gather(read, Axis.VOCAB).tensor.float()
    decoder.read([Prompt(prompt[:-1], i) for i, prompt in enumerate(prompts)])
    latest = torch.tensor([[prompt[-1] for prompt in prompts], [len(prompt) - 1 for prompt in prompts]])
    places = [device.device for device in context.devices.values()]
    tokens, positions = ([numbers.to(place) for place in places] for numbers in latest)
    return found, context.gather(decoder.decode(tokens, positions), Axis.VOCAB).tensor.float()


def check_sixteen_bits(
    model: Model, layout: str, dtype: torch.dtype, directory: Path, devices: int = 3, *, backend: str = "cpu"
) -> None:
    """Compare what 16 bits lose in a decoder, of prompts and of a step, with what they lose in transformers.

    Args:
        model: in 32 bits.
        layout: of the plan.
        dtype: of 16 bits.
        directory: where there is room for the model in them.
        devices: of the plan.
        backend: to run on.
    """
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model.directory, dtype=dtype, attn_implementation="eager"
    )
    loaded.to(dtype).save_pretrained(directory)  # norms of gpt_oss too, which transformers has in 32 bits
    check_losses(model, loaded, plan_of(directory, devices, request_of(layout), {}, seed=3), directory, backend)


def check_losses(model: Model, loaded: Any, plan: SplitPlan, directory: Path, backend: str) -> None:
    """Compare what a model in 16 bits loses in a decoder with what it loses in transformers.

    Args:
        model: in 32 bits.
        loaded: the model of transformers in 16 bits.
        plan: of the decoder's.
        directory: which has it.
        backend: to run on.
    """
    with torch.no_grad():
        reference = torch.stack([loaded(torch.tensor([prompt])).logits[0, -1].float() for prompt in model.prompts])
    with compile_plan(plan, backend=backend, scratch=False) as context:
        decoder = Decoder(context, directory, load_weights(plan, directory, context))
        for found in read_and_stepped(decoder, model.prompts):
            assert 0 < (found - model.logits).norm() < 2 * (reference - model.logits).norm()
