"""Decoding by hand: texts that have lost their cache are refused, and so is whatever else steps cannot be taken of."""

from __future__ import annotations

import gc
import re
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

from tests.decoder_cases import BATCH, LENGTH, VOCAB, decoding, model_of, plan_of, request_of
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.core.axes import Axis
from tpplan.core.sizes import counted
from tpplan.decoder import Decoder, Prompt, Sampling, Steps, generate, prepare
from tpplan.decoder.decoding.steps import StepGraphs
from tpplan.errors import ExecutionError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.decoder_cases import Model

NEW = 6
BEGUN = "texts of other steps or generations have begun since, in the same cache"


@pytest.fixture
def model() -> Model:
    """Return a model, with what transformers says of it."""
    return model_of("mistral")


@pytest.fixture
def decoder(model: Model) -> Iterator[Decoder]:
    """Return a decoder of two sequences."""
    with decoding(plan_of(model.directory, 2, request_of(), {}, seed=2), "mistral", "fp32") as decoder:
        yield decoder


def hand(decoder: Decoder, prompt: list[int], sampling: Sampling = Sampling()) -> Iterator[int]:  # noqa: B008 (frozen)
    """Yield the tokens behind a prompt, which come by hand."""
    steps = decoder.steps(1)
    yield steps.start([prompt], sampling)[0]
    while True:
        yield steps.step()[0]


def own(decoder: Decoder, prompt: list[int]) -> Iterator[int]:
    """Yield the tokens behind a prompt, by steps that have graphs of their own."""
    steps = decoder.new_steps(1)
    yield steps.start([prompt])[0]
    while True:
        yield steps.step()[0]


def drawn(decoder: Decoder, prompt: list[int]) -> Iterator[int]:
    """Yield the tokens behind a prompt, which the host draws: nearly always the likeliest."""
    yield from hand(decoder, prompt, Sampling(temperature=1e-4))


def generated(decoder: Decoder, prompt: list[int]) -> Iterator[int]:
    """Yield the tokens behind a prompt."""
    for (token,) in generate(decoder, [prompt], LENGTH - len(prompt)):
        assert token is not None
        yield token


TEXTS: list[Callable[[Decoder, list[int]], Iterator[int]]] = [hand, own, drawn, generated]


@pytest.mark.parametrize("older", TEXTS)
@pytest.mark.parametrize("newer", TEXTS)
def test_texts_that_take_turns(
    older: Callable[..., Iterator[int]], newer: Callable[..., Iterator[int]], decoder: Decoder, model: Model
) -> None:
    """Whatever they come by, the older one is refused, every time; the newer one is right, and so are later ones."""
    first, second = older(decoder, model.prompts[0]), newer(decoder, model.prompts[1])
    assert [next(first), next(first)] == model.tokens[0][:2]
    found = [next(second), next(second)]
    with pytest.raises(RequestError, match=f"this text cannot go on: {BEGUN}") as error:
        next(first)
    assert "finish texts before others begin" in error.value.hint
    assert [*found, *(next(second) for _ in range(NEW))] == model.tokens[1][: NEW + 2]
    third = older(decoder, model.prompts[0])
    assert [next(third) for _ in range(NEW)] == model.tokens[0][:NEW]
    with pytest.raises(RequestError, match=f"this text cannot go on: {BEGUN}"):
        next(second)


def _decode(decoder: Decoder, prompt: list[int]) -> None:
    tokens, positions = ([torch.tensor([number]) for _ in decoder.context.devices] for number in (prompt[0], 0))
    decoder.decode(tokens, positions)


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (lambda d, p: d.read([Prompt(p, 0)]), "a prompt of 13 tokens has been read since into sequence 0 of the cache"),
        (
            lambda d, p: d.read([Prompt(p[:1], 0, 7)]),
            "a prompt of 1 token has been read since into sequence 0 of the cache",
        ),
        (lambda d, p: d.prefill(p), "a prompt of 13 tokens has been read since into sequence 0 of the cache"),
        (_decode, "decode() of 1 sequence has run since, in the same cache"),
        (lambda d, _: prepare(d), "prepare() has run since, in the same cache"),
        (lambda d, p: d.steps(2).start([p, p]), BEGUN),
        (lambda d, p: next(generate(d, [p, p], 2)), BEGUN),
    ],
    ids=["read", "read behind", "prefill", "decode", "prepare", "steps", "generate"],
)
@pytest.mark.parametrize("text", TEXTS)
def test_what_overwrites_a_text(
    text: Callable[..., Iterator[int]],
    between: Callable[[Decoder, list[int]], object],
    why: str,
    decoder: Decoder,
    model: Model,
) -> None:
    """It is refused to go on, and the error says what has taken its cache."""
    tokens = text(decoder, model.prompts[0])
    assert [next(tokens), next(tokens)] == model.tokens[0][:2]
    between(decoder, model.prompts[1])
    with pytest.raises(RequestError, match=f"this text cannot go on: {re.escape(why)}"):
        next(tokens)


