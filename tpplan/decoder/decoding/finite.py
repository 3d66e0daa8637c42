"""The error for logits that are not finite, with the weights that they come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from tpplan.decoder.weights.quantised import Float8Matrix
from tpplan.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tpplan.decoder.forward import Forward
    from tpplan.decoder.weights.device import DeviceWeights

#: Tensors that the error names.
_NAMED: Final = 3
#: 8-bit elements that are checked at a time.
_AT_ONCE: Final = 2**22


def not_finite(forward: Forward, when: str) -> ExecutionError:
    """Return the error for logits that are not finite, with the names of weights that are not, in any process.

    All processes call this at once: their logits come from the weights of all.

    Args:
        forward: computed the logits.
        when: the tokens and texts that they came after, in words.
    """
    context, plan = forward.context, forward.context.plan
    what = f"the logits of {plan.model.name} are not finite (NaN or infinity) {when}"
    own = [f"{name} on device {device}" for device, weights in forward.weights.items() for name in _names(weights)]
    reports = context.tell((len(own), own[:_NAMED]))
    count, names = sum(each for each, _ in reports), [name for _, some in reports for name in some]
    if names:
        more = f" and {count - _NAMED} more" if count > _NAMED else ""
        hint = "fetch the checkpoint again, and compare its files with the published hashes"
        return ExecutionError(f"{what}, because these weights are not: {', '.join(names[:_NAMED])}{more}", hint)
    dtype = str(context.dtype).removeprefix("torch.")
    wider = "float32" if dtype == "bfloat16" else "bfloat16 or float32"
    hint = f"convert the checkpoint to {wider}, which holds larger numbers" if dtype != "float32" else ""
    if (kind := plan.request.cache.kind) != "fp16":
        fewer = f"plan with a cache of fp16: that of {kind} holds smaller numbers"
        hint = f"{hint}, or {fewer}" if hint else fewer
    return ExecutionError(f"{what}, although its weights are: its activations overflow in {dtype}", hint)


def _names(weights: DeviceWeights) -> Iterator[str]:
    """Yield the names of a device's weights that have NaN or infinity, those of joined matrices once."""
    for name, tensor in weights.tensors.items():
        if tensor.is_floating_point() and not _is_finite(tensor):
            yield name
    for name, matrix in (
        *weights.quantised.items(),
        *((name, stack.matrix) for name, stack in weights.stacked.items()),
    ):
        scales = matrix.scales
        if (scales.is_floating_point() and not _is_finite(scales)) or (
            isinstance(matrix, Float8Matrix) and not _are_finite(matrix.codes)
        ):
            yield name


def _is_finite(tensor: Tensor) -> bool:
    """Return whether no element is NaN or infinite, without a tensor of the same size."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()  # either is NaN if any element is
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _are_finite(codes_NK: Tensor) -> bool:
    """Return whether no 8-bit float is NaN or infinite; few rows are converted at a time."""
    step = max(1, _AT_ONCE // max(1, codes_NK.shape[1]))
    return all(_is_finite(codes_NK[row : row + step].float()) for row in range(0, len(codes_NK), step))
