"""The decoder on real GPUs: the tokens of transformers, every step a graph."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from attrs import evolve
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from tests.decoder.test_memory import made
from tests.decoder_cases import CONFIGS, LENGTH, check, check_sixteen_bits, model_of, plan_of, request_of
from tests.flash_cases import check_parts, check_texts
from tests.graph_cases import mixtures
from tests.later import transformers
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.core import axes
from tpplan.core.axes import Axis
from tpplan.core.plan import Cache
from tpplan.decoder import Decoder, Prompt, Sampling, forward, generate
from tpplan.decoder import math as layers
from tpplan.decoder.cache.layer import LayerCache
from tpplan.decoder.cache.store import Store
from tpplan.decoder.decoding import prefill_graphs as prompt_graphs
from tpplan.decoder.decoding import steps
from tpplan.decoder.fast.launches.pointwise import Pointwise
from tpplan.decoder.layer import steps as plain
from tpplan.decoder.layer.stack import Stack
from tpplan.decoder.math import Scoring, additive_mask, attend, merge_parts
from tpplan.exec import compile as compile_plan
from tpplan.exec.toolchain.torch_shims import takes_cudnn
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tpplan.decoder.math import Merge

#: Families whose roundings choose other experts.
CHOOSING = {
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2", "mixtral"),
    *("qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
}

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
                for taken in (decoder.steps(count), decoder.new_steps(count, graphs=False))
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
@pytest.mark.parametrize("tokens", [40, 130, 300])
def test_parts_of_tokens_take_kernels(tokens: int) -> None:
    """The last tokens attend to a part of all at a time, and what parts find is weighed by their scores."""
    check_parts(tokens, torch.device("cuda"), torch.bfloat16, 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 1, 24, 64])
@pytest.mark.parametrize("queries", [1, 40, 64])
def test_prompts_take_kernels_without_masks(queries: int, window: int) -> None:
    """In 16 bits, flash kernels take the last tokens of a prompt as they are, heads shared, and say what others do.

    So they do behind windows, and with sinks.
    """
    torch.manual_seed(3)
    q = torch.randn(1, 8, queries, 64)
    k, v = torch.randn(2, 1, 2, 64, 64)
    for sinks in (None, torch.linspace(-3, 6, 8).bfloat16()):
        check_without_masks(q, k, v, sinks, window)


def check_without_masks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, window: int
) -> None:
    """Compare attention on a GPU in 16 bits, which makes no masks, with that in 32 bits."""
    expected = attend(q, k, v, None, scoring=Scoring(0.1, sinks=sinks), window=window)
    q, k, v = (x.to("cuda", torch.bfloat16) for x in (q, k, v))
    scoring = Scoring(0.1, sinks=None if sinks is None else sinks.to("cuda"))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), patch.object(layers, "additive_mask", side_effect=AssertionError):
        found = attend(q, k, v, None, scoring=scoring, window=window)
    torch.testing.assert_close(found.cpu().float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("sizes", [[2, 1, 130, 0], [1, 1, 1, 0]], ids=str)
def test_texts_in_a_cache(sizes: list[int], width: int, dtype: torch.dtype) -> None:
    """In 16 bits, one flash kernel takes several texts where they are, each with the numbers that it has alone."""
    for window, sinks in ((0, False), (0, True), (1, False), (70, True)):
        check_texts(sizes, torch.device("cuda"), dtype, width, 2e-2, window=window, sinks=sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [2, 97, 256, 1000, 4096])
def test_a_step_attends_without_copies(length: int, width: int) -> None:
    """In 16 bits, to a part of caches of any length: where torch takes cuDNN, by its kernels alone."""
    torch.manual_seed(3)
    q = torch.randn(3, 8, 1, width).bfloat16()
    cache = torch.randn(2, 3, 2, length + 5, width).bfloat16()
    mask = additive_mask(
        (torch.arange(length) <= torch.tensor([[0], [length // 2], [length - 1]]))[:, None, None], q.dtype
    )
    k, v = cache[..., :length, :].float()
    expected = attend(q.float(), k, v, mask.float(), scoring=Scoring(0.1))
    q, mask, (k, v) = q.to("cuda"), mask.to("cuda"), cache.to("cuda")[..., :length, :]
    found = attend(q, k, v, mask, scoring=Scoring(0.1), recurs=True)
    torch.testing.assert_close(found.cpu().float(), expected, atol=2e-2, rtol=2e-2)
    if takes_cudnn(q, k, v, mask, 0.1):
        names = kernels(lambda: attend(q, k, v, mask, scoring=Scoring(0.1), recurs=True))
        assert all("cudnn" in name for name in names), names


@pytest.mark.gpu
def test_new_lengths_are_not_planned(tmp_path: Path) -> None:
    """In 16 bits, cuDNN, which makes a plan for every shape, takes no prompt but those that fill a pass."""
    model = model_of("qwen3")
    transformers.AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.bfloat16).save_pretrained(tmp_path)
    plan = plan_of(tmp_path, 1, request_of(), {}, seed=4)
    with compile_plan(plan, backend="cuda", scratch=False) as context:
        decoder = Decoder(context, tmp_path, load_weights(plan, tmp_path, context), graphs=False)
        for prompt in ([1], [1, 2, 3], [1, 2, 3, 4, 5]):
            names = kernels(lambda prompt=prompt: decoder.prefill(prompt))  # type: ignore[misc]
            assert not any("cudnn" in name for name in names), names
            assert any("flash" in name for name in names), names


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("times", [1, 2, 4, 6])
@pytest.mark.parametrize(("heads", "keys", "width"), [(8, 2, 128), (32, 8, 128), (4, 4, 64)])
def test_full_passes_take_cudnn(heads: int, keys: int, width: int, times: int, dtype: torch.dtype) -> None:
    """Where torch prefers it, in parts of the tokens that a kernel merges, as near to 32 bits as the flash kernel."""
    torch.manual_seed(times)
    rows, place, scoring = 256, torch.device("cuda"), Scoring(width**-0.5)
    qkv = torch.randn(rows, heads + 2 * keys, width, device=place).to(dtype)
    store = Store("fp16", (2, keys, rows * times + 8, width), dtype, place)
    store._parts[0].normal_()
    q = torch.unflatten(qkv[:, :heads], 0, (1, rows)).transpose(1, 2)
    k, v = (half[1:, :, : rows * times] for half in store.halves)
    pointwise = Pointwise(torch.device("cuda", 0), dtype, "silu", eps=1e-5)

    def found(merge: Merge | None) -> torch.Tensor:
        return attend(q, k, v, scoring=scoring, recurs=merge is not None, merge=merge)

    def merge(*parts: torch.Tensor) -> torch.Tensor:
        sums = pointwise.merge(*parts)
        assert sums is not None
        return sums

    expected = attend(*(x.cpu().float() for x in (q, k, v)), scoring=scoring)
    errors = [(found(each).cpu().float() - expected).norm() / expected.norm() for each in (None, merge, merge_parts)]
    assert errors[0] < 0.01
    assert max(errors) < 2 * errors[0]
    if takes_cudnn(q, k[:, :, -rows:], v[:, :, -rows:], None, scoring.scale, is_causal=True):
        names, parts = kernels(lambda: found(merge)), 1 + (times - 1).bit_count()
        assert sum("cudnn" in name for name in names) >= parts
        assert sum("pointwise_merge" in name for name in names) == parts - 1
        assert not any("pytorch_flash" in name for name in names), names
        assert found(merge).transpose(1, 2).is_contiguous()  # or what follows would copy it


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [1, min(max(GPUS, 1), 4)])
@pytest.mark.parametrize("graphs", [None, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral"])
def test_long_texts_say_what_torch_says(model_type: str, graphs: bool | None, devices: int, tmp_path: Path) -> None:
    """Of several passes that they fill, and a last one, also behind a text that the cache has, and beside others."""
    rows, length = 64, 400
    directory = made(model_type, tmp_path, head_dim=64, max_position_embeddings=length)
    request = evolve(request_of(batch=2), cache=Cache("fp16", 2 * length), max_rows=rows)
    plan = plan_of(directory, devices, request, {}, seed=4)
    with (
        compile_plan(plan, backend="cuda", scratch=False) as context,
        patch.object(prompt_graphs, "_SMALLEST", rows // 4),
        torch.inference_mode(),
    ):
        weights = load_weights(plan, directory, context)
        decoder = Decoder(context, directory, weights, graphs=graphs)
        plain_one = Decoder(context, directory, weights, graphs=False, kernels=False)
        assert bool(decoder.prompt_graphs) == (graphs is None)
        random = Random(devices)
        for sizes in ([(0, 300, 0)], [(1, 30, 0)], [(1, 128, 30), (0, 60, 300)], [(0, 390, 0)], [(1, 256, 0)]):
            prompts = [Prompt([random.randrange(200) for _ in range(size)], i, at) for i, size, at in sizes]
            for _ in range(3):  # as written, captured and replayed, where there are graphs
                found, expected = (
                    context.gather(each.read(prompts), Axis.VOCAB).tensor.float() for each in (decoder, plain_one)
                )
                assert (found - expected).norm() < 0.03 * expected.norm(), sizes
        for own, right in zip(decoder.stack.heads, plain_one.stack.heads, strict=True):
            for device, heads in own.items():
                (part,), (other,) = heads.cache._parts, right[device].cache._parts
                assert (part - other).float().norm() < 0.03 * other.float().norm()


def check_passes(
    directory: Path,
    devices: int,
    *,
    batch: int = 4,
    max_rows: int = 16,
    layout: str = "reduce",
    transport: str = "auto",
    turns: bool | None = None,
) -> None:
    """Compare passes of prompts as graphs with the same as they are written, and with those of a decoder without.

    Before and after them are steps, whose graphs share their memory. Nothing else is written to the cache: what is
    cleared as texts begin, which only a decoder with graphs of steps has to do, is left out.
    """
    request = evolve(request_of(layout, batch=batch), max_rows=max_rows)
    plan = plan_of(directory, devices, request, {}, seed=4)
    with (
        compile_plan(plan, backend="cuda", scratch=False, transport=transport) as context,
        patch.multiple(prompt_graphs, _SMALLEST=max_rows // 4, _LEAST_OF_ONE=max_rows // 2),
        patch.object(Stack, "clear_caches"),
        torch.inference_mode(),
    ):
        weights = load_weights(plan, directory, context)
        decoder, without = (
            Decoder(context, directory, weights, graphs=graphs, turns=turns) for graphs in (None, False)
        )
        graphs = decoder.prompt_graphs
        assert graphs
        assert not without.prompt_graphs
        texts = [list(generate(decoder, [[5, 17, 99], [8, 4]], 8))]
        stores = [
            [part for layer in each.stack.heads for heads in layer.values() for part in heads.cache._parts]
            for each in (decoder, without)
        ]
        for stored in (*stores[0], *stores[1]):
            stored.fill_(torch.nan)

        def read(by: Decoder, prompts: Sequence[Prompt]) -> torch.Tensor:
            return context.gather(by.read(prompts), Axis.VOCAB).tensor.clone()

        begun = [Prompt([7 * i % 200 for i in range(max_rows)])]
        alone = [begun, [Prompt([9 * i % 200 for i in range(max_rows // 2 - 1)], start=max_rows)]]
        for prompts in (*mixtures(Random(5), batch, max_rows), *alone * 3):
            before = [stored.clone() for stored in stores[0]]
            replayed, expected = read(decoder, prompts), read(without, prompts)
            for stored, old in zip(stores[0], before, strict=True):  # rings forget what a pass overwrites
                stored.copy_(old)
            with patch.object(graphs, "_have_run", set()):
                written = read(decoder, prompts)
            assert (replayed - written).norm() < 0.001 * written.norm()
            assert (replayed - expected).norm() < 0.03 * expected.norm()
        assert {shape.rows for shape in graphs._graphs} == set(graphs.sizes)
        assert {shape.goes_on for shape in graphs._graphs} == ({None, False, True} if graphs._has_alone else {None})
        for found, right in zip(*stores, strict=True):
            assert right.isnan().any() or right.shape[-2] < LENGTH  # windows are full
            assert torch.equal(found.isnan(), right.isnan())
            assert (found - right).nan_to_num().norm() < 0.03 * right.nan_to_num().norm()
            found.zero_()  # steps look at more than there is, and hide it
        texts.append(list(generate(decoder, [[5, 17, 99], [8, 4]], 8)))
    assert texts[0] == texts[1]


def saved(model_type: str, dtype: torch.dtype, directory: Path) -> Path:
    """Return a family's model in 16 bits."""
    transformers.AutoModelForCausalLM.from_pretrained(model_of(model_type).directory, dtype=dtype).save_pretrained(
        directory
    )
    return directory


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen2", "mistral"])
def test_passes_are_graphs(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of any mixture of prompts, on one GPU, also behind windows."""
    check_passes(saved(model_type, dtype, tmp_path), 1)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen2"])
def test_passes_are_graphs_over_gpus(model_type: str, tmp_path: Path) -> None:
    """The same over several, unevenly."""
    check_passes(saved(model_type, torch.bfloat16, tmp_path), min(GPUS, 4))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("layout", ["reduce", "gather"])
@pytest.mark.parametrize(("transport", "turns"), [("host", None), ("events", None), ("peer", True)])
def test_halves_of_passes_take_turns(transport: str, turns: bool | None, layout: str, tmp_path: Path) -> None:
    """By default where devices cannot write to each other's memory; they find what whole passes find."""
    taken, run = list[int](), Stack.run_in_turns

    def noted(self: Stack, halves: Any) -> None:
        taken.append(len(halves))
        run(self, halves)

    few = patch.multiple(forward, _HALF=4, _EVEN=1)
    with few, patch.object(Stack, "run_in_turns", noted):
        directory = saved("llama", torch.bfloat16, tmp_path)
        check_passes(directory, min(GPUS, 4), layout=layout, transport=transport, turns=turns)
    assert taken


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [1, min(max(GPUS, 1), 4)])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral"])
def test_passes_are_graphs_where_kernels_write_to_the_cache(model_type: str, devices: int, tmp_path: Path) -> None:
    """They leave out the rows that fill a pass up; heads have 64 elements."""
    directory = made(model_type, tmp_path, head_dim=64)
    method = (plain.Plain, "norm_and_rope") if model_type == "mistral" else (LayerCache, "put")  # torch writes rings
    with patch.object(*method, side_effect=AssertionError):
        check_passes(directory, devices, batch=6, max_rows=64)


