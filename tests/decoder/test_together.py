"""The decoder in several processes, each with some of the plan's devices: the same as in one."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import saved_values
from tests.decoder_cases import VOCAB, model_of, plan_of, request_of
from tests.exec.processes.threads import Together, used
from tests.graph_cases import FakeGraph
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.core.axes import Axis
from tpplan.decoder import Decoder, Sampling, generate
from tpplan.decoder.layer.agree import agreed
from tpplan.decoder.prompts import Prompt
from tpplan.errors import ExecutionError
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext

NEW = 6

#: Cuts in which each device lacks some axis: heads, intermediate, vocabulary or residual columns.
LACKING: dict[Axis, tuple[int, ...]] = {
    Axis.KV_HEADS: (0, 4, 4, 4),
    Axis.INTERMEDIATE: (0, 0, 72, 72),
    Axis.VOCAB: (0, 0, 203, 203),
    Axis.RESIDUAL: (0, 0, 0, 48),
    Axis.LINEAR_HEADS: (0, 0, 3, 4),
}

#: The same of routed and of shared experts.
LACKING_EXPERTS: dict[Axis, tuple[int, ...]] = {
    Axis.EXPERT_INTERMEDIATE: (0, 8, 24, 24),
    Axis.SHARED_INTERMEDIATE: (0, 0, 8, 48),
}

#: What a family has beside them, or has more of.
LACKING_MORE: dict[str, dict[Axis, tuple[int, ...]]] = {
    "glm4_moe": LACKING_EXPERTS,
    "deepseek_v3": {**LACKING_EXPERTS, Axis.KV_HEADS: (0, 0, 8, 8)},
}


def _told(plan: SplitPlan, model_type: str, sampling: Sampling) -> Callable[[TPContext], tuple[Tensor, list[object]]]:
    """Return what loads a model by a context and says what follows its prompts: logits and tokens."""
    model = model_of(model_type)

    def tell(context: TPContext) -> tuple[Tensor, list[object]]:
        weights = load_weights(plan, model.directory, context)
        assert set(weights.tensors) == set(context.devices)
        decoder = Decoder(context, model.directory, weights, cache="fp32")
        logits = decoder.prefill(model.prompts[1])
        out = None if logits else torch.empty(1, VOCAB)
        whole = context.gather(logits, Axis.VOCAB, out=out).tensor.clone()
        return whole, [*generate(decoder, model.prompts, NEW, sampling=sampling)]

    return tell


#: Family, layout, temperature, and whether every device lacks an axis.
CASES = [
    ("llama", "reduce", 0.0, True),
    ("llama", "gather", 0.8, True),
    ("gemma2", "reduce", 0.0, False),
    ("gemma2", "gather", 0.0, True),
    ("qwen3_moe", "gather", 0.0, False),
    ("gpt_oss", "reduce", 0.0, False),
    ("glm4_moe", "reduce", 0.0, True),
    ("minimax_m2", "gather", 0.0, True),
    ("qwen3_5_text", "reduce", 0.0, True),
    ("qwen3_next", "gather", 0.8, False),
    ("deepseek_v2", "reduce", 0.0, False),
    ("deepseek_v3", "gather", 0.0, True),
]


@pytest.mark.parametrize(("model_type", "layout", "temperature", "lacks"), CASES)
def test_the_same_as_in_one_process(model_type: str, layout: str, temperature: float, lacks: bool) -> None:
    """Logits and tokens of two texts, whatever the processes own."""
    cut = {**LACKING, **LACKING_MORE.get(model_type, {})} if lacks else {}
    plan = plan_of(model_of(model_type).directory, 3, request_of(layout), cut, seed=4)
    sampling = Sampling(temperature, 0.9, 7)
    tell = _told(plan, model_type, sampling)
    with compile_plan(plan, backend="cpu", scratch=False) as context:
        logits, tokens = tell(context)
    first, *others = used(plan)
    for own in ([[first], others], [[device] for device in used(plan)]):
        with Together(plan, own) as together:
            for found, said in together.run(tell):
                torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)
                assert said == tokens


def test_processes_agree_on_how_they_go_on() -> None:
    """What holds in all of them holds; each process tells the others where it is."""
    plan = plan_of(model_of("llama").directory, 3, request_of(), {}, seed=4)
    first, second, third = used(plan)
    with Together(plan, [[second], [first, third]]) as together:

        def tell(context: TPContext) -> tuple[list[bool], list[bool], list[int], int]:
            is_first = first in context.devices
            facts = agreed(context, [True, is_first, not is_first, False])
            return facts, agreed(context, []), context.tell(context.process), context.processes

        assert together.run(tell) == [([True, False, False, False], [], [0, 1], 2)] * 2


def test_a_decoder_is_ready_when_all_are() -> None:
    """No kernel of a process waits for another one that still compiles its own."""
    model = model_of("llama")
    plan = plan_of(model.directory, 2, request_of(), {}, seed=4)
    made: list[int] = []
    prepare = Decoder._prepare

    def prepare_slowly(decoder: Decoder, context: TPContext, *arguments: Any, **more: Any) -> None:
        time.sleep(0.3 * context.process)
        prepare(decoder, context, *arguments, **more)
        made.append(context.process)

    slow = patch.object(Decoder, "_prepare", prepare_slowly)
    with Together(plan, [[device] for device in used(plan)]) as together, slow:

        def make(context: TPContext) -> list[int]:
            Decoder(context, model.directory, load_weights(plan, model.directory, context), cache="fp32")
            return sorted(made)

        assert together.run(make) == [[0, 1]] * 2


def test_a_graph_is_one_of_all_processes(caplog: pytest.LogCaptureFixture) -> None:
    """Where one of them cannot capture, none replays: padded passes would have other rows than those of the rest."""
    model = model_of("llama")
    plan = plan_of(model.directory, 2, request_of(), {}, seed=4)
    with Together(plan, [[device] for device in used(plan)]) as together:

        def tell(context: TPContext) -> tuple[object, object]:
            decoder = Decoder(context, model.directory, load_weights(plan, model.directory, context), cache="fp32")
            if 0 in context.devices:  # virtual devices have no graphs
                return decoder.captured(lambda: None, "work"), decoder.graph
            with patch.object(context, "capture", lambda: FakeGraph(lambda: None, Mock())):
                return decoder.captured(lambda: None, "work"), decoder.graph

        assert together.run(tell) == [(None, None)] * 2
    assert caplog.text.count("work cannot be captured") == 1


def _outcomes(call: Callable[[TPContext], object], *, fail: bool = True) -> list[str]:
    """Return what a call ends in, in each of three processes of a tiny Llama."""
    model = model_of("llama")
    plan = plan_of(model.directory, 3, request_of(), {}, seed=4)
    with Together(plan, [[device] for device in used(plan)]) as together:
        outcomes = together.outcomes(call)
    assert not fail or all(isinstance(each, ExecutionError) for each in outcomes), outcomes
    return [str(each) for each in outcomes]


def test_different_weights_are_told_in_all_processes(tmp_path: Path) -> None:
    """A single tensor of the same shape is enough; copies of the same content are the same, whatever their files."""
    directory = model_of("llama").directory
    copy, other = tmp_path / "copy", tmp_path / "other"
    for target in (copy, other):
        shutil.copytree(directory, target)
    tensors = saved_values(directory)
    save_file(dict(reversed(tensors.items())), copy / "model.safetensors", metadata={"by": "another tool"})
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name] * 2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})

    def load(context: TPContext, *directories: Path) -> object:
        return load_weights(context.plan, directories[context.process], context).tensors.keys()

    first, *others = _outcomes(lambda context: load(context, directory, copy, other))
    what = rf"the processes have different weights for \w+: 1 of {len(tensors)} tensors, first {name}: bytes of hash"
    assert re.match(rf"{what} (\w+) in process 2, bytes of hash (?!\1)\w+ in all others\nhint: give", first), first
    assert others == [first, first]
    assert "dict_keys" in _outcomes(lambda context: load(context, directory, copy, directory), fail=False)[0]


def test_a_process_that_cannot_load_is_told_in_all(tmp_path: Path) -> None:
    """None waits for one that has another checkpoint, or none; where all have none, the error is the usual one."""
    directory = model_of("llama").directory

    def load(context: TPContext, *directories: Path) -> object:
        return load_weights(context.plan, directories[context.process], context)

    first, *others = _outcomes(lambda context: load(context, directory, tmp_path, directory))
    assert first.startswith(f"reading the checkpoint failed:\n  process 1: {tmp_path}")
    assert others == [first, first]
    alike = _outcomes(lambda context: load(context, tmp_path, tmp_path, tmp_path), fail=False)
    assert alike[0].startswith(f"{tmp_path}/config.json does not exist")


#: What a process of three does differently, and what all are told.
DIFFERENCES: dict[str, tuple[dict[str, object], str]] = {
    "prompts": (
        {"prompts": [[1, 2, 4], [5, 6]]},
        r"prompts\[0\]: 3 tokens \((\w+)\) .* in process 1, 3 tokens \((?!\1)",
    ),
    "second": ({"prompts": [[1, 2, 3], [5, 7]]}, r"prompts\[1\]: 2 tokens"),
    "fewer": (
        {"prompts": [[1, 2, 3]]},
        "prompts: 1 in process 1, 2 in all others\n  prompts\\[1\\]: nothing in process 1",
    ),
    "count": ({"max_new_tokens": 3}, "max_new_tokens: 3 in process 1, 2 in all others"),
    "seed": ({"sampling": Sampling(0.5, seed=1)}, "seed: 1 in process 1, 0 in all others"),
    "temperature": ({"sampling": Sampling(0.25)}, "temperature: 0.25 in process 1, 0.5 in all others"),
    "end": ({"end": {3}}, r"end: \[3\] in process 1, \[\] in all others"),
    "invalid": ({"prompts": [[]]}, "process 1: a prompt has no tokens"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_different_prompts_and_settings_are_told_in_all_processes(name: str) -> None:
    """Before the first step; the process that differs is named, and the value of each."""
    given, told = DIFFERENCES[name]
    directory = model_of("llama").directory

    def call(context: TPContext) -> object:
        decoder = Decoder(context, directory, load_weights(context.plan, directory, context), cache="fp32")
        usual = {"prompts": [[1, 2, 3], [5, 6]], "max_new_tokens": 2, "sampling": Sampling(0.5), "end": ()}
        arguments: dict[str, Any] = usual | (given if context.process == 1 else {})
        return generate(decoder, **arguments)

    first, *others = _outcomes(call)
    assert re.match(rf"(the processes differ in )?what to generate( failed)?:\n  {told}", first)
    assert others == [first, first]


def test_different_tokens_for_a_decoder_are_told() -> None:
    """Also where the caller schedules texts."""
    directory = model_of("llama").directory

    def call(context: TPContext) -> object:
        decoder = Decoder(context, directory, load_weights(context.plan, directory, context), cache="fp32")
        return decoder.read([Prompt([1, 2, 3 + context.process // 2])])

    first, *others = _outcomes(call)
    assert first.startswith("the processes differ in the prompts:\n  prompts[0]: 3 tokens (")
    assert others == [first, first]


def test_a_config_that_differs_is_told(tmp_path: Path) -> None:
    """What no plan has and every layer computes with, such as the base of RoPE; and arguments of the decoder."""
    directory = model_of("llama").directory
    shutil.copytree(directory, tmp_path / "other")
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))

    def call(context: TPContext, *, cache: bool = False) -> object:
        where = tmp_path / "other" if context.process == 2 and not cache else directory
        kind = "fp32" if context.process or not cache else "fp16"
        return Decoder(context, where, load_weights(context.plan, where, context), cache=kind)

    first, *others = _outcomes(call)
    eps = config["rms_norm_eps"]
    what = "the processes differ in the decoder:\n  "
    assert first.startswith(f"{what}norm_eps: 0.0001 in process 2, {eps} in all others")
    assert others == [first, first]
    first, *others = _outcomes(lambda context: call(context, cache=True))
    assert first.startswith(f"{what}cache: fp16 in process 0, fp32 in all others")
    assert others == [first, first]


def test_logits_that_are_not_finite_are_one_error_in_all() -> None:
    """The weights that cause them belong to one process; the others do not say that all weights are finite."""
    directory = model_of("llama").directory

    def call(context: TPContext) -> object:
        weights = load_weights(context.plan, directory, context)
        for tensors in weights.tensors.values():
            if context.process == 1:
                tensors["model.layers.1.mlp.down_proj.weight"].view(-1)[:] = math.nan
        return list(generate(Decoder(context, directory, weights, cache="fp32"), [[1, 2, 3]], 2))

    first, *others = _outcomes(call)
    assert "because these weights are not: model.layers.1.mlp.down_proj.weight on device" in first
    assert others == [first, first]
