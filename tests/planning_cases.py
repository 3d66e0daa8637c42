"""Small random planning tasks."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from attrs import frozen

from tpplan.config import parse_config
from tpplan.devices import Device
from tpplan.families import spec_from_config
from tpplan.memory import demands
from tpplan.model import ModelSpec
from tpplan.plan import Cache, Request

if TYPE_CHECKING:
    from tpplan.costs import Demands


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
