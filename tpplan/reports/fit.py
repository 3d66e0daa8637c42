"""What ``tpplan fit`` tells: which contexts, cache kinds and quantisations of a model fit on devices, and how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from tpplan.core.plan import CACHE_KINDS, Cache, Request, Reserve, reserves_told
from tpplan.core.speed import LinkSpeed, Speed
from tpplan.files.codec import document
from tpplan.planner.infeasible import CONTEXT_STEP, FEWEST_TENTHS, InfeasibleError, Trials, most_that_fit
from tpplan.planner.place import Effort
from tpplan.planner.plan import faster, gains, plan_request
from tpplan.planner.request import check_devices, resolve
from tpplan.planner.speed import bandwidth_of, outside_elements, predict, quantised
from tpplan.reports.error import Advice, error_report

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpplan.core.device import Device
    from tpplan.core.model import ModelSpec
    from tpplan.planner.infeasible import Room


#: Shortest context of the table, and most of its contexts.
_SHORTEST, _MOST_CONTEXTS = 4096, 8
#: Most tenths of a bit per weight to look for.
_MOST_TENTHS = 160
_TENTHS = 10

#: Common quantisations: name, and hundredths of a bit that a weight of the layers' matrices takes with its scales.
#: GGUF: block sizes of ggml, of mixtures the average that llama.cpp's quantize tool states for 8B models. AWQ and GPTQ:
#: codes, and for each group of 128 a 16-bit scale and a zero point. EXL3: its nominal bits.
QUANTISATIONS = (
    ("16 bits", 1600),
    ("Q8_0", 850),
    ("FP8", 800),
    ("Q6_K", 656),
    ("Q5_K_M", 570),
    ("EXL3 5.0", 500),
    ("Q4_K_M", 489),
    ("NVFP4", 450),
    ("Q4_0", 450),
    ("IQ4_XS", 425),
    ("AWQ, GPTQ 4-bit g128", 416),
    ("EXL3 4.0", 400),
    ("Q3_K_M", 400),
    ("EXL3 3.5", 350),
    ("Q2_K", 335),
    ("EXL3 3.0", 300),
    ("EXL3 2.5", 250),
    ("EXL3 2.0", 200),
)


@frozen(kw_only=True)
class FitCell:
    """One cache kind at one context.

    Attributes:
        cache: kind of the cache.
        fits: whether a plan exists.
        tokens_per_second: predicted for the batch with a full cache, by the faster plan that is found with little
            effort; left out if it does not fit, or a bandwidth is unknown.
    """

    cache: str
    fits: bool
    tokens_per_second: int | None = None


@frozen(kw_only=True)
class FitRow:
    """One context.

    Attributes:
        context: tokens of each sequence.
        cells: one for each kind of cache.
        most_bits_tenths: tenths of a bit per weight that fit at this context in the cache kind that was asked for, if
            all tensors change in proportion; 160 at most, 0 if not even 1.5 bits fit.
        quantisation: the largest common quantisation that fits; empty if none does.
        quantisation_tokens_per_second: estimated for weights of that many bits, as in the cells; left out if none fits,
            or a bandwidth is unknown.
    """

    context: int
    cells: tuple[FitCell, ...]
    most_bits_tenths: int
    quantisation: str
    quantisation_tokens_per_second: int | None = None


@frozen(kw_only=True)
class LongestContext:
    """The longest context that fits in a cache kind.

    Attributes:
        cache: the kind.
        context: tokens of each sequence, a multiple of 256 or the model's maximum; 0 if not even 256 fit.
    """

    cache: str
    context: int


@document("fit-report")
@frozen(kw_only=True)
class FitReport:
    """What fits of a model on devices.

    Attributes:
        model: display name of the model.
        weight_format: how most of its weights are stored.
        bits_tenths: tenths of a bit per weight as it is stored.
        assumed: what is assumed of the weights because no file says; left out if their bytes are exact.
        devices: display names of the devices.
        budget_bytes: budgets of all devices together.
        reserve: what is left to something else beside a draft model, in words; left out for nothing.
        batch: sequences that decode together.
        context: tokens of each sequence that were asked for.
        cache: cache kind that was asked for.
        draft: display name of what drafts beside the model; left out for nothing.
        draft_bytes: what is left to it of each device, with as many tokens as were asked for; left out without it, or
            if it has no room.
        fits: whether that fits.
        reason: why it does not, in a sentence; left out if it fits.
        hint: what to do about that where no single change helps; left out otherwise.
        rows: contexts, ascending.
        longest: the longest context for each cache kind.
        suggestions: single changes with which what was asked for fits, the cheapest first; left out if it fits.
        without_bandwidth: indices of the devices whose bandwidth is unknown, for which no speed is told; left out if
            there are none.
        notes: what the command noted on standard error beside it; left out for none.
    """

    model: str
    weight_format: str
    bits_tenths: int
    assumed: str = ""
    devices: tuple[str, ...]
    budget_bytes: int
    reserve: str = ""
    batch: int
    context: int
    cache: str
    draft: str = ""
    draft_bytes: tuple[int, ...] = ()
    fits: bool
    reason: str = ""
    hint: str = ""
    rows: tuple[FitRow, ...]
    longest: tuple[LongestContext, ...]
    suggestions: tuple[Advice, ...] = ()
    without_bandwidth: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def fit(
    model: ModelSpec,
    devices: Iterable[Device],
    *,
    context: int = 0,
    cache: str = "fp16",
    batch: int = 1,
    max_rows: int = 2048,
    layout: str = "",
    links: Iterable[LinkSpeed] = (),
    gpus: str = "",
    reserve: tuple[Reserve, ...] = (),
    room: Room | None = None,
    draft: str = "",
    mtp: bool = False,
) -> FitReport:
    """Return what of a model fits on devices.

    Args:
        model: from :func:`tpplan.read_model`.
        devices: from :func:`tpplan.parse_devices`.
        context: tokens of each sequence that are wished for; the model's maximum by default.
        cache: cache kind that is wished for.
        batch: sequences that decode together, each with the whole context.
        max_rows: tokens in the largest forward pass.
        layout: ``reduce`` or ``gather``, by default as the planner chooses.
        links: measured links between the devices.
        gpus: the devices as they were named, so that suggestions can name them with more memory.
        reserve: memory to leave to something else.
        room: reserves more for a draft model, see :class:`tpplan.planner.infeasible.Trials`.
        draft: display name of that.
        mtp: whether that is the model's own prediction layers.

    Raises:
        RequestError: the request is not valid for this model or these devices.
    """
    devices, links = tuple(devices), tuple(links)
    wished = Cache(cache, (context or model.max_context) * batch)
    asked = Request(layout, "balanced", wished, batch, max_rows, "idle", reserve=reserve, mtp=mtp)
    request = resolve(model, asked)
    check_devices(devices, request)
    context = context or model.max_context
    table = _Table(Trials(model, devices, request, room), links)
    rows = tuple(table.row(each) for each in _contexts(model, context))
    row = next(row for row in rows if row.context == context)
    suggestions: tuple[Advice, ...] = ()
    reason = hint = ""
    if not (fits := table.fits(cache, context)):
        try:
            plan_request(model, devices, asked, room=room)
            fits = True
        except InfeasibleError as error:
            suggestions = _advised(error_report(error, gpus).error.suggestions, row.quantisation, model)
            reason, hint = error.message, "" if suggestions else error.hint
    whole = table.trials.whole(request, devices) if room else None
    return FitReport(
        model=model.name,
        weight_format=model.weight_format,
        bits_tenths=model.weight_bytes * 8 * _TENTHS // model.parameter_count,
        assumed=model.assumed,
        devices=tuple(device.name for device in devices),
        budget_bytes=sum(device.budget_bytes for device in devices),
        reserve=reserves_told(reserve)[0] if reserve else "",
        batch=batch,
        context=context,
        cache=cache,
        draft=draft,
        draft_bytes=whole.draft.room_bytes if whole and whole.draft else (),
        fits=fits,
        reason=reason,
        hint=hint,
        rows=rows,
        longest=tuple(LongestContext(cache=kind, context=table.longest(kind)) for kind in CACHE_KINDS),
        suggestions=suggestions,
        without_bandwidth=tuple(i for i, device in enumerate(devices) if not bandwidth_of(device)),
    )


def _contexts(model: ModelSpec, wished: int) -> list[int]:
    """Return the contexts of the table: powers of two, the model's maximum, and what is wished for."""
    most = max(model.max_context, wished)
    powers, each = [], _SHORTEST
    while each < most:
        powers.append(each)
        each *= 2
    return sorted({*powers[: _MOST_CONTEXTS - 2], wished, most})


