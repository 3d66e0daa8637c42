"""The decoder in several processes, each with some of the plan's devices: the same as in one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from unittest.mock import Mock, patch

import pytest
import torch

from tests.decoder_cases import VOCAB, model_of, plan_of, request_of
from tests.exec.cluster.threads import Together, used
from tests.graph_cases import FakeGraph
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.axes import Axis
from tpplan.decoder import Decoder, Sampling, generate
from tpplan.decoder.agreed import agreed
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tpplan.exec.context import TPContext
    from tpplan.plan import SplitPlan

NEW = 6
#: What a decoder makes last.
GRAPHS = "tpplan.decoder.model.graphs_of"

#: Cuts in which each device lacks some axis: heads, intermediate, vocabulary or residual columns.
LACKING: dict[Axis, tuple[int, ...]] = {
    Axis.KV: (0, 4, 4, 4),
    Axis.ID: (0, 0, 72, 72),
    Axis.VC: (0, 0, 203, 203),
    Axis.RS: (0, 0, 0, 48),
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
        whole = context.gather(logits, Axis.VC, out=out).tensor.clone()
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
]


@pytest.mark.parametrize(("model_type", "layout", "temperature", "lacks"), CASES)
def test_the_same_as_in_one_process(model_type: str, layout: str, temperature: float, lacks: bool) -> None:
    """Logits and tokens of two texts, whatever the processes own."""
    cut = LACKING if lacks else {}
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

    def compile_slowly(decoder: Decoder, *_: object, **__: object) -> None:
        time.sleep(0.3 * decoder.context.process)
        made.append(decoder.context.process)

    with Together(plan, [[device] for device in used(plan)]) as together, patch(GRAPHS, compile_slowly):

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
