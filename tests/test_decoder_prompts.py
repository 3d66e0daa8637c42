"""Prompts that are read together: how they are cut into passes, and that each is read as it would be alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.decoder_cases import CONFIGS, MAX_ROWS, model_of, plan_of, request_of
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.axes import Axis
from tpplan.decoder import Decoder
from tpplan.decoder.prompts import Prompt, cut
from tpplan.errors import RequestError
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=6), st.integers(1, 8))
def test_passes_have_every_token_once(sizes: list[tuple[int, int]], most: int) -> None:
    """Passes are full but for the last; each prompt's tokens follow each other, and its end is marked."""
    prompts = [Prompt([100 * i + t for t in range(count)], i, start) for i, (count, start) in enumerate(sizes)]
    found: list[list[tuple[int, int]]] = [[] for _ in prompts]
    lengths, ends = [], []
    for tokens, stretches in cut(prompts, most):
        assert [row for each in stretches for row in range(each.first, each.end)] == [*range(len(tokens))]
        for each in stretches:
            places = range(each.start, each.start + each.end - each.first)
            found[each.sequence] += zip(tokens[each.first : each.end], places, strict=True)
        ends += [(each.sequence, tokens[each.end - 1]) for each in stretches if each.is_last]
        lengths.append(len(tokens))
    assert found == [[*zip(each.tokens, range(each.start, 99), strict=False)] for each in prompts]
    assert ends == [(each.sequence, each.tokens[-1]) for each in prompts]
    total = sum(count for count, _ in sizes)
    assert lengths == [most] * (total // most) + [total % most] * (total % most > 0)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_together_as_alone(model_type: str) -> None:
    """Two prompts, one of which has begun: each has the logits that transformers gives it, in the order given."""
    model = model_of(model_type)
    plan = plan_of(model.directory, 3, request_of(), {}, seed=9)
    short, long = model.prompts
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx), cache="fp32")
        decoder.prefill(long[:8], 0)
        assert len(long[8:]) + len(short) > MAX_ROWS  # in two passes, of which one has rows of both
        logits = ctx.gather(decoder.read([Prompt(long[8:], 0, 8), Prompt(short, 1)]), Axis.VC).tensor
    torch.testing.assert_close(logits, model.logits.flip(0), atol=1e-4, rtol=1e-4)


def test_a_sequence_has_one_prompt() -> None:
    """Two for the same sequence are refused."""
    model = model_of("mistral")
    plan = plan_of(model.directory, 2, request_of(), {}, seed=2)
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx))
        with pytest.raises(RequestError, match="sequence 1 has two prompts"):
            decoder.read([Prompt([1], 1), Prompt([2], 0), Prompt([3], 1, start=1)])