@frozen
class _Table:
    """What the table is made of.

    Attributes:
        trials: attempts to plan the model on the devices.
        links: measured links.
    """

    trials: Trials
    links: tuple[LinkSpeed, ...]

    def asked(self, kind: str, context: int) -> Request:
        """Return the request with another cache."""
        request = self.trials.request
        return evolve(request, cache=Cache(kind, context * request.batch))

    def fits(self, kind: str, context: int) -> bool:
        """Return whether there is a plan."""
        return self.trials.fits(self.asked(kind, context))

    def cell(self, kind: str, context: int) -> FitCell:
        """Return whether there is a plan, and how fast the faster one is."""
        found = self.trials.attempt(self.asked(kind, context))
        if found is None:
            return FitCell(cache=kind, fits=False)
        speed = faster(found.plan(), self.trials.model, self.links, effort=Effort.QUICK).speed
        rate = speed.decode[-1].full_tokens_per_second if speed else None
        return FitCell(cache=kind, fits=True, tokens_per_second=rate)

    def row(self, context: int) -> FitRow:
        """Return what fits at a context."""
        trials = self.trials
        request = self.asked(trials.request.cache.kind, context)
        bits = most_that_fit(lambda tenths: trials.fits_bits(request, tenths), _MOST_TENTHS)
        bits = bits if bits >= FEWEST_TENTHS else 0
        quantisation = next((each for each in _whole_bits(trials.model) if each[1] <= bits), ("", 0))
        return FitRow(
            context=context,
            cells=tuple(self.cell(kind, context) for kind in CACHE_KINDS),
            most_bits_tenths=bits,
            quantisation=quantisation[0],
            quantisation_tokens_per_second=self._rate(request, *quantisation) if quantisation[0] else None,
        )

    def _rate(self, request: Request, quantisation: str, tenths: int) -> int | None:
        """Return the tokens a second with weights of a quantisation, by the faster strategy; None if it is unknown."""
        trials, parts = self.trials, quantised(self.trials.model, dict(QUANTISATIONS)[quantisation])
        best: Speed | None = None
        for strategy in ("balanced", "latency") if all(map(bandwidth_of, trials.devices)) else ():
            found = trials.attempt(evolve(request, strategy=strategy), tenths)
            speed = predict(found.plan(), trials.model, self.links, parts) if found else None
            best = speed if speed and (best is None or gains(best, speed)) else best
        return best.decode[-1].full_tokens_per_second if best else None

    def longest(self, kind: str) -> int:
        """Return the longest context that fits in a cache kind."""
        most = self.trials.model.max_context
        if self.fits(kind, most):
            return most
        return CONTEXT_STEP * most_that_fit(
            lambda steps: self.fits(kind, steps * CONTEXT_STEP), (most - 1) // CONTEXT_STEP
        )


def _advised(others: tuple[Advice, ...], quantisation: str, model: ModelSpec) -> tuple[Advice, ...]:
    """Return advice with a quantisation that fits, if any does, before any for other devices."""
    if not quantisation:
        return others
    bits = dict(_whole_bits(model))[quantisation]
    words = f"quantise the weights to {bits // _TENTHS}.{bits % _TENTHS} bits each, as {quantisation} does"
    own = Advice(kind="quantisation", value=quantisation, device=-1, message=words)
    return (*(one for one in others if one.device < 0), own, *(one for one in others if one.device >= 0))


def _whole_bits(model: ModelSpec) -> list[tuple[str, int]]:
    """Return common quantisations, with the tenths of a bit per weight of the whole model, rounded up, largest first.

    Matrices of the layers are quantised; embeddings, the output matrix and vectors have 16 bits.
    """
    outside = outside_elements(model)
    inside = max(1, model.parameter_count - outside)
    return sorted(
        ((name, -(-(inside * bits + outside * 1600) // (10 * (inside + outside)))) for name, bits in QUANTISATIONS),
        key=lambda pair: -pair[1],
    )
