"""Rotary embeddings as transformers has them."""

from __future__ import annotations

import importlib
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from tests.later import transformers

if TYPE_CHECKING:
    from torch import Tensor

    from tests.exec.rope.cases import Json


def modeling(config: Json) -> Any:
    """Return the configuration object of transformers and the module with the model's code."""
    theirs = transformers.AutoConfig.for_model(**deepcopy(config))
    return theirs, importlib.import_module(type(theirs).__module__.replace(".configuration_", ".modeling_"))


def reference(config: Json, positions: int, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
    """Return sines and cosines of transformers' module for this config, of shape [positions, columns]."""
    theirs, module = modeling(config)
    classes = [name for name in dir(module) if name.endswith("RotaryEmbedding") and not name.startswith("Apply")]
    assert len(classes) == 1, classes
    embedding = getattr(module, classes[0])(theirs)
    cos, sin = embedding(torch.zeros(1), torch.arange(positions)[None], *([layer_type] if layer_type else []))
    return sin[0], cos[0]


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tables hold the same bits."""
    return ours.shape == theirs.shape and torch.equal(ours.view(torch.int32), theirs.contiguous().view(torch.int32))
