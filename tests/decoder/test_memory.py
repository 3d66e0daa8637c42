"""What a decoder's activations take of each device: no more than the plan's ledger has scratch for."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import finalize

import pytest
import torch
from attrs import asdict, evolve, has

import tpplan
from tests.decoder.activations import activations
from tests.decoder.quantised_checkpoints import mxfp4, quantised, stored
from tests.decoder_cases import CONFIGS, FURTHER, LATENT, OWN_STEPS, plan_of
from tests.flash_cases import flash_calls
from tests.later import transformers
from tests.published import sizes
from tests.watching import Watching
from tests.weight_plans import fine_units
from tpplan.core.axes import Axis, bounds_of
from tpplan.core.plan import Cache, Request
from tpplan.core.workspace import areas
from tpplan.decoder import Decoder, Prompt, forward
from tpplan.decoder import math as layers
from tpplan.decoder.cache import layer as layer_cache
from tpplan.decoder.decoding.steps import greedy
from tpplan.decoder.layer import experts, latent
from tpplan.decoder.weights import products
from tpplan.decoder.weights import quantised as quantised_matrices
from tpplan.decoder.weights.quantised import Exl2Matrix, Float4Matrix, NestedScales, TableMatrix
from tpplan.exec import compile as compile_plan
from tpplan.exec.toolchain.torch_shims import flash_attention_to_part
from tpplan.planner.ledger import demands
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.flash_cases import FlashCalls
    from tpplan.core.plan import SplitPlan
    from tpplan.decoder.weights.quantised import Quantised
    from tpplan.weights import Weights

__all__ = ["fine_units", "flash_calls"]  # fixtures

#: Shapes of activations that are to each other as those of models are, two or more passes of a prompt, and rows of
#: every expert.
_SIZES: dict[str, Any] = {
    **sizes(vocab=1024, hidden=256, dense=768, layers=2, q=8, kv=4, head_dim=32, context=128),
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "bfloat16",
}
_LENGTH, _BATCH, _ROWS = 128, 8, 64
#: Where the last three passes of a long text begin, which take the most: those before them have less to attend to.
_LAST = 8 * _LENGTH - 3 * _ROWS
#: Of models that read long texts: one layer takes as much as several, one after the other.
_FEW: dict[str, int] = {"num_hidden_layers": 1}
_SMALLER = {"hidden_size": 256, "head_dim": 32, "moe_intermediate_size": 160, "sliding_window": 24}
_LATENTS = {
    "num_key_value_heads": 8,
    "head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "kv_lora_rank": 128,
    "q_lora_rank": 96,
}


def made(model_type: str, directory: Path, **more: Any) -> Path:
    """Make a checkpoint of a family in 16 bits, with more in its config."""
    torch.manual_seed(1)
    special = (CONFIGS | FURTHER)[model_type]
    smaller = {key: value for key, value in _SMALLER.items() if special.get(key)}
    smaller |= {key: value for key, value in _LATENTS.items() if model_type in LATENT and special.get(key)}
    config = transformers.AutoConfig.for_model(**{**_SIZES, "model_type": model_type, **special, **smaller, **more})
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(directory)
    return directory


def planned(directory: Path, layout: str, shares: tuple[int, ...], cache: Cache) -> SplitPlan:
    """Return a plan that cuts every axis by shares."""
    request = Request(layout, "balanced", cache, _BATCH, _ROWS, "idle", beyond=True)
    cut = {}
    for demand in demands(tpplan.read_model(directory), request, len(shares)).axes:
        ends = [round(demand.units * sum(shares[:i]) / sum(shares)) for i in range(len(shares) + 1)]
        cut[demand.axis] = bounds_of([end - start for start, end in pairwise(ends)], demand.unit, demand.size)
    return plan_of(directory, len(shares), request, cut, seed=0)


def taken(
    directory: Path, plan: SplitPlan, kinds: int = 1000, at_once: int = 2**13, start: int = 0
) -> dict[int, float]:
    """Return the peak of a long prompt and of a step of all sequences, by device, as a share of the scratch.

    What has a limit in bytes, whatever the model, is limited here as models are smaller.

    Args:
        directory: the model's.
        plan: to run by.
        kinds: of tokens in the prompt.
        at_once: elements that are made at a time of what could take any amount of memory.
        start: tokens of the prompt that the cache is taken to have.
    """
    room = [area.scratch_bytes for area in areas(plan.splits, plan.model.dtype, plan.request)]
    length = plan.request.cache.tokens // _BATCH
    with (
        compile_plan(plan, backend="cpu", scratch=False) as context,
        patch.object(layers, "AT_ONCE", at_once),
        patch.object(layer_cache, "AT_ONCE", at_once),
        patch.object(latent, "AT_ONCE", at_once),
        patch.object(layers, "_WIDENED", 16),
    ):
        decoder = Decoder(context, directory, load_weights(plan, directory, context))
        used = context.all_devices
        tokens, positions = ([torch.full((_BATCH,), n) for _ in used] for n in (3, length - 1))
        decoder._most[1] = start
        with activations(decoder) as counted:
            decoder.prefill([i % kinds for i in range(start, length - 1)], 1, start)
            assert not any(counted.live.values())
            for device, *tensors in zip(used, tokens, positions, strict=True):
                for tensor in tensors:
                    counted.own(tensor, device)
            greedy(decoder.context, decoder.decode(tokens, positions), decoder.stack.steps, tokens, positions)
    return {device: counted.peak[device] / room[device] for device in used}


@pytest.mark.parametrize("model_type", [*CONFIGS, *OWN_STEPS])
def test_activations_fit_in_the_scratch_of_the_ledger(model_type: str, tmp_path: Path) -> None:
    """On one device and on uneven ones, in both layouts."""
    directory = made(model_type, tmp_path)
    for layout in ("reduce", "gather"):
        for shares in ((1,), (3, 1)):
            plan = planned(directory, layout, shares, Cache("fp16", _BATCH * _LENGTH))
            found = taken(directory, plan)
            assert all(0.4 < share <= 1 for share in found.values()), (layout, shares, found)


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        (
            "deepseek_v3",
            {"first_k_dense_replace": 2, "kv_lora_rank": 256, "num_attention_heads": 32, "num_key_value_heads": 32},
        ),
        ("qwen3_5_text", {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 32}),
    ],
)
def test_steps_of_as_many_sequences_as_rows_do_too(
    model_type: str, more: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which some are computed at a time."""
    monkeypatch.setattr(f"{__name__}._BATCH", _ROWS)
    directory = made(model_type, tmp_path, **more, intermediate_size=128)
    for shares in ((1,), (3, 1)):
        found = taken(directory, planned(directory, "reduce", shares, Cache("fp16", _ROWS * _LENGTH)))
        assert all(share <= 1 for share in found.values()), (shares, found)


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {}),
        ("deepseek_v3", {}),
        ("gpt_oss", {}),
        ("qwen3_next", {}),
        ("qwen3_moe", {"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    ],
)
@pytest.mark.parametrize("layout", ["reduce", "gather"])
def test_experts_of_as_many_sequences_as_rows_do_too(
    layout: str, model_type: str, more: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which few are computed for all rows at a time, on a device with a small part of each too."""
    monkeypatch.setattr(f"{__name__}._BATCH", _ROWS)
    monkeypatch.setitem(_SMALLER, "moe_intermediate_size", more.get("moe_intermediate_size", 160))
    directory = made(model_type, tmp_path, **more)
    found = taken(directory, planned(directory, layout, (3, 1), Cache("fp16", _ROWS * _LENGTH)))
    assert all(share <= 1 for share in found.values()), found


@pytest.mark.parametrize("kind", ["fp8", "q8", "q6", "q4"])
def test_smaller_caches_of_long_texts_do_too(kind: str, tmp_path: Path) -> None:
    """Of which one KV head of a sequence is in 16 bits at a time."""
    directory = made("qwen3", tmp_path, **_FEW)
    plan = planned(directory, "reduce", (1,), Cache(kind, _BATCH * 8 * _LENGTH))
    assert taken(directory, plan, start=_LAST)[0] <= 1


@pytest.mark.parametrize("kind", ["fp16", "fp8"])
def test_latents_of_long_texts_do_too(kind: str, tmp_path: Path) -> None:
    """Of which few tokens are in 16 bits at a time, and few sequences have scores."""
    directory = made("deepseek_v3", tmp_path, **_FEW)
    plan = planned(directory, "reduce", (1,), Cache(kind, _BATCH * 8 * _LENGTH))
    assert taken(directory, plan, start=_LAST)[0] <= 1


def test_long_windows_do_too(tmp_path: Path) -> None:
    """Which are hidden from a few queries of a pass at a time, in passes that a whole window is before."""
    window = 8 * _LENGTH
    directory = made("mistral", tmp_path, sliding_window=window, **_FEW)
    plan = planned(directory, "reduce", (1,), Cache("fp16", _BATCH * 2 * window))
    assert taken(directory, plan, start=2 * window - 3 * _ROWS)[0] <= 1


@pytest.mark.parametrize(("intermediate", "has_room"), [(768, True), (160, True), (32, False)])
def test_second_attention_outputs_do_too(
    intermediate: int, has_room: bool, tmp_path: Path, flash_calls: FlashCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of full passes behind others, whose tokens are attended to in parts where the plan has room for that."""
    shapes = set[tuple[int, int]]()

    def attend_to(q: torch.Tensor, k: torch.Tensor, *others: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.add((q.shape[2], k.shape[2]))
        return flash_attention_to_part(q, k, *others, **more)

    directory = made("llama", tmp_path, intermediate_size=intermediate, **_FEW)
    plan = planned(directory, "reduce", (1,), Cache("fp16", _BATCH * 4 * _LENGTH))
    by_flash = taken(directory, plan)[0]
    monkeypatch.setattr(layers, "takes_cudnn", lambda *_, **__: True)
    monkeypatch.setattr(layers, "cudnn_attention_to_part", attend_to)
    monkeypatch.setattr(layers, "_MERGED", 4)
    assert taken(directory, plan)[0] <= max(1, by_flash)
    found = shapes.copy()
    shapes.clear()
    taken(directory, planned(directory, "reduce", (1,), Cache("q8", _BATCH * 4 * _LENGTH)))
    assert {tokens for _, tokens in shapes} == {_ROWS}
    shapes |= found
    assert shapes == {(_ROWS, _ROWS * times) for times in ((1, 2, 4) if has_room else (1,))}
    assert not flash_calls  # of several texts


def test_windows_do_too_where_much_is_made_at_once(tmp_path: Path) -> None:
    """As much of a pass as in a model of 7B parameters: masks are made of parts that take as much again."""
    directory = made("mistral", tmp_path, sliding_window=4 * _LENGTH, **_FEW)
    plan = planned(directory, "reduce", (1,), Cache("fp16", _BATCH * 8 * _LENGTH))
    assert taken(directory, plan, at_once=2**15)[0] <= 1


def test_keys_and_values_of_latents_do_too(tmp_path: Path) -> None:
    """Made of one or two heads of long prompts at a time, as of a model of 16B parameters."""
    directory, heads = made("deepseek_v2", tmp_path), set[int]()

    def attend(q: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        heads.add(q.shape[1])
        return layers.attend(q, *others, **more)

    for layout in ("reduce", "gather"):
        for shares in ((1,), (3, 1)):
            plan = planned(directory, layout, shares, Cache("fp16", _BATCH * _LENGTH))
            with patch.object(latent, "attend", attend):
                found = taken(directory, plan, at_once=3 * _LENGTH * 48)
            assert heads == {1, 2}
            assert all(0.4 < share <= 1 for share in found.values()), (layout, shares, found)


def test_rows_of_the_same_experts_do_too(tmp_path: Path) -> None:
    """Equal tokens are routed to the same experts, which compute some of them at a time."""
    directory = made("mixtral", tmp_path)
    for shares in ((1,), (3, 1)):
        plan = planned(directory, "reduce", shares, Cache("fp16", _BATCH * _LENGTH))
        found = taken(directory, plan, kinds=1)
        assert all(share <= 1 for share in found.values()), (shares, found)


@pytest.mark.parametrize(("layout", "model_type"), [("reduce", "llama"), ("gather", "mistral")])
def test_prompts_that_attend_at_once_do_too(
    layout: str, model_type: str, tmp_path: Path, flash_calls: FlashCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they go on, if a pass of them is to be a graph, and if its halves take turns.

    Of windows, the keys and values of a head are copied at a time, here.
    """
    monkeypatch.setattr(layer_cache, "AT_ONCE", 2**14)
    monkeypatch.setattr(forward, "_HALF", _ROWS // 2)
    monkeypatch.setattr(forward, "_EVEN", 1)
    directory = made(model_type, tmp_path)
    for shares in ((1,), (3, 1)):
        plan = planned(directory, layout, shares, Cache("fp16", _BATCH * _LENGTH))
        room = [area.scratch_bytes for area in areas(plan.splits, plan.model.dtype, plan.request)]
        for graphs, turns in ((False, False), (True, False), (True, True)):
            with compile_plan(plan, backend="cpu", scratch=False) as context, patch.object(layers, "_WIDENED", 16):
                weights = load_weights(plan, directory, context)
                decoder = Decoder(context, directory, weights, graphs=graphs, turns=turns)
                starts = [0 if graphs else 9 * i for i in range(_BATCH)]
                decoder._most |= dict(enumerate(starts))
                with activations(decoder) as counted:
                    decoder.read([Prompt([*range(_ROWS // _BATCH)], i, start) for i, start in enumerate(starts)])
            least = 0.3 if turns else 0.4
            assert all(least < counted.peak[device] / room[device] <= 1 for device in context.all_devices)
    assert flash_calls


@pytest.mark.parametrize(
    "form", ["gptq 4 g64 asym", "int 8 channel", "fp8 block", "nvfp4 modelopt", "nf4 nested", "exl2", "mxfp8"]
)
def test_quantised_weights_take_no_more(form: str) -> None:
    """Of matrices parts are made at a time that are an eighth of the scratch."""
    taken_by = []
    directory, twin = stored("llama", form, 1)
    layout = "gather" if tpplan.read_model(directory).gather_only else "reduce"
    for each in (twin, directory):
        plan = planned(each, layout, (1,), Cache("fp16", _BATCH * _LENGTH))
        with patch.object(products, "AT_ONCE", 2**13), patch.object(quantised_matrices, "_AT_ONCE", 2**10):
            taken_by.append(taken(each, plan)[0])
    dense, codes = taken_by
    assert codes <= dense


def _tensors(of: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in records and mappings."""
    if isinstance(of, torch.Tensor):
        yield of
    elif has(type(of)) or isinstance(of, dict | list):
        parts = of if isinstance(of, list) else (of if isinstance(of, dict) else asdict(of, recurse=False)).values()
        for part in parts:
            yield from _tensors(part)


def _beside(decoder: Decoder, weights: Weights) -> dict[int, int]:
    """Return the bytes of a decoder's weights, but for joined biases, that are not where they were loaded."""
    found = {}
    for device, whole in decoder.weights.items():
        own = evolve(whole, tensors={name: each for name, each in whole.tensors.items() if "qkv_proj.bias" not in name})
        blocks = {tensor.untyped_storage().data_ptr() for tensor in weights[device].values()}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in _tensors(own)}
        found[device] = sum(storage.nbytes() for place, storage in storages.items() if place not in blocks)
    return found


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3_moe", "mxfp4 compressed"),
        ("mixtral", "mxfp4 quark"),
        ("gpt_oss", "mxfp4"),
        ("qwen3_moe", "nvfp4 compressed"),
        ("mixtral", "gptq 8 g64 asym desc_act"),
        ("llama", "exl2"),
    ],
)
def test_weights_take_what_the_ledger_says(family: str, form: str, devices: int) -> None:
    """Joined and rearranged matrices stay in the memory that the plan counts; a second decoder shares and keeps them.

    Of NVFP4, the factors of matrices that are joined are copied: few times 4 bytes for each. EXL2 has 10 bytes for each
    column beside.
    """
    model, _ = mxfp4() if family == "gpt_oss" else quantised(family, form)
    spec = tpplan.read_model(model.directory)
    layout = "gather" if spec.gather_only else "reduce"
    plan = planned(model.directory, layout, (1,) * devices, Cache("fp16", _BATCH * _LENGTH))
    with compile_plan(plan, backend="cpu", model=model.directory, scratch=False) as context:
        weights = load_weights(plan, model.directory, context)
        loaded = {device: sum(tensor.nbytes for tensor in own.values()) for device, own in weights.tensors.items()}
        assert loaded == {device: plan.memory[device].weights_bytes for device in range(devices)}
        copied = {
            device: sum(
                8 * ("global_scale" in name) + 10 * ("perm" in name) * len(part.view(-1)) for name, part in own.items()
            )
            for device, own in weights.tensors.items()
        }
        for _ in range(2):
            decoder = Decoder(context, model.directory, weights, cache="fp32")
            assert all(each <= copied[device] for device, each in _beside(decoder, weights).items())
            for prompt, right in zip(model.prompts, model.logits, strict=True):
                logits = context.gather(decoder.prefill(prompt), Axis.VOCAB).tensor
                torch.testing.assert_close(logits[0], right, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("gpt_oss", "mxfp4"),
        ("qwen3_moe", "nvfp4 compressed"),
        ("mixtral", "gptq 8 g64 asym desc_act"),
        ("mixtral", "mxfp4 quark"),
    ],
)
def test_quantised_experts_are_computed_few_at_a_time(family: str, form: str) -> None:
    """One after the other is as all at once, up to the order of sums."""
    model, _ = mxfp4() if family == "gpt_oss" else quantised(family, form)
    layout = "gather" if tpplan.read_model(model.directory).gather_only else "reduce"
    plan = planned(model.directory, layout, (1,), Cache("fp16", _BATCH * _LENGTH))
    with compile_plan(plan, backend="cpu", model=model.directory, scratch=False) as context:
        decoder = Decoder(context, model.directory, load_weights(plan, model.directory, context), cache="fp32")
        tokens, positions = [torch.arange(3, 3 + _BATCH)], [torch.zeros(_BATCH, dtype=torch.int64)]
        (right,) = (logits.clone() for logits in decoder.decode(tokens, positions))
        with patch.object(experts, "_in_turn", lambda count, *_: (slice(i, i + 1) for i in range(count))):
            (found,) = decoder.decode(tokens, positions)
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


class _Computed(Watching):
    """Counts the operations that compute something, and the most bytes of their results that live at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if func.is_view:
            return result
        self.operations += 1
        storage = result.untyped_storage()
        place, size, in_place = storage.data_ptr(), storage.nbytes(), func.overloadpacket.__name__.endswith("_")
        if not in_place and place not in self._known:
            self._known.add(place)
            self.live += size
            self.peak = max(self.peak, self.live)
            finalize(storage, self._gone, place, size).atexit = False
        return result

    def _gone(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.live -= size


def _coded(kind: str, rows: int, columns: int) -> Quantised:
    """Return a matrix of random codes without kernels."""
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
    if kind == "nvfp4":
        return Float4Matrix(codes, torch.ones(rows, columns // 16).to(torch.float8_e4m3fn), 16, torch.ones(1))
    if kind == "nf4":
        return TableMatrix(codes, torch.rand(rows, columns // 64), torch.rand(16), 64)
    if kind == "nf4 nested":
        scales, none = torch.randint(256, (rows, columns // 64), dtype=torch.uint8), torch.zeros(1, dtype=torch.long)
        nested = NestedScales(torch.rand(256), torch.rand(scales.numel() // 256), 256, none, none, torch.zeros(1))
        return TableMatrix(codes, scales, torch.rand(16), 64, nested)
    at = 4 * torch.arange(columns, dtype=torch.int32)
    shifts = torch.stack((12 - at % 8, torch.full_like(at, 12))).char()
    scales = torch.randint(2**31, (columns // 128, rows // 8), dtype=torch.int32)
    words = torch.randint(2**31, (columns // 8, rows), dtype=torch.int32)
    return Exl2Matrix(words, scales, torch.rand(columns // 128), at // 512, at // 8, shifts, torch.arange(columns))


@pytest.mark.parametrize(("kind", "most"), [("nvfp4", 40), ("nf4", 40), ("nf4 nested", 100), ("exl2", 100)])
def test_pieces_are_dequantised_by_few_operations(kind: str, most: int) -> None:
    """A piece of 4 Mi elements takes few launches, and no more memory beside it than 1.5 times as much in 16 bits."""
    out = torch.empty(1024, 4096, dtype=torch.bfloat16)
    matrix = _coded(kind, *out.shape)
    with _Computed() as computed:
        matrix.write(0, out)
    assert computed.operations <= most
    assert out.nbytes // 2 < computed.peak <= 3 * out.nbytes // 2
