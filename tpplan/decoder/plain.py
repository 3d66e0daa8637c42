"""What a device computes in a layer, by plain torch: everywhere, in any dtype.

Shapes: R rows, D hidden, O columns of some matrices, I intermediate, H heads, K elements of a head, E experts, C of
them that a row is sent to.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from tpplan.decoder import experts
from tpplan.decoder.heads import found_by
from tpplan.decoder.layers import attend, rms_norm, rotate
from tpplan.decoder.products import AT_ONCE, Making, add_linear, by_torch, linear
from tpplan.decoder.sampling import best_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpplan.decoder.cache import Where
    from tpplan.decoder.heads import Heads
    from tpplan.decoder.held import Held
    from tpplan.decoder.quantised import Quantised, Stacked
    from tpplan.exec.gpu.channel import Channel


@frozen
class Turn:
    """What becomes of the queries and keys of rows before they meet.

    Attributes:
        angles: of the rows, from :func:`tpplan.decoder.layers.angles`.
        norms: the weights of the norms that a query head and a key head get first, if they get any.
    """

    angles: Tensor
    norms: tuple[Tensor, ...] = ()


class Plain:
    """The steps of a layer on one device, each as large as something could do it at once.

    Who knows faster ways for some tensors overrides what it takes.

    Attributes:
        joint_rows: most rows that :meth:`joint` takes.
    """

    joint_rows = 0

    def __init__(self, eps: float, activation: Callable[[Tensor], Tensor], at_once: int = AT_ONCE) -> None:
        """Know a model.

        Args:
            eps: what norms add to the mean square.
            activation: of gates; it writes over what it is given.
            at_once: elements of quantised matrices that are made at a time.
        """
        self._making = Making(self.make, at_once)
        self._eps = eps
        self._activation = activation

    def norm(self, x_RD: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Return rows behind a norm; see :func:`tpplan.decoder.layers.rms_norm`."""
        return rms_norm(x_RD, weight, self._eps, out)

    def linear(self, x: Tensor, weights: Held, name: str, *, bias: bool = True) -> Tensor:
        """Multiply by the matrix of this name, and add its bias, if it has one and it is wanted."""
        return linear(x, weights.matrix(name), weights.bias(name) if bias else None, self._making)

    def add_linear(self, to: Tensor, x: Tensor, weights: Held, name: str) -> None:
        """Add to rows of the residual stream what a matrix makes of others."""
        add_linear(to, x, weights.matrix(name), weights.bias(name), self._making)

    def make(self, matrix: Quantised, start: int, out_RK: Tensor) -> None:
        """Make rows of a quantised matrix, from a number on: computed in float32, rounded once."""
        by_torch(matrix, start, out_RK)

    def joint(  # noqa: PLR0917 (all that a product and a sum need)
        self, to: Tensor, x: Tensor, weights: Held, name: str, channel: Channel, device: int
    ) -> Callable[[], None] | None:
        """Return what adds to rows of the residual stream what matrices of all devices make, in one kernel.

        Args:
            to: the rows, the same on all devices.
            x: the columns of others that the device has.
            weights: of the device, by name.
            name: of the matrix.
            channel: by which the devices add up.
            device: this one.

        Returns:
            What launches it; None if there is no such kernel.
        """
        del to, x, weights, name, channel, device
        return None

    def normed(self, x_RD: Tensor, norm: Tensor, weights: Held, fused: str, names: Sequence[str] = ()) -> Tensor:
        """Multiply rows behind a norm by some matrices, side by side: ``[R, O]``.

        Args:
            x_RD: rows.
            norm: the weights of their norm.
            weights: of the device, by name.
            fused: the name of the one matrix that is made of them, which mostly there is.
            names: theirs.
        """
        y_RD = self.norm(x_RD, norm)
        if weights.find(fused) is not None:
            return self.linear(y_RD, weights, fused)
        return torch.cat([self.linear(y_RD, weights, name) for name in names], dim=-1)

    def gated(self, x_RD: Tensor, norm: Tensor, weights: Held, fused: str, names: Sequence[str]) -> Tensor:
        """Return the gate of rows behind a norm, ``[R, I]``; of the two matrices the first has the activation."""
        gate_RI, up_RI = self.normed(x_RD, norm, weights, fused, names).chunk(2, dim=-1)
        return self.gate(gate_RI, up_RI)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Multiply the activation of one tensor by another, and return the former, which is written over."""
        return self._activation(gate).mul_(up)

    def choose(self, scores_RE: Tensor, count: int, *, normalised: bool) -> Tensor:
        """Return what experts rows are sent to, ``[R, 2 × C]`` in float32: weights of them, then their numbers.

        Args:
            scores_RE: of all experts.
            count: of experts that a row is sent to.
            normalised: whether their weights add up to 1.
        """
        return torch.cat(experts.choose(scores_RE, count, normalised=normalised), dim=1)

    def experts_up(
        self, x_RD: Tensor, gate_EID: Tensor | Stacked, up_EID: Tensor | Stacked, choice_RC: Tensor, *, fixed: bool
    ) -> Tensor:
        """Return what the experts of rows have between their matrices, ``[R, C, I]``.

        Args:
            x_RD: rows.
            gate_EID: see :func:`tpplan.decoder.experts.up`.
            up_EID: likewise.
            choice_RC: what :meth:`choose` returns.
            fixed: whether no shape may depend on that.
        """
        return experts.up(
            x_RD, gate_EID, up_EID, choice_RC.chunk(2, dim=1)[1].long(), self.gate, self._making, fixed=fixed
        )

    def experts_down(
        self, h_RCI: Tensor, down_EDI: Tensor | Stacked, choice_RC: Tensor, to_RD: Tensor | None = None, *, fixed: bool
    ) -> Tensor:
        """Return the weighed sum of what the experts of rows make of ``h``, ``[R, D]``, which may be written over.

        Args:
            h_RCI: what they have between their matrices.
            down_EDI: the last of these.
            choice_RC: what :meth:`choose` returns.
            to_RD: rows that the sum is added to, where they are; they are returned then.
            fixed: whether no shape may depend on the choice.
        """
        weights_RC, numbers_RC = choice_RC.chunk(2, dim=1)
        y_RD = experts.down(h_RCI, down_EDI, numbers_RC.long(), weights_RC, self._making, fixed=fixed)
        return y_RD if to_RD is None else to_RD.add_(y_RD)

    def turn(self, qkv_RHK: Tensor, heads: Heads, turn: Turn) -> None:
        """Turn the query and key heads of rows where they are, behind their norms.

        Args:
            qkv_RHK: queries, then keys, then values.
            heads: how many there are.
            turn: how.
        """
        if turn.norms:
            for x_RHK, weight in zip(heads.apart(qkv_RHK), turn.norms, strict=False):
                x_RHK.copy_(self.norm(x_RHK, weight))
        rotate(qkv_RHK[:, : heads.queries + heads.keys], turn.angles)

    def keep(
        self,
        qkv_RHK: Tensor,
        heads: Heads,
        turn: Turn,
        sequences: Tensor,
        places: Tensor,
        *,
        kept: Tensor | None = None,
    ) -> None:
        """Do that, and write the keys and values to the heads' cache.

        Args:
            qkv_RHK: queries, then keys, then values.
            heads: with the cache.
            turn: how.
            sequences: of the rows; of nobody's below 0.
            places: of the rows in the cache.
            kept: the row that is written for each, which is somebody's; its own if not given, and all are somebody's.
        """
        self.turn(qkv_RHK, heads, turn)
        kv_RHK = qkv_RHK[:, heads.queries :]
        if kept is not None:  # no shape may depend on how many are nobody's: what is written twice is the same
            kv_RHK, sequences, places = (x.index_select(0, kept) for x in (kv_RHK, sequences, places))
        heads.cache.put(sequences, places, *kv_RHK.chunk(2, dim=1))

    def attends(self, heads: Heads) -> bool:  # noqa: ARG002 (a kernel may)
        """Tell whether :meth:`attend` does the same work for heads wherever texts end, without a mask."""
        return False

    def attend(self, qkv_RHK: Tensor, heads: Heads, where: Where, *, scale: float, cap: float | None) -> Tensor:
        """Return what the queries of one token of each sequence find in the heads' cache, ``[R, H × K]``.

        Args:
            qkv_RHK: queries, then keys, then values.
            heads: with the cache, which has these keys and values already.
            where: they are.
            scale: of the scores.
            cap: see :class:`tpplan.decoder.settings.Settings`.
        """
        attending = partial(attend, scale=scale, cap=cap, recurs=True)

        def find(some: slice, keys: slice) -> Tensor:
            q_BHSK = qkv_RHK[some, : heads.queries, None]
            k_BHTK, v_BHTK = heads.cache.read(some, keys, where.span)
            return found_by(heads.runs_of(keys), q_BHSK, k_BHTK, v_BHTK, partial(attending, mask=where.mask[some]))

        return heads.cache.in_pieces(len(where.places), 0, where.span, find)

    def best(self, logits_BV: Tensor, start: int, place: int, places: int) -> Tensor:
        """Return the largest logits of rows and their tokens; see :func:`tpplan.decoder.sampling.best_of`."""
        return best_of(logits_BV, start, place, places)