@pytest.mark.gpu
def test_threads_take_turns_with_passes_of_one_sequence(tmp_path: Path) -> None:
    """Each captures what another one ran first, and finds the same."""
    directory, rows = made("llama", tmp_path, head_dim=64), 64
    plan = plan_of(directory, 1, evolve(request_of(batch=2), max_rows=rows), {}, seed=4)
    few = patch.multiple(prompt_graphs, _SMALLEST=rows // 4, _LEAST_OF_ONE=rows // 2)
    with compile_plan(plan, backend="cuda", scratch=False) as context, few:
        decoder = Decoder(context, directory, load_weights(plan, directory, context))
        graphs = decoder.prompt_graphs
        assert graphs

        def read(prompt: Prompt) -> torch.Tensor:
            return context.gather(decoder.read([prompt]), Axis.VOCAB).tensor.clone()

        for prompt in (Prompt([5] * rows), Prompt([7] * (rows // 2 - 1), start=rows)):
            found = []
            for _ in range(3):
                with ThreadPoolExecutor(1) as thread:
                    found.append(thread.submit(read, prompt).result())
            assert all((each - found[0]).norm() < 0.001 * found[0].norm() for each in found)
        assert decoder.prompt_graphs is graphs
        expected = [False, True] if graphs._has_alone else [None, None]
        assert [shape.goes_on for shape in graphs._graphs] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [1, min(max(GPUS, 1), 4)])
@pytest.mark.parametrize(
    ("model_type", "count"),
    [("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts"), ("gpt_oss", "num_local_experts")],
)
def test_passes_with_experts_are_graphs(model_type: str, count: str, devices: int, tmp_path: Path) -> None:
    """They are grouped by kernels. Rows have all experts: otherwise roundings would choose others."""
    more = {"num_experts_per_tok": CONFIGS[model_type][count]}
    directory = made(model_type, tmp_path, head_dim=64, **more)
    vectors = patch.dict(axes.DEFAULT_UNIT, {Axis.EXPERT_INTERMEDIATE: 8})  # torch computes with what is cut finer
    with vectors, patch.object(plain.Plain, "experts_up", side_effect=AssertionError):
        check_passes(directory, devices, batch=6, max_rows=64)


def check_kernels(directory: Path, devices: int, backend: str) -> None:
    """Compare prompts and steps of some numbers of sequences with those of a decoder by torch alone."""
    plan = plan_of(directory, devices, evolve(request_of(batch=5), max_rows=64), {}, seed=4)
    with compile_plan(plan, backend=backend, scratch=False) as context, torch.inference_mode():
        weights = load_weights(plan, directory, context)
        decoders = [Decoder(context, directory, weights, graphs=False, kernels=kernels) for kernels in (True, False)]
        prompts = [Prompt([(7 * i + 5 * t) % 200 for t in range(9 * i + 1)], i) for i in range(5)]

        def said(decoder: Decoder, count: int) -> torch.Tensor:
            if not count:
                return context.gather(decoder.read(prompts), Axis.VOCAB).tensor.float()
            places = [device.device for device in context.devices.values()]
            numbers = torch.arange(count), torch.tensor([len(each.tokens) for each in prompts[:count]])
            tokens, positions = ([each.to(place) for place in places] for each in numbers)
            return context.gather(decoder.decode(tokens, positions), Axis.VOCAB).tensor.float()

        for count in (0, 1, 2, 4, 5):
            found, expected = (said(decoder, count) for decoder in decoders)
            assert (found - expected).norm() < 0.03 * expected.norm(), count


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [1, min(max(GPUS, 1), 4)])
@pytest.mark.parametrize("model_type", sorted({*CONFIGS} - CHOOSING))
def test_kernels_say_what_torch_says(model_type: str, devices: int, tmp_path: Path) -> None:
    """Of few rows and of more, but for rounding; heads have 64 elements."""
    check_kernels(made(model_type, tmp_path, head_dim=64), devices, "cuda")
