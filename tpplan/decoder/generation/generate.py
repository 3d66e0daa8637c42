"""Generating tokens from prompts, one token of each text at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import fields

from tpplan.core.sizes import counted
from tpplan.decoder.decoding.sampling import Sampling
from tpplan.decoder.prompts import Prompt, check_tokens, facts_of, length_of
from tpplan.errors import ExecutionError, RequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from tpplan.core.plan import SplitPlan
    from tpplan.decoder.decoder import Decoder

_GREEDY = Sampling()


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    sampling: Sampling | Sequence[Sampling] = _GREEDY,
    end: Collection[int] = (),
    resume: bool = False,
) -> Iterator[tuple[int | None, ...]]:
    """Continue a batch of prompts, and return an iterator over their new tokens.

    Several processes call this at once, with the same arguments, and take the same tokens from it.

    Args:
        decoder: a decoder whose batch has room for the prompts; its cache is overwritten.
        prompts: the tokens of each text.
        max_new_tokens: maximum new tokens of each text, one number or one for each.
        sampling: how tokens are chosen; greedily by default. With one for each prompt, a text does not depend on what
            is drawn for others.
        end: end-of-text tokens; each ends its text, and is itself yielded.
        resume: whether to read only what the latest generation left out of the cache, where prompts begin like its
            texts; that had one number of new tokens.

    Yields:
        The next token of each text, None for texts that have ended.

    Raises:
        ExecutionError: the arguments of several processes differ, or those of one are invalid: the same error in all.
        RequestError: there are no prompts or too many, or one is empty, too long for the plan's cache, or has tokens
            outside the vocabulary; or another generation has started since, in the same cache.
    """
    from tpplan.exec.processes.agreement import agree  # noqa: PLC0415 (needs torch, which checking prompts does not)

    each = (sampling,) if isinstance(sampling, Sampling) else tuple(sampling)
    settings = {
        "max_new_tokens": str(max_new_tokens if isinstance(max_new_tokens, int) else [*max_new_tokens]),
        **{field.name: ", ".join(str(getattr(one, field.name)) for one in each) for field in fields(Sampling)},
        "end": str(sorted(end)),
        "resume": str(resume),
    }

    def check() -> None:
        check_prompts(prompts, max_new_tokens, decoder.context.plan)
        if not isinstance(sampling, Sampling) and len(each) != len(prompts):
            raise RequestError(f"{len(each)} samplings for {len(prompts)} prompts", "give one, or one for each prompt")

    agree(
        decoder.context,
        "what to generate",
        check,
        lambda _: settings | facts_of([Prompt(prompt, i) for i, prompt in enumerate(prompts)]),
    )
    return _tokens(decoder, prompts, sampling, max_new_tokens, frozenset(end), resume=resume)


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], plan: SplitPlan) -> None:
    """Check that prompts are tokens of a plan's model, and that the plan has room for them and the new tokens.

    Args:
        prompts: the tokens of each text.
        max_new_tokens: maximum new tokens of each text, one number or one for each.
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
    counts = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else [*max_new_tokens]
    if len(counts) != len(prompts):
        what = f"{len(counts)} numbers of new tokens for {len(prompts)} prompts"
        raise RequestError(what, "give one number, or one for each prompt")
    if (least := min(counts)) < 1:
        raise RequestError(f"{least} new tokens were asked for", "ask for 1 or more")
    longest, count = max(((len(prompt), count) for prompt, count in zip(prompts, counts, strict=True)), key=sum)
    if longest + count > length:
        what = f"{counted(longest, 'token')} and {count} new ones, the plan caches {length} of a sequence"
        raise RequestError(what, "ask for fewer, or plan with a larger --context")


def _tokens(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | Sequence[Sampling],
    count: int | Sequence[int],
    end: frozenset[int],
    *,
    resume: bool,
) -> Iterator[tuple[int | None, ...]]:
    steps = decoder.steps(len(prompts))
    counts = [count] * len(prompts) if isinstance(count, int) else count
    tokens: list[int] = []
    ended = [False] * len(prompts)
    decoder.generations = mine = decoder.generations + 1
    for made in range(1, max(counts) + 1):
        if decoder.generations != mine:
            what = "this text cannot go on: the decoder has begun others since, which have taken its cache"
            raise RequestError(what, "finish one generate() before the next, or give it all prompts at once")
        if tokens:
            for text, token in zip(decoder.cached, tokens, strict=False):  # none if others were read since
                text.append(token)
            try:
                tokens = steps.step(ended, more=made < max(counts))
            except ExecutionError:
                decoder.cached = []  # the steps have cleared what was not finite
                raise
        else:
            tokens = steps.start(prompts, sampling, cached(decoder, prompts) if resume else ())
            if len({*counts}) == 1:  # else a text that has ended may start again in the cache
                decoder.cached = [[*map(int, prompt)] for prompt in prompts]
        yield tuple(None if over else token for token, over in zip(tokens, ended, strict=True))
        ended = [over or token in end or made == most for token, over, most in zip(tokens, ended, counts, strict=True)]
        if all(ended):
            return


def cached(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return how many of the first tokens of each prompt the cache has; one at least is left to read."""
    counts, progress = [0] * len(prompts), decoder.stack.progress
    for i, (prompt, text) in enumerate(zip(prompts, decoder.cached, strict=False)):
        same = next(
            (n for n, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), min(len(prompt), len(text))
        )
        counts[i] = min(same, len(prompt) - 1)
        if counts[i] < len(text) and not decoder.keeps_all:
            counts[i] = 0  # later tokens have overwritten what the window of an earlier one saw, or are in states
        if progress and progress.tokens[i] != counts[i]:
            counts[i] = 0  # a step did not end
    return counts
