"""What linear attention computes with between its projections, and what kernels for that offer.

Shapes: R rows, P parts that channels lie in one behind the other, C channels of a part, T tokens that the convolution
spans, H key heads, G value heads of each, V elements of a value.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from attrs import frozen
from torch import Tensor


class Rows(NamedTuple):
    """What the projections give of the rows of a pass; all are views of their products.

    Attributes:
        mixed: inputs of the convolution, ``[R, P, C]``, which prompts overwrite with what comes of it: the queries,
            keys and values of all key heads (one part), or of each (a part for each).
        gates: gates of the output, ``[R, H × G × V]``, or head by head ``[R, H, G × V]``.
        betas: logits of β, ``[R, H, G]``.
        decays: what the decays are made of, ``[R, H, G]``.
    """

    mixed: Tensor
    gates: Tensor
    betas: Tensor
    decays: Tensor


@frozen(eq=False)
class DeltaWeights:
    """The weights of a layer on a device that belong to no projection.

    Attributes:
        conv: weights of the convolution, ``[P × C, 1, T]``, of all parts' channels.
        rates: rates of the decays, ``[H × G]`` in float32.
        dt_bias: what is added to what the decays are made of, ``[H × G]`` in float32.
        norm: weights of the norm of the outputs, ``[V]``.
    """

    conv: Tensor
    rates: Tensor
    dt_bias: Tensor
    norm: Tensor


class DeltaKernels(Protocol):
    """Kernels for the gated delta rule of a layer on a device.

    Attributes:
        nbytes: bytes that they keep on the device for all layers together.
    """

    @property
    def nbytes(self) -> int: ...  # noqa: D102

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
        """Update the states of successive sequences by their next tokens, and write the outputs.

        Args:
            rows: what the projections give of the tokens, those of a sequence one behind the other.
            first: the first sequence.
            count: number of sequences.
            out_RHGV: where outputs go; may be the memory of the values.
            goes_on_N: whether tokens of each sequence come before; if not given, it depends on ``fresh``.
            fresh: whether all sequences begin.

        Returns:
            Whether the kernel takes such tensors; if not, nothing is done.
        """

    def gate(self, y_RHGV: Tensor, gates: Tensor, eps: float) -> Tensor | None:
        """Return the norms of outputs, multiplied by the activations (SiLU) of gates: ``[R, H × G × V]``.

        Args:
            y_RHGV: outputs of the rule.
            gates: gates of :class:`Rows`.
            eps: epsilon of the norm.

        Returns:
            The products, each rounded as the norm and the activation are; None if the kernel takes no such tensors.
        """
