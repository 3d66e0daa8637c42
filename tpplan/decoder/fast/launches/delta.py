"""Launches of the kernels for linear attention by the gated delta rule.

Shapes: R rows, N sequences, P parts that channels lie in one behind the other, C channels of a part, H key heads, G
value heads of each, K and V elements of a key and of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder.cache.state import State
from tpplan.decoder.fast.launches.launcher import DTYPES, Launcher, bits_of
from tpplan.decoder.layer.recurrence import DeltaWeights

if TYPE_CHECKING:
    from tpplan.decoder.layer.recurrence import Rows

#: Sizes that the kernels are made for, see :mod:`tpplan.decoder.fast.kernels.delta`.
KEY_DIM: Final = 128
VALUE_DIM: Final = 128
SPAN: Final = 4
VALUES: Final = 32

_ITEM: Final = 2
_VECTOR: Final = 16
_THREADS: Final = 128
#: Bytes of a word that blocks take turns by.
_TURN: Final = 4


def names_of(dtype: torch.dtype) -> list[str]:
    """Return the names of the kernels for a dtype."""
    return [f"delta_{what}_{DTYPES[dtype]}" for what in ("recur", "gate")]


def takes(span: int, key_dim: int, value_dim: int) -> bool:
    """Tell whether there are kernels for a convolution and heads of these sizes."""
    return (span, key_dim, value_dim) == (SPAN, KEY_DIM, VALUE_DIM)


class Delta:
    """The gated delta rule in 16 bits on one CUDA device."""

    def __init__(self, place: torch.device, dtype: torch.dtype) -> None:
        """Load the kernels.

        Args:
            place: the device.
            dtype: dtype of the activations, one of :data:`DTYPES`.
        """
        self._dtype = dtype
        self._recur, self._gate = (Launcher(name, place) for name in names_of(dtype))
        self._turns = torch.zeros(0, dtype=torch.int32, device=place)

    def of(self, state: State, weights: DeltaWeights) -> OfLayer | None:
        """Return the kernels of a layer, or None if they do not take its sizes, or what its tensors are made of."""
        of_16_bits, of_32_bits = (state.inputs, weights.conv, weights.norm), (weights.rates, weights.dt_bias)
        is_fitting = all(x.dtype is self._dtype and x.is_contiguous() for x in of_16_bits)
        is_fitting &= all(x.dtype is torch.float32 and x.is_contiguous() for x in (state.recurrent, *of_32_bits))
        if not is_fitting or not takes(state.inputs.shape[2], state.key_dim, state.value_dim):
            return None
        words = len(state.recurrent) * state.keys
        if len(self._turns) < words:  # launches follow one another, so that all layers have the same ones
            self._turns = self._turns.new_zeros(words)
        return OfLayer(state, weights, self._turns, self._recur, self._gate)


@frozen(eq=False)
class OfLayer:
    """The kernels of a layer.

    Attributes:
        state: the states of the sequences.
        weights: the layer's weights.
        turns: zeros, one at least for each key head of each sequence.
        launch_recur: launches one kernel.
        launch_gate: launches the other.
    """

    state: State
    weights: DeltaWeights
    turns: Tensor
    launch_recur: Launcher
    launch_gate: Launcher

    @property
    def nbytes(self) -> int:
        """Bytes that they keep on the device for all layers together."""
        return self.turns.nbytes

    def recur(
        self,
        rows: Rows,
        first: int,
        count: int,
        out_RHGV: Tensor,
        *,
        goes_on_N: Tensor | None = None,
        fresh: bool = False,
    ) -> bool:
        """Read rows into the states, as :meth:`tpplan.decoder.layer.recurrence.DeltaKernels.recur` says."""
        state, weights, mixed = self.state, self.weights, rows.mixed
        keys, group, parts = state.keys, state.group, mixed.shape[1]
        vectors = (mixed.data_ptr(), *(_ITEM * step for step in mixed.stride()[:-1]), weights.conv.data_ptr())
        dtypes = {x.dtype for x in (mixed, out_RHGV, state.inputs, rows.betas, rows.decays)}
        is_fitting = len(dtypes) == 1 and not any(x % _VECTOR for x in vectors)
        is_fitting &= goes_on_N is None or goes_on_N.dtype is torch.bool
        steps = rows.betas.stride(2), rows.decays.stride(2), mixed.stride(2), *out_RHGV.stride()[2:]
        if not is_fitting or steps != (1, 1, 1, VALUE_DIM, 1):
            return False
        if parts > 1:  # all of a key head one behind the other
            k_at, v_at, channels = KEY_DIM, 2 * KEY_DIM, (mixed.shape[2],) * 2
            strides = (mixed.stride(1),) * 2
        else:
            k_at, v_at, channels = keys * KEY_DIM, 2 * keys * KEY_DIM, (KEY_DIM, group * VALUE_DIM)
            strides = channels
        of_rates = [
            word for x in (rows.betas, rows.decays) for word in (x.data_ptr(), _ITEM * x.stride(0), x.stride(1))
        ]
        self.launch_recur(
            (group * VALUE_DIM // VALUES, keys, count),
            _THREADS,
            *(mixed.data_ptr(), _ITEM * mixed.stride(0), *strides, k_at, v_at, *channels, weights.conv.data_ptr()),
            *(state.inputs[first].data_ptr(), state.recurrent[first].data_ptr(), *of_rates),
            *(weights.rates.data_ptr(), weights.dt_bias.data_ptr()),
            *(out_RHGV.data_ptr(), _ITEM * out_RHGV.stride(0), out_RHGV.stride(1)),
            *((0, 0) if goes_on_N is None else (goes_on_N.data_ptr(), goes_on_N.stride(0))),
            *(fresh, self.turns.data_ptr() + _TURN * first * keys, len(mixed) // count),
        )
        return True

    def gate(self, y_RHGV: Tensor, gates: Tensor, eps: float) -> Tensor | None:
        """Return gated norms; see :meth:`tpplan.decoder.layer.recurrence.DeltaKernels.gate`."""
        rows, keys, group, width = y_RHGV.shape
        gate_step = gates.stride(1) if gates.dim() > 2 else group * width  # noqa: PLR2004 (without heads)
        steps = y_RHGV.stride(0), y_RHGV.stride(1), gates.stride(0), gate_step
        starts = y_RHGV.data_ptr(), gates.data_ptr(), self.weights.norm.data_ptr()
        is_fitting = y_RHGV.dtype is gates.dtype is self.weights.norm.dtype
        is_fitting &= not any(x % _VECTOR for x in (*starts, *(_ITEM * step for step in steps)))
        if not is_fitting or y_RHGV.stride()[2:] != (width, 1) or gates.stride(-1) != 1:
            return None
        y_RO = y_RHGV.new_empty(rows, keys * group * width)
        lanes, heads = width * _ITEM // _VECTOR, keys * group
        self.launch_gate(
            (rows, -(-heads * lanes // _THREADS), 1),
            _THREADS,
            *(starts[0], _ITEM * steps[0], steps[1], starts[1], _ITEM * steps[2], steps[3]),
            *(y_RO.data_ptr(), _ITEM * y_RO.stride(0), starts[2], bits_of(eps), heads, group),
        )
        return y_RO
