"""Generating tokens from prompts, one token of each text at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import asdict

from tpplan.decoder.decoding.sampling import Sampling
from tpplan.decoder.prompts import Prompt, check_tokens, facts_of, length_of
from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from tpplan.core.plan import SplitPlan
    from tpplan.decoder.decoder import Decoder

_GREEDY = Sampling()


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling = _GREEDY,
    end: Collection[int] = (),
) -> Iterator[tuple[int | None, ...]]:
    """Continue a batch of prompts, and return an iterator over their new tokens.

    Several processes call this at once, with the same arguments, and take the same tokens from it.

    Args:
        decoder: a decoder whose batch has room for the prompts; its cache is overwritten.
        prompts: the tokens of each text.
        max_new_tokens: maximum new tokens of each text.
        sampling: how tokens are chosen; greedily by default.
        end: end-of-text tokens; each ends its text, and is itself yielded.

    Yields:
        The next token of each text, None for texts that have ended.

    Raises:
        ExecutionError: the arguments of several processes differ, or those of one are invalid: the same error in all.
        RequestError: there are no prompts or too many, or one is empty, too long for the plan's cache, or has tokens
            outside the vocabulary; or another generation has started since, in the same cache.
    """
    from tpplan.exec.processes.agreement import agree  # noqa: PLC0415 (needs torch, which checking prompts does not)

    settings = {
        "max_new_tokens": str(max_new_tokens),
        **{name: str(value) for name, value in asdict(sampling).items()},
        "end": str(sorted(end)),
    }
    agree(
        decoder.context,
        "what to generate",
        lambda: check_prompts(prompts, max_new_tokens, decoder.context.plan),
        lambda _: settings | facts_of([Prompt(prompt, i) for i, prompt in enumerate(prompts)]),
    )
    return _tokens(decoder, prompts, sampling, max_new_tokens, frozenset(end))


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, plan: SplitPlan) -> None:
    """Check that prompts are tokens of a plan's model, and that the plan has room for them and the new tokens.

    Args:
        prompts: the tokens of each text.
        max_new_tokens: maximum new tokens of each text.
        plan: the plan to run.

    Raises:
        RequestError: see :func:`generate`.
    """
    batch, length = plan.request.batch, length_of(plan.request)
    for prompt in prompts:
        check_tokens(prompt, plan)
        if not len(prompt):
            raise RequestError("a prompt has no tokens", "a text continues one token at least")
    if not len(prompts):
        raise RequestError("there are no prompts", "give one or more")
    if len(prompts) > batch:
        what = f"{len(prompts)} prompts, the plan has room for {batch} at a time"
        raise RequestError(what, "plan with a larger --batch")
    if max_new_tokens < 1:
        raise RequestError(f"{max_new_tokens} new tokens were asked for", "ask for 1 or more")
    longest = max(map(len, prompts))
    if longest + max_new_tokens > length:
        what = f"{longest} tokens and {max_new_tokens} new ones, the plan caches {length} of a sequence"
        raise RequestError(what, "ask for fewer, or plan with a larger --context")


def _tokens(
    decoder: Decoder, prompts: Sequence[Sequence[int]], sampling: Sampling, count: int, end: frozenset[int]
) -> Iterator[tuple[int | None, ...]]:
    steps = decoder.steps(len(prompts))
    tokens: list[int] = []
    ended = [False] * len(prompts)
    decoder.generations = mine = decoder.generations + 1
    for _ in range(count):
        if decoder.generations != mine:
            what = "this text cannot go on: the decoder has begun others since, which have taken its cache"
            raise RequestError(what, "finish one generate() before the next, or give it all prompts at once")
        tokens = steps.step() if tokens else steps.start(prompts, sampling)
        yield tuple(None if over else token for token, over in zip(tokens, ended, strict=True))
        ended = [over or token in end for token, over in zip(tokens, ended, strict=True)]
        if all(ended):
            return
