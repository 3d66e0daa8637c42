"""What all tests share: Hypothesis profiles, a model, and skipping what this machine has no GPUs for."""

from __future__ import annotations

import gc
import json
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pathlib import Path

_SLOW_IS_FINE = (HealthCheck.too_slow,)  # one slow core must not turn a green run red

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads on top of pytest's workers only get in each other's way

settings.register_profile("dev", deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile("ci", deadline=None, suppress_health_check=_SLOW_IS_FINE, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def _gpu_count() -> int:
    import torch  # noqa: PLC0415 - three seconds that only GPU tests pay

    return torch.cuda.device_count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that are marked ``gpu`` or ``multi_gpu`` where there are too few GPUs."""
    needs = {item: 2 if item.get_closest_marker("multi_gpu") else 1 for item in items if _wants_gpu(item)}
    have = _gpu_count() if needs else 0
    for item, count in needs.items():
        if have < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} GPUs, found {have}"))


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone what was imported, and come less often: compilers make many objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def _wants_gpu(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("gpu", "multi_gpu"))


@pytest.fixture(scope="session")
def llama_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the config.json of a model as large as Llama-3.1-8B."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }
    path = tmp_path_factory.mktemp("models") / "config.json"
    path.write_text(json.dumps(config))
    return path
