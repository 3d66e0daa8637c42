"""The layers of a model, computed on all devices of a compiled plan.

Shapes: R rows, D hidden, H heads, K elements of a head, I intermediate, C experts of a row. A plural such as ``xs`` is
one tensor for each device, in device order.
"""

from __future__ import annotations

from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

import torch

from tpplan.core.axes import Axis
from tpplan.decoder.layer.agree import agreed, room_for
from tpplan.decoder.layer.latent import Latents
from tpplan.decoder.layer.steps import NormAndRope, Plain
from tpplan.decoder.math import Scoring
from tpplan.exec.toolchain.torch_shims import leaving_processors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from tpplan.core.model import Block
    from tpplan.decoder.cache.heads import Heads
    from tpplan.decoder.cache.state import Progress
    from tpplan.decoder.layer.delta import GatedDelta
    from tpplan.decoder.layer.passes import Pass
    from tpplan.decoder.model.settings import Settings
    from tpplan.decoder.prompts import PassShape
    from tpplan.decoder.weights.device import DeviceWeights
    from tpplan.exec.context import TPContext
    from tpplan.exec.handles import Aside


class Partial(NamedTuple):
    """The partial output of attention or an MLP on each device, to be combined and added to the residual stream.

    Attributes:
        ys: one tensor for each device; the stream itself if the output is already added to it.
        axis: the axis whose devices have an output; None if all devices in use have.
        post: name of the norm applied before the addition, empty if there is none.
    """

    ys: Sequence[Tensor]
    axis: Axis | None
    post: str = ""


