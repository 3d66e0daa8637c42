"""What the tests of reading models share: configs and checkpoints that are small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.checkpoints import LLAMA, Tensors
from tests.family_models import build, hub_config, save_model

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def plain(inputs: int, outputs: int, _layer: int) -> Tensors:
    """Return the one tensor of an unquantised matrix."""
    return {".weight": ("F16", (outputs, inputs))}


def small(**changes: Any) -> dict[str, Any]:
    """Return the small Llama's config; a change to None takes the key out."""
    return {key: value for key, value in (LLAMA | changes).items() if value is not None}


def save(directory: Path, data: dict[str, Any], dtype: torch.dtype, shard: str) -> None:
    """Save a model of random weights as transformers does with one that it loaded from the hub."""
    import torch  # noqa: PLC0415 (where it is not installed, the other tests run)

    torch.manual_seed(0)
    model = build(hub_config(data), dtype=dtype)
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith((".e_score_correction_bias", ".expert_bias")):  # stays as it is on the hub
            tensor.data = tensor.data.float()
        elif "norm" in name or name.endswith(".A_log"):  # in 16 bits, though transformers makes some in 32
            tensor.data = tensor.data.to(dtype)
    save_model(model, directory, shard)
