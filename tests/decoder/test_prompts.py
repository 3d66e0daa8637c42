"""Prompts that are read together: how they are cut into passes, and that each is read as it would be alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from tests.decoder_cases import CONFIGS, MAX_ROWS, model_of, plan_of, request_of
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.core.axes import Axis
from tpplan.core.plan import Cache, Request
from tpplan.decoder import Decoder, generate
from tpplan.decoder.layer import passes, steps
from tpplan.decoder.math import attend
from tpplan.decoder.prompts import Prompt, cut, length_of
from tpplan.errors import RequestError
from tpplan.exec import compile as compile_plan
from tpplan.weights import load_weights

if TYPE_CHECKING:
    from random import Random


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 1)), min_size=1, max_size=6),
    st.integers(1, 30),
    st.randoms(use_true_random=False),
)
def test_passes_have_every_token_once(sizes: list[tuple[int, int]], most: int, random: Random) -> None:
    """Passes are full but for the last; each prompt's tokens follow each other, and what ends or fills is marked."""
    numbers = [*range(len(sizes))]
    random.shuffle(numbers)
    prompts = [Prompt([100 * i + t for t in range(n)], i, start) for i, (n, start) in zip(numbers, sizes, strict=True)]
    found: dict[int, list[tuple[int, int]]] = {i: [] for i in numbers}
    lengths, ends = [], []
    for tokens, prompt_slices in cut(prompts, most):
        assert [row for each in prompt_slices for row in range(each.rows.start, each.rows.stop)] == [
            *range(len(tokens))
        ]
        for each in prompt_slices:
            assert each.is_full == (each.size == most)
            for i in range(each.count):
                first = each.first + i * each.size
                places = range(each.start, each.start + each.size)
                found[each.sequence + i] += zip(tokens[first : first + each.size], places, strict=True)
        ends += [token for each in prompt_slices for token in tokens[each.ends]]
        lengths.append(len(tokens))
    assert found == {each.sequence: [*zip(each.tokens, range(each.start, 99), strict=False)] for each in prompts}
    assert ends == [each.tokens[-1] for each in prompts]
    total = sum(count for count, _ in sizes)
    assert lengths == [most] * (total // most) + [total % most] * (total % most > 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"context": 100}, r"shares 128 tokens between 2 sequences of up to 100; .* --context 64 for"),
        ({"full_window": True}, r"keeps all tokens in layers with a sliding window; .* without --full-window"),
    ],
)
def test_caches_of_other_kinds_than_the_decoders_are_refused(change: dict[str, Any], words: str) -> None:
    """The ledger of a pool, or of whole windows, is not what the decoder allocates."""
    request = Request("reduce", "balanced", Cache("fp16", 128), 2, 8, "idle")
    assert length_of(request) == 64
    with pytest.raises(RequestError) as error:
        length_of(evolve(request, **change))
    assert re.search(words, str(error.value), re.DOTALL)


def test_prompts_that_are_alike_are_one_stretch() -> None:
    """As long as their sequences follow each other, begin with them, and none is cut."""
    sizes = [(4, 0), (4, 0), (3, 0), (3, 1), (3, 1)]
    prompts = [Prompt([7] * size, i, start) for i, (size, start) in enumerate(sizes)]
    ((_, prompt_slices),) = cut(prompts, 20)
    assert [(each.first, each.size, each.sequence, each.count) for each in prompt_slices] == [
        (0, 4, 0, 2),
        (8, 3, 2, 1),
        (11, 3, 3, 1),
        (14, 3, 4, 1),
    ]
    assert [[each.count for each in prompt_slices] for _, prompt_slices in cut(prompts, 6)] == [
        [1, 1],
        [1, 1, 1],
        [1, 1],
    ]


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
        logits = ctx.gather(decoder.read([Prompt(long[8:], 0, 8), Prompt(short, 1)]), Axis.VOCAB).tensor
    torch.testing.assert_close(logits, model.logits.flip(0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_prompts_of_one_length(model_type: str) -> None:
    """Read at once, also in chunks, they have the logits that each has alone."""
    model = model_of(model_type)
    plan = plan_of(model.directory, 3, evolve(request_of(batch=4), max_rows=30), {}, seed=9)
    texts = [[(7 * i + 5 * t) % 200 for t in range(15)] for i in range(3)]
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx), cache="fp32")
        alone = [ctx.gather(decoder.prefill(text), Axis.VOCAB).tensor[0].clone() for text in texts]
        for start, end in ((0, 8), (8, 15)):
            logits = decoder.read([Prompt(text[start:end], i, start) for i, text in enumerate(texts, 1)])
        together = ctx.gather(logits, Axis.VOCAB).tensor
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-4, rtol=1e-4)


