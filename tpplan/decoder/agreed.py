"""Agreement of the processes that own a decoder's devices on how they go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpplan.exec.context import TPContext


def agreed(context: TPContext, facts: Sequence[bool]) -> list[bool]:
    """Return which facts hold in all processes; each process gives as many, at the same time.

    What a process can do may depend on its devices. Whatever decides on the operations that follow, or on their rows,
    has to be the same in all processes.
    """
    if not facts or len(context.devices) == len(context.all_devices):
        return list(facts)
    flags = [torch.tensor([facts], dtype=torch.float32, device=each.device) for each in context.devices.values()]
    counts = context.all_reduce(flags)[0][0]
    return [count == len(context.all_devices) for count in counts.tolist()]


def agreed_tokens(context: TPContext, tokens: Tensor) -> Tensor:
    """Return the tokens that the first device's process has drawn: another host may round probabilities otherwise.

    Args:
        context: the compiled plan.
        tokens: the tokens that this process has drawn, in host memory.
    """
    if len(context.devices) == len(context.all_devices):
        return tokens
    first = context.all_devices[0]
    x = tokens[None].to(context.devices[first].device if first in context.devices else "meta")
    return context.broadcast(x, source=first)[0][0].cpu()
