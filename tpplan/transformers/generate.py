"""Generating tokens by a model of transformers, one token of each text at a time."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import DynamicCache, StaticCache

from tpplan.errors import ExecutionError
from tpplan.exec.compiler import compiler
from tpplan.transformers.sharding import shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Generator, Tensor

    from tpplan.core.plan import SplitPlan
    from tpplan.exec.context import TPContext
    from tpplan.weights.source import Source


class Sampling(Protocol):
    """How the tokens of a text are chosen."""

    @property
    def seed(self) -> int:
        """Seed of the random generator."""

    def draw(
        self, logits: Tensor, generator: Generator, texts: Sequence[Sequence[int]], new: Sequence[Sequence[int]], /
    ) -> Tensor:
        """Return a token for each row of logits in host memory, negative where they are not finite."""


@contextmanager
def loaded(
    source: Source, plan: SplitPlan, backend: str, note: Callable[[str], None]
) -> Iterator[tuple[TPContext, Callable[..., Iterator[tuple[int | None, ...]]]]]:
    """Load a checkpoint by a plan; yield the compiled plan, and :func:`tokens` of the sharded model.

    Args:
        source: the checkpoint.
        plan: the plan.
        backend: ``cuda``, ``cpu`` or ``auto``.
        note: called with the reason if the devices are virtual.

    Raises:
        TpplanError: the plan, the checkpoint, transformers and the machine do not fit together.
    """
    with compiler(plan, backend, note, scratch=False)("auto") as context:
        yield context, partial(tokens, shard(source, plan, context))


def tokens(
    model: Any,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    samplings: Sequence[Sampling],
    end: frozenset[int],
) -> Iterator[tuple[int | None, ...]]:
    """Yield the next token of each text, None for texts that have ended.

    Prompts are padded on the left, as transformers' own ``generate`` takes them.

    Args:
        model: a sharded model; if it captures steps, its cache is static.
        prompts: the tokens of each text.
        counts: maximum new tokens of each.
        samplings: how those of each are chosen.
        end: tokens that end a text.
    """
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    given = torch.tensor(padded, device=model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    new: list[list[int]] = [[] for _ in prompts]
    generators = [torch.Generator().manual_seed(sampling.seed) for sampling in samplings]
    ended = [False] * len(prompts)
    cache: Any = DynamicCache(config=model.config)
    if model.captures_steps:
        cache = StaticCache(config=model.config, max_cache_len=longest + max(counts))
    while True:
        with torch.no_grad():
            inputs = model.prepare_inputs_for_generation(
                given,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                is_first_iteration=not new[0],
            )
            logits = model(**inputs).logits[:, -1].float().cpu()
        chosen = [
            int(sampling.draw(row[None], generator, [[*prompt, *made]], [made]))
            for sampling, row, generator, prompt, made in zip(samplings, logits, generators, prompts, new, strict=True)
        ]
        if odd := [i for i, token in enumerate(chosen) if token < 0 and not ended[i]]:
            message = (
                f"the logits of text {odd[0] + 1} are not finite (NaN or infinity) after {len(new[odd[0]])} new tokens"
            )
            raise ExecutionError(
                message, "convert the checkpoint to float32, or fetch it again if its weights are not finite"
            )
        yield tuple(None if over else token for token, over in zip(chosen, ended, strict=True))
        for made, token in zip(new, chosen, strict=True):
            made.append(token)
        ended = [
            over or token in end or len(made) >= count
            for over, token, made, count in zip(ended, chosen, new, counts, strict=True)
        ]
        if all(ended):
            return
        given = torch.tensor(chosen, device=model.device).clamp(min=0)[:, None]
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], 1)
        positions = positions[:, -1:] + 1
