"""The decoder against transformers: logits, and tokens one after the other, however a plan cuts the model."""

from __future__ import annotations

import gc
import math
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import saved_values
from tests.decoder.quantised_checkpoints import mxfp4
from tests.decoder_cases import (
    CONFIGS,
    FURTHER,
    LENGTH,
    NEW,
    OWN_STEPS,
    VOCAB,
    check,
    check_losses,
    check_sixteen_bits,
    decoding,
    model_of,
    plan_of,
    request_of,
)
from tests.graph_cases import WAITING, Calls, FakeGraph
from tests.later import transformers
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.core.axes import Axis
from tpplan.decoder import Decoder, Prompt, Sampling, generate
from tpplan.decoder.decoding import steps
from tpplan.decoder.decoding.steps import Steps, greedy
from tpplan.decoder.forward import Forward
from tpplan.decoder.prompts import NO_TOKEN
from tpplan.errors import ExecutionError, ModelError, RequestError
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


#: Devices, layout, KV heads and transport of plans that are cut at random, and tokens that follow each prompt.
CASES = [
    (1, "reduce", "idle", "events", NEW),
    (2, "gather", "idle", "peer", NEW),
    (3, "reduce", "idle", "host", 16),
    (5, "reduce", "replicate", "peer", 16),
    (4, "gather", "replicate", "events", 16),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("model_type", CONFIGS)
def test_as_transformers(model_type: str, case: tuple[int, str, str, str, int]) -> None:
    """Logits of prompts that are read in several passes, and up to 64 tokens of two texts of different length."""
    devices, layout, kv, transport, new = case
    model = model_of(model_type)
    check(model, plan_of(model.directory, devices, request_of(layout, kv), {}, seed=devices), transport, new)


@pytest.mark.parametrize(("number", "model_type"), [*enumerate(FURTHER)])
def test_further_families_as_transformers(number: int, model_type: str) -> None:
    """The same, by two of these plans for each family, in turn."""
    model = model_of(model_type)
    for case in (number, number + 2):
        devices, layout, kv, transport, new = CASES[case % len(CASES)]
        check(model, plan_of(model.directory, devices, request_of(layout, kv), {}, seed=devices), transport, new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("llama", "reduce"),
        ("phi3", "gather"),
        ("qwen3_moe", "reduce"),
        ("glm4_moe", "reduce"),
        ("minimax_m2", "gather"),
        ("ernie4_5_moe", "reduce"),
    ],
)
def test_sixteen_bits_lose_what_they_lose_in_transformers(
    model_type: str, layout: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A model stored in 16 bits is computed in them, about as near to 32 bits as transformers gets, and not equal."""
    check_sixteen_bits(model_of(model_type), layout, dtype, tmp_path)


@pytest.mark.parametrize("model_type", ["glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2"])
def test_routers_in_32_bits_beside_16(model_type: str, tmp_path: Path) -> None:
    """Checkpoints in bfloat16 may have routers and selection biases in float32, which are computed with as they are."""
    model = model_of(model_type)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model.directory, dtype=torch.bfloat16, attn_implementation="eager"
    )
    loaded.to(torch.bfloat16).save_pretrained(tmp_path)
    exact = saved_values(model.directory)
    ends = ("e_score_correction_bias", ".gate.weight", ".gate.wg.weight")
    tensors = {name: exact[name] if name.endswith(ends) else tensor for name, tensor in saved_values(tmp_path).items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16, torch.float32}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_losses(model, loaded, plan_of(tmp_path, 3, request_of(), {}, seed=3), tmp_path, "cpu")


#: KV heads, and cuts of a model with 4 KV heads, 72 of the intermediate axis, 203 tokens and a residual stream of 48.
CUTS: dict[str, tuple[str, dict[Axis, tuple[int, ...]]]] = {
    "every device lacks some axis": (
        "idle",
        {
            Axis.KV_HEADS: (0, 0, 3, 4, 4),
            Axis.INTERMEDIATE: (0, 72, 72, 72, 72),
            Axis.VOCAB: (0, 0, 0, 100, 203),
            Axis.RESIDUAL: (0, 0, 24, 24, 48),
        },
    ),
    "an idle device": (
        "idle",
        {
            Axis.KV_HEADS: (0, 1, 1, 2, 4),
            Axis.INTERMEDIATE: (0, 8, 8, 40, 72),
            Axis.VOCAB: (0, 52, 52, 52, 203),
            Axis.RESIDUAL: (0, 4, 4, 20, 48),
        },
    ),
    "repeated heads that are torn": ("replicate", {Axis.KV_HEADS: (0, 3, 3, 4, 6, 8)}),
}


@pytest.mark.parametrize("layout", ["reduce", "gather"])
@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("model_type", ["qwen3", "minimax_m2"])
def test_cuts_that_leave_something_out(model_type: str, name: str, layout: str) -> None:
    """Devices without heads, MLP, vocabulary or residual stream, and with half of a repeated head's queries.

    Of MiniMax-M2, all heads are normed together.
    """
    model = model_of(model_type)
    kv, cut = CUTS[name]
    plan = plan_of(model.directory, len(cut[Axis.KV_HEADS]) - 1, request_of(layout, kv), cut, seed=1)
    check(model, plan, "events", new=8)


#: Cuts of routed experts, 24 wide, and of shared ones, 48 wide, over three devices.
SHARED_CUTS: dict[str, dict[Axis, tuple[int, ...]]] = {
    "the same devices": {Axis.EXPERT_INTERMEDIATE: (0, 8, 8, 24), Axis.SHARED_INTERMEDIATE: (0, 40, 40, 48)},
    "routed experts on more": {Axis.EXPERT_INTERMEDIATE: (0, 8, 16, 24), Axis.SHARED_INTERMEDIATE: (0, 0, 0, 48)},
    "shared experts on more": {Axis.EXPERT_INTERMEDIATE: (0, 0, 24, 24), Axis.SHARED_INTERMEDIATE: (0, 8, 40, 48)},
    "on some devices each": {Axis.EXPERT_INTERMEDIATE: (0, 16, 24, 24), Axis.SHARED_INTERMEDIATE: (0, 0, 24, 48)},
    "on no common device": {Axis.EXPERT_INTERMEDIATE: (0, 24, 24, 24), Axis.SHARED_INTERMEDIATE: (0, 0, 48, 48)},
}


@pytest.mark.parametrize("layout", ["reduce", "gather"])
@pytest.mark.parametrize("name", SHARED_CUTS)
def test_cuts_of_shared_experts(name: str, layout: str) -> None:
    """Devices without routed or shared experts, or without either."""
    model = model_of("glm4_moe")
    plan = plan_of(model.directory, 3, request_of(layout), SHARED_CUTS[name], seed=1)
    check(model, plan, "events", new=8)


def test_weights_stay_where_they_were_loaded() -> None:
    """Matrices that become one, and experts that become one tensor, are views of what was loaded, for all decoders."""
    for model_type in ("mistral", "qwen3_moe", "gpt_oss", "glm4_moe"):
        directory = model_of(model_type).directory
        plan = plan_of(directory, 3, request_of(), {}, seed=2)
        with compile_plan(plan, backend="cpu") as ctx:
            weights = load_weights(plan, directory, ctx)
            decoder = Decoder(ctx, directory, weights)
            assert any("qkv_proj" in name for name in decoder.weights[0].tensors)
            for device in ctx.all_devices:
                loaded = {tensor.untyped_storage().data_ptr() for tensor in weights[device].values()}
                held = decoder.weights[device].tensors.items()
                used = {x.untyped_storage().data_ptr() for name, x in held if not name.endswith("qkv_proj.bias")}
                assert used <= loaded
            expected = [logits.clone() for logits in decoder.prefill([5, 17, 99])]
            for found, right in zip(Decoder(ctx, directory, weights).prefill([5, 17, 99]), expected, strict=True):
                assert torch.equal(found, right)


def test_weights_that_are_not_the_plans() -> None:
    """Without a device or a tensor, of another shape, or of another model, they are refused by name."""
    directory = model_of("mistral").directory
    plan = plan_of(directory, 3, request_of(), {}, seed=2)
    with compile_plan(plan, backend="cpu") as ctx:
        weights: Any = load_weights(plan, directory, ctx).tensors
        name = next(name for name, tensor in weights[1].items() if tensor.dim() == 2)
        without = {key: tensor for key, tensor in weights[1].items() if key != name}
        odd = {**weights[1], name: weights[1][name][1:]}
        rows, columns = weights[1][name].shape
        cases: list[tuple[Any, str]] = [
            ({}, r"the plan for .*: model\.\S+ of device 0 is missing"),
            ({0: weights[0], 2: weights[2]}, "of device 1 is missing"),
            ({**weights, 1: without}, rf"{name} of device 1 is missing"),
            ({**weights, 1: odd}, rf"{name} of device 1 has the shape \[{rows - 1}, {columns}\], not \[{rows}, "),
        ]
        for given, match in cases:
            with pytest.raises(RequestError, match=match) as error:
                Decoder(ctx, directory, given)
            assert "load_weights(plan, directory, context)" in error.value.hint
        with pytest.raises(ModelError, match="is for sha256:"):
            Decoder(ctx, model_of("qwen3").directory, weights)


def test_a_decoder_gives_its_memory_back() -> None:
    """Weights and cache go with the decoder, also after it has made a text, without waiting for a collector."""
    model = model_of("mistral")
    gc.disable()
    try:
        with decoding(plan_of(model.directory, 2, request_of(), {}, seed=2), "mistral") as decoder:
            list(generate(decoder, model.prompts, 3))
            kept = ref(decoder)
        del decoder
        assert kept() is None
    finally:
        gc.enable()


def test_a_text_ends() -> None:
    """It ends with a token of those that end it; the others go on, and it has None from then on."""
    model = model_of("mistral")
    expected = model.tokens[0]
    last = expected[5]
    first = expected.index(last)
    with decoding(plan_of(model.directory, 2, request_of(), {}, seed=2), "mistral", "fp32") as decoder:
        found = list(zip(*generate(decoder, model.prompts, 20, end={last}), strict=True))
        assert list(found[0]) == [*expected[: first + 1], *[None] * (len(found[0]) - first - 1)]
        assert [t for t in found[1] if t is not None] == model.tokens[1][: len(found[1])]
        assert len(list(generate(decoder, model.prompts[:1], 20, end={last}))) == first + 1


def test_a_text_that_has_lost_its_cache_is_refused() -> None:
    """Two texts at a time have one cache: the older one says so when it is to go on, and the newer one is right."""
    model = model_of("mistral")
    with decoding(plan_of(model.directory, 2, request_of(), {}, seed=2), "mistral", "fp32") as decoder:
        older, newer = (generate(decoder, [prompt], 4) for prompt in model.prompts)
        assert next(older) == (model.tokens[0][0],)
        found = [next(newer)]
        with pytest.raises(
            RequestError, match="this text cannot go on: texts of other steps or generations have begun since"
        ):
            next(older)
        assert [*found, *newer] == [(token,) for token in model.tokens[1][:4]]


def test_what_is_refused() -> None:
    """Prompts that the plan has no room for, tokens that the model has not, and caches that the decoder has not."""
    model = model_of("mistral")
    short = model.prompts[0]
    with decoding(plan_of(model.directory, 2, request_of(), {}, seed=2), "mistral") as decoder:
        with pytest.raises(RequestError, match="3 prompts, the plan has room for 2"):
            generate(decoder, [short] * 3, 1)
        with pytest.raises(RequestError, match=f"5 tokens and {LENGTH} new ones, the plan caches {LENGTH} of"):
            generate(decoder, [short], LENGTH)
        with pytest.raises(RequestError, match=f"token {VOCAB}, the model's are 0 to {VOCAB - 1}"):
            generate(decoder, [[0, VOCAB]], 1)
        with pytest.raises(RequestError, match="there are no prompts") as error:
            generate(decoder, [], 1)
        assert "--batch" not in error.value.hint
        with pytest.raises(RequestError, match="a prompt has no tokens"):
            generate(decoder, [short, []], 1)
        with pytest.raises(RequestError, match="0 new tokens"):
            generate(decoder, [short], 0)
        with pytest.raises(RequestError, match="sequence 2, the plan has room for 2"):
            decoder.prefill(short, 2)
        with pytest.raises(RequestError, match=f"5 tokens from position {LENGTH - 4}, the plan caches {LENGTH}"):
            decoder.prefill(short, 0, LENGTH - 4)
        assert len(list(generate(decoder, [short], LENGTH - len(short)))) == LENGTH - len(short)
        taken = decoder.steps(1)
        with pytest.raises(RequestError, match="2 prompts for the steps of 1 sequence"):
            taken.start([short] * 2, Sampling())
        taken.start([[1] * (LENGTH - 1)], Sampling())
        taken.step()
        with pytest.raises(RequestError, match=f"the cache has {LENGTH} tokens of the longest text"):
            taken.step()
    for kind in ("q4", "q8"):  # they take heads of 32 elements
        plan = plan_of(model.directory, 2, request_of(kind=kind), {}, seed=2)
        with pytest.raises(ExecutionError, match=f"no cache of kind {kind} for heads of 8"), decoding(plan, "mistral"):
            pass


@pytest.mark.parametrize("model_type", [*CONFIGS, *OWN_STEPS, "gpt_oss in MXFP4"])
def test_a_step_can_be_a_graph(model_type: str) -> None:
    """Nothing that a step issues waits for a device or makes a tensor of numbers of the host's, also with experts."""
    model = mxfp4()[0] if model_type == "gpt_oss in MXFP4" else model_of(model_type)
    for batch in (1, 4):
        plan = plan_of(model.directory, 3, request_of(batch=batch), {}, seed=6)
        with compile_plan(plan, backend="cpu", scratch=False) as context, Calls() as calls:
            decoder = Decoder(context, model.directory, load_weights(plan, model.directory, context))
            everywhere = [[torch.zeros(batch, dtype=torch.int64)] * len(decoder.context.all_devices) for _ in range(2)]
            calls.names.clear()
            with torch.inference_mode():
                greedy(decoder.context, decoder.decode(everywhere[0], everywhere[1]), decoder.stack.steps, *everywhere)
            assert any("attention" in name or "softmax" in name for name in calls.names)
            assert not calls.names & WAITING


def test_spans_are_captured_once_they_have_run() -> None:
    """The cache is looked at in powers of two: the first step of a span runs, the second is captured, others replay.

    All graphs share the memory of the first.
    """
    model = model_of("mistral")
    events: list[object] = []
    with decoding(plan_of(model.directory, 3, request_of(), {}, seed=8), "mistral", "fp32") as decoder:
        taken = decoder.new_steps(2, graphs=True)

        def capture(what: str) -> FakeGraph:
            events.append(what)
            return FakeGraph(
                lambda: taken._graphs._issue(int(str(events[-1])), is_greedy=True), lambda: capture("beside")
            )

        def decode(tokens: list[torch.Tensor], positions: list[torch.Tensor], span: int) -> tuple[torch.Tensor, ...]:
            events.append(span)
            return Forward.decode(decoder.forward, tokens, positions, span)

        with (
            patch.object(steps, "_SHORTEST_SPAN", 8),
            patch.object(decoder.context, "capture", lambda: capture("capture")),
            patch.object(decoder.forward, "decode", decode),
        ):
            found = [taken.start(model.prompts, Sampling()), *(taken.step(more=i < 5) for i in range(6))]
    assert [list(tokens) for tokens in zip(*found, strict=True)] == [tokens[:7] for tokens in model.tokens]
    assert events == [16, "capture", 16, 16, 32, "beside", 32, 32]


def captured_steps(decoder: Decoder, sequences: int) -> tuple[Steps, list[int]]:
    """Return steps whose graphs are what they issue, and a list that becomes that of the replays' spans."""
    replayed: list[int] = []

    def capture(issue: Callable[[], None], _: str) -> FakeGraph:
        def again() -> None:
            replayed.append(issue.args[0])  # type: ignore[attr-defined]
            issue()

        issue()
        return FakeGraph(again, lambda: pytest.fail("no graph is beside"))

    taken = decoder.new_steps(sequences, graphs=True)
    taken._graphs._capture = capture  # type: ignore[assignment]
    return taken, replayed


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read() -> None:
    """Once it is a graph, and one may follow; texts that begin anew, or read others between, are as they were."""
    model = model_of("mistral")
    plan = plan_of(model.directory, 3, request_of(batch=3), {}, seed=8)
    with decoding(plan, "mistral", "fp32") as decoder:
        taken, replayed = captured_steps(decoder, 2)
        for turn in range(2):
            found = [taken.start(model.prompts, Sampling())]
            for i in range(8):
                before = len(replayed)
                found.append(taken.step(more=i < 7))
                if i > 1 or turn:
                    assert len(replayed) - before == (2 if turn and i == 0 else 0 if i == 7 else 1)
                if i == 4:
                    decoder.read([Prompt([5, 7, 11], 2)])
            assert [list(tokens) for tokens in zip(*found, strict=True)] == [tokens[:9] for tokens in model.tokens]
            assert decoder.texts.ahead is None
        taken.start([[1] * (LENGTH - 2), [1]], Sampling())
        taken.step()
        before = len(replayed)
        taken.step()  # the cache has no room for another
        assert len(replayed) == before


def test_a_refused_prompt_and_a_failed_launch_lose_no_token() -> None:
    """Refused, texts go on as they were, also if a step had been launched ahead; behind a failure they say so."""
    model = model_of("mistral")
    plan = plan_of(model.directory, 2, request_of(), {}, seed=8)
    with decoding(plan, "mistral", "fp32") as decoder:
        taken, replayed = captured_steps(decoder, 2)
        found = [taken.start(model.prompts, Sampling()), *(taken.step() for _ in range(3))]
        assert replayed
        with pytest.raises(RequestError):
            taken.start([[VOCAB], [1]], Sampling())
        found += [taken.step(more=i < 2) for i in range(3)]
        with patch.object(taken._graphs, "_run", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            taken.step()
        with pytest.raises(RequestError, match="these 2 texts cannot go on: the latest step did not end"):
            taken.step()
    assert [list(tokens) for tokens in zip(*found, strict=True)] == [tokens[:7] for tokens in model.tokens]


def test_a_step_in_vain_leaves_no_number_that_is_not_finite() -> None:
    """A step that was launched ahead may be one that nobody checks."""
    model = model_of("mistral")
    plan = plan_of(model.directory, 2, request_of(), {}, seed=8)
    with decoding(plan, "mistral", "fp32") as decoder, torch.inference_mode():
        taken, replayed = captured_steps(decoder, 2)
        taken.start(model.prompts, Sampling())
        for _ in range(3):
            taken.step()
        assert replayed
        positions, parts = taken._at, [h.cache for layer in decoder.stack.heads for h in layer.values()]
        for cache in parts:
            cache._parts[0][:, 1, :, positions[1] % cache.length] = math.nan
            assert cache._parts[0].isnan().any()
        tokens = taken._graphs.read_back[taken._launched % 2].tokens
        tokens[1] = NO_TOKEN
        decoder.read([Prompt([3, 4], 0)])
        assert not any(cache._parts[0].isnan().any() for cache in parts)


def test_a_step_that_did_not_end_has_not_run() -> None:
    """What comes after it is not captured: not everything may have been loaded."""
    model = model_of("mistral")
    with decoding(plan_of(model.directory, 2, request_of(), {}, seed=8), "mistral", "fp32") as decoder:
        taken = decoder.new_steps(2, graphs=True)
        taken.start(model.prompts, Sampling())
        with patch.object(decoder.stack, "run", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            taken.step()
        with patch.object(decoder.context, "capture", side_effect=AssertionError):
            found = [taken.start(model.prompts, Sampling()), taken.step()]
    assert [list(tokens) for tokens in zip(*found, strict=True)] == [tokens[:2] for tokens in model.tokens]
