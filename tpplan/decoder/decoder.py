"""A decoder that runs on a compiled plan: each device computes its slices, and the context's operations combine them.

Shapes: B batch, R rows, D hidden, V vocabulary. A plural such as ``xs`` is one tensor for each device, in device order.
"""

from __future__ import annotations

import logging
from itertools import groupby
from typing import TYPE_CHECKING
from weakref import proxy

import torch

from tpplan.core.sizes import counted
from tpplan.core.workspace import areas
from tpplan.decoder.cache.heads import heads_of
from tpplan.decoder.cache.state import Progress, states_of
from tpplan.decoder.decoding.prefill_graphs import PrefillGraphs, graphs_of
from tpplan.decoder.decoding.steps import StepGraphs, Steps
from tpplan.decoder.decoding.texts import Texts
from tpplan.decoder.fast import fused
from tpplan.decoder.forward import Forward, numbers_of
from tpplan.decoder.layer.agree import agreed
from tpplan.decoder.layer.delta import GatedDelta
from tpplan.decoder.layer.stack import Stack
from tpplan.decoder.layer.steps import Plain
from tpplan.decoder.model.settings import facts_of as settings_facts
from tpplan.decoder.model.settings import settings_of
from tpplan.decoder.prompts import (
    Prompt,
    check,
    check_flags,
    check_sequences,
    check_step,
    cut,
    facts_of,
    length_of,
)
from tpplan.decoder.weights.convert import matrices_of
from tpplan.decoder.weights.fuse import check_weights, fuse_weights
from tpplan.decoder.weights.gguf import dequantised, room_note
from tpplan.errors import ExecutionError, RequestError
from tpplan.exec.processes.agreement import agree
from tpplan.exec.programs.program import HOST
from tpplan.models.hub import local
from tpplan.models.reader import read_model
from tpplan.weights.source import Source, gguf_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from tpplan.core.model import ModelSpec
    from tpplan.decoder.decoding.prefill_graphs import Capture
    from tpplan.decoder.model.settings import Settings
    from tpplan.decoder.prompts import PromptSlice
    from tpplan.decoder.weights.quantised import Quantised
    from tpplan.exec.context import TPContext
    from tpplan.exec.cuda.graph import Graph
    from tpplan.weights import TensorSlice, Weights

_LOG = logging.getLogger(__name__)


