"""A decoder that runs by a plan: every device computes its slices, and the context's operations tie them together.

Shapes: R rows, D hidden, H heads, K elements of a head, I intermediate, V vocabulary, C experts of a row. A plural such
as ``xs`` is one tensor for each device, in device order.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tpplan.axes import Axis
from tpplan.decoder import experts
from tpplan.decoder.cache import Where
from tpplan.decoder.heads import heads_of, length_of
from tpplan.decoder.joined import joined
from tpplan.decoder.layers import angles, linear, linears, rms_norm, rotate
from tpplan.decoder.passes import Decode, Prefill
from tpplan.decoder.prompts import Prompt, check, check_step, cut
from tpplan.decoder.settings import settings_of
from tpplan.decoder.steps import Steps
from tpplan.exec.program import HOST
from tpplan.reader import read_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from tpplan.decoder.passes import Pass
    from tpplan.decoder.prompts import Stretch
    from tpplan.exec.context import TPContext
    from tpplan.exec.graph import Graph
    from tpplan.weights import Weights


class Decoder:
    """A model on the devices of a compiled plan, with its weights and its cache.

    Attributes:
        context: the compiled plan.
        batch: sequences that can decode together.
        weights: by device and name, those with the same input joined where they lie side by side.
        length: tokens that each can have: the plan's cache tokens over its batch.
        graph: the latest that was captured of its work, or None; all of them share their memory.
        generations: how many have begun; the cache is the latest one's.
    """

    @torch.inference_mode()
    def __init__(self, context: TPContext, directory: str | Path, weights: Weights, *, cache: str = "") -> None:
        """Make the cache, in the memory that the plan counts for it.

        Args:
            context: a compiled plan for the model.
            directory: the model's, with a config.json.
            weights: of the model, from :func:`tpplan.weights.load_weights`.
            cache: its kind; the plan's if not given. ``fp32``, which no plan has, loses nothing.

        Raises:
            ModelError: the decoder does not compute such a model; see :func:`tpplan.decoder.settings.settings_of`.
            ExecutionError: it has no cache of the kind.
        """
        self.context = context
        request, model = context.plan.request, read_model(directory)
        self.batch = request.batch
        self.length = length_of(request)
        self._reduce = request.layout == "reduce"
        self._settings = settings_of(directory, model, context.dtype)
        self._family = self._settings.family
        scale = sqrt(model.hidden_size) if self._family.scaled_embedding else 1.0
        self._embedding_scale = torch.tensor(scale, dtype=context.dtype).item()  # rounded as in transformers
        self._head = "model.embed_tokens" if model.tied_embeddings else "lm_head"
        blocks = {layer: block for block in model.blocks for layer in block.layers}
        self._blocks = [blocks[layer] for layer in range(model.layer_count)]
        windows = [block.attention.window if block.attention else 0 for block in self._blocks]
        kind = cache or request.cache.kind
        self._heads = [heads_of(context, layer, window, kind) for layer, window in enumerate(windows)]
        self.weights = {device: joined(weights[device], self._blocks, self._family) for device in context.all_devices}
        self._steps: dict[int, Steps] = {}
        self.graph: Graph | None = None
        self.generations = 0
        holders = sorted({device for heads in self._heads for device in heads})
        self._tables = dict(zip(holders, context.rope_tables(self._settings.rope, self.length), strict=True))

    def cache_bytes(self, device: int) -> int:
        """Return the bytes that the cache takes on a device."""
        return sum(heads[device].cache.nbytes for heads in self._heads if device in heads)

    def steps(self, sequences: int) -> Steps:
        """Return what makes the first so many sequences of the cache grow; made once, and kept with its graphs."""
        if sequences not in self._steps:
            self._steps[sequences] = Steps(self, sequences)
        return self._steps[sequences]

    def prefill(self, tokens: Sequence[int], sequence: int = 0, start: int = 0) -> tuple[Tensor, ...]:
        """Take the next tokens of one sequence; see :meth:`read`.

        Args:
            tokens: one or more.
            sequence: its number.
            start: tokens that it has already.
        """
        return self.read([Prompt(tokens, sequence, start)])

    @torch.inference_mode()
    def read(self, prompts: Sequence[Prompt]) -> tuple[Tensor, ...]:
        """Take the next tokens of some sequences, in as many passes as the plan's rows make of all of them.

        Args:
            prompts: one or more, of different sequences.

        Returns:
            The logits of what follows each, ``[B, V]``, on each device its part of the vocabulary.

        Raises:
            RequestError: see :func:`tpplan.decoder.prompts.check`.
        """
        check(prompts, self.context.plan)
        ends: list[list[Tensor]] = [[] for _ in self.context.all_devices]
        xs: tuple[Tensor, ...] = ()
        for tokens, stretches in cut(prompts, self.context.max_rows):
            ids = self.context.broadcast(torch.tensor([tokens]), source=HOST)
            rows = self._prefill(stretches)
            xs = ()  # room for the next
            xs = self._forward([one[0] for one in ids], rows)
            last = [row for stretch in stretches for row in stretch.ends]
            ends = [[*kept, *(x_RD[row].clone() for row in last)] for kept, x_RD in zip(ends, xs, strict=True)]
        return self._logits([torch.stack(kept) for kept in ends])

    @torch.inference_mode()
    def decode(self, tokens: Sequence[Tensor], positions: Sequence[Tensor], span: int = 0) -> tuple[Tensor, ...]:
        """Take one token of each sequence; nothing waits, and no shape depends on a value, so that a graph can do it.

        Args:
            tokens: ``[B]`` on each device in use: of the first B sequences.
            positions: theirs, ``[B]`` on each device in use.
            span: more than the largest position; as many as the cache holds if not given.

        Returns:
            The logits of what follows, ``[B, V]``; see :meth:`read`.

        Raises:
            RequestError: see :func:`tpplan.decoder.prompts.check_step`.
        """
        check_step(tokens, positions, len(self.context.all_devices), self.context.plan)
        at = dict(zip(self.context.all_devices, positions, strict=True))
        return self._logits(self._forward(tokens, self._decode(at, span or self.length)))

    def _prefill(self, stretches: Sequence[Stretch]) -> Prefill:
        at = [slice(each.start, each.start + each.size) for each in stretches for _ in range(each.count)]
        turns = {
            device: angles(*(torch.cat([table[each] for each in at]) for table in tables))
            for device, tables in self._tables.items()
        }
        return Prefill(turns, stretches)

    def _decode(self, positions: dict[int, Tensor], span: int) -> Decode:
        lengths = {heads.cache.length for each in self._heads for heads in each.values()}
        turns, where = {}, {}
        for device, (sin, cos) in self._tables.items():
            at = positions[device]
            turns[device] = angles(sin[at], cos[at])
            where[device] = {length: Where.of(at, length, span, self.context.dtype) for length in lengths}
        return Decode(turns, where)

    def _forward(self, tokens: Sequence[Tensor], rows: Pass) -> tuple[Tensor, ...]:
        """Return the residual stream ``[R, D]`` behind the last layer, equal on all devices in use."""
        xs = self._embed(tokens)
        for layer, block in enumerate(self._blocks):
            xs = self._attention(layer, xs, rows)
            xs = self._mixture(layer, xs, fixed=rows.fixed) if block.experts else self._mlp(layer, xs)
        return xs

    def _embed(self, tokens: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tokens' rows of the embedding: a device has zeros for those that others hold, and all add up."""
        ids = dict(zip(self.context.all_devices, tokens, strict=True))
        parts = []
        for part in self.context.split(Axis.VC):
            size = part.end - part.start
            own = ids[part.device] - part.start
            x_RD = functional.embedding(own.clamp(0, size - 1), self.weights[part.device]["model.embed_tokens.weight"])
            parts.append(x_RD.mul_(((own >= 0) & (own < size))[:, None]))
        xs = self.context.all_reduce(parts, axis=Axis.VC)
        return tuple(x.mul_(self._embedding_scale) for x in xs) if self._family.scaled_embedding else xs

    def _attention(self, layer: int, xs: tuple[Tensor, ...], rows: Pass) -> tuple[Tensor, ...]:
        found = [self._attend(layer, xs, rows, device) for device in self._heads[layer]]
        name = f"model.layers.{layer}.self_attn.o_proj"
        post = "post_attention_layernorm" if self._family.sandwich else ""
        return self._add(layer, self._lead_back(layer, found, name, Axis.Q, self._head_dim(layer)), Axis.Q, xs, post)

    def _attend(self, layer: int, xs: tuple[Tensor, ...], rows: Pass, device: int) -> Tensor:
        """Return what the query heads of a device find, side by side in ``[R, ...]``."""
        start, head_dim = f"model.layers.{layer}.self_attn.", self._head_dim(layer)
        weights, heads = self.weights[device], self._heads[layer][device]
        names = [f"{start}{which}_proj" for which in "qkv"]
        x_RD = self._norm(xs, device, f"model.layers.{layer}.input_layernorm")
        qkv_RHK = torch.unflatten(linears(x_RD, weights, f"{start}qkv_proj", names), -1, (-1, head_dim))
        del x_RD
        counts = [heads.queries, heads.keys]
        qk_RHK, v_RHK = torch.split_with_sizes(qkv_RHK, [sum(counts), heads.keys], dim=1)
        if f"{start}q_norm.weight" in weights:
            for which, x_RHK in zip("qk", torch.split_with_sizes(qk_RHK, counts, dim=1), strict=True):
                x_RHK.copy_(self._rms(x_RHK, weights[f"{start}{which}_norm.weight"]))
        q_RHK, k_RHK = torch.split_with_sizes(rotate(qk_RHK, *rows.angles[device]), counts, dim=1)
        scale = 1 / sqrt(self._settings.attention_scalar or head_dim)
        cap = self._settings.attention_cap
        return rows.attention(device, heads, q_RHK, k_RHK, v_RHK, scale=scale, cap=cap).flatten(1)

    def _mlp(self, layer: int, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        name = f"model.layers.{layer}.mlp.down_proj"
        post = "post_feedforward_layernorm" if self._family.sandwich else ""
        return self._add(layer, self._lead_back(layer, self._gated(layer, xs), name, Axis.ID), Axis.ID, xs, post)

    def _gated(self, layer: int, xs: tuple[Tensor, ...]) -> list[Tensor]:
        """Return what every device has between the matrices of an MLP."""
        start, found = f"model.layers.{layer}.mlp.", []
        names = [f"{start}gate_proj", f"{start}up_proj"]
        for part in self.context.split(Axis.ID, layer):
            x_RD = self._norm(xs, part.device, self._before_mlp(layer))
            gate_RI, up_RI = linears(x_RD, self.weights[part.device], f"{start}gate_up_proj", names).chunk(2, dim=-1)
            found.append(self._settings.activation(gate_RI).mul_(up_RI))
        return found

    def _mixture(self, layer: int, xs: tuple[Tensor, ...], *, fixed: bool) -> tuple[Tensor, ...]:
        start, names, count = f"model.layers.{layer}.", self._family.experts, self._blocks[layer].experts_per_token
        devices = self.context.devices_of(Axis.EX, layer)
        inputs = {device: self._norm(xs, device, self._before_mlp(layer)) for device in devices}
        # One device chooses for all: others may round differently, and would take other experts.
        scores_RE = linear(inputs[devices[0]], self.weights[devices[0]], start + names.router)
        choice_RC = torch.cat(experts.choose(scores_RE, count, normalised=self._settings.normalised), dim=1)
        choices = dict(zip(self.context.all_devices, self.context.broadcast(choice_RC, source=devices[0]), strict=True))
        hidden = [
            experts.up(
                inputs[device],
                self.weights[device][start + names.gate],
                self.weights[device][start + names.up],
                choices[device][:, count:].long(),
                self._settings.activation,
                fixed=fixed,
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
                self.weights[device][start + names.down],
                choices[device][:, count:].long(),
                choices[device][:, :count],
                fixed=fixed,
            )
            for device, h_RCI in zip(devices, hidden, strict=True)
        ]
        return self._add(layer, ys, Axis.EX, xs, "")

    def _lead_back(self, layer: int, parts: Sequence[Tensor], name: str, axis: Axis, dim: int = 1) -> list[Tensor]:
        """Multiply what an axis is cut of by the matrix that leads back to the residual stream."""
        devices = self.context.devices_of(axis, layer)
        if not self._reduce:
            parts = self.context.allgather(parts, axis, Axis.RS, dim=dim, layer=layer)
            devices = self.context.devices_of(Axis.RS)
        return [
            linear(part, self.weights[device], name, bias=not (self._reduce and i))  # a sum has one bias
            for i, (part, device) in enumerate(zip(parts, devices, strict=True))
        ]

    def _add(
        self, layer: int, ys: Sequence[Tensor], axis: Axis, xs: tuple[Tensor, ...], post: str
    ) -> tuple[Tensor, ...]:
        """Put together what the devices have made, and add it to the residual stream, behind a norm if there is one."""
        ctx = self.context
        if post:
            if self._reduce:
                at = dict(zip(ctx.devices_of(axis, layer), ys, strict=True))
                out = [at[d] if d in at else torch.empty_like(x) for d, x in zip(ctx.all_devices, xs, strict=True)]
                whole = ctx.all_reduce(ys, axis=axis, layer=layer, out=out)
            else:
                whole = ctx.allgather(ys, Axis.RS)
            for x, y, device in zip(xs, whole, ctx.all_devices, strict=True):
                weight = self.weights[device][f"model.layers.{layer}.{post}.weight"]
                x.add_(rms_norm(y, weight, self._settings.norm_eps, out=y))
            return xs
        if self._reduce:
            return ctx.all_reduce(ys, xs, axis=axis, layer=layer, out=xs)
        at = dict(zip(ctx.all_devices, xs, strict=True))
        ctx.add_residual(ys, [at[device] for device in ctx.devices_of(Axis.RS)], Axis.RS)
        return ctx.allgather(ys, Axis.RS, out=xs)

    def _logits(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        cap, logits = self._settings.logit_cap, []
        for device in self.context.devices_of(Axis.VC):
            y_RV = linear(self._norm(xs, device, "model.norm"), self.weights[device], self._head)
            logits.append(y_RV if cap is None else y_RV.div_(cap).tanh_().mul_(cap))
        return tuple(logits)

    def _norm(self, xs: Sequence[Tensor], device: int, name: str) -> Tensor:
        """Return the rows of a device behind one of its norms."""
        return self._rms(xs[self.context.all_devices.index(device)], self.weights[device][f"{name}.weight"])

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._settings.norm_eps)

    def _before_mlp(self, layer: int) -> str:
        which = "pre_feedforward" if self._family.sandwich else "post_attention"
        return f"model.layers.{layer}.{which}_layernorm"

    def _head_dim(self, layer: int) -> int:
        return self.context.plan.split(Axis.KV, layer).width
