"""The decoder on real GPUs: the tokens of transformers, every step a graph."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
from attrs import evolve
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from tests.decoder_cases import CONFIGS, check, check_sixteen_bits, model_of, plan_of, request_of
from tests.flash_cases import check_texts
from tests.graph_cases import mixtures
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.axes import Axis
from tpplan.decoder import Decoder, Prompt, Sampling, generate, steps
from tpplan.decoder.layers import attend, hiding
from tpplan.exec import compile as compile_plan
from tpplan.exec.torch_shims import takes_cudnn
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def kernels(call: Callable[[], object]) -> list[str]:
    """Return the names of the kernels that a call runs on a GPU."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:  # which warns otherwise
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events() or () if event.device_type.name == "CUDA"]
    return [name for name in names if not name.startswith("Mem")]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("layout", ["reduce", "gather"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_as_transformers(model_type: str, layout: str) -> None:
    """Logits of two prompts, and 64 tokens of each, of which most come from graphs of several spans."""
    model = model_of(model_type)
    plan = plan_of(model.directory, min(GPUS, 4), request_of(layout), {}, seed=4)
    with patch.object(steps, "_SHORTEST_SPAN", 16):
        check(model, plan, "auto", backend="cuda")


@pytest.mark.gpu
def test_graphs_draw_what_is_drawn_without() -> None:
    """Logits of graphs of several spans, of two numbers of sequences in turn, are each those of the step as written."""
    model = model_of("llama")
    plan = plan_of(model.directory, min(GPUS, 2), request_of(), {}, seed=4)
    sampling = Sampling(temperature=1.5, seed=3)
    with compile_plan(plan, backend="cuda", scratch=False) as context, patch.object(steps, "_SHORTEST_SPAN", 16):
        decoder = Decoder(context, model.directory, load_weights(plan, model.directory, context), cache="fp32")
        for count in (2, 1, 2):
            drawn, expected = (
                [taken.start(model.prompts[:count], sampling), *(taken.step() for _ in range(40))]
                for taken in (decoder.steps(count), steps.Steps(decoder, count, graphs=False))
            )
            assert drawn == expected


@pytest.mark.gpu
def test_one_gpu() -> None:
    """The same on a single one."""
    model = model_of("llama")
    check(model, plan_of(model.directory, 1, request_of(), {}, seed=4), "auto", backend="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_sixteen_bits(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """What other kernels than those for 32 bits compute is about as near to the latter as in transformers."""
    check_sixteen_bits(model_of(model_type), "reduce", dtype, tmp_path, min(GPUS, 2), backend="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 40, 64])
def test_prompts_take_kernels_without_masks(queries: int) -> None:
    """In 16 bits, flash kernels take the last tokens of a prompt as they are, heads shared, and say what others do."""
    torch.manual_seed(3)
    q = torch.randn(1, 8, queries, 64)
    k, v = torch.randn(2, 1, 2, 64, 64)
    expected = attend(q, k, v, None, scale=0.1, cap=None)
    q, k, v = (x.to("cuda", torch.bfloat16) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = attend(q, k, v, None, scale=0.1, cap=None)
    torch.testing.assert_close(found.cpu().float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("sizes", [[2, 1, 130, 0], [1, 1, 1, 0]], ids=str)
def test_texts_in_a_cache(sizes: list[int], width: int, dtype: torch.dtype) -> None:
    """In 16 bits, one flash kernel takes several texts where they are, each with the numbers that it has alone."""
    check_texts(sizes, torch.device("cuda"), dtype, width, 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [2, 97, 256, 1000, 4096])
def test_a_step_attends_without_copies(length: int, width: int) -> None:
    """In 16 bits, to a part of caches of any length: where torch takes cuDNN, by its kernels alone."""
    torch.manual_seed(3)
    q = torch.randn(3, 8, 1, width).bfloat16()
    cache = torch.randn(2, 3, 2, length + 5, width).bfloat16()
    mask = hiding((torch.arange(length) <= torch.tensor([[0], [length // 2], [length - 1]]))[:, None, None], q.dtype)
    k, v = cache[..., :length, :].float()
    expected = attend(q.float(), k, v, mask.float(), scale=0.1, cap=None)
    q, mask, (k, v) = q.to("cuda"), mask.to("cuda"), cache.to("cuda")[..., :length, :]
    found = attend(q, k, v, mask, scale=0.1, cap=None, recurs=True)
    torch.testing.assert_close(found.cpu().float(), expected, atol=2e-2, rtol=2e-2)
    if takes_cudnn(q, k, v, mask, 0.1):
        names = kernels(lambda: attend(q, k, v, mask, scale=0.1, cap=None, recurs=True))
        assert all("cudnn" in name for name in names), names


@pytest.mark.gpu
def test_new_lengths_are_not_planned(tmp_path: Path) -> None:
    """In 16 bits, cuDNN, which makes a plan for every shape, takes no prompt but those that fill a pass."""
    model = model_of("qwen3")
    AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.bfloat16).save_pretrained(tmp_path)
    plan = plan_of(tmp_path, 1, request_of(), {}, seed=4)
    with compile_plan(plan, backend="cuda", scratch=False) as context:
        decoder = Decoder(context, tmp_path, load_weights(plan, tmp_path, context))
        for prompt in ([1], [1, 2, 3], [1, 2, 3, 4, 5]):
            names = kernels(lambda prompt=prompt: decoder.prefill(prompt))  # type: ignore[misc]
            assert not any("cudnn" in name for name in names), names
            assert any("flash" in name for name in names), names


def check_full_passes(model_type: str, devices: int, dtype: torch.dtype, directory: Path) -> None:
    """Compare full passes as a graph with the same as they are written, and with those of a decoder without graphs.

    Between them are passes that are not full, and steps before and after, whose graphs share their memory.
    """
    model = model_of(model_type)
    AutoModelForCausalLM.from_pretrained(model.directory, dtype=dtype).save_pretrained(directory)
    plan = plan_of(directory, devices, evolve(request_of(batch=4), max_rows=16), {}, seed=4)
    with compile_plan(plan, backend="cuda", scratch=False) as context:
        weights = load_weights(plan, directory, context)
        decoder, without = (Decoder(context, directory, weights, graphs=graphs) for graphs in (True, False))
        assert decoder.full

        def read(by: Decoder, prompts: Sequence[Prompt]) -> torch.Tensor:
            return context.gather(by.read(prompts), Axis.VC).tensor.clone()

        texts = [list(generate(decoder, model.prompts, 8))]
        for prompts in mixtures(Random(5), 4, 16):
            replayed, expected = read(decoder, prompts), read(without, prompts)
            with patch.object(decoder.full, "_has_run", new=False):
                written = read(decoder, prompts)
            assert (replayed - written).norm() < 0.001 * written.norm()
            assert (replayed - expected).norm() < 0.03 * expected.norm()
            begun = [evolve(prompt, tokens=prompt.tokens[:3]) for prompt in prompts[:2]]
            found, expected = read(decoder, begun), read(without, begun)
            assert (found - expected).norm() < 0.03 * expected.norm()
        assert decoder.full._graph
        texts.append(list(generate(decoder, model.prompts, 8)))
    assert texts[0] == texts[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_full_passes_are_graphs(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of any mixture of prompts, on one GPU."""
    check_full_passes(model_type, 1, dtype, tmp_path)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_full_passes_are_graphs_over_gpus(model_type: str, tmp_path: Path) -> None:
    """The same over several, unevenly."""
    check_full_passes(model_type, min(GPUS, 4), torch.bfloat16, tmp_path)