def test_prompts_that_cannot_be_read() -> None:
    """None at all, one without tokens, and two for the same sequence are refused."""
    model = model_of("mistral")
    plan = plan_of(model.directory, 2, request_of(), {}, seed=2)
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx))
        for prompts, match in (
            ([], "there are no prompts"),
            ([Prompt([1], 0), Prompt([], 1)], "the prompt of sequence 1 has no tokens"),
            ([Prompt([1], 1), Prompt([2], 0), Prompt([3], 1, start=1)], "sequence 1 has two prompts"),
        ):
            with pytest.raises(RequestError, match=match):
                decoder.read(prompts)


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ("a text", "a prompt has 'a', which is no token"),
        (["a text"], "a prompt has 'a', which is no token"),
        ([1, 2], "a prompt is 1, which is no list of tokens"),
        (torch.tensor([7]), r"a prompt is tensor\(7\), which is no list of tokens"),
        ([iter([1, 2])], "a prompt is <list_iterator object at .*, which is no list of tokens"),
        ([[1, 2.5]], r"a prompt has 2\.5, which is no token"),
        ([[1, "of"]], "a prompt has 'of', which is no token"),
        ([torch.ones(3)], r"a prompt has tensor\(1\.\), which is no token"),
        ([[[1, 2]]], r"a prompt has \[1, 2\], which is no token"),
        ([["x" * 1000]], "a prompt has 'x{59}, which is no token"),
    ],
)
def test_what_is_no_prompt(prompts: Any, match: str) -> None:
    """Texts, numbers, and lists of other things than numbers are refused before anything is computed."""
    model = model_of("mistral")
    plan = plan_of(model.directory, 2, request_of(), {}, seed=2)
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx))
        with pytest.raises(RequestError, match=match) as error:
            generate(decoder, prompts, 1)
        assert "the model's own tokenizer" in error.value.hint
        if not isinstance(prompts, str):
            with pytest.raises(RequestError, match=match):
                decoder.read([Prompt(prompts[0])])


def test_prompts_may_be_tensors() -> None:
    """Of whole numbers, as a tokenizer returns them; what follows is the same."""
    model = model_of("mistral")
    plan = plan_of(model.directory, 2, request_of(), {}, seed=2)
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx), cache="fp32")
        found = list(generate(decoder, torch.tensor([model.prompts[0]] * 2), 4))  # type: ignore[arg-type]
    assert found == [(token, token) for token in model.tokens[0][:4]]


@pytest.mark.parametrize(
    ("tokens", "positions", "match"),
    [
        ([], [], "devices: 2 in use, 0 with tokens, 0 with positions"),
        ([[1]], [[0], [0]], "devices: 2 in use, 1 with tokens, 2 with positions"),
        ([[1], [1]], [[0]], "devices: 2 in use, 2 with tokens, 1 with positions"),
        ([[], []], [[], []], "tokens of 0 sequences, the plan has room for 2 at a time"),
        ([[1, 2, 3]] * 2, [[0, 0, 0]] * 2, "tokens of 3 sequences, the plan has room for 2 at a time"),
        ([[1, 2]] * 2, [[0]] * 2, r"tokens or positions of shape \[1\]"),
        ([[1, 2], [1]], [[0, 0]] * 2, r"tokens or positions of shape \[1\]"),
        ([[[1]]] * 2, [[0]] * 2, r"tokens or positions of shape \[1, 1\]"),
        ([1] * 2, [0] * 2, r"tokens or positions of shape \[\]"),
    ],
)
def test_steps_that_cannot_be_taken(tokens: list[object], positions: list[object], match: str) -> None:
    """No token, or not one and a position of each sequence on each device, is refused before anything is computed."""
    model = model_of("mistral")
    plan = plan_of(model.directory, 2, request_of(), {}, seed=2)
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx))
        given, at = ([torch.tensor(each).long() for each in some] for some in (tokens, positions))
        with pytest.raises(RequestError, match=match):
            decoder.decode(given, at)


def test_what_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, and prompts that fill a pass, have shapes that come again and again; no others."""
    asked: set[tuple[int, bool]] = set()

    def attending(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked.add((q.shape[2], kwargs["recurs"]))
        return attend(q, *args, **kwargs)

    for module in (passes, steps):
        monkeypatch.setattr(module, "attend", attending)
    model = model_of("llama")
    plan = plan_of(model.directory, 1, request_of(), {}, seed=2)
    with compile_plan(plan, backend="cpu") as ctx:
        decoder = Decoder(ctx, model.directory, load_weights(plan, model.directory, ctx))
        for size in (1, MAX_ROWS - 1, MAX_ROWS):
            decoder.prefill([1] * size)
        assert asked == {(1, False), (MAX_ROWS - 1, False), (MAX_ROWS, True)}
        decoder.decode([torch.tensor([1])], [torch.tensor([MAX_ROWS])])
    assert (1, True) in asked