class Decoder:
    """A model on the devices of a compiled plan, with its weights and its cache.

    Attributes:
        forward: computes prefill passes and decode steps.
        stack: the model's layers.
        batch: maximum number of sequences that decode together.
        weights: tensors by device and name; adjacent matrices with the same input are joined into one.
        length: maximum tokens of a sequence: the plan's cache tokens divided by its batch.
        graph: the latest graph captured of the decoder's work, or None; all of its graphs share their memory.
        prompt_graphs: runs passes of prompts as graphs, or None if they run without.
        keeps_all: whether the caches of all layers keep all tokens of a sequence, which those of short windows and
            states of linear attention do not.
        texts: the latest texts of steps or a generation; they know whether the cache still has them.
    """

    @torch.inference_mode()
    def __init__(
        self,
        context: TPContext,
        checkpoint: str | Path | Source,
        weights: Weights,
        *,
        cache: str = "",
        graphs: bool | None = None,
        kernels: bool = True,
        turns: bool | None = None,
    ) -> None:
        """Prepare the weights and allocate the cache, in the memory that the plan reserves for it.

        Args:
            context: a compiled plan for the model.
            checkpoint: the model's directory, with a config.json or a GGUF file, or that file; or what was
                read of them.
            weights: weights of the model, from :func:`tpplan.weights.load_weights`.
            cache: kind of cache; the plan's if not given. ``fp32``, which no plan has, is lossless.
            graphs: whether to capture passes of prompts as graphs where possible, see
                :func:`tpplan.decoder.decoding.prefill_graphs.is_fixed`; by default on CUDA devices.
            kernels: whether to use the fused kernels of :mod:`tpplan.decoder.fast.fused` where they apply, instead of
                torch.
            turns: whether the halves of large captured passes take turns, so that the all-reduce of one overlaps the
                computation of the other; by default on CUDA devices that cannot write to each other's memory.

        Raises:
            ModelError: the decoder does not support the model, see :func:`tpplan.decoder.model.settings.settings_of`,
                or the plan is for another one.
            RequestError: the weights do not match the plan, or an argument is of another type.
            ExecutionError: the decoder has no cache of this kind, or the plan counts other bytes for its cache; a
                device has too little room for the numbers that blocks of GGUF become; or of several processes, one
                failed, or their arguments or config.json differ: the same error in all.
        """
        request = context.plan.request
        arguments = {
            "cache": cache or request.cache.kind,
            "graphs": str(graphs),
            "kernels": str(kernels),
            "turns": str(turns),
        }

        def read() -> tuple[ModelSpec, Settings]:
            check_flags(kernels=kernels, **_given(graphs=graphs, turns=turns))
            where = checkpoint if isinstance(checkpoint, Source) else local(checkpoint)
            model = where.model if isinstance(where, Source) else read_model(where)
            self._gguf = gguf_of(where)
            if self._gguf:
                room_note(context, self._gguf)
            return model, settings_of(where, model)

        model, self._settings = agree(
            context, "the decoder", read, lambda result: arguments | settings_facts(result[1])
        )
        self.batch = request.batch
        self.length = length_of(request)
        self._step_graphs: dict[int, StepGraphs] = {}
        self.graph: Graph | None = None
        self.texts = Texts()
        # By sequence, how much is cached of texts whose logits nobody here checked for NaN, and what graphs may cache.
        self._unchecked: dict[int, int] = {}
        self._captured: dict[int, int] = {}
        # By sequence, how many tokens of a text its cache may have: at most, where only the devices know it.
        self._most: dict[int, int] = {}
        agree(context, "preparing the decoder", lambda: self._prepare(context, model, weights, cache, kernels=kernels))
        if turns is None:
            is_joint = len(context.all_devices) > 1 and context.processes == 1
            turns = is_joint and context.transport != "peer" and context.can_capture
        head = "model.embed_tokens" if model.tied_embeddings else "lm_head"
        self.forward = Forward(
            self.stack,
            self._settings,
            self.weights,
            self._tables,
            batch=self.batch,
            length=self.length,
            head=head,
            in_turns=turns,
        )
        self.prompt_graphs = graphs_of(self.forward, self._capture(), graphs=graphs)

    def _prepare(self, context: TPContext, model: ModelSpec, weights: Weights, cache: str, *, kernels: bool) -> None:
        """Prepare this process's weights, and allocate its cache and tables."""
        request = context.plan.request
        slices = check_weights(weights, context.plan, model, context.devices)
        layers = [*model.by_layer.values()]
        self.weights = {}
        if self._gguf:
            _LOG.info("the GGUF file's blocks become numbers of %s, which takes longer than reading them", model.dtype)
        for device in context.devices:  # before there is a cache: rearranging codes takes memory
            tensors, matrices = self._read(weights[device], slices[device], context.dtype)
            self.weights[device] = fuse_weights(tensors, matrices, layers, self._settings, context.dtype)
            rearranged = matrices or self._settings.family.experts.fused or self._settings.family.experts.stacked
            if rearranged and context.devices[device].device.type == "cuda":
                torch.cuda.empty_cache()  # frees the memory that rearranging took
        windows = [block.attention.window if block.attention else 0 for block in layers]
        has_states = any(block.linear for block in layers)
        self.keeps_all = not has_states and all(not window or window >= self.length for window in windows)
        kind = cache or request.cache.kind
        rank = self._settings.latent_rank
        heads = [heads_of(context, layer, block.attention, rank, kind) for layer, block in enumerate(layers)]
        own = (each.cache for layer in heads for each in layer.values())
        head_dims = {cache.head_dim for cache in own if not cache.value_dim}
        room = areas(context.plan.splits, context.plan.model.dtype, request)

        def steps_on(device: int) -> Plain:
            place, elements = context.devices[device].device, room[device].scratch_bytes // context.dtype.itemsize
            if not kernels or not fused.has_kernels(place, context.dtype):
                return Plain.of(self._settings, elements)
            return fused.Fused(
                place,
                context.dtype,
                self._settings,
                head_dims,
                kind,
                joint=len(context.all_devices) > 1,
                experts=any(block.experts for block in layers),
                linear=[block.linear for block in layers if block.linear],
                codes=fused.codes_of(self.weights[device]),
                room=elements,
            )

        steps = {device: steps_on(device) for device in context.devices}
        linear = [
            {
                device: GatedDelta(
                    state,
                    steps[device],
                    self.weights[device],
                    f"model.layers.{layer}.",
                    eps=self._settings.norm_eps,
                    room=room[device].scratch_bytes,
                    rows=context.max_rows,
                    hidden=model.hidden_size,
                )
                for device, state in states_of(context, layer, block.linear).items()
            }
            if block.linear
            else {}
            for layer, block in enumerate(layers)
        ]
        progress = Progress([0] * self.batch) if has_states else None
        self.stack = Stack(
            context, self._settings, layers, self.weights, heads, steps=steps, linear=linear, progress=progress
        )
        if kind == request.cache.kind:
            self._check_ledger()
        holders = sorted({device for each in heads for device in each})
        self._tables = dict(zip(holders, context.rope_tables(self._settings.ropes.rope, self.length), strict=True))

    def _read(
        self, tensors: Mapping[str, Tensor], slices: Mapping[str, TensorSlice], dtype: torch.dtype
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Quantised]]:
        """Return a device's tensors, those of a GGUF file as the decoder computes with them; and quantised matrices."""
        if self._gguf:
            return dequantised(tensors, self._gguf, dtype)
        return tensors, matrices_of(tensors, slices, self._settings.scheme)

    @property
    def context(self) -> TPContext:
        """The compiled plan."""
        return self.stack.context

    def cache_bytes(self, device: int) -> int:
        """Return the size of the cache on a device, with the states of linear attention, in bytes."""
        caches = sum(heads[device].cache.nbytes for heads in self.stack.heads if device in heads)
        return caches + sum(linear[device].state.nbytes for linear in self.stack.linear if device in linear)

    def _check_ledger(self) -> None:
        """Check that the cache takes the bytes that the plan counts.

        It takes fewer where its tokens do not divide evenly among the sequences.

        Raises:
            ExecutionError: it takes others on a device.
        """
        plan = self.context.plan
        is_even = not plan.request.cache.tokens % plan.request.batch
        for device in self.context.devices:
            size, counted = self.cache_bytes(device), plan.memory[device].cache_bytes
            if size > counted or (is_even and size < counted):
                what = f"the cache takes {size} bytes on device {device}, the plan for {plan.model.name}"
                raise ExecutionError(f"{what} counts {counted}", "make the plan again with tpplan plan")

    def steps(self, sequences: int) -> Steps:
        """Return new decoding steps of the cache's first ``sequences`` sequences; their graphs are kept for later ones.

        Raises:
            RequestError: the plan has no room for this many sequences.
        """
        check_sequences(sequences, self.context.plan)
        if sequences not in self._step_graphs:
            self._step_graphs[sequences] = self.new_step_graphs(sequences)
        return Steps(self._step_graphs[sequences], self._begin_texts)

    def new_steps(self, sequences: int, *, graphs: bool | None = None) -> Steps:
        """Return decoding steps like those of :meth:`steps`, with tokens, positions and graphs of their own.

        Args:
            sequences: number of sequences.
            graphs: whether to capture steps as graphs; by default on CUDA devices.

        Raises:
            RequestError: see :meth:`steps`; or ``graphs`` is no bool.
        """
        check_sequences(sequences, self.context.plan)
        check_flags(**_given(graphs=graphs))
        return Steps(self.new_step_graphs(sequences, graphs=graphs), self._begin_texts)

    def new_step_graphs(self, sequences: int, *, graphs: bool | None = None) -> StepGraphs:
        """Return new graphs of steps, for :class:`Steps`; the decoder must outlive them; see :meth:`new_steps`."""
        return StepGraphs(self.forward, sequences, self._capture(), graphs=graphs)

    def _begin_texts(self, check: Callable[[], list[list[int]]], *, resume: bool) -> tuple[Texts, tuple[Tensor, ...]]:
        """Read the prompts of new texts of the first sequences; see :class:`tpplan.decoder.decoding.steps.Begin`."""
        texts = Texts(obstacle="a prompt was not read to its end")

        def prompts() -> list[Prompt]:
            texts.tokens = check()
            texts.cached = [*map(len, texts.tokens)]
            starts = self.cached(texts.tokens) if resume else [0] * len(texts.tokens)
            return [
                Prompt(text[start:], i, start) for i, (text, start) in enumerate(zip(texts.tokens, starts, strict=True))
            ]

        logits = self._read_prompts(
            prompts, "texts of other steps or generations have begun since, in the same cache", are_checked=True
        )
        self.texts = texts
        self._most |= dict.fromkeys(range(len(texts.tokens)), self.length)  # steps are to come
        return texts, logits

    def cached(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Return how many of the first tokens of each prompt the cache has, of the latest texts of steps.

        One token of each at least is left to read.

        Args:
            prompts: the tokens of each prompt, one or more.
        """
        counts, progress, texts = [0] * len(prompts), self.stack.progress, self.texts
        for i, (prompt, text, count) in enumerate(zip(prompts, texts.tokens, texts.cached, strict=False)):
            same = next((n for n, (a, b) in enumerate(zip(prompt, text[:count], strict=False)) if a != b), len(prompt))
            counts[i] = min(same, count, len(prompt) - 1)
            if counts[i] < count and not self.keeps_all:
                counts[i] = 0  # later tokens have overwritten what the window of an earlier one saw, or are in states
            if progress and progress.tokens[i] != counts[i]:
                counts[i] = 0  # a step did not end
        return counts

    def new_prompt_graphs(self, sizes: Sequence[int]) -> PrefillGraphs:
        """Return new graphs of prefill passes, for :attr:`prompt_graphs`; the decoder must outlive them.

        Args:
            sizes: rows of each graph, in ascending order; such passes must have a fixed shape, see
                :func:`tpplan.decoder.decoding.prefill_graphs.is_fixed`.
        """
        return PrefillGraphs(self.forward, self._capture(), sizes)

    def _capture(self) -> Capture:
        """Return :meth:`captured` as a function that does not keep the decoder alive."""
        decoder: Decoder = proxy(self)

        def capture(issue: Callable[[], None], what: str) -> Graph | None:
            return decoder.captured(issue, what)

        return capture

    def captured(self, issue: Callable[[], None], what: str) -> Graph | None:
        """Capture work as a graph that shares the memory of earlier ones; return None and log a warning on failure.

        If it fails in one of several processes, all return None.

        Args:
            issue: does the work.
            what: name of the work in the warning.
        """
        is_captured = True
        try:
            with self.graph.beside() if self.graph else self.context.capture() as graph:
                issue()
        except Exception as error:  # noqa: BLE001 (whatever it is: memory, a driver, a library)
            _LOG.warning("%s cannot be captured, none is a graph from now on: %s", what, error)
            is_captured = False
        if not agreed(self.context, [is_captured])[0]:
            return None
        self.graph = graph
        return graph

    def prefill(self, tokens: Sequence[int], sequence: int = 0, start: int = 0) -> tuple[Tensor, ...]:
        """Process the next tokens of one sequence; see :meth:`read`.

        Args:
            tokens: one or more tokens.
            sequence: index of the sequence.
            start: number of tokens already in its cache.

        Raises:
            RequestError: see :meth:`read`.
        """
        return self.read([Prompt(tokens, sequence, start)])

    @torch.inference_mode()
    def read(self, prompts: Sequence[Prompt]) -> tuple[Tensor, ...]:
        """Process the next tokens of several sequences, in passes of at most the context's ``max_rows`` rows.

        A sequence that begins anew meets nothing of earlier ones, even if their numbers were infinite or NaN.

        Args:
            prompts: one or more prompts, of different sequences.

        Returns:
            The logits of the token after each prompt, ``[B, V]``, on each device for its part of the vocabulary.

        Raises:
            RequestError: see :func:`tpplan.decoder.prompts.check`; or a prompt is to go on behind more tokens than its
                sequence can have, or not where the states of linear attention are.
        """
        return self._read_prompts(lambda: prompts)

    def _read_prompts(
        self, prompts_of: Callable[[], Sequence[Prompt]], why: str = "", *, are_checked: bool = False
    ) -> tuple[Tensor, ...]:
        """Read prompts, see :meth:`read`.

        Args:
            prompts_of: returns the prompts, or refuses them.
            why: says why texts that they overwrite cannot go on.
            are_checked: whether the caller checks the logits for NaN.
        """
        progress = self.stack.progress

        def checked() -> Sequence[Prompt]:
            check(prompts := prompts_of(), self.context.plan)
            self._check_starts(prompts)
            return prompts

        prompts = agree(self.context, "the prompts", checked, facts_of)
        first = min(prompts, key=lambda each: each.sequence)
        read = f"a prompt of {counted(len(first.tokens), 'token')} has been read since"
        self._overwrite(first.sequence, why or f"{read} into sequence {first.sequence} of the cache")
        before = {each.sequence: self._unchecked.get(each.sequence, 0) if each.start else 0 for each in prompts}
        self._most |= {each.sequence: each.start for each in prompts}  # should this fail
        self._begin(prompts)
        if progress:
            progress.begin(prompts)
        ends: list[list[Tensor]] = [[] for _ in self.context.devices]
        for tokens, prompt_slices in cut(prompts, self.context.max_rows):
            numbers = numbers_of(tokens, prompt_slices)
            last: Sequence[Tensor] = ()
            if self.prompt_graphs:
                last = self.prompt_graphs.run(numbers, prompt_slices)
                if self.prompt_graphs.has_failed:
                    self.prompt_graphs = None
            if not last:
                xs = self.run(self.context.broadcast(numbers, source=HOST), prompt_slices)
                last = [torch.cat([x_RD[each.ends] for each in prompt_slices]) for x_RD in xs]
                del xs  # frees memory for the next pass
            ends = [[*rows, new_RD] for rows, new_RD in zip(ends, last, strict=True)]
        if progress:
            progress.end(prompts)
        logits = self.forward.logits([torch.cat(rows) for rows in ends])
        if are_checked:
            self._unchecked |= before
        self._most |= {each.sequence: each.start + len(each.tokens) for each in prompts}
        return logits

    def _check_starts(self, prompts: Sequence[Prompt]) -> None:
        """Check that prompts begin anew, or go on behind tokens that their sequences can have.

        Raises:
            RequestError: one does not.
        """
        if self.stack.progress:
            self.stack.progress.check(prompts)
        for each in prompts:
            if each.start > (most := self._most.get(each.sequence, 0)):
                where = f"sequence {each.sequence} is to go on behind {counted(each.start, 'token')}"
                what = f"{where}, but its cache has {most}"
                raise RequestError(what, "read the text from its first token on, with start 0")

    def _overwrite(self, sequence: int, why: str) -> None:
        """Let the latest texts end if this sequence, the first that is about to be overwritten, is one of theirs."""
        if ahead := self.texts.ahead:
            ahead.clear_up(self.stack)
            self.texts.ahead = None
        if sequence < len(self.texts.tokens):
            self.texts.lose(why)

    def _begin(self, prompts: Sequence[Prompt]) -> None:
        """Clear what earlier texts, which may have overflowed, left in the caches of sequences that begin anew.

        Places that their prompts fill are written before anything reads them: only those behind are cleared. Sequences
        that follow each other are cleared together: clearing launches a kernel for each layer.
        """
        left: dict[int, slice] = {}
        for prompt in prompts:
            end, before = prompt.start + len(prompt.tokens), self._unchecked.get(prompt.sequence, 0)
            if not prompt.start and (most := max(before, self._captured.get(prompt.sequence, 0))) > end:
                left[prompt.sequence] = slice(end, most)
            self._unchecked[prompt.sequence] = max(before, end) if prompt.start else end
        for _, run in groupby(enumerate(sorted(left)), lambda each: each[1] - each[0]):
            numbers = [number for _, number in run]
            places = [left[number] for number in numbers]
            places_of_all = slice(min(each.start for each in places), max(each.stop for each in places))
            self.stack.clear_caches(slice(numbers[0], numbers[-1] + 1), places_of_all)

    def run(self, numbers: Sequence[Tensor], prompt_slices: Sequence[PromptSlice] = ()) -> tuple[Tensor, ...]:
        """Return the residual stream after a prefill pass; see :meth:`tpplan.decoder.forward.Forward.prefill`."""
        return self.forward.prefill(numbers, prompt_slices)

    @torch.inference_mode()
    def decode(self, tokens: Sequence[Tensor], positions: Sequence[Tensor], span: int = 0) -> tuple[Tensor, ...]:
        """Process one token of each sequence; it can be captured, as nothing waits and no shape depends on a value.

        With linear attention, a token is taken to follow those that the states of its sequence have read. At position 0
        a sequence begins. Its cache is not cleared: if an earlier text overflowed, begin by :meth:`read`.

        Args:
            tokens: tokens of the first B sequences, ``[B]`` on each device in use.
            positions: positions of these tokens, ``[B]`` on each device in use.
            span: a number above the largest position; by default the maximum length of a sequence.

        Returns:
            The logits of the next tokens, ``[B, V]``; see :meth:`read`.

        Raises:
            RequestError: see :func:`tpplan.decoder.prompts.check_step`.
        """
        check_step(tokens, positions, span, len(self.context.devices), self.context.plan)
        end = span or self.length
        why = f"decode() of {counted(len(tokens[0]), 'sequence')} has run since, in the same cache"
        if any(map(_is_captured, tokens)):  # in which nothing waits
            self.texts.lose(why)
            cached = self._captured
        else:
            self._overwrite(0, why)
            cached = self._unchecked
        for ends in (cached, self._most):
            ends |= {i: max(end, ends.get(i, 0)) for i in range(len(tokens[0]))}
        if self.stack.progress:
            self.stack.progress.set([None] * len(tokens[0]))
        return self.forward.decode(tokens, positions, end)


def _is_captured(tensor: Tensor) -> bool:
    """Return whether the current stream of a tensor's device is being captured in a graph, which may run any time."""
    if not tensor.is_cuda:
        return False
    with torch.cuda.device(tensor.device):
        return torch.cuda.is_current_stream_capturing()


def _given(**flags: bool | None) -> dict[str, bool]:
    """Return the arguments that are not left out."""
    return {name: value for name, value in flags.items() if value is not None}
