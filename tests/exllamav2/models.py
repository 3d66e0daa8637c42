"""Models as ExLlamaV2's TPContext sees them, and contexts for them, on virtual devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tpplan.exllamav2 import BROADCAST_ID, BROADCAST_KV, BROADCAST_Q, BROADCAST_RS, BROADCAST_VC, TPContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

KINDS = {"kv": BROADCAST_KV, "id": BROADCAST_ID, "vc": BROADCAST_VC, "rs": BROADCAST_RS, "q": BROADCAST_Q}
HALF = torch.half


def cache(name: str) -> type:
    """A cache class of ExLlamaV2, which is not installed here."""
    return type(name, (), {})


def named(name: str, size: int) -> Any:
    """A module of ExLlamaV2 with weights of ``size`` bytes."""
    return type(name, (), {"weight_footprint": lambda _: size})()


def small_model(modules: Sequence[object] = (), **keys: Any) -> Any:
    """A model of ExLlamaV2, as far as TPContext looks at it; small unless the keys say otherwise."""
    config: dict[str, Any] = {
        "arch": SimpleNamespace(lm=SimpleNamespace(supports_tp=True)),
        "hidden_size": 512,
        "intermediate_size": 2048,
        "vocab_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_key_value_groups": 2,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "max_seq_len": 256,
        "max_batch_size": 2,
        "max_input_len": 20,
        "max_output_len": None,
        "rotary_embedding_base": 10000.0,
    }
    return SimpleNamespace(config=SimpleNamespace(**(config | keys)), modules=list(modules))


def finalized(gpu_split: Sequence[float] = (2.0, 1.0, 1.5), scratch_bytes: int | None = None, **keys: Any) -> TPContext:
    """Return a context on virtual devices."""
    tp = TPContext(small_model(**keys), list(gpu_split), backend="cpu", scratch_bytes=scratch_bytes)
    tp.finalize()
    return tp


#: Llama-3.1-8B.
LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_groups": 4,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "max_seq_len": 8192,
    "max_batch_size": 1,
    "max_input_len": 2048,
}

#: 256 columns of intermediate for 512 of hidden: the smaller share of the former is none, that of the latter is some.
LOPSIDED: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 256, "vocab_size": 1024}
SHAPES: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
    "one GPU": ((2.0,), {}),
    "even": ((1.0, 1.0), {}),
    "uneven": ((2.0, 1.0, 1.5), {}),
    "a GPU without heads": ((1.0, 1.0, 1.0, 1.0), {"num_key_value_heads": 2, "num_key_value_groups": 8}),
    "a GPU that is left alone": ((1.5, 0.0, 1.0), {}),
    "a GPU with residual columns only": (
        (8.0, 1.0),
        {**LOPSIDED, "num_key_value_heads": 1, "num_key_value_groups": 16},
    ),
    "sizes that are no multiples": ((2.0, 1.0), {"intermediate_size": 1856, "vocab_size": 4001, "hidden_size": 720}),
}
shapes = pytest.mark.parametrize(("gpu_split", "keys"), SHAPES.values(), ids=SHAPES)


def noise(seed: int, *shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """Return normally distributed numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parts_of(tp: TPContext, whole: Tensor, kind: int, dim: int = 1) -> list[Tensor]:
    """The columns of each device, in memory of their own, as a device has them."""
    return [whole[..., a * dim : b * dim].clone() for _, a, b in tp.get_split(kind)]


def size_of(tp: TPContext, kind: int) -> int:
    """Return the elements of an axis."""
    return tp.get_split(kind)[-1][2]


def overlap(a: Tensor, b: Tensor) -> bool:
    """Tell whether two contiguous tensors share memory."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
