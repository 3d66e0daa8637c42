"""What the tests of measuring a whole model share: a tiny one, and its tokens."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.common import random_checkpoint
from benchmarks.decode.order import WARM, Order, prompts
from tests.published import sizes
from tpplan.decoder import Decoder, generate
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from tpplan.core.plan import SplitPlan


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **sizes(vocab=203, hidden=64, dense=96, layers=2, q=8, kv=4, head_dim=8, context=128),
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
TOKENS = 5


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Order:
    """Return what to measure of a tiny model on two virtual devices."""
    directory = tmp_path_factory.mktemp("model")
    random_checkpoint.write(directory, CONFIG)
    return Order(directory=str(directory), gpus=2, backend="cpu", batches=(1, 3), tokens=TOKENS, prefill=40)


def run_command(
    main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, folder: Path, config: Mapping[str, Any], *options: str
) -> int:
    """Run a command for a tiny model on virtual devices, with the model's config in a folder; return how it exits."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    monkeypatch.setattr(sys, "argv", [main.__module__, "--backend", "cpu", "--config", str(path), *options])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def generated(order: Order, plan: SplitPlan) -> list[int]:
    """Return the tokens that the first prompt leads to, as everybody else would have them made."""
    with compile_plan(plan, backend="cpu") as context:
        decoder = Decoder(context, order.directory, load_weights(plan, order.directory, context))
        return [token or 0 for (token,) in generate(decoder, prompts(1, 203), 1 + WARM + order.tokens)]


def different(matrix: torch.Tensor) -> int:
    """Return how many different rows there are."""
    return len({tuple(row) for row in matrix.tolist()})
