"""Generating tokens from prompts, one token of each text at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import fields

from tpplan.core.sizes import counted
from tpplan.decoder.decoding.sampling import GREEDY, Sampling, samplings_of
from tpplan.decoder.prompts import Prompt, check_flags, facts_of, length_of, prompts_of, shown, whole
from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from tpplan.core.plan import SplitPlan
    from tpplan.decoder.decoder import Decoder


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
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
        resume: whether to read only what the cache lacks, where prompts begin like the texts that it has.

    Yields:
        The next token of each text, None for texts that have ended.

    Raises:
        ExecutionError: the arguments of several processes differ, or those of one are invalid: the same error in all.
        RequestError: there are no prompts or too many, or one is empty, too long for the plan's cache, or has tokens
            outside the vocabulary; an argument is of another type; or something else has overwritten the texts in the
            cache since, such as another generation or a prompt that was read.
    """
    from tpplan.exec.processes.agreement import agree  # noqa: PLC0415 (needs torch, which checking prompts does not)

    def check() -> tuple[list[list[int]], list[int], frozenset[int]]:
        tokens, counts = check_prompts(prompts, max_new_tokens, decoder.context.plan)
        samplings_of(sampling, len(tokens))
        check_flags(resume=resume)
        return tokens, counts, _ends_of(end)

    def facts(checked: tuple[list[list[int]], list[int], frozenset[int]]) -> dict[str, str]:
        tokens, counts, ends = checked
        each = samplings_of(sampling, len(tokens))
        return {
            "max_new_tokens": str(max_new_tokens if isinstance(max_new_tokens, int) else counts),
            **{field.name: ", ".join(str(getattr(one, field.name)) for one in each) for field in fields(Sampling)},
            "end": str(sorted(ends)),
            "resume": str(resume),
        } | facts_of([Prompt(prompt, i) for i, prompt in enumerate(tokens)])

    tokens, counts, ends = agree(decoder.context, "what to generate", check, facts)
    return _tokens(decoder, tokens, sampling, counts, ends, resume=resume)


def check_prompts(
    prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], plan: SplitPlan
) -> tuple[list[list[int]], list[int]]:
    """Check that prompts are tokens of a plan's model, and that the plan has room for them and the new tokens.

    Args:
        prompts: the tokens of each text.
        max_new_tokens: maximum new tokens of each text, one number or one for each.
        plan: the plan to run.

    Returns:
        The tokens of each prompt, and the maximum new tokens of each.

    Raises:
        RequestError: see :func:`generate`.
    """
    batch, length = plan.request.batch, length_of(plan.request)
    tokens = prompts_of(prompts, plan)
    if len(tokens) > batch:
        what = f"{len(tokens)} prompts, the plan has room for {batch} at a time"
        raise RequestError(what, "plan with a larger --batch")
    each = max_new_tokens if isinstance(max_new_tokens, (list, tuple)) else [max_new_tokens] * len(tokens)
    counts = [whole("the number of new tokens", count) for count in each]
    if len(counts) != len(tokens):
        what = f"{counted(len(counts), 'number')} of new tokens for {counted(len(tokens), 'prompt')}"
        raise RequestError(what, "give one number, or one for each prompt")
    if (least := min(counts)) < 1:
        raise RequestError(f"{least} new tokens were asked for", "ask for 1 or more")
    longest, count = max(((len(prompt), count) for prompt, count in zip(tokens, counts, strict=True)), key=sum)
    if longest + count > length:
        what = f"{counted(longest, 'token')} and {count} new ones, the plan caches {length} of a sequence"
        raise RequestError(what, "ask for fewer, or plan with a larger --context")
    return tokens, counts


def _ends_of(end: Collection[int]) -> frozenset[int]:
    """Return end-of-text tokens.

    Raises:
        RequestError: they are none, such as a number alone.
    """
    try:
        listed = [*end] if not isinstance(end, (str, bytes)) else None
    except TypeError:
        listed = None
    if listed is None:
        raise RequestError(f"end is {shown(end)}, which is no set of tokens", "write {2} where 2 is the only one")
    return frozenset(whole("an end token", each) for each in listed)


def _tokens(
    decoder: Decoder,
    prompts: list[list[int]],
    sampling: Sampling | Sequence[Sampling],
    counts: list[int],
    end: frozenset[int],
    *,
    resume: bool,
) -> Iterator[tuple[int | None, ...]]:
    steps, most = decoder.steps(len(prompts)), max(counts)
    ended = [False] * len(prompts)
    for made in range(1, most + 1):
        if made > 1:
            more = any(made < count for over, count in zip(ended, counts, strict=True) if not over)
            tokens = steps.step(ended, more=more)
        else:
            tokens = steps.start(prompts, sampling, resume=resume)
        yield tuple(None if over else token for token, over in zip(tokens, ended, strict=True))
        ended = [
            over or token in end or made == count for token, over, count in zip(tokens, ended, counts, strict=True)
        ]
        if all(ended):
            return
