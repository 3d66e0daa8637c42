"""Halves of passes that take turns: each waits for its own sums, and they leave what passes in one piece leave."""

from __future__ import annotations

from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch
from weakref import ref

import pytest
from attrs import evolve

from tests.decoder.test_prompt_graphs import check_same
from tests.decoder_cases import model_of, plan_of, request_of
from tests.flash_cases import flash_calls
from tests.weight_plans import fine_units
from tpplan.decoder import Decoder, forward
from tpplan.decoder.decoding import prefill_graphs
from tpplan.decoder.layer.steps import Plain
from tpplan.exec import TPContext
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["fine_units", "flash_calls"]  # fixtures


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let halves have few rows, but more than the smallest graph."""
    monkeypatch.setattr(prefill_graphs, "_SMALLEST", 4)
    monkeypatch.setattr(forward, "_HALF", 4)
    monkeypatch.setattr(forward, "_EVEN", 1)


class Late:
    """An aside whose operations are done when somebody waits for them: as late as they may be.

    Attributes:
        events: what was computed, added up and waited for, over all.
    """

    events: list[str]
    open: Late | None = None

    def __init__(self) -> None:
        self._left: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        type(self).open = self
        return self

    def __exit__(self, *_: object) -> None:
        type(self).open = None

    def leave(self, call: Callable[[], object]) -> None:
        """Do something later."""
        self.events.append("issue")
        self._left.append(call)

    def wait(self) -> None:
        """Do all of it."""
        self.events.append("wait")
        for call in self._left:
            call()
        self._left.clear()


@contextmanager
def late() -> Iterator[list[str]]:
    """Let sums of asides be done late, of parts that nobody but who waits for them keeps."""
    Late.events, add = [], TPContext.all_reduce

    def all_reduce(self: TPContext, parts: Any, residual: Any = None, **words: Any) -> Any:
        if Late.open is None:
            return add(self, parts, residual, **words)
        kept = [ref(part) for part in parts]

        def later() -> None:
            held = [part() for part in kept]
            assert all(part is not None for part in held), "what is added up was dropped before"
            add(self, held, residual, **words)  # type: ignore[arg-type]

        del parts
        Late.open.leave(later)
        return words["out"]

    with patch.object(TPContext, "aside", lambda _: Late()), patch.object(TPContext, "all_reduce", all_reduce):
        yield Late.events


def planned(model_type: str, seed: int, layout: str = "reduce", devices: int = 3) -> Any:
    """Return an uneven plan with room for passes of a few rows, and its model's directory."""
    directory = model_of(model_type).directory
    request = evolve(request_of(layout, batch=4), max_rows=21)
    return plan_of(directory, devices, request, {}, seed=seed), directory


def both(context: TPContext, directory: Any) -> tuple[Decoder, Decoder]:
    """Return a decoder with graphs whose halves take turns, and one with neither."""
    weights = load_weights(context.plan, directory, context)
    first, second = (
        Decoder(context, directory, weights, cache="fp32", graphs=turns, turns=turns) for turns in (True, False)
    )
    return first, second


@pytest.mark.parametrize("layout", ["reduce", "gather"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("flash_calls")
def test_halves_leave_what_whole_passes_leave(
    seed: int, model_type: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same logits and caches, of all mixtures of prompts, of which texts lie in both halves."""
    for which in ("up", "down"):
        monkeypatch.setattr(Plain, f"takes_experts_{which}", lambda *_: True)
    plan, directory = planned(model_type, seed, layout, devices=2 + seed)
    with compile_plan(plan, backend="cpu", transport="host") as context:
        decoders, turns = both(context, directory), []
        run = decoders[0].stack.run_in_turns

        def noted(halves: Any) -> None:
            turns.append([len(xs[0]) for xs, _ in halves])
            run(halves)

        with patch.object(decoders[0].stack, "run_in_turns", noted):
            check_same(decoders, Random(seed))
    assert {tuple(each) for each in turns} == {(5, 5), (10, 11)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("flash_calls")
def test_sums_may_be_as_late_as_they_are_waited_for(seed: int) -> None:
    """Nothing reads them before, and what they are made of is kept; while one half is computed, the other's travel."""
    plan, directory = planned("llama", seed)
    with compile_plan(plan, backend="cpu", transport="host") as context, late() as events:
        decoders = both(context, directory)
        layers = len(decoders[0].stack.heads)
        check_same(decoders, Random(seed))
    turns = ["issue", "issue", *["wait", "issue"] * 2 * (2 * layers - 1), "wait", "wait"]
    assert events[: len(turns)] == turns
    assert events == turns * (len(events) // len(turns))


def test_turns_are_for_links_that_are_slow() -> None:
    """By default only on GPUs that cannot write to each other's memory; on virtual devices nothing travels."""
    plan, directory = planned("llama", 1)
    for transport in ("peer", "host"):
        with compile_plan(plan, backend="cpu", transport=transport) as context:
            weights = load_weights(plan, directory, context)
            assert not Decoder(context, directory, weights).forward._in_turns
            assert Decoder(context, directory, weights, turns=True).forward._in_turns


@pytest.mark.usefixtures("flash_calls")
def test_few_rows_and_passes_that_are_not_captured_take_no_turns() -> None:
    """Each half would read all weights; and the host would issue as much again."""
    plan, directory = planned("llama", 1)
    with compile_plan(plan, backend="cpu", transport="host") as context:
        weights = load_weights(plan, directory, context)
        decoder = Decoder(context, directory, weights, cache="fp32", graphs=True, turns=True)
        with patch.object(decoder.stack, "run_in_turns", side_effect=AssertionError):
            decoder.prefill([5] * 5)  # the smallest graph
            decoder.prompt_graphs = None
            decoder.prefill([5] * 21)
            decoder.prefill([5] * 42)


@pytest.mark.usefixtures("flash_calls")
def test_no_half_is_all_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size whose next smaller one is no graph is none either, if few rows would fill a half of it."""
    for which in ("up", "down"):
        monkeypatch.setattr(Plain, f"takes_experts_{which}", lambda _, rows, *__: rows > 10)
    plan, directory = planned("qwen3_moe", 1)
    with compile_plan(plan, backend="cpu", transport="host") as context:
        weights = load_weights(plan, directory, context)
        for turns in (True, False):
            graphs = Decoder(context, directory, weights, cache="fp32", graphs=True, turns=turns).prompt_graphs
            assert (graphs.sizes if graphs else ()) == (() if turns else (21,))
