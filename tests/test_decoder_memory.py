"""What a decoder's activations take of each device: no more than the plan's ledger has scratch for."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tpplan
from tests.activations import activations
from tests.decoder_cases import CONFIGS, plan_of
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.axes import bounds_of
from tpplan.decoder import Decoder, cache, layers
from tpplan.decoder.sampling import likeliest
from tpplan.exec import compile as compile_plan
from tpplan.memory import demands
from tpplan.plan import Cache, Request
from tpplan.weights import load_weights
from tpplan.workspace import areas

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.plan import SplitPlan

#: Shapes of activations that are to each other as those of models are, two or more passes of a prompt, and rows of
#: every expert.
_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "bfloat16",
}
_LENGTH, _BATCH, _ROWS = 128, 8, 64
_SMALLER = {"hidden_size": 256, "head_dim": 32, "moe_intermediate_size": 160, "sliding_window": 24}


def made(model_type: str, directory: Path) -> Path:
    """Make a checkpoint of a family in 16 bits."""
    torch.manual_seed(1)
    special = CONFIGS[model_type]
    smaller = {key: value for key, value in _SMALLER.items() if special.get(key)}
    config = AutoConfig.for_model(**{**_SIZES, "model_type": model_type, **special, **smaller})
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(directory)
    return directory


def planned(directory: Path, layout: str, shares: tuple[int, ...]) -> SplitPlan:
    """Return a plan that cuts every axis by shares."""
    request = Request(layout, "balanced", Cache("fp16", _BATCH * _LENGTH), _BATCH, _ROWS, "idle")
    cut = {}
    for demand in demands(tpplan.read_model(directory), request, len(shares)).axes:
        ends = [round(demand.units * sum(shares[:i]) / sum(shares)) for i in range(len(shares) + 1)]
        cut[demand.axis] = bounds_of([end - start for start, end in pairwise(ends)], demand.unit, demand.size)
    return plan_of(directory, len(shares), request, cut, seed=0)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_activations_fit_in_the_scratch_of_the_ledger(model_type: str, tmp_path: Path) -> None:
    """The peak of long prompts and of a step of all sequences, on one device and on uneven ones, in both layouts.

    What has a limit in bytes, whatever the model, is limited here as models are smaller.
    """
    directory = made(model_type, tmp_path)
    for layout in ("reduce", "gather"):
        for shares in ((1,), (3, 1)):
            plan = planned(directory, layout, shares)
            room = {i: area.scratch_bytes for i, area in enumerate(areas(plan.splits, plan.model.dtype, plan.request))}
            with (
                compile_plan(plan, backend="cpu", scratch=False) as context,
                patch.object(layers, "AT_ONCE", 2**13),
                patch.object(cache, "AT_ONCE", 2**13),
                patch.object(layers, "_WIDENED", 16),
            ):
                decoder = Decoder(context, directory, load_weights(plan, directory, context))
                used = context.all_devices
                tokens, positions = ([torch.full((_BATCH,), n) for _ in used] for n in (3, _LENGTH - 1))
                with activations(decoder) as counted:
                    decoder.prefill([i % 1000 for i in range(_LENGTH - 1)], 1)
                    assert not any(counted.live.values())
                    for device, *tensors in zip(used, tokens, positions, strict=True):
                        for tensor in tensors:
                            counted.own(tensor, device)
                    likeliest(decoder.context, decoder.decode(tokens, positions))
            taken = {device: counted.peak[device] / room[device] for device in used}
            assert all(0.4 < share <= 1 for share in taken.values()), (layout, shares, taken)
