"""A layer of linear attention in plain torch and by kernels, on the CPU, where lanes do them, and on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpplan.decoder.cache.state import State
from tpplan.decoder.fast.launches.delta import KEY_DIM, SPAN, VALUE_DIM
from tpplan.decoder.layer.delta import GatedDelta
from tpplan.decoder.layer.recurrence import Rows
from tpplan.decoder.layer.steps import Plain
from tpplan.decoder.prompts import PromptSlice
from tpplan.decoder.weights.linear import JOINED, ONE_BEHIND_THE_OTHER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tpplan.decoder.layer.recurrence import DeltaKernels, DeltaWeights

    #: Makes kernels for states and weights.
    Making = Callable[[State, DeltaWeights], DeltaKernels | None]
    #: Calls :meth:`GatedDelta.read` or :meth:`GatedDelta.step`.
    Recurring = Callable[[GatedDelta, Rows], Tensor]


class Layer:
    """A layer of random weights and states, twice.

    Attributes:
        plain: in plain torch.
        fast: by kernels.
    """

    def __init__(self, joined: str, sizes: tuple[int, int], batch: int, dtype: torch.dtype, making: Making) -> None:
        """Make it.

        Args:
            joined: how its projections are joined.
            sizes: key heads, and value heads of each.
            batch: sequences.
            dtype: of activations.
            making: makes the kernels.
        """
        self._sizes, self._joined, self._dtype = sizes, joined, dtype
        keys, group = sizes
        channels, heads = keys * (2 * KEY_DIM + group * VALUE_DIM), keys * group
        weights = _Weights({
            "conv1d.weight": torch.randn(channels, 1, SPAN).mul_(0.5).to(dtype),
            "norm.weight": torch.randn(VALUE_DIM).to(dtype),
            "A_log": -torch.rand(heads).exp(),
            "dt_bias": torch.randn(heads),
        })  # fmt: skip
        weights.joined = JOINED[joined][0]
        inputs = torch.randn(batch, channels, SPAN).to(dtype)
        recurrent = torch.randn(batch, keys, group, KEY_DIM, VALUE_DIM)
        states = [State(keys, group, KEY_DIM, VALUE_DIM, inputs.clone(), recurrent.clone()) for _ in range(2)]
        self.plain, self.fast = (
            GatedDelta(state, steps, weights, "", eps=1e-6, room=2**30, rows=64, hidden=64)  # type: ignore[arg-type]
            for state, steps in zip(states, (Plain(1e-6, "silu"), _Steps(making)), strict=True)
        )

    def rows(self, count: int) -> Rows:
        """Return what projections may give."""
        keys, group = self._sizes
        values = keys * group * VALUE_DIM
        mixed = 2 * keys * KEY_DIM + values
        wide, narrow = (torch.randn(count, width).to(self._dtype) for width in (mixed + values, 2 * keys * group))
        if self._joined == ONE_BEHIND_THE_OTHER:
            betas, decays = (torch.unflatten(x, 1, (keys, group)) for x in narrow.chunk(2, dim=1))
            return Rows(wide[:, None, :mixed], wide[:, mixed:], betas, decays)
        mixed_RHC, gates_RHC = torch.unflatten(wide, 1, (keys, -1)).split_with_sizes([mixed // keys, values // keys], 2)
        return Rows(mixed_RHC, gates_RHC, *torch.unflatten(narrow, 1, (keys, 2, group)).unbind(2))

    def check(self, count: int, recur: Recurring, allow: Callable[[Sequence[Tensor]], object] = id) -> None:
        """Compare outputs for so many rows, and all states then.

        Args:
            count: of rows.
            recur: what is done.
            allow: told what memory the kernels may touch: what the projections give.
        """
        rows = self.rows(count)
        own, memory = _cloned(rows)
        right = _outputs(self.plain, rows, recur)
        allow(memory)
        torch.testing.assert_close(_outputs(self.fast, own, recur).float(), right.float(), atol=4e-2, rtol=4e-2)
        ours, theirs = self.fast.state, self.plain.state
        assert torch.equal(ours.inputs, theirs.inputs)
        torch.testing.assert_close(ours.recurrent, theirs.recurrent, atol=2e-2, rtol=2e-2)

    def check_texts(self, long: int, batch: int, allow: Callable[[Sequence[Tensor]], object] = id) -> None:
        """Compare prompts from their beginning and continued, long and short, and steps of which some begin.

        Args:
            long: rows of the longest.
            batch: sequences, at least 3.
            allow: as :meth:`check` takes it.
        """
        texts = [_slice(0, long, 0, 1), _slice(long, 2, 5, 2), _slice(long + 2, 1, 9, 0)]
        goes_on = torch.arange(batch) % 3 != 1
        self.check(long + 3, lambda layer, rows: layer.read(rows, texts), allow)
        self.check(batch, lambda layer, rows: layer.step(rows, goes_on), allow)
        self.check(6, lambda layer, rows: layer.read(rows, [_slice(0, 3, 4, 1, 2)]), allow)
        self.check(1, lambda layer, rows: layer.step(rows, goes_on[:1]), allow)


def _slice(first: int, size: int, start: int, sequence: int, count: int = 1) -> PromptSlice:
    return PromptSlice(first, size, start, sequence, count, is_last=True, is_full=False)


class _Weights:
    """A device's weights as far as a layer asks."""

    joined = ""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = {f"linear_attn.{name}": each for name, each in weights.items()}

    def find(self, name: str) -> str | None:
        """Tell whether there is a joined projection."""
        return name if name == self.joined else None

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name]


class _Steps(Plain):
    """Steps with kernels for the rule only."""

    def __init__(self, making: Making) -> None:
        super().__init__(1e-6, "silu")
        self._making = making

    def delta_kernels(self, state: State, weights: DeltaWeights) -> DeltaKernels | None:
        return self._making(state, weights)


def _outputs(layer: GatedDelta, rows: Rows, recur: Recurring) -> Tensor:
    """Return a layer's outputs for what its projections give."""
    layer._project = lambda *_: rows  # type: ignore[method-assign]
    nothing = torch.empty(0)
    return layer.outputs(nothing, nothing, lambda found: recur(layer, found))


def _cloned(rows: Rows) -> tuple[Rows, list[Tensor]]:
    """Return rows with the same strides in memory of their own, and that memory."""
    bases = {each.untyped_storage().data_ptr(): each for each in rows}
    copies = {start: torch.empty_like(x[:0]).set_(_cloned_storage(x)) for start, x in bases.items()}
    found = (copies[x.untyped_storage().data_ptr()].as_strided(x.shape, x.stride(), x.storage_offset()) for x in rows)
    return Rows(*found), [*copies.values()]


def _cloned_storage(x: Tensor) -> torch.UntypedStorage:
    return x.untyped_storage().clone()  # type: ignore[no-untyped-call,no-any-return]
