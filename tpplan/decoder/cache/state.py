"""The states of one layer's linear attention on one device: what it keeps of each sequence, whatever its length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import torch
from attrs import field, frozen
from torch import Tensor

from tpplan.core.axes import Axis
from tpplan.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.core.model import LinearAttention
    from tpplan.decoder.prompts import Prompt
    from tpplan.exec.context import TPContext


@frozen(eq=False)
class State:
    """The states of the sequences of a layer, and the sizes of its heads on the device.

    Shapes: B sequences, C channels of queries, keys and values, T tokens that the convolution spans, H key heads, G
    value heads of each, K and V elements of a key and of a value.

    Attributes:
        keys: number of key heads, H.
        group: value heads that belong to each, G.
        key_dim: elements of a query or key, K.
        value_dim: elements of a value, V.
        inputs: the latest inputs of the convolution, in the activations' dtype, ``[B, C, T]``; the last is the newest.
        recurrent: the recurrent state in float32, ``[B, H, G, K, V]``.
    """

    keys: int
    group: int
    key_dim: int
    value_dim: int
    inputs: Tensor
    recurrent: Tensor

    @classmethod
    def of(cls, sizes: LinearAttention, keys: int, batch: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Allocate the memory that the plan counts for so many key heads and sequences, and clear it.

        Args:
            sizes: the sizes of the layer.
            keys: number of key heads of the device.
            batch: number of sequences.
            dtype: dtype of the activations.
            device: device of the memory.
        """
        group, key_dim, value_dim = sizes.group, sizes.key_head_dim, sizes.value_head_dim
        channels = keys * (2 * key_dim + group * value_dim)
        inputs = torch.zeros(batch, channels, sizes.kernel, dtype=dtype, device=device)
        recurrent = torch.zeros(batch, keys, group, key_dim, value_dim, dtype=torch.float32, device=device)
        return cls(keys, group, key_dim, value_dim, inputs, recurrent)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.inputs.nbytes + self.recurrent.nbytes

    def clear(self, sequences: int) -> None:
        """Clear the states of the first sequences."""
        self.inputs[:sequences].zero_()
        self.recurrent[:sequences].zero_()


def states_of(context: TPContext, layer: int, sizes: LinearAttention) -> dict[int, State]:
    """Return the states of a layer by device, and allocate them.

    Args:
        context: the compiled plan.
        layer: number of the layer.
        sizes: the sizes of its linear attention, whose key heads are cut.
    """
    batch, found = context.plan.request.batch, {}
    for part in context.split(Axis.LINEAR_HEADS, layer):
        place = context.devices[part.device].device
        found[part.device] = State.of(sizes, part.end - part.start, batch, context.dtype, place)
    return found


#: Number of tokens of states that were left half updated: no prompt may continue them.
BROKEN: Final = -1


@frozen
class Progress:
    """How many tokens the states of each sequence have read, as far as the host knows: states cannot go back.

    Attributes:
        tokens: number of tokens by sequence; None where only the devices know it.
    """

    tokens: list[int | None] = field(factory=list)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Check that prompts continue sequences where their states are, or begin them.

        Raises:
            RequestError: one continues elsewhere.
        """
        for prompt in prompts:
            has = self.tokens[prompt.sequence]
            if not prompt.start or has is None or has == prompt.start:
                continue
            what = f"sequence {prompt.sequence} is to go on behind {prompt.start} tokens, but its states are"
            where = f"behind {has}" if has != BROKEN else "those of a prompt or step that did not end"
            hint = "layers with linear attention cannot go back: read the text from its first token on, with start 0"
            raise RequestError(f"{what} {where}", hint)

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Note that prompts are about to be read."""
        for prompt in prompts:
            self.tokens[prompt.sequence] = BROKEN

    def end(self, prompts: Sequence[Prompt]) -> None:
        """Note that prompts have been read."""
        for prompt in prompts:
            self.tokens[prompt.sequence] = prompt.start + len(prompt.tokens)

    def set(self, tokens: Sequence[int | None]) -> None:
        """Note how many tokens the first sequences have read."""
        self.tokens[: len(tokens)] = tokens
