"""Choosing the likeliest tokens from logits, on the devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpplan.core.axes import Axis
from tpplan.decoder.decoding.sampling import NO_TOKEN
from tpplan.decoder.layer.agree import room_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpplan.decoder.layer.steps import Plain
    from tpplan.exec.context import TPContext


def likeliest(
    context: TPContext, logits: Sequence[Tensor], steps: Mapping[int, Plain], rows: int
) -> tuple[Tensor, ...]:
    """Return the likeliest tokens ``[B]``, in float32, on every device in use.

    Where the largest logit is not finite, it is ``NO_TOKEN``.

    Each device finds its own best token. One small all-reduce collects these, as every device has columns of its own.
    float32 holds every token number exactly, and all devices choose by the same bits.

    Args:
        context: the compiled plan.
        logits: ``[B, V]`` on each device that holds a part of the vocabulary.
        steps: the computation steps of each device.
        rows: B.
    """
    every = context.plan.slices(Axis.VC)
    here = [(i, part) for i, part in enumerate(every) if part.device in context.devices]
    bests = [
        steps[part.device].best(logits_BV, part.start, i, len(every))
        for (i, part), logits_BV in zip(here, logits, strict=True)
    ]
    out = None if bests else room_for(context, rows, 2 * len(every), torch.float32)
    return tuple(map(_best, context.all_reduce(bests, axis=Axis.VC, out=out)))


def _best(found_B2P: Tensor) -> Tensor:
    """Return the token of the largest logit of each row, given pairs of logits and tokens; NaN counts as largest.

    They stay float32: whoever copies them converts them, which saves a launch in each step.
    """
    best_B1, place_B1 = found_B2P[:, ::2].max(1, keepdim=True)
    token_B1 = found_B2P[:, 1::2].gather(1, place_B1)
    is_odd_B1 = best_B1 - best_B1 != 0  # only finite numbers less themselves are 0
    return token_B1.masked_fill_(is_odd_B1, NO_TOKEN).squeeze(1)
