"""Checkpoints made of headers alone, whose files are holes, and small ones with random values."""

from __future__ import annotations

import json
from math import prod
from random import randbytes
from typing import TYPE_CHECKING, Any

from tests.published import sizes
from tpplan.core.model import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def tensor_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Return the bytes of data of these tensors."""
    return sum(prod(shape) * DTYPE_BITS[dtype] // 8 for dtype, shape in tensors.values())


def write_checkpoint(directory: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """Write a config.json, and a safetensors file with this header over a hole of the right size."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path = directory / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + end)
    return directory


#: A small Llama whose matrices are never square, so that no format can mistake rows for columns.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **sizes(vocab=320, hidden=256, dense=512, layers=3, q=6, kv=2, head_dim=64, context=128),
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}

#: Its linear layers: inputs and outputs.
LINEAR = {
    "self_attn.q_proj": (256, 384),
    "self_attn.k_proj": (256, 128),
    "self_attn.v_proj": (256, 128),
    "self_attn.o_proj": (384, 256),
    "mlp.gate_proj": (256, 512),
    "mlp.up_proj": (256, 512),
    "mlp.down_proj": (512, 256),
}


def llama_outside(head: bool = True, dtype: str = "F16") -> Tensors:
    """Return the small Llama's tensors outside the layers."""
    tensors: Tensors = {"model.embed_tokens.weight": (dtype, (320, 256)), "model.norm.weight": (dtype, (256,))}
    return tensors | ({"lm_head.weight": (dtype, (320, 256))} if head else {})


def llama_layers(matrix: Any, dtype: str = "F16") -> Tensors:
    """Return its layers; ``matrix(inputs, outputs, layer)`` gives the stored tensors of a matrix by suffix."""
    tensors: Tensors = {}
    for layer in range(3):
        start = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{start}{norm}.weight"] = (dtype, (256,))
        for name, (inputs, outputs) in LINEAR.items():
            for suffix, tensor in matrix(inputs, outputs, layer).items():
                tensors[start + name + suffix] = tensor
    return tensors


def save_random(directory: Path, config: Mapping[str, Any], dtype: str, shard_bytes: int = 2**30) -> Path:
    """Save a transformers model of this config, all of its tensors random, and return the directory."""
    import torch  # noqa: PLC0415 (tests of headers alone do without)

    from tests.family_models import build, hub_config, save_model  # noqa: PLC0415

    model = build(hub_config(dict(config)))
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():  # others, such as complex ones of what reads images, stay what they are
            tensor.data = tensor.data.to(getattr(torch, dtype)).normal_()
    save_model(model, directory, shard_bytes)
    return directory


def saved_values(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint's files, as the safetensors library reads them."""
    from safetensors.torch import load_file  # noqa: PLC0415 (it imports torch)

    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def fill_random(directory: Path) -> None:
    """Put random bytes into the holes of a checkpoint."""
    path = directory / "model.safetensors"
    with path.open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        file.seek(start)
        file.write(randbytes(path.stat().st_size - start))