def test_only_a_texts_own_sequences_count(model: Model) -> None:
    """Prompts in others leave texts as they are; a single one of theirs ends all of them."""
    plan = plan_of(model.directory, 2, request_of(batch=3), {}, seed=2)
    with decoding(plan, "mistral", "fp32") as decoder:
        steps = decoder.steps(2)
        found = [steps.start(model.prompts)]
        decoder.read([Prompt([5, 7, 11], 2)])
        found.append(steps.step())
        decoder.read([Prompt([5], 2, 3)])
        found.append(steps.step())
        assert [list(tokens) for tokens in zip(*found, strict=True)] == [tokens[:3] for tokens in model.tokens]
        decoder.read([Prompt([5, 7], 2), Prompt([3, 4, 6], 1)])
        with pytest.raises(
            RequestError, match=r"these 2 texts cannot go on: a prompt of 3 tokens .* since into sequence 1"
        ):
            steps.step()


def test_steps_that_were_launched_ahead(decoder: Decoder, model: Model) -> None:
    """Their token is not returned after others have begun; a text dropped midway is nothing to those behind it."""
    for graphs in (decoder.new_step_graphs(1, graphs=True), decoder.new_step_graphs(1, graphs=True)):
        graphs._capture = Replay  # type: ignore[assignment]
        decoder._step_graphs = {1: graphs}
        first = decoder.steps(1)
        found = [first.start([model.prompts[0]]), *(first.step() for _ in range(4))]
        assert [token for (token,) in found] == model.tokens[0][:5]
        assert decoder.texts.ahead
        second = decoder.steps(1)
        assert second.start([model.prompts[1]]) == model.tokens[1][:1]
        with pytest.raises(RequestError, match=BEGUN):
            first.step()
        with pytest.raises(RequestError, match=BEGUN):
            first.step(more=False)
        assert [second.step()[0] for _ in range(NEW)] == model.tokens[1][1 : NEW + 1]


class Replay:
    """A graph that does its work again."""

    def __init__(self, issue: Callable[[], None], _: str) -> None:
        self.replay = issue


def test_refused_prompts_are_nothing_to_a_text(decoder: Decoder, model: Model) -> None:
    """Whoever is refused has overwritten nothing."""
    steps = decoder.steps(1)
    found = [steps.start([model.prompts[0]])]
    for refused in (
        lambda: decoder.prefill([VOCAB]),
        lambda: decoder.prefill([]),
        lambda: decoder.steps(1).start([[1] * (LENGTH + 1)]),
        lambda: steps.start([[1], [2]]),
        lambda: generate(decoder, [[VOCAB]], 1),
        lambda: prepare(decoder, 3),
    ):
        with pytest.raises(RequestError):
            refused()
        found.append(steps.step())
    assert [token for (token,) in found] == model.tokens[0][:7]


def test_steps_keep_their_decoder(model: Model) -> None:
    """Also if nobody else does; nor does anything keep it once they are gone."""
    plan = plan_of(model.directory, 2, request_of(), {}, seed=2)
    gc.disable()
    try:
        with decoding(plan, "mistral", "fp32") as decoder:
            steps = decoder.steps(1)
            del decoder
            assert steps.start([model.prompts[0]]) == model.tokens[0][:1]
            assert steps.step() == model.tokens[0][1:2]
    finally:
        gc.enable()
    with pytest.raises(ExecutionError, match="the context is closed"):
        steps.step()


