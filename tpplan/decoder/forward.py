"""The forward pass of a model over all devices of a compiled plan: embedding, layers, and logits.

Shapes: B batch, R rows, D hidden, V vocabulary. A plural such as ``xs`` is one tensor for each device, in device order.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from tpplan.core.axes import Axis
from tpplan.decoder.cache.store import CachePlaces
from tpplan.decoder.layer.agree import room_for
from tpplan.decoder.layer.attention import Group
from tpplan.decoder.layer.passes import Decode, Prefill
from tpplan.decoder.prompts import PassShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpplan.decoder.layer.stack import Stack
    from tpplan.decoder.model.ropes import Angles
    from tpplan.decoder.model.settings import Settings
    from tpplan.decoder.prompts import PromptSlice
    from tpplan.decoder.weights.device import DeviceWeights
    from tpplan.exec.context import TPContext

#: Minimum rows of half a pass for the halves to be interleaved, and a multiple that the first half is rounded down to.
_HALF, _EVEN = 512, 128


def numbers_of(tokens: Sequence[int], prompt_slices: Sequence[PromptSlice]) -> Tensor:
    """Return the numbers of each row of a pass, ``[R, 5]`` in host memory, in int64.

    They are its token, its position, its sequence, and how many sequences have rows before it. The last has nothing to
    do with the row: it is the last row of the first prompt that ends in this pass, then that of the second, then zeros.
    """
    # Of lists, torch would take ten times as long, and its own operations would start threads.
    token, position, sequence_of, before = array("q", tokens), array("q"), array("q"), array("q")
    ends, count = array("q"), 0
    for each in prompt_slices:
        for sequence in range(each.sequence, each.sequence + each.count):
            position.extend(range(each.start, each.start + each.size))
            sequence_of.extend(array("q", (sequence,)) * each.size)
            before.extend(array("q", (count,)) * each.size)
            count += 1
        ends.extend(range(len(tokens))[each.ends])
    ends.extend(array("q", (0,)) * (len(tokens) - len(ends)))
    columns = (torch.frombuffer(each, dtype=torch.int64) for each in (token, position, sequence_of, before, ends))
    return torch.stack(tuple(columns), dim=1)


class Forward:
    """Computes prefill passes and decode steps. It only knows tokens, positions and sequences, no texts.

    Attributes:
        stack: the model's layers, with their KV cache.
        settings: the settings of the model.
        weights: tensors by device and name; adjacent matrices with the same input are joined into one.
        batch: maximum number of sequences in the cache.
        length: maximum tokens of a sequence.
    """

    def __init__(
        self,
        stack: Stack,
        settings: Settings,
        weights: Mapping[int, DeviceWeights],
        tables: Mapping[int, tuple[Tensor, Tensor]],
        *,
        batch: int,
        length: int,
        head: str,
        in_turns: bool,
    ) -> None:
        """Combine the parts of a model.

        Args:
            stack: the model's layers, with their KV cache.
            settings: the settings of the model.
            weights: tensors by device and name.
            tables: sines and cosines of RoPE on each device that has KV heads.
            batch: maximum number of sequences in the cache.
            length: maximum tokens of a sequence.
            head: name of the matrix that makes logits of the residual stream.
            in_turns: whether to interleave the two halves of large prefill passes of a fixed shape, so that the
                all-reduce of one overlaps the computation of the other.
        """
        self.stack = stack
        self.settings = settings
        self.weights = weights
        self.batch = batch
        self.length = length
        self._tables = tables
        self._head = head
        self._in_turns = in_turns
        scale = settings.embedding_scale
        if settings.family.scaled_embedding:
            scale = torch.tensor(scale, dtype=stack.context.dtype).item()  # rounded as in transformers
        self._embedding_scale = scale

    @property
    def context(self) -> TPContext:
        """The compiled plan."""
        return self.stack.context

    def prefill(
        self,
        numbers: Sequence[Tensor],
        prompt_slices: Sequence[PromptSlice] = (),
        *,
        pass_shape: PassShape | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the residual stream after a prefill pass.

        Args:
            numbers: :func:`numbers_of` the rows, on each device.
            prompt_slices: slices of prompts that make up all rows; left out if the work must not depend on them, as in
                a graph. Only then may the last rows be padding.
            pass_shape: shape of the pass if they are left out; by default that of any pass of so many rows.
        """
        xs = self._embed([one[:, 0] for one in numbers])
        count = len(numbers[0])
        pass_shape = pass_shape or PassShape.of_any(count, self.batch, self.length)
        half = self.first_half(count)
        if prompt_slices or not half:
            return self.stack.run(xs, self._pass_of(numbers, prompt_slices, pass_shape))
        halves = [
            (tuple(x_RD[some] for x_RD in xs), self._pass_of([one[some] for one in numbers], (), shape))
            for some, shape in zip((slice(half), slice(half, count)), self._shapes_of(pass_shape, half), strict=True)
        ]
        self.stack.run_in_turns(halves)
        return xs

    def first_half(self, rows: int) -> int:
        """Return how many rows of a pass of a fixed shape come first, or 0 if it is not divided into halves.

        A graph of such a pass must have more rows that are no padding: devices expect some in both halves.
        """
        half = rows // 2 // _EVEN * _EVEN
        return half if self._in_turns and half >= _HALF else 0

    def _shapes_of(self, pass_shape: PassShape, half: int) -> tuple[PassShape, PassShape]:
        """Return the shapes of both halves of a pass, of which the first has ``half`` rows."""
        rest, length = pass_shape.rows - half, self.length
        if pass_shape.goes_on is None:
            return PassShape.of_any(half, self.batch, length), PassShape.of_any(rest, self.batch, length)
        first = PassShape.of_one(half, length, goes_on=pass_shape.goes_on)
        return first, PassShape.of_one(rest, length, goes_on=True)

    def _pass_of(
        self, numbers: Sequence[Tensor], prompt_slices: Sequence[PromptSlice], pass_shape: PassShape
    ) -> Prefill:
        """Return what layers need to know of a prefill pass of these rows."""
        _, *others, _ = zip(*(one.unbind(1) for one in numbers), strict=True)
        if prompt_slices:
            pass_shape = PassShape.of(prompt_slices)
        cap, heads = self.settings.attention_cap, [each for layer in self.stack.heads for each in layer.values()]
        some_attend = len(prompt_slices) != 1 and any(each.attend_at_once(pass_shape, cap) for each in heads)
        groups = {
            device: Group.of(positions, sequences, before, pass_shape, is_filled=not prompt_slices)
            for device, positions, sequences, before in zip(self.context.devices, *others, strict=True)
            if device in self._tables and some_attend
        }
        positions, sequences, _ = others
        places = dict(zip(self.context.devices, zip(sequences, positions, strict=True), strict=True))
        return Prefill(self._angles(positions), groups, prompt_slices, places)

    def decode(self, tokens: Sequence[Tensor], positions: Sequence[Tensor], span: int) -> tuple[Tensor, ...]:
        """Return the logits after one token of each sequence; see :meth:`tpplan.decoder.decoder.Decoder.decode`."""
        return self.logits(self.stack.run(self._embed(tokens), self._decode(positions, span)))

    def _decode(self, positions: Sequence[Tensor], span: int) -> Decode:
        lengths = {heads.cache.length for each in self.stack.heads for heads in each.values()}
        places = {
            device: {length: CachePlaces.of(at, length, span, self.context.dtype) for length in lengths}
            for device, at in zip(self.context.devices, positions, strict=True)
            if device in self._tables
        }
        with_states = {device for layer in self.stack.linear for device in layer}
        goes_on = {d: at != 0 for d, at in zip(self.context.devices, positions, strict=True) if d in with_states}
        return Decode(self._angles(positions), places, goes_on)

    def _angles(self, positions: Sequence[Tensor]) -> dict[int, Angles]:
        """Return the RoPE angles of rows at these positions on each device that has KV heads."""
        at = dict(zip(self.context.devices, positions, strict=True))
        ropes, steps = self.settings.ropes, self.stack.steps
        return {
            device: ropes.angles(sin, cos, at[device], steps[device].angles)
            for device, (sin, cos) in self._tables.items()
        }

    def _embed(self, tokens: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the embeddings of tokens: the sum over devices, each with zeros for tokens that others hold."""
        ids = dict(zip(self.context.devices, tokens, strict=True))
        parts = []
        for part in self.context.split(Axis.VOCAB):
            table_VD = self.weights[part.device]["model.embed_tokens.weight"]
            parts.append(self.stack.steps[part.device].embed(ids[part.device], table_VD, part.start))
        hidden = self.context.plan.split(Axis.RESIDUAL).size
        out = None if parts else room_for(self.context, len(tokens[0]), hidden, self.context.dtype)
        xs = self.context.all_reduce(parts, axis=Axis.VOCAB, out=out)
        return xs if self._embedding_scale == 1 else tuple(x.mul_(self._embedding_scale) for x in xs)

    def logits(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the logits of rows of the residual stream ``[R, D]``, on each device for its part of the vocabulary.

        Args:
            xs: rows on each device in use.
        """
        cap, logits = self.settings.logit_cap, []
        for device in self.context.devices_of(Axis.VOCAB):
            y_RV = self.stack.normed(xs, device, "model.norm", self._head)
            logits.append(y_RV if cap is None else y_RV.div_(cap).tanh_().mul_(cap))
        return tuple(logits)
