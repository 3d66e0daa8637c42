"""Small random planning tasks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from attrs import frozen

from tests.published import MODELS, example
from tpplan.core.device import Device
from tpplan.core.model import ModelSpec
from tpplan.core.plan import Cache, Request
from tpplan.models.config import parse_config
from tpplan.models.families import spec_from_config
from tpplan.models.reader import read_model
from tpplan.planner.ledger import demands

if TYPE_CHECKING:
    from tpplan.planner.costs import Demands


MIB = 2**20


@frozen
class Case:
    """A planning task."""

    model: ModelSpec
    devices: tuple[Device, ...]
    request: Request

    @property
    def wanted(self) -> Demands:
        """What the model costs."""
        return demands(self.model, self.request, len(self.devices))


def spec(**keys: object) -> ModelSpec:
    """A llama in 16 bits, small unless the keys say otherwise."""
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "head_dim": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
        "intermediate_size": 2048,
        "vocab_size": 4096,
        "max_position_embeddings": 2**20,
        "torch_dtype": "bfloat16",
    }
    return spec_from_config(parse_config(json.dumps(config | keys).encode(), "config.json"), "tiny")


def read_config(config: dict[str, Any]) -> ModelSpec:
    """Return the model that a config describes, quantised as it says."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        return read_model(path)


#: True shapes: DeepSeek-V2-Lite, GLM-4.7-Flash, DeepSeek-V3.2 of fewer layers, Qwen3-Next, Gemma 3 12B.
_SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v2": MODELS["DeepSeek-V2-Lite"],
    "glm4_moe_lite": MODELS["GLM-4.7-Flash"],
    "deepseek_v32": MODELS["DeepSeek-V3.2"]
    | {"num_hidden_layers": 6, "n_routed_experts": 32, "first_k_dense_replace": 1},
    "qwen3_next": example("Qwen3-Next-80B-A3B"),
    "gemma3_text": {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "head_dim": 256}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1024, "sliding_window_pattern": 6}
    | {"vocab_size": 262208, "max_position_embeddings": 131072},
}


def shape(name: str) -> ModelSpec:
    """A model of a true shape in 16 bits, by its type."""
    config = {"model_type": name, "torch_dtype": "bfloat16"} | _SHAPES[name]
    return spec_from_config(parse_config(json.dumps(config).encode(), "config.json"), name)


def tiny_model(rng: random.Random) -> ModelSpec:
    """A model of a random family with a handful of units per axis."""
    kv = rng.choice((1, 2, 3, 4, 6, 8))
    heads = kv * rng.choice((1, 2, 4))
    config: dict[str, Any] = {
        "hidden_size": heads * 32,
        "head_dim": 32,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": rng.randint(1, 12),
        "intermediate_size": 128 * rng.randint(2, 24),
        "vocab_size": rng.choice((32 * rng.randint(20, 120), rng.randint(700, 4000))),
        "max_position_embeddings": 65536,
        "tie_word_embeddings": rng.random() < 0.3,
        "torch_dtype": rng.choice(("bfloat16", "float32")),
    }
    family = rng.random()
    if family < 0.3:
        config |= {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts_per_tok": 2}
        config |= {"num_experts": 4, "moe_intermediate_size": 32 * rng.randint(2, 12), "decoder_sparse_step": 1}
        config |= {"shared_expert_intermediate_size": 32 * rng.randint(2, 12), "mlp_only_layers": [0]}
    elif family > 0.8:
        heads = rng.randint(1, 9)
        config |= {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "full_attention_interval": 3}
        config |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads * rng.choice((1, 2, 3))}
        config |= {"linear_key_head_dim": 32, "linear_value_head_dim": rng.choice((16, 32, 64))}
    return spec(**config)


def case(seed: int, layout: str, strategy: str) -> Case:
    """A random task: 1 to 8 uneven devices with little slack, sometimes too little."""
    rng = random.Random(seed)
    model = tiny_model(rng)
    tokens = rng.choice((64, 1024, 8192, 65536))
    request = Request(layout, strategy, Cache(rng.choice(("fp16", "q8", "q4")), tokens), 1, rng.choice((1, 64)), "idle")
    count = rng.randint(1, 8)
    wanted = demands(model, request, count)
    total = sum(
        d.split.bytes - d.split.workspace + d.kept.bytes + d.units * d.unit_cost().workspace for d in wanted.axes
    )
    weights = [rng.choice((1, 2, 3, 4, 6)) for _ in range(count)]
    slack = rng.choice((0.98, 1.01, 1.05, 1.2, 2))
    devices = []
    for i, weight in enumerate(weights):
        overhead = rng.choice((0, 2 * MIB, rng.randint(0, 4 * MIB)))
        room = int(total * slack * weight / sum(weights))
        budget = wanted.common.bytes + overhead + room + rng.randint(0, 1000)
        speed = rng.choice((300, 900, rng.randint(100, 4000))) * 10**9
        devices.append(
            Device(name=f"GPU {i}", budget_bytes=budget, overhead_bytes=overhead, bandwidth_bytes_per_second=speed)
        )
    return Case(model, tuple(devices), request)
