"""How fast tpplan's decoder runs a plan: bytes over bandwidth, exchanges over links, and what lies between kernels.

A decode step reads the weights and the cache once, and writes states back; kernels of few rows take little longer than
that. What they do take longer was measured with tpplan's decoder on one and two H100, as multiples of the time in which
the weights are read, and as nanoseconds per layer: ``python -m benchmarks.bench_decode``, see docs/benchmarks.md. All
numbers are integers, so that a plan predicts the same on every machine.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from attrs import evolve, field, frozen

from tpplan.core.axes import Axis
from tpplan.core.limits import MOST
from tpplan.core.model import GGUF, ModelSpec
from tpplan.core.plan import SplitPlan
from tpplan.core.speed import MIDDLE_BYTES, DeviceTime, LinkSpeed, Pass, Speed
from tpplan.core.workspace import ITEM_BYTES
from tpplan.errors import RequestError
from tpplan.planner.costs import THOUSANDTHS, Cost, Stage
from tpplan.planner.kinds import KINDS, ROWS, Kind, at_rows, attending, is_expert, kind_of
from tpplan.planner.ledger import demands

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tpplan.core.device import Device
    from tpplan.core.model import Block, Parameter

#: For each stage and device, what a pass reads of each kind of weights.
_Costs: TypeAlias = dict[Stage, list[dict[str, Cost]]]

_SECOND = 10**9
_FEMTOSECONDS = 10**6

#: Part of the catalogue's bandwidth that kernels reach which only read, in thousandths, where none was measured.
_READ = 930
#: Nanoseconds from a tiny kernel of a graph to the next, on the H100 that the constants below are of.
_BOUNDARY_NS = 1000
#: Where no link was measured: as through the host's memory over PCIe 4.0 with 16 lanes.
_GUESSED = LinkSpeed(first=0, second=1, latency_ns=6000, bytes_per_second=10 * 10**9)

#: Nanoseconds of a step beside its layers: the embedding, the logits, sampling, and the host.
_STEP_NS = 60_000
#: Tokens of the prompt that prefill is predicted for, and nanoseconds of a layer beside its products.
PROMPT = 4096
_PREFILL_LAYER_NS = 240_000
#: How many times as long as the matrix rate allows attention takes.
_ATTENTION = 2
#: Bytes per second of the slowest links over which products add up in their epilogue, the nanoseconds that this saves,
#: and the part of a prompt's sums over other links that is not hidden behind products.
_DIRECT, _UNFUSED_NS, _BESIDE = 64 * 10**9, 5000, 3
#: Bytes of a sum from which on each device adds up a part only (two-shot).
_TWO_SHOT = 256 * 2**10


#: How formats begin that the decoder's kernels multiply by; of MXFP4 they do so where experts are in it.
_WITH_KERNELS = ("F16", "BF16", "F32", "F64", GGUF, "GPTQ", "AWQ", "INT", "FP8", "F8_E4M3", "LLM.int8")


def without_kernels(model: ModelSpec) -> str:
    """Say that predictions do not hold, if the decoder has no kernels for the format of most weights; else nothing."""
    known = model.weight_format.startswith(_WITH_KERNELS)
    if known or (model.weight_format == "MXFP4" and any(block.experts for block in model.blocks)):
        return ""
    return f"tpplan's decoder has no kernels for {model.weight_format}, so it is slower than plans say"


@frozen
class Part:
    """The weights of a model that are multiplied by kernels of one kind.

    Attributes:
        kind: a key of :data:`KINDS`.
        model: the model with these weights only.
        scale: what their bytes are multiplied and divided by.
    """

    kind: str
    model: ModelSpec
    scale: tuple[int, int] = (1, 1)


def predict(
    plan: SplitPlan, model: ModelSpec, links: Iterable[LinkSpeed] = (), parts: Sequence[Part] = ()
) -> Speed | None:
    """Return what a plan predicts of tpplan's decoder; None if the bandwidth of a device in use is unknown.

    Args:
        plan: the plan, for this model.
        model: the model.
        links: links that were measured.
        parts: its weights, if they are to be thought of as stored otherwise, see :func:`quantised`.

    Raises:
        RequestError: a pass takes longer than a plan can say, by absurd speeds.
    """
    used = tuple(i for i, entry in enumerate(plan.memory) if entry.used_bytes)
    if not all(bandwidth_of(plan.devices[i]) for i in used):
        return None
    links = tuple(link for link in links if link.first in used and link.second in used)
    predictor = _Predictor(plan, model, used, links, tuple(parts) or _parts(model))
    prompt = min(PROMPT, plan.request.max_rows, plan.request.sequence_tokens)
    known = all(plan.devices[i].matrix_flops_per_second for i in used)
    decode = tuple(predictor.decode(batch) for batch in dict.fromkeys((1, plan.request.batch)))
    prefill = (predictor.prefill(prompt),) if known else ()
    if any(one.total_ns > MOST for one in (*decode, *prefill)):
        raise _too_slow(plan, links, used)
    return Speed(decode=decode, prefill=prefill, links=links)


def _too_slow(plan: SplitPlan, links: Iterable[LinkSpeed], used: Sequence[int]) -> RequestError:
    """Return the error for devices or links by which a pass takes longer than a plan can say."""
    rates = {f"device {i} ({plan.devices[i].name}) reads": bandwidth_of(plan.devices[i]) for i in used}
    slow = {i: plan.devices[i].matrix_flops_per_second for i in used}
    rates |= {f"device {i} ({plan.devices[i].name}) multiplies": rate for i, rate in slow.items() if rate}
    rates |= {f"the link of devices {each.first} and {each.second} has": each.bytes_per_second for each in links}
    what = min(rates, key=lambda name: rates[name])
    message = (
        f"a pass takes more than {MOST} ns by these speeds, of which the least is that {what} {rates[what]} a second"
    )
    waits = max((each.latency_ns for each in links), default=0)
    waits = max(waits, *(plan.devices[i].boundary_ns for i in used))
    return RequestError(
        f"{message}, and the longest wait {waits} ns",
        "correct them in the devices file, or leave them out to guess them",
    )


def bandwidth_of(device: Device) -> int:
    """Return the bytes per second that kernels read on a device, measured or guessed; 0 if unknown."""
    return device.read_bytes_per_second or device.bandwidth_bytes_per_second * _READ // THOUSANDTHS


@frozen
class _Predictor:
    """Predicts passes of a plan.

    Attributes:
        plan: the plan.
        model: its model.
        used: the devices in use.
        links: measured links between them.
        parts: its weights, by kind.
        costs: what passes of so many rows read, by the parts, as far as it was computed.
    """

    plan: SplitPlan
    model: ModelSpec
    used: tuple[int, ...]
    links: tuple[LinkSpeed, ...]
    parts: tuple[Part, ...]
    costs: dict[int, _Costs] = field(factory=dict, eq=False)

    def decode(self, rows: int) -> Pass:
        """Return the times of a step of ``rows`` sequences."""
        request, blocks = self.plan.request, self.model.blocks
        stages = self._stages(rows)
        of_token = self._stages(1) if rows > ROWS[-1] else {}
        tokens = min(rows * request.sequence_tokens, request.cache.tokens)
        between = _STEP_NS
        between += sum(
            len(block.layers) * at_rows(each.layer_ns, rows)
            for i, block in enumerate(blocks)
            for each in (KINDS[self._layer_kind(i)], attending(block))
        )

        def reading(i: int, stage: Stage) -> tuple[int, int, int]:
            device = self.plan.devices[i]
            bandwidth, weights, states, cache = bandwidth_of(device), 0, 0, 0
            for name, cost in stages[stage][i].items():
                size = (cost.reads - cost.cache) * at_rows(KINDS[name].slower, rows)
                one = size * _SECOND // THOUSANDTHS // bandwidth
                if of_token:
                    one = max(one, _multiplying(of_token[stage][i][name], KINDS[name], rows, device))
                weights += one
                states, cache = cost.states, cost.cache - cost.states  # the same in all of them
            moved = 2 * states * rows // request.batch, cache * tokens // request.cache.tokens
            kept_ns, cached_ns = (size * _SECOND // bandwidth for size in moved)
            return weights, kept_ns, cached_ns

        rest = {i: between * (self.plan.devices[i].boundary_ns or _BOUNDARY_NS) // _BOUNDARY_NS for i in self.used}
        return self._pass(rows, {stage: {i: reading(i, stage) for i in self.used} for stage in stages}, rest)

    def prefill(self, rows: int) -> Pass:
        """Return the times of a prompt of ``rows`` tokens, of which only the last one's logits are computed."""
        plan, model = self.plan, self.model
        pairs = sum(
            len(block.layers) * block.attention.q_heads * (block.attention.head_dim + block.attention.v_head_dim)
            for block in model.blocks
            if block.attention
        )

        def multiplying(i: int, costs: Mapping[str, Cost]) -> tuple[int, int, int]:
            rate, weights = plan.devices[i].matrix_flops_per_second, 0
            for name, cost in costs.items():
                kind, size = KINDS[name], cost.reads - cost.cache
                reached = max(1, rate * kind.prefill // THOUSANDTHS)
                weights += 2 * size * 8 // kind.bits * rows * _SECOND // reached
                weights += size * 8 // kind.bits * kind.dequantise_fs // _FEMTOSECONDS
            return weights, 0, 0

        stages = {
            stage: {i: multiplying(i, costs[i]) for i in self.used}
            for stage, costs in self._stages(1).items()
            if stage[0] != Axis.VOCAB
        }
        stages[Axis.Q_HEADS, ""] = {
            i: (0, 0, pairs * rows * rows * _share(plan, i) * _ATTENTION // THOUSANDTHS * _SECOND // rate)
            for i in self.used
            for rate in (plan.devices[i].matrix_flops_per_second,)
        }
        between = sum(len(block.layers) * (_PREFILL_LAYER_NS + attending(block).prompt_ns) for block in model.blocks)
        rest = between * rows // PROMPT
        return self._pass(rows, stages, dict.fromkeys(self.used, rest), hidden=_are_slow(self._between()))

    def _pass(
        self,
        rows: int,
        stages: Mapping[Stage, Mapping[int, tuple[int, int, int]]],
        rest: Mapping[int, int],
        *,
        hidden: bool = False,
    ) -> Pass:
        """Return the times of a pass.

        Args:
            rows: its tokens.
            stages: nanoseconds of every device's weights, states and other cache between two sums, after which all go
                on together.
            rest: nanoseconds of every device's other kernels.
            hidden: whether one half of the rows computes while the other's sums are on their way.
        """
        weights = {i: sum(times[i][0] for times in stages.values()) for i in self.used}
        cache = {i: sum(sum(times[i][1:]) for times in stages.values()) for i in self.used}
        without = sum(max(sum(time[:2]) for time in times.values()) for times in stages.values()) + max(rest.values())
        total = sum(max(map(sum, times.values())) for times in stages.values()) + max(rest.values())
        exchanges = self._exchanges(rows)
        if hidden:
            exchanges = max(exchanges // _BESIDE, exchanges - total)
        times = tuple(DeviceTime(i, weights[i], cache[i], exchanges, rest[i]) for i in self.used)
        return Pass(rows, times, without + exchanges, total + exchanges)

    def _stages(self, rows: int) -> _Costs:
        """Return for each stage and device what a pass of ``rows`` tokens reads of each kind of weights.

        Experts are read if any of these tokens is routed to them. What all devices hold is a stage of its own.
        """
        if rows in self.costs:
            return self.costs[rows]
        plan = self.plan
        bounds = {(split.axis, split.layers): split.bounds for split in plan.splits}
        found = self.costs.setdefault(rows, {})
        for part in self.parts:
            name, wanted = part.kind, demands(part.model, plan.request, len(plan.devices), rows=rows)
            wanted = wanted if part.scale == (1, 1) else wanted.with_weights(*part.scale)
            common = [wanted.common] * len(plan.devices)
            parts = [(d.stage, [d.cost(*cut) for cut in pairwise(bounds[d.axis, d.layers])]) for d in wanted.axes]
            for stage, costs in [(("", ""), common), *parts]:
                own = found.setdefault(stage, [{} for _ in plan.devices])
                for i, cost in enumerate(costs):
                    own[i][name] = own[i].get(name, Cost()) + cost
        return found

    def _layer_kind(self, block: int) -> str:
        """Return the kind of most of the weights of the layers of a block: of their experts, if they have any."""
        sizes: dict[str, int] = {}
        for part in self.parts:
            held = sum(p.bytes for p in part.model.blocks[block].parameters) if part.model.blocks else 0
            if held:
                sizes[part.kind] = sizes.get(part.kind, 0) + held * part.scale[0] // part.scale[1]
        return max(sizes, key=lambda name: (name.startswith("experts"), sizes[name]), default="dense")

    def _exchanges(self, rows: int) -> int:
        """Return the nanoseconds that a pass spends on sums between devices, or on gathers of as many bytes."""
        devices, model = len(self.used), self.model
        if devices == 1:
            return 0
        size = rows * model.hidden_size * ITEM_BYTES[model.dtype]
        slowest = self._between()
        moved = size * (devices - 1) if size < _TWO_SHOT else size * 2 * (devices - 1) // devices
        count = sum(
            len(block.layers) * (bool(block.attention or block.linear) + bool(block.intermediate or block.experts))
            for block in model.blocks
        )
        count = count * (2 if self.plan.request.layout == "gather" else 1) + 1
        latency = max(link.latency_ns for link in slowest)
        longest = max(_moving(link, moved) for link in slowest)
        return count * (latency * (devices + 2) // 4 + longest + _UNFUSED_NS * _are_slow(slowest))

    def _between(self) -> list[LinkSpeed]:
        """Return the links of the devices in use, with a guess for those that were not measured."""
        pairs = len(self.used) * (len(self.used) - 1) // 2
        return [*self.links, *([_GUESSED] if len(self.links) < pairs else [])]


def quantised(model: ModelSpec, hundredths: int) -> tuple[Part, ...]:
    """Return a model's weights as if its layers took so many hundredths of a bit per weight, and the others 16 bits."""
    bits = next(each for each, least in ((16, 1200), (8, 600), (4, 0)) if hundredths >= least)
    kinds = f"experts{bits}", "dense" if bits == KINDS["dense"].bits else f"codes{bits}"
    outside = outside_elements(model)
    held = sum(p.bytes for p in model.parameters)
    inside = (model.parameter_count - outside) * hundredths, 800 * max(1, model.weight_bytes - held)
    layers = []
    for kind in kinds:
        of_experts = kind.startswith("experts")
        own = (tuple(p for p in b.parameters if is_expert(p) == of_experts) for b in model.blocks)
        blocks = tuple(evolve(b, parameters=some) for b, some in zip(model.blocks, own, strict=True))
        if any(block.parameters for block in blocks):
            layers.append(Part(kind, evolve(model, blocks=blocks, parameters=()), inside))
    return *layers, Part("dense", evolve(model, blocks=()), (2 * outside, max(1, held)))


def outside_elements(model: ModelSpec) -> int:
    """Return the weights outside the layers, however they are stored: those of the embedding and the output matrix."""
    return model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)


def _parts(model: ModelSpec) -> tuple[Part, ...]:
    """Return the weights of a model by kind."""

    def of_kind(name: str, block: Block | None = None) -> tuple[Parameter, ...]:
        return tuple(p for p in (block or model).parameters if kind_of(p, model, block) == name)

    found = []
    for name in sorted({kind_of(p, model, each) for each in (None, *model.blocks) for p in (each or model).parameters}):
        blocks = tuple(evolve(block, parameters=of_kind(name, block)) for block in model.blocks)
        found.append(Part(name, evolve(model, blocks=blocks, parameters=of_kind(name))))
    return tuple(found)


def _share(plan: SplitPlan, device: int) -> int:
    """Return a device's share of the query heads, in thousandths."""
    heads = [split.bounds for split in plan.splits if split.axis is Axis.Q_HEADS]
    total = sum(cuts[-1] for cuts in heads)
    return sum(cuts[device + 1] - cuts[device] for cuts in heads) * THOUSANDTHS // total if total else 0


def _multiplying(cost: Cost, kind: Kind, rows: int, device: Device) -> int:
    """Return the nanoseconds in which a device multiplies rows by the weights that each of them reads, if known."""
    rate = device.matrix_flops_per_second * kind.prefill // THOUSANDTHS
    return 2 * (cost.reads - cost.cache) * 8 // kind.bits * rows * _SECOND // rate if rate else 0


def _moving(link: LinkSpeed, size: int) -> int:
    """Return the nanoseconds by which a sum of so many bytes takes longer than one of next to nothing."""
    beyond = max(0, size - MIDDLE_BYTES) if link.middle_ns else size
    near = max(0, link.middle_ns - link.latency_ns) * (size - beyond) // MIDDLE_BYTES
    return near + beyond * _SECOND // link.bytes_per_second


def _are_slow(links: Sequence[LinkSpeed]) -> bool:
    """Return whether kernels of one device cannot write into another's memory over some of the links."""
    return any(link.bytes_per_second < _DIRECT for link in links)