class Stack:
    """All layers of a model, each split over the devices as the plan says.

    Attributes:
        context: the compiled plan, whose operations combine the devices' results.
        heads: attention heads of each layer, by device.
        linear: linear attention of each layer, by device.
        progress: how far the states of linear attention have read; None if no layer has any.
        steps: the computation steps of each device.
        looks_at_spans: whether the work of a step depends on how many places of the cache it may read.
        processors_left: multiprocessors that matrix products leave free while passes are interleaved, so that the
            all-reduce of one pass need not wait for a product of the other. With more than 8, products lost more time
            than all-reduces gained.
    """

    processors_left = 8

    def __init__(
        self,
        context: TPContext,
        settings: Settings,
        blocks: Sequence[Block],
        weights: Mapping[int, DeviceWeights],
        heads: Sequence[Mapping[int, Heads]],
        *,
        steps: Mapping[int, Plain],
        linear: Sequence[Mapping[int, GatedDelta]] = (),
        progress: Progress | None = None,
    ) -> None:
        """Create the layers.

        Args:
            context: a compiled plan for the model.
            settings: settings of the model.
            blocks: the block that each layer belongs to.
            weights: weights of each device, see :func:`tpplan.decoder.weights.fuse.fuse_weights`.
            heads: attention heads of each layer, by device.
            steps: the computation steps of each device.
            linear: linear attention of each layer, by device; may be left out if no layer has any.
            progress: how far states have read, if there are any.
        """
        self.context = context
        self.heads = heads
        self.linear = linear
        self.progress = progress
        attend = all(steps[device].attends(each) for layer in heads for device, each in layer.items())
        self.looks_at_spans = not agreed(context, [attend])[0]
        self._is_alone = len(context.all_devices) == 1
        self._settings = settings
        self._family = settings.family
        self._norms = settings.family.norms
        self._blocks = blocks
        self._weights = weights
        self.steps = steps
        self._reduce = context.plan.request.layout == "reduce"
        self._places = {device: place for place, device in enumerate(context.devices)}
        self._joint_elements = self._most_joint(steps.values())
        self._latents = [
            {
                device: Latents(own, steps[device], weights[device], layer, attention, settings, context.max_rows)
                for device, own in heads[layer].items()
            }
            if (attention := block.attention) and attention.latent_dim
            else {}
            for layer, block in enumerate(blocks)
        ]
        self._head_dims = [
            context.plan.split(Axis.KV_HEADS, layer).width if block.attention else 0
            for layer, block in enumerate(blocks)
        ]

    def run(self, xs: tuple[Tensor, ...], rows: Pass) -> tuple[Tensor, ...]:
        """Return the residual stream ``[R, D]`` after the last layer, equal on all devices in use."""
        for layer, block in enumerate(self._blocks):
            for make in self._sublayers(block):
                xs = self._add(layer, make(layer, xs, rows), xs)
        return xs

    def run_in_turns(self, passes: Sequence[tuple[tuple[Tensor, ...], Pass]]) -> None:
        """Run several passes interleaved, sublayer by sublayer, updating their residual streams in place.

        While one pass is computed, the devices' outputs of the others are combined. A pass may attend to keys and
        values of the passes before it, as it comes after them in every layer.
        """
        adding: dict[int, tuple[Aside, Partial]] = {}  # keeps the outputs alive until they are added up
        with leaving_processors([device.device for device in self.context.devices.values()], self.processors_left):
            try:
                halves = [(layer, make) for layer, block in enumerate(self._blocks) for make in self._sublayers(block)]
                for layer, make in halves:
                    for i, (xs, rows) in enumerate(passes):
                        if i in adding:
                            adding[i][0].wait()
                            del adding[i]
                        partial = make(layer, xs, rows)
                        with self.context.aside() as aside:
                            self._add(layer, partial, xs)
                        adding[i] = aside, partial
                        del partial
            finally:
                for aside, _ in adding.values():
                    aside.wait()

    def clear(self, sequences: int) -> None:
        """Clear the caches and states of the first sequences, on the devices of this process."""
        self.clear_caches(slice(0, sequences))
        for layer in self.linear:
            for linear in layer.values():
                linear.state.clear(sequences)
        if self.progress:
            self.progress.set([0] * sequences)

    def clear_caches(self, sequences: slice, places: slice = slice(None)) -> None:
        """Clear some places of the caches of sequences, by default all, on the devices of this process.

        Numbers that are not finite would spoil later texts even where attention does not see them: 0 times NaN is NaN.
        """
        for heads in self.heads:
            for each in heads.values():
                if (places.start or 0) < each.cache.length:
                    each.cache.clear(sequences, places)

    def clear_position(self, sequence: int, position: int) -> None:
        """Clear what a token of a sequence has added to the caches."""
        for heads in self.heads:
            for each in heads.values():
                place = position % each.cache.length
                each.cache.clear(slice(sequence, sequence + 1), slice(place, place + 1))

    def attends_alone(self, pass_shape: PassShape) -> bool:
        """Tell whether :class:`tpplan.decoder.layer.attention.Group` lets cuDNN attend to one sequence in all layers.

        It does where torch would choose it, if no layer has sinks or a window, and if there is room for the output over
        earlier tokens.

        Args:
            pass_shape: shape of any pass of one sequence behind others, where all rows can attend in one kernel call.
        """
        return all(
            f"model.layers.{layer}.self_attn.sinks" not in self._weights[device]
            and pass_shape.most <= heads.cache.length
            and heads.take_cudnn()
            and self.steps[device].merge_within_room(heads.sample(pass_shape.rows), heads)
            for layer, own in enumerate(self.heads)
            for device, heads in own.items()
        )

    def has_fixed_experts(self, rows: int) -> bool:
        """Tell whether neither the host nor a shape depends on the experts that rows are routed to, in any layer."""
        return all(self._are_fixed(layer, rows) for layer, block in enumerate(self._blocks) if block.experts)

    def _are_fixed(self, layer: int, rows: int) -> bool:
        start, names, chosen = f"model.layers.{layer}.", self._family.experts, self._blocks[layer].experts_per_token
        devices = self.context.devices_of(Axis.EXPERT_INTERMEDIATE, layer)
        for device in devices:
            gates, ups = (self._weights[device].experts(start + name) for name in (names.gate, names.up))
            if not self.steps[device].takes_experts_up(rows, chosen, gates, ups):
                return False
        return all(
            self.steps[device].takes_experts_down(rows, chosen, self._weights[device].experts(start + names.down))
            for device in (devices if self._reduce else self.context.devices_of(Axis.RESIDUAL))
        )

    def normed(self, xs: Sequence[Tensor], device: int, norm: str, fused: str, names: Sequence[str] = ()) -> Tensor:
        """Normalise rows of a device and multiply by matrices; see :meth:`tpplan.decoder.layer.steps.Plain.normed`."""
        weights, x_RD = self._weights[device], xs[self._places[device]]
        return self.steps[device].normed(x_RD, weights[f"{norm}.weight"] if norm else None, weights, fused, names)

    def _normed(self, x_RD: Tensor, device: int, norm: str) -> Tensor:
        """Return the norm of rows on a device, given its name; the rows themselves if it is empty."""
        return self.steps[device].norm(x_RD, self._weights[device][f"{norm}.weight"]) if norm else x_RD

    def _sublayers(self, block: Block) -> tuple[Callable[[int, tuple[Tensor, ...], Pass], Partial], ...]:
        """Return the functions that compute the two sublayers of a layer: attention, and the MLP or the experts."""
        return self._mixer(block), self._mixture if block.experts else self._mlp

    def _mixer(self, block: Block) -> Callable[[int, tuple[Tensor, ...], Pass], Partial]:
        """Return the function that computes what mixes the tokens of a layer."""
        if block.linear:
            return self._linear_attention
        return self._latent_attention if block.attention and block.attention.latent_dim else self._attention

    def _attention(self, layer: int, xs: tuple[Tensor, ...], rows: Pass) -> Partial:
        qkv: Iterable[Tensor] = (self._qkv(layer, xs, device) for device in self.heads[layer])
        if self._norms.of_all_heads:
            qkv = self._norm_all_heads(layer, [*qkv], len(xs[0]))
        found = [self._attend(layer, x_RHK, rows, device) for x_RHK, device in zip(qkv, self.heads[layer], strict=True)]
        name = f"model.layers.{layer}.self_attn.o_proj"
        ys = self._project_back(layer, found, name, Axis.Q_HEADS, xs=xs, dim=self._head_dims[layer])
        return Partial(ys, Axis.Q_HEADS, self._norms.after_attention)

    def _latent_attention(self, layer: int, xs: tuple[Tensor, ...], rows: Pass) -> Partial:
        attention = self._blocks[layer].attention
        assert attention is not None  # noqa: S101 - only such layers are computed here
        latents = self._latents[layer].items()
        found = [each.outputs(xs[self._places[device]], rows, device) for device, each in latents]
        name = f"model.layers.{layer}.self_attn.o_proj"
        ys = self._project_back(layer, found, name, Axis.Q_HEADS, xs=xs, dim=attention.v_head_dim)
        return Partial(ys, Axis.Q_HEADS, self._norms.after_attention)

    def _linear_attention(self, layer: int, xs: tuple[Tensor, ...], rows: Pass) -> Partial:
        start, sizes, found = f"model.layers.{layer}.", self._blocks[layer].linear, []
        assert sizes is not None  # noqa: S101 - only such layers are computed here
        for device, linear in self.linear[layer].items():
            norm = self._weights[device][f"{start}{self._norms.before_attention}.weight"]
            found.append(linear.outputs(xs[self._places[device]], norm, partial(rows.recur, linear, device=device)))
        dim = sizes.group * sizes.value_head_dim
        ys = self._project_back(layer, found, f"{start}linear_attn.out_proj", Axis.LINEAR_HEADS, xs=xs, dim=dim)
        return Partial(ys, Axis.LINEAR_HEADS)

    def _qkv(self, layer: int, xs: tuple[Tensor, ...], device: int) -> Tensor:
        """Return the queries, keys and values of a device's heads, ``[R, H, K]``."""
        start, before = f"model.layers.{layer}.", self._norms.before_attention
        names = [f"{start}self_attn.{which}_proj" for which in "qkv"]
        norm = f"{start}{before}" if before else ""
        qkv_RO = self.normed(xs, device, norm, f"{start}self_attn.qkv_proj", names)
        return torch.unflatten(qkv_RO, -1, (-1, self._head_dims[layer]))

    def _head_norms(self, layer: int, device: int) -> tuple[Tensor, ...]:
        """Return the weights of the norms of queries and keys; empty if a layer has none."""
        weights, names = self._weights[device], (self._norms.queries, self._norms.keys)
        found = (f"model.layers.{layer}.{name}.weight" for name in names)
        return tuple(weights[name] for name in found if name in weights)

    def _norm_all_heads(self, layer: int, qkv: list[Tensor], rows: int) -> list[Tensor]:
        """Normalise the queries of all devices' heads together, and the keys, in place."""
        plan, devices, head_dim = self.context.plan, self.heads[layer], self._head_dims[layer]
        queries, keys = plan.split(Axis.Q_HEADS, layer).size, plan.split(Axis.KV_HEADS, layer)
        count = keys.size // keys.replicas
        squares = [
            self.steps[device].squares(x_RHK, heads, queries // count)
            for x_RHK, (device, heads) in zip(qkv, devices.items(), strict=True)
        ]
        if not self._is_alone:
            out = None if squares else room_for(self.context, rows, 2, torch.float32)
            sums = self.context.all_reduce(squares, axis=Axis.KV_HEADS, layer=layer, out=out)
            at = dict(zip(self.context.devices, sums, strict=True))
            squares = [at[device] for device in devices]
        sizes = queries * head_dim, count * head_dim
        for x_RHK, square_R2, (device, heads) in zip(qkv, squares, devices.items(), strict=True):
            self.steps[device].norm_all_heads(x_RHK, heads, square_R2, sizes, self._head_norms(layer, device))
        return qkv

    def _attend(self, layer: int, qkv_RHK: Tensor, rows: Pass, device: int) -> Tensor:
        """Return the attention output of a device's query heads, concatenated to ``[R, ...]``."""
        start, head_dim, of = f"model.layers.{layer}.", self._head_dims[layer], self._norms
        weights, ropes, angles = self._weights[device], self._settings.ropes, rows.angles[device]
        steps, heads = self.steps[device], self.heads[layer][device]
        gates_RHK = None
        if self._family.gated_attention:  # a gate behind each query
            gates_RHK = qkv_RHK[:, 1 : 2 * heads.queries : 2]
            qkv_RHK = torch.cat((qkv_RHK[:, : 2 * heads.queries : 2], qkv_RHK[:, 2 * heads.queries :]), dim=1)
        if angles.growth is not None:
            qkv_RHK[:, : heads.queries].mul_(angles.growth)
        norms = () if of.of_all_heads else self._head_norms(layer, device)
        by = angles.by_kind[ropes.kinds[layer]]
        norm_rope = NormAndRope(by, norms, are_neighbours=ropes.are_neighbours, norms_last=of.behind_rope)
        sinks = weights[name] if (name := f"{start}self_attn.sinks") in weights else None
        scoring = Scoring(self._settings.attention_scale or 1 / sqrt(head_dim), self._settings.attention_cap, sinks)
        y_RO = rows.attention(steps, heads, qkv_RHK, norm_rope, scoring, device)
        return y_RO if gates_RHK is None else y_RO.mul_(gates_RHK.sigmoid().flatten(1))

    def _mlp(self, layer: int, xs: tuple[Tensor, ...], _rows: Pass) -> Partial:
        name = f"model.layers.{layer}.mlp.down_proj"
        return Partial(
            self._project_back(layer, self._gated(layer, xs), name, Axis.INTERMEDIATE, xs=xs),
            Axis.INTERMEDIATE,
            self._norms.after_mlp,
        )

    def _gated(self, layer: int, xs: tuple[Tensor, ...]) -> list[Tensor]:
        """Return each device's gated hidden activations of an MLP."""
        start, before, found = f"model.layers.{layer}.mlp.", self._before_mlp(layer), []
        names = [f"{start}gate_proj", f"{start}up_proj"]
        for part in self.context.split(Axis.INTERMEDIATE, layer):
            x_RD, weights = xs[self._places[part.device]], self._weights[part.device]
            norm = weights[f"{before}.weight"] if before else None
            found.append(self.steps[part.device].gated(x_RD, norm, weights, f"{start}gate_up_proj", names))
        return found

    def _mixture(self, layer: int, xs: tuple[Tensor, ...], rows: Pass) -> Partial:
        routed = self.context.devices_of(Axis.EXPERT_INTERMEDIATE, layer)
        shared = self._devices_of_shared(layer)
        before, inputs = self._before_mlp(layer), {}
        for device in sorted({*routed, *shared}):
            x_RD = xs[self._places[device]]
            inputs[device] = self._normed(x_RD, device, before)
        choices = self._choose(layer, inputs, xs)
        hidden = self._experts_up(layer, inputs, choices, rows)
        of_shared = [self._shared_up(layer, device, inputs[device]) for device in shared]
        del inputs
        # A single device adds directly to the residual stream.
        to_RD = xs[0] if self._is_alone and not self._norms.of_outputs else None
        ys = self._experts_down(layer, hidden, choices, xs, to_RD, rows)
        axis = self._add_shared(layer, of_shared, ys, xs)
        out = [ys[device] for device in self.context.devices_of(axis, layer)] if self._reduce else [*ys.values()]
        return Partial(out if to_RD is None else xs, axis, self._norms.after_mlp)

    def _choose(self, layer: int, inputs: Mapping[int, Tensor], xs: tuple[Tensor, ...]) -> dict[int, Tensor]:
        """Return the experts of rows by device; see :meth:`tpplan.decoder.layer.steps.Plain.choose`.

        One device chooses for all: others may round differently and choose other experts.
        """
        start, names, count = f"model.layers.{layer}.", self._family.experts, self._blocks[layer].experts_per_token
        first = self.context.plan.slices(Axis.EXPERT_INTERMEDIATE, layer)[0].device
        if first in inputs:
            steps, weights, router = self.steps[first], self._weights[first], self._settings.router
            logits_RE = steps.route(inputs[first], weights, start + names.router, wide=router.wide)
            correction_E = weights[start + names.correction] if names.correction else None
            choice_RC = steps.choose(logits_RE, count, router, correction_E)
        else:
            choice_RC = torch.empty(len(xs[0]), 2 * count, dtype=torch.float32, device="meta")
        return dict(zip(self.context.devices, self.context.broadcast(choice_RC, source=first), strict=True))

    def _experts_up(
        self, layer: int, inputs: Mapping[int, Tensor], choices: Mapping[int, Tensor], rows: Pass
    ) -> list[Tensor]:
        """Return each device's intermediate activations of the rows' experts, ``[R, C, I]``.

        If they are to be gathered, columns are elements × experts of a row, so that the elements can be joined.
        """
        start, names, hidden = f"model.layers.{layer}.", self._family.experts, []
        for device in self.context.devices_of(Axis.EXPERT_INTERMEDIATE, layer):
            gates, ups = (self._weights[device].experts(start + name) for name in (names.gate, names.up))
            h_RCI = self.steps[device].experts_up(inputs[device], gates, ups, choices[device], fixed=rows.fixed)
            hidden.append(h_RCI if self._reduce else h_RCI.transpose(1, 2).flatten(1))
        return hidden

    def _experts_down(  # noqa: PLR0917 (what a layer has)
        self,
        layer: int,
        hidden: list[Tensor],
        choices: Mapping[int, Tensor],
        xs: tuple[Tensor, ...],
        to_RD: Tensor | None,
        rows: Pass,
    ) -> dict[int, Tensor]:
        """Return the weighted sums of the outputs of the rows' experts by device, ``[R, D]``, added to ``to_RD``."""
        name, count = f"model.layers.{layer}.{self._family.experts.down}", self._blocks[layer].experts_per_token
        devices = self.context.devices_of(Axis.EXPERT_INTERMEDIATE, layer)
        if not self._reduce:
            wholes = self._gathered(hidden, Axis.EXPERT_INTERMEDIATE, layer, xs, dim=count)
            hidden = [torch.unflatten(whole, 1, (-1, count)).transpose(1, 2) for whole in wholes]
            devices = self.context.devices_of(Axis.RESIDUAL)
        first = self.context.plan.slices(Axis.EXPERT_INTERMEDIATE, layer)[0].device
        found = {}
        for device, h_RCI in zip(devices, hidden, strict=True):
            downs = self._weights[device].experts(name, bias=not self._reduce or device == first)
            steps = self.steps[device]
            found[device] = steps.experts_down(h_RCI, downs, choices[device], to_RD, fixed=rows.fixed)
        return found

    def _devices_of_shared(self, layer: int) -> tuple[int, ...]:
        """Return the devices that have a part of a layer's shared experts."""
        has_any = self._blocks[layer].shared_intermediate
        return self.context.devices_of(Axis.SHARED_INTERMEDIATE, layer) if has_any else ()

    def _shared_up(self, layer: int, device: int, x_RD: Tensor) -> Tensor:
        """Return a device's intermediate activations of the shared experts, times their weight, ``[R, I]``."""
        start, names = f"model.layers.{layer}.", self._family.experts
        steps, weights, mlp = self.steps[device], self._weights[device], start + names.shared
        h_RI = steps.gated(x_RD, None, weights, f"{mlp}.gate_up_proj", [f"{mlp}.gate_proj", f"{mlp}.up_proj"])
        if names.shared_gate:
            h_RI.mul_(steps.linear(x_RD, weights, start + names.shared_gate).sigmoid_())
        return h_RI

    def _add_shared(
        self, layer: int, hidden: Sequence[Tensor], ys: dict[int, Tensor], xs: tuple[Tensor, ...]
    ) -> Axis | None:
        """Add the outputs of the shared experts to those of the routed ones, in place.

        Args:
            layer: number of the layer.
            hidden: intermediate activations of the shared experts, of each device that has a part of them.
            ys: outputs of the routed experts by device; gets an output of each device of the axis that is returned.
            xs: the residual stream.

        Returns:
            An axis of which all devices with experts of either kind have a part; None for all devices in use.
        """
        if not self._blocks[layer].shared_intermediate:
            return Axis.EXPERT_INTERMEDIATE
        name = f"model.layers.{layer}.{self._family.experts.shared}.down_proj"
        devices = self._devices_of_shared(layer)
        if not self._reduce:
            hidden = self._gathered(hidden, Axis.SHARED_INTERMEDIATE, layer, xs)
            devices = self.context.devices_of(Axis.RESIDUAL)
        first = self.context.plan.slices(Axis.SHARED_INTERMEDIATE, layer)[0].device
        for device, h_RI in zip(devices, hidden, strict=True):
            steps, weights, bias = self.steps[device], self._weights[device], not self._reduce or device == first
            if device in ys:
                steps.add_linear(ys[device], h_RI, weights, name, bias=bias)
            else:
                ys[device] = steps.linear(h_RI, weights, name, bias=bias)
        both = (Axis.EXPERT_INTERMEDIATE, Axis.SHARED_INTERMEDIATE)
        routed, shared = ({part.device for part in self.context.plan.slices(axis, layer)} for axis in both)
        if shared <= routed or routed <= shared:
            return both[routed < shared]
        if self._reduce:
            for device, x_RD in zip(self.context.devices, xs, strict=True):
                ys.setdefault(device, torch.zeros_like(x_RD))
        return None

    def _project_back(
        self, layer: int, parts: Sequence[Tensor], name: str, axis: Axis, *, xs: tuple[Tensor, ...], dim: int = 1
    ) -> Sequence[Tensor]:
        """Multiply the parts of an axis by the matrix that projects back to the residual stream.

        If the product is added to the stream at once, on a single device or for few rows, return the stream.
        """
        devices = self.context.devices_of(axis, layer)
        if self._is_alone and not self._norms.of_outputs:
            self.steps[devices[0]].add_linear(xs[0], parts[0], self._weights[devices[0]], name)
            return xs
        if self._add_at_once(parts, name, xs):
            return xs
        if not self._reduce:
            parts = self._gathered(parts, axis, layer, xs, dim=dim)
            devices = self.context.devices_of(Axis.RESIDUAL)
        first = self.context.plan.slices(axis, layer)[0].device
        return [
            self.steps[device].linear(part, self._weights[device], name, bias=not self._reduce or device == first)
            for part, device in zip(parts, devices, strict=True)
        ]

    def _gathered(
        self, parts: Sequence[Tensor], axis: Axis, layer: int, xs: Sequence[Tensor], *, dim: int = 1
    ) -> Sequence[Tensor]:
        """Concatenate the parts of an axis on every device that holds residual columns."""
        columns = self.context.plan.split(axis, layer).size * dim
        out = None if parts else room_for(self.context, len(xs[0]), columns, xs[0].dtype, Axis.RESIDUAL)
        return self.context.allgather(parts, axis, Axis.RESIDUAL, dim=dim, layer=layer, out=out)

    def _most_joint(self, steps: Iterable[Plain]) -> int:
        """Return the maximum elements of rows for which one kernel multiplies and all-reduces; 0 if none can."""
        if not self._reduce or self._norms.of_outputs:
            return 0
        return min(each.joint_rows for each in steps) * self.context.plan.split(Axis.RESIDUAL).bounds[-1]

    def _add_at_once(self, parts: Sequence[Tensor], name: str, xs: tuple[Tensor, ...]) -> bool:
        """Add the product of all devices to the residual stream with one kernel on each; return False if none can."""
        if len(parts) != len(xs) or xs[0].numel() > self._joint_elements:
            return False
        channel = self.context.channel(self._joint_elements)
        if channel is None:
            return False
        launches = []
        for x_RD, part, device in zip(xs, parts, self.context.devices, strict=True):
            launch = self.steps[device].joint(x_RD, part, self._weights[device], name, channel, device)
            if launch is None:
                return False
            launches.append(launch)
        channel.run(launches)
        return True

    def _add(self, layer: int, partial: Partial, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Combine the outputs of the devices and add them to the residual stream, after the norm if there is one."""
        ctx, (ys, axis, post) = self.context, partial
        if ys is xs:  # already added
            return xs
        if post:
            if self._reduce:
                at = dict(zip(ctx.devices_of(axis, layer), ys, strict=True))
                out = [at[d] if d in at else torch.empty_like(x) for d, x in zip(ctx.devices, xs, strict=True)]
                whole = ctx.all_reduce(ys, axis=axis, layer=layer, out=out)
            else:
                whole = ctx.allgather(ys, Axis.RESIDUAL, out=None if ys else [torch.empty_like(x) for x in xs])
            for x, y, device in zip(xs, whole, ctx.devices, strict=True):
                weight = self._weights[device][f"model.layers.{layer}.{post}.weight"]
                self.steps[device].add_norm(x, y, weight)
            return xs
        if self._reduce:
            return ctx.all_reduce(ys, xs, axis=axis, layer=layer, out=xs)
        at = dict(zip(ctx.devices, xs, strict=True))
        ctx.add_residual(ys, [at[device] for device in ctx.devices_of(Axis.RESIDUAL)], Axis.RESIDUAL)
        return ctx.allgather(ys, Axis.RESIDUAL, out=xs)

    def _before_mlp(self, layer: int) -> str:
        return f"model.layers.{layer}.{self._norms.before_mlp}" if self._norms.before_mlp else ""