def test_interrupted_texts_are_refused(decoder: Decoder, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how far a step has come; resuming the text reads what the cache lacks, and is right."""
    texts = generate(decoder, [model.prompts[0]], 20)
    found = [next(texts), next(texts)]
    steps = decoder.steps(1)
    steps.start([model.prompts[0]])
    steps.step()
    with monkeypatch.context() as patched:
        patched.setattr(decoder.stack, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps.step()
    with pytest.raises(RequestError, match="this text cannot go on: the latest step did not end"):
        steps.step()
    longer = model.prompts[0] + [token for (token,) in found if token is not None]
    assert [token for (token,) in generate(decoder, [longer], 4, resume=True)] == model.tokens[0][2:6]
    with monkeypatch.context() as patched:
        patched.setattr(decoder.stack, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps.start([model.prompts[1]])
    with pytest.raises(RequestError, match=f"this text cannot go on: {BEGUN}|the latest step"):
        steps.step()


def test_texts_interrupted_as_one_begins_again_are_refused(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices may have other positions than the host then."""
    steps = decoder.steps(2)
    steps.start([[1] * (LENGTH - 1), [1, 2]])
    steps.step()
    with monkeypatch.context() as patched:
        patched.setattr(StepGraphs, "set", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps.step([True, False])
    with pytest.raises(RequestError, match="these 2 texts cannot go on: the latest step did not end"):
        steps.step([True, False])


def interrupted(*_: object) -> None:
    """Be interrupted."""
    raise KeyboardInterrupt


def _started(decoder: Decoder, count: int = 1) -> Any:
    steps: Steps = decoder.steps(count)
    steps.start([[1, 2, 3]] * count)
    return steps


def _numbers(decoder: Decoder, *numbers: int) -> Any:
    return [torch.tensor(numbers) for _ in decoder.context.devices]


def test_prompts_that_go_on_behind_what_is_not_there(model: Model) -> None:
    """They would attend to what earlier texts left, or to nothing; where only devices know what is there, they may."""
    plan = plan_of(model.directory, 2, request_of(), {}, seed=2)
    with decoding(plan, "mistral", "fp32") as decoder:
        for sequence, start, has in ((0, 3, 0), (1, 1, 0)):
            what = f"sequence {sequence} is to go on behind {counted(start, 'token')}, but its cache has {has}"
            with pytest.raises(RequestError, match=what):
                decoder.prefill([1, 2], sequence, start)
        prompt = model.prompts[1]
        decoder.prefill(prompt[:8])
        with pytest.raises(RequestError, match="sequence 0 is to go on behind 9 tokens, but its cache has 8") as error:
            decoder.prefill(prompt[8:], 0, 9)
        assert "start 0" in error.value.hint
        with pytest.raises(RequestError, match="sequence 1 is to go on behind 8 tokens, but its cache has 0"):
            decoder.prefill(prompt[8:], 1, 8)
        (logits,) = decoder.context.gather(decoder.prefill(prompt[8:], 0, 8), Axis.VOCAB).tensor
        assert logits.argmax() == model.tokens[1][0]
        steps = decoder.steps(1)
        found = [steps.start([prompt]), *(steps.step() for _ in range(3))]
        more = [token for (token,) in found]
        (logits,) = decoder.context.gather(decoder.prefill(more[-1:], 0, len(prompt) + 3), Axis.VOCAB).tensor
        assert logits.argmax() == model.tokens[1][4]


#: Functions that take anything, as Python does.
generating: Any = generate
preparing: Any = prepare
making: Any = Decoder
choosing: Any = Sampling

#: What cannot be done, and what the error says of it.
MISUSES: dict[str, tuple[Callable[[Any], object], str]] = {
    "no steps": (lambda d: d.steps(0), "steps of 0 sequences, the plan has room for 2 at a time"),
    "too many steps": (lambda d: d.steps(3), "steps of 3 sequences, the plan has room for 2 at a time"),
    "new steps": (lambda d: d.new_steps(3), "steps of 3 sequences, the plan has room for 2 at a time"),
    "half a step": (lambda d: d.steps(1.5), "the number of sequences is 1.5, expected a whole number"),
    "true steps": (lambda d: d.steps(True), "the number of sequences is True, expected a whole number"),
    "steps of none": (lambda d: d.new_steps(None), "the number of sequences is None, expected a whole number"),
    "not started": (lambda d: d.steps(1).step(), "steps cannot be taken: no text has begun"),
    "no sampling": (lambda d: d.steps(1).start([[1]], None), "sampling is None, which is no Sampling"),
    "a temperature": (lambda d: d.steps(1).start([[1]], 0.7), "sampling is 0.7, which is no Sampling"),
    "samplings": (lambda d: d.steps(1).start([[1]], [Sampling()] * 2), "2 samplings for 1 prompt"),
    "a prompt": (lambda d: d.steps(1).start([1, 2]), "a prompt is 1, which is no list of tokens"),
    "no prompts": (lambda d: d.steps(1).start([]), "there are no prompts"),
    "none for prompts": (lambda d: d.steps(1).start(None), "prompts is None, which is no list"),
    "an iterator": (lambda d: d.steps(1).start(iter([[1]])), "prompts is <list_iterator"),
    "two prompts": (lambda d: d.steps(1).start([[1], [2]]), "2 prompts for the steps of 1 sequence"),
    "an empty prompt": (lambda d: d.steps(2).start([[1], []]), "a prompt has no tokens"),
    "a long prompt": (lambda d: d.steps(1).start([[1] * 97]), "97 tokens from position 0, the plan caches 96 of a"),
    "a text": (lambda d: d.steps(1).start(["hello"]), "a prompt has 'h', which is no token"),
    "half a token": (lambda d: d.steps(1).start([[1, 2.0]]), "a prompt has 2.0, which is no token"),
    "a mask": (lambda d: d.steps(1).start([[True, True]]), "a prompt has True, which is no token"),
    "a foreign token": (lambda d: d.steps(1).start([[1, VOCAB]]), f"token {VOCAB}, the model's are 0 to {VOCAB - 1}"),
    "a negative token": (lambda d: d.steps(1).start([[1, -1]]), f"token -1, the model's are 0 to {VOCAB - 1}"),
    "over, one of two": (lambda d: _started(d, 2).step([True]), "over is [True], the steps are of 2 sequences"),
    "over, two of one": (lambda d: _started(d).step([False, True]), "over is [False, True], the steps are of 1 seq"),
    "over, alone": (lambda d: _started(d).step(True), "over is True, the steps are of 1 sequence"),
    "over, a number": (lambda d: _started(d).step([1]), "over has 1, which is neither True nor False"),
    "over, a token": (lambda d: _started(d).step(7), "over is 7, the steps are of 1 sequence"),
    "more, a number": (lambda d: _started(d).step(more=1), "more is 1, which is neither True nor False"),
    "more, none": (lambda d: _started(d).step(more=None), "more is None, which is neither True nor False"),
    "more, a list": (lambda d: _started(d).step([], more=[True]), "more is [True], which is neither True nor False"),
    "resume, a text": (lambda d: d.steps(1).start([[1]], resume="no"), "resume is 'no', which is neither True nor"),
    "generating, resume": (lambda d: generating(d, [[1]], 2, resume=0), "resume is 0, which is neither True nor False"),
    "graphs": (lambda d: d.new_steps(1, graphs=0), "graphs is 0, which is neither True nor False"),
    "kernels": (lambda d: making(d.context, "m", {}, kernels=None), "kernels is None, which is neither True nor Fal"),
    "turns": (lambda d: making(d.context, "m", {}, turns="yes"), "turns is 'yes', which is neither True nor False"),
    "half a new token": (
        lambda d: generating(d, [[1]], 2.5),
        "the number of new tokens is 2.5, expected a whole number",
    ),
    "half of two": (lambda d: generating(d, [[1], [2]], [3, 2.5]), "the number of new tokens is 2.5, expected a whole"),
    "negative": (lambda d: generating(d, [[1]], -1), "-1 new tokens were asked for"),
    "no number": (lambda d: generating(d, [[1]], None), "the number of new tokens is None, expected a whole number"),
    "true": (lambda d: generating(d, [[1]], True), "the number of new tokens is True, expected a whole number"),
    "numbers": (lambda d: generating(d, [[1]], [1, 2]), "2 numbers of new tokens for 1 prompt"),
    "an end": (lambda d: generating(d, [[1]], 2, end=2), "end is 2, which is no set of tokens"),
    "no end": (lambda d: generating(d, [[1]], 2, end=None), "end is None, which is no set of tokens"),
    "a word": (lambda d: generating(d, [[1]], 2, end="</s>"), "end is '</s>', which is no set of tokens"),
    "words": (lambda d: generating(d, [[1]], 2, end={"</s>"}), "an end token is '</s>', expected a whole number"),
    "generating none": (lambda d: generating(d, None, 2), "prompts is None, which is no list"),
    "generating one": (lambda d: generating(d, [1, 2], 2), "a prompt is 1, which is no list of tokens"),
    "no sampling at all": (lambda d: generating(d, [[1]], 2, sampling=None), "sampling is None, which is no Sampling"),
    "preparing half": (lambda d: preparing(d, 1.5), "the number of sequences is 1.5, expected a whole number"),
    "preparing none": (lambda d: preparing(d, 1, sampling=None), "sampling is None, which is no Sampling"),
    "reading none": (lambda d: d.read(None), "prompts is None, which is no list"),
    "reading one": (
        lambda d: d.read(Prompt([1])),
        "prompts is Prompt(tokens=[1], sequence=0, start=0), which is no list",
    ),
    "reading lists": (lambda d: d.read([[1, 2]]), "prompts[0] is [1, 2], which is no Prompt"),
    "a named sequence": (lambda d: d.prefill([1], "a"), "a sequence is 'a', expected a whole number"),
    "half a start": (lambda d: d.prefill([1], 0, 1.5), "the start of a prompt is 1.5, expected a whole number"),
    "a negative start": (lambda d: d.prefill([1], 0, -1), "1 token from position -1, the plan caches 96"),
    "a single token": (lambda d: d.prefill(7), "a prompt is 7, which is no list of tokens"),
    "decoding lists": (lambda d: d.decode([[1], [1]], [[0], [0]]), "tokens is [[1], [1]], expected a list of tensors"),
    "decoding none": (lambda d: d.decode(None, None), "tokens is None, expected a list of tensors"),
    "positions": (lambda d: d.decode(_numbers(d, 1), [0, 0]), "positions is [0, 0], expected a list of tensors"),
    "a negative span": (lambda d: d.decode(_numbers(d, 1), _numbers(d, 0), -1), "a span of -1 places, the plan caches"),
    "a wide span": (lambda d: d.decode(_numbers(d, 1), _numbers(d, 0), 97), "a span of 97 places, the plan caches 96"),
    "a hot temperature": (lambda _: choosing("hot"), "the temperature is 'hot', expected a number"),
    "no temperature": (lambda _: choosing(temperature=None), "the temperature is None, expected a number"),
    "half a top-k": (lambda _: choosing(top_k=2.5), "the top k is 2.5, expected a whole number"),
    "half a seed": (lambda _: choosing(seed=0.5), "the seed is 0.5, expected a whole number"),
    "a true penalty": (lambda _: choosing(presence_penalty=True), "the presence penalty is True, expected a number"),
}


def test_misuse() -> None:
    """Each ends in an error with names, numbers and a hint, and a text that goes on is none the worse."""
    model = model_of("mistral")
    with decoding(plan_of(model.directory, 2, request_of(), {}, seed=2), "mistral", "fp32") as decoder:
        assert (decoder.batch, decoder.length) == (BATCH, LENGTH)
        for name, (misuse, message) in MISUSES.items():
            with pytest.raises(RequestError) as error:
                misuse(decoder)
            assert error.value.message.startswith(message), (name, error.value.message)
            assert error.value.hint, name
        steps = _started(decoder)
        expected = [steps.step() for _ in range(3)]
        steps = _started(decoder)
        for over, more in (([True, True], True), (True, True), (7, True), ([True], 1)):
            with pytest.raises(RequestError):
                steps.step(over, more=more)
        assert [steps.step(over) for over in ([], (), [True])] == expected


def test_the_last_step_of_texts_is_told_as_such(decoder: Decoder, model: Model) -> None:
    """Of those that have not ended: one that ended before its last token needs no step that is launched ahead."""
    _, second = model.tokens
    end = second[1]
    assert end not in model.tokens[0][:3]
    followed = []

    def step(self: Steps, over: Sequence[bool], *, more: bool) -> list[int]:
        followed.append(more)
        return taken(self, over, more=more)

    taken = Steps.step
    with patch.object(Steps, "step", step):
        found = [*generate(decoder, model.prompts, [3, 9], end={end})]
    assert found[2] == (model.tokens[0][2], None)
    assert followed == [True, False]


def test_a_full_cache_where_all_texts_have_ended(decoder: Decoder) -> None:
    """Nothing is left to decode: that some start again is for those that need more steps."""
    steps = decoder.steps(2)
    steps.start([[1] * (LENGTH - 1), [2] * 4])
    steps.step([False, False])
    with pytest.raises(RequestError, match=f"the cache has {LENGTH} tokens of the longest text"):
        steps.step([True, True])
    assert len(steps.step([True, False])) == 2
