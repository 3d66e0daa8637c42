"""The layers of a model: what each of them makes of the residual stream, on all devices of a compiled plan.

Shapes: R rows, D hidden, H heads, K elements of a head, I intermediate, C experts of a row. A plural such as ``xs`` is
one tensor for each device, in device order.
"""

from __future__ import annotations

from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Final

import torch

from tpplan.axes import Axis
from tpplan.decoder import experts
from tpplan.decoder.layers import add_linear, linear, linears, rms_norm, rotate, some_of
from tpplan.decoder.room import Room, rooms_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tpplan.decoder.heads import Heads
    from tpplan.decoder.passes import Pass
    from tpplan.decoder.settings import Settings
    from tpplan.exec.context import TPContext
    from tpplan.model import Block


#: Percent of a device's room for rows in float32.
_WIDENED: Final = 4


class Stack:
    """All layers of a model, each cut over the devices as the plan says.

    Attributes:
        context: the compiled plan, whose operations tie the devices together.
        heads: what each device holds of each layer's attention.
        hidden: elements of the residual stream.
        has_experts: whether layers have.
        rooms: the scratch of each device, but for logits.
    """

    def __init__(
        self,
        context: TPContext,
        settings: Settings,
        blocks: Sequence[Block],
        weights: Mapping[int, Mapping[str, Tensor]],
        heads: Sequence[Mapping[int, Heads]],
    ) -> None:
        """Put together what a layer needs.

        Args:
            context: a compiled plan for the model.
            settings: of the model.
            blocks: what is in each layer.
            weights: by device and name, see :func:`tpplan.decoder.joined.joined`.
            heads: of each layer, by device.
        """
        self.context = context
        self.heads = heads
        self.has_experts = any(block.experts for block in blocks)
        self.rooms = rooms_of(context)
        self._settings = settings
        self._family = settings.family
        self._blocks = blocks
        self._weights = weights
        self._reduce = context.plan.request.layout == "reduce"
        self.hidden = sum(part.end - part.start for part in context.split(Axis.RS))
        # Norms whose weights are in float32 make some rows in float32.
        share = _WIDENED if self._family.offset else 0
        self._widened = {device: room.size_bytes * share // 100 for device, room in self.rooms.items()}
        self._places = {device: place for place, device in enumerate(context.all_devices)}
        self._head_dims = [context.plan.split(Axis.KV, layer).width for layer in range(len(blocks))]
        self._back = [self._back_bytes(layer, Axis.Q, width) for layer, width in enumerate(self._head_dims)]
        self._mlps = [{} if block.experts else self._mlp_bytes(layer) for layer, block in enumerate(blocks)]

    def run(self, xs: tuple[Tensor, ...], rows: Pass) -> tuple[Tensor, ...]:
        """Return the residual stream ``[R, D]`` behind the last layer, equal on all devices in use."""
        kept = {d: x.nbytes + rows.held[d] + self._widened[d] for d, x in zip(self._places, xs, strict=True)}
        rooms = {d: self.rooms[d].less(size) for d, size in kept.items()}
        for layer, block in enumerate(self._blocks):
            self._attention(layer, xs, rows, rooms)
            if block.experts:
                each = self._mixture_bytes(layer, len(xs[0]), fixed=rows.fixed)
                own = {d: Room(room.size_bytes // (2 if rows.fixed else 1)) for d, room in rooms.items()}
                left = {d: rooms[d].less(min(len(xs[0]), own[d].count(size)) * size) for d, size in each.items()}
                self._in_pieces(xs, own, each, partial(self._mixture, layer, left, fixed=rows.fixed))
            else:
                self._in_pieces(xs, rooms, self._mlps[layer], partial(self._mlp, layer))
        return xs

    def norm(self, xs: Sequence[Tensor], device: int, name: str) -> Tensor:
        """Return the rows of a device behind one of its norms."""
        return self._rms(xs[self._places[device]], device, name)

    @staticmethod
    def _in_pieces(
        xs: Sequence[Tensor],
        rooms: Mapping[int, Room],
        each: Mapping[int, int],
        add: Callable[[tuple[Tensor, ...], slice], None],
    ) -> None:
        """Add something to the residual stream: to as many rows at a time as there is room for on all devices.

        Args:
            xs: the residual stream.
            rooms: on each device.
            each: bytes that it takes there for a row.
            add: adds to some rows, and is told which.
        """
        count = len(xs[0])
        if all(count * size <= rooms[d].size_bytes for d, size in each.items()):  # mostly
            add(tuple(xs), slice(0, count))
            return
        for some in min((rooms[d].pieces(count, size) for d, size in each.items()), key=lambda found: found[0].stop):
            add(tuple(some_of(x, some, dim=0) for x in xs), some)

    def _attention(self, layer: int, xs: tuple[Tensor, ...], rows: Pass, rooms: Mapping[int, Room]) -> None:
        name = f"model.layers.{layer}.self_attn.o_proj"
        post = "post_attention_layernorm" if self._family.sandwich else ""
        found = {device: self._attend(layer, xs, rows, device, rooms[device]) for device in self.heads[layer]}
        taken = {device: each.untyped_storage().nbytes() for device, each in found.items()}
        left = {device: room.less(taken.get(device, 0)) for device, room in rooms.items()}

        def add(xs: tuple[Tensor, ...], some: slice) -> None:
            parts = [some_of(each, some, dim=0) for each in found.values()]
            ys = self._lead_back(layer, parts, name, Axis.Q, xs=xs, dim=self._head_dims[layer])
            self._add(layer, ys, Axis.Q, xs, post)

        self._in_pieces(xs, left, self._back[layer], add)

    def _attend(self, layer: int, xs: tuple[Tensor, ...], rows: Pass, device: int, room: Room) -> Tensor:
        """Return what the query heads of a device find, side by side in ``[R, ...]``."""
        heads, head_dim, x_RD = self.heads[layer][device], self._head_dims[layer], xs[self._places[device]]
        counts = [heads.queries, heads.keys, heads.keys]
        count, row = len(x_RD), head_dim * x_RD.element_size()
        whole, turned = row * sum(counts), row * (heads.queries + heads.keys)
        weights, start = self._weights[device], f"model.layers.{layer}.self_attn."
        # A row takes its normed copy and what is made of it; that and twice what is turned; or that, normed, and again.
        normed = x_RD[:1].nbytes + whole * (1 if f"{start}qkv_proj.weight" in weights else 2)
        each = max(normed, whole + 2 * turned, 2 * whole + turned if f"{start}q_norm.weight" in weights else 0)
        left = room.less(count * whole)
        project = partial(self._project, layer, device)
        qkv_RHK = room.by_rows(
            count, each, whole, lambda some: project(some_of(x_RD, some, 0), some_of(rows.angles[device], some, 0))
        )
        q_RHK, k_RHK, v_RHK = torch.split_with_sizes(qkv_RHK, counts, dim=1)
        del qkv_RHK
        scale, cap = 1 / sqrt(self._settings.attention_scalar or head_dim), self._settings.attention_cap
        return rows.attention(device, heads, q_RHK, k_RHK, v_RHK, scale=scale, cap=cap, room=left)

    def _project(self, layer: int, device: int, x_RD: Tensor, angles: Tensor) -> Tensor:
        """Return the queries, keys and values of some rows, turned."""
        start, head_dim = f"model.layers.{layer}.self_attn.", self._head_dims[layer]
        weights, heads = self._weights[device], self.heads[layer][device]
        names = [f"{start}{which}_proj" for which in "qkv"]
        x_RD = self._rms(x_RD, device, f"model.layers.{layer}.input_layernorm")
        qkv_RHK = torch.unflatten(linears(x_RD, weights, f"{start}qkv_proj", names), -1, (-1, head_dim))
        del x_RD
        if f"{start}q_norm.weight" in weights:
            q_RHK, k_RHK, v_RHK = torch.split_with_sizes(qkv_RHK, [heads.queries, heads.keys, heads.keys], dim=1)
            q_RHK, k_RHK = (self._rms(x, device, f"{start}{c}_norm") for c, x in (("q", q_RHK), ("k", k_RHK)))
            qkv_RHK = torch.cat((q_RHK, k_RHK, v_RHK), dim=1)
            del q_RHK, k_RHK, v_RHK
        rotate(qkv_RHK[:, : heads.queries + heads.keys], angles)
        return qkv_RHK

    def _mlp(self, layer: int, xs: tuple[Tensor, ...], _: slice) -> None:
        name = f"model.layers.{layer}.mlp.down_proj"
        post = "post_feedforward_layernorm" if self._family.sandwich else ""
        ys = self._lead_back(layer, self._gated(layer, xs), name, Axis.ID, xs=xs)
        self._add(layer, ys, Axis.ID, xs, post)

    def _gated(self, layer: int, xs: tuple[Tensor, ...]) -> list[Tensor]:
        """Return what every device has between the matrices of an MLP."""
        start, found = f"model.layers.{layer}.mlp.", []
        names = [f"{start}gate_proj", f"{start}up_proj"]
        for part in self.context.split(Axis.ID, layer):
            x_RD = self.norm(xs, part.device, self._before_mlp(layer))
            gate_RI, up_RI = linears(x_RD, self._weights[part.device], f"{start}gate_up_proj", names).chunk(2, dim=-1)
            found.append(self._settings.activation(gate_RI).mul_(up_RI))
            del x_RD, gate_RI, up_RI
        return found

    def _mlp_bytes(self, layer: int) -> dict[int, int]:
        """Return the bytes that :meth:`_mlp` takes for a row on each device."""
        item, split = self.context.dtype.itemsize, self.context.plan.split(Axis.ID, layer)
        found = self._back_bytes(layer, Axis.ID)
        for part in self.context.split(Axis.ID, layer):
            is_joined = f"model.layers.{layer}.mlp.gate_up_proj.weight" in self._weights[part.device]
            both = 2 * (part.end - part.start) * item
            back = found[part.device] if self._reduce else split.size * item
            normed = self.hidden * item + both * (1 if is_joined else 2)
            found[part.device] = max(found.get(part.device, 0), normed, both + back)
        return found

    def _back_bytes(self, layer: int, axis: Axis, width: int = 1) -> dict[int, int]:
        """Return the bytes that it takes for a row to lead back what an axis is cut of, on each device that does."""
        item, split = self.context.dtype.itemsize, self.context.plan.split(axis, layer)
        devices = self.context.all_devices if self._family.sandwich else self.context.devices_of(axis, layer)
        found = dict.fromkeys(devices, self.hidden * item)
        if not self._reduce:
            for part in self.context.split(Axis.RS):
                own = (part.end - part.start) * item
                found[part.device] = own + max(split.size * width * item, found.get(part.device, 0))
        return found

    def _mixture_bytes(self, layer: int, rows: int, *, fixed: bool) -> dict[int, int]:
        """Return the bytes that :meth:`_mixture` takes for a row on each device, but for the chosen matrices."""
        dtype, split, block = self.context.dtype, self.context.plan.split(Axis.EX, layer), self._blocks[layer]
        count, chosen = block.experts, block.experts_per_token
        bytes_of = partial(
            experts.row_bytes, self.hidden, count=count, chosen=chosen, dtype=dtype, rows=rows, fixed=fixed
        )
        found = dict.fromkeys(self.context.all_devices, 0)
        for i, part in enumerate(self.context.split(Axis.EX, layer)):
            above, below = bytes_of(part.end - part.start)
            routed = self.hidden * dtype.itemsize + experts.choice_bytes(count, chosen, dtype)
            joins = chosen * (2 * (part.end - part.start) + split.size) * dtype.itemsize
            found[part.device] = max(above, 0 if i else routed, below if self._reduce else joins)
        if not self._reduce:
            below = bytes_of(split.size)[1]
            for device in self.context.devices_of(Axis.RS):
                found[device] = max(found[device], below)
        return {device: size + experts.CHOICE * chosen for device, size in found.items()}

    def _mixture(self, layer: int, rooms: Mapping[int, Room], xs: tuple[Tensor, ...], _: slice, *, fixed: bool) -> None:
        start, names, count = f"model.layers.{layer}.", self._family.experts, self._blocks[layer].experts_per_token
        devices = self.context.devices_of(Axis.EX, layer)
        inputs = {device: self.norm(xs, device, self._before_mlp(layer)) for device in devices}
        # One device chooses for all: others may round differently, and would take other experts.
        scores_RE = linear(inputs[devices[0]], self._weights[devices[0]], start + names.router)
        choice_RC = torch.cat(experts.choose(scores_RE, count, normalised=self._settings.normalised), dim=1)
        choices = dict(zip(self.context.all_devices, self.context.broadcast(choice_RC, source=devices[0]), strict=True))
        chosen = {device: choice[:, count:].long() for device, choice in choices.items()}
        hidden = [
            experts.up(
                inputs[device],
                self._weights[device][start + names.gate],
                self._weights[device][start + names.up],
                chosen[device],
                self._settings.activation,
                fixed=fixed,
                room=rooms[device],
            )
            for device in devices
        ]
        del inputs
        if not self._reduce:  # columns are elements × experts of a row here, so that the elements can be joined
            hidden = [h_RCI.transpose(1, 2).flatten(1) for h_RCI in hidden]
            wholes = self.context.allgather(hidden, Axis.EX, Axis.RS, dim=count, layer=layer)
            hidden = [torch.unflatten(whole, 1, (-1, count)).transpose(1, 2) for whole in wholes]
            devices = self.context.devices_of(Axis.RS)
        ys = [
            experts.down(
                h_RCI,
                self._weights[device][start + names.down],
                chosen[device],
                choices[device][:, :count],
                fixed=fixed,
                room=rooms[device],
            )
            for device, h_RCI in zip(devices, hidden, strict=True)
        ]
        self._add(layer, ys, Axis.EX, xs, "")

    def _lead_back(
        self, layer: int, parts: Sequence[Tensor], name: str, axis: Axis, *, xs: tuple[Tensor, ...], dim: int = 1
    ) -> Sequence[Tensor]:
        """Multiply what an axis is cut of by the matrix that leads back to the residual stream.

        A device that has all of it adds it to that at once, which takes no other kernel, and the stream is returned.
        """
        devices = self.context.devices_of(axis, layer)
        if len(xs) == 1 and not self._family.sandwich:
            add_linear(xs[0], parts[0], self._weights[devices[0]], name)
            return xs
        if not self._reduce:
            parts = self.context.allgather(parts, axis, Axis.RS, dim=dim, layer=layer)
            devices = self.context.devices_of(Axis.RS)
        return [
            linear(part, self._weights[device], name, bias=not (self._reduce and i))  # a sum has one bias
            for i, (part, device) in enumerate(zip(parts, devices, strict=True))
        ]

    def _add(self, layer: int, ys: Sequence[Tensor], axis: Axis, xs: tuple[Tensor, ...], post: str) -> None:
        """Put together what the devices have made, and add it to the residual stream, behind a norm if there is one."""
        ctx = self.context
        if ys is xs:  # which it is in already
            return
        if post:
            if self._reduce:
                at = dict(zip(ctx.devices_of(axis, layer), ys, strict=True))
                out = [at[d] if d in at else torch.empty_like(x) for d, x in zip(ctx.all_devices, xs, strict=True)]
                whole = ctx.all_reduce(ys, axis=axis, layer=layer, out=out)
            else:
                whole = ctx.allgather(ys, Axis.RS)
            for x, y, device in zip(xs, whole, ctx.all_devices, strict=True):
                x.add_(self._rms(y, device, f"model.layers.{layer}.{post}", out=y))
        elif self._reduce:
            ctx.all_reduce(ys, xs, axis=axis, layer=layer, out=xs)
        else:
            at = dict(zip(ctx.all_devices, xs, strict=True))
            ctx.add_residual(ys, [at[device] for device in ctx.devices_of(Axis.RS)], Axis.RS)
            ctx.allgather(ys, Axis.RS, out=xs)

    def _rms(self, x: Tensor, device: int, name: str, out: Tensor | None = None) -> Tensor:
        weight = self._weights[device][f"{name}.weight"]
        return rms_norm(x, weight, self._settings.norm_eps, out=out, room=Room(self._widened[device]))

    def _before_mlp(self, layer: int) -> str:
        which = "pre_feedforward" if self._family.sandwich else "post_attention"
        return f"model.layers.{layer}.{which}_layernorm"
