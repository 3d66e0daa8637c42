"""Computing the stored tensors of a model from its config alone."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.model import Parameter, Segment
from tpplan.models.families import DTYPES
from tpplan.models.formats.scheme import EMBEDDING, EXPERTS, HEAD, LINEAR, Choice, needs_headers
from tpplan.models.formats.storage import Assumed, Stored, inputs_of, split_name, store
from tpplan.models.formats.table import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tpplan.core.model import Block, ModelSpec
    from tpplan.models.formats.scheme import Form, Scheme


def rebuild(
    logical: ModelSpec,
    stored: Callable[[Parameter, int | None], tuple[Parameter, ...]],
    more: Callable[[int], tuple[Parameter, ...]] = lambda _layer: (),
) -> ModelSpec:
    """Return the model with each parameter replaced by its stored parameters in its layer (None outside the layers).

    Layers of a block whose stored parameters differ go to separate blocks, in order of their first layer. A layer may
    have ``more`` parameters, which it is asked for after its own.
    """
    blocks: list[Block] = []
    for block in logical.blocks:
        groups: dict[tuple[Parameter, ...], list[int]] = {}
        for layer in block.layers:
            own = tuple(chain.from_iterable(stored(parameter, layer) for parameter in block.parameters))
            groups.setdefault((*own, *more(layer)), []).append(layer)
        blocks += [evolve(block, layers=tuple(layers), parameters=found) for found, layers in groups.items()]
    return evolve(
        logical,
        blocks=tuple(sorted(blocks, key=lambda block: block.layers)),
        parameters=tuple(chain.from_iterable(stored(parameter, None) for parameter in logical.parameters)),
    )


def stored_by_formula(logical: ModelSpec, scheme: Scheme, starts: Mapping[str, str] | None = None) -> ModelSpec:
    """Return the model as stored in the format that its config names.

    Args:
        logical: the unquantised model.
        scheme: what the config says.
        starts: how names start in the checkpoint, by how they do here, where the config goes by those.

    Raises:
        ModelError: the sizes of the stored tensors do not follow from the config.
    """
    if scheme.problem:
        raise scheme.problem
    if not scheme.method:
        return logical
    if not scheme.rules or (scheme.format == "mxfp4" and logical.model_type != "gpt_oss"):
        raise needs_headers(scheme)
    formula = _Formula(logical, scheme, starts or {})
    spec = rebuild(logical, formula.stored)
    if not formula.sizes and any(rule.form and rule.names for rule in scheme.rules):
        raise needs_headers(scheme, "no module of the model is one of those that it quantises")
    text = max(formula.sizes, key=lambda text: (formula.sizes[text], text), default=logical.weight_format)
    gather_only, notes = next(iter(formula.gather_only), ""), (*spec.notes, *scheme.slips.values())
    return evolve(spec, weight_format=text, gather_only=gather_only, notes=notes)


class _Formula:
    """What a scheme makes of a model's parameters; it records sizes of formats, as matching with headers does."""

    def __init__(self, logical: ModelSpec, scheme: Scheme, starts: Mapping[str, str]) -> None:
        self.scheme = scheme
        self.starts = starts
        self.choice = Choice(scheme)
        self.dtype = DTYPES[logical.dtype]
        self.caches = _cache_dims(logical, scheme)
        self.sizes: Counter[str] = Counter()
        self.gather_only: dict[str, None] = {}
        self.kinds: dict[tuple[int, int], Stored | None] = {}

    def stored(self, parameter: Parameter, layer: int | None) -> tuple[Parameter, ...]:
        """Return the stored parameters of a parameter in a layer."""
        stem, suffix = split_name(parameter.name)
        stem = stem.removesuffix(".weight").replace("{layer}", str(layer))
        start = next(filter(stem.startswith, self.starts), "")
        stem = self.starts.get(start, "") + stem.removeprefix(start)
        found = [
            (self.kind(parameter, form, stem), count) for form, count in self.forms(parameter, stem, suffix, layer)
        ]
        for kind, count in found:
            if layer is not None and kind.text:
                self.sizes[kind.text] += sum(p.bytes for p in kind.parameters) * count // parameter.copies
            if kind.gather_only:
                self.gather_only[kind.gather_only] = None
        parameters = tuple(evolve(p, copies=count) for kind, count in found for p in kind.parameters)
        return parameters + self.cache_scales(parameter, stem, parameters)

    def forms(self, parameter: Parameter, stem: str, suffix: str, layer: int | None) -> list[tuple[Form | None, int]]:
        """Return the forms of a parameter, and how many of its copies have each."""
        kind = _kind(parameter, stem, suffix, layer)
        if not kind:
            return [(None, parameter.copies)]
        before, expert, after = stem.partition(".{expert}")
        if not expert:
            return [(self.choice.form(stem, kind), parameter.copies)]
        if not self.choice.tells_apart(before, parameter.copies):
            return [(self.choice.form(f"{before}.0{after}", kind), parameter.copies)]
        chosen = [self.choice.form(f"{before}.{number}{after}", kind) for number in range(parameter.copies)]
        counts = Counter(map(id, chosen))
        return [(form, counts[id(form)]) for form in {id(form): form for form in chosen}.values()]

    def kind(self, parameter: Parameter, form: Form | None, stem: str) -> Stored:
        """Return how a form stores a parameter.

        Raises:
            ModelError: its sizes do not follow from the config.
        """
        key = id(parameter), id(form)
        if key not in self.kinds:
            self.kinds[key] = self.by_form(parameter, form) if form else Stored((parameter,), (), "")
        found = self.kinds[key]
        if found is None:
            raise needs_headers(self.scheme, f"how {stem} is stored" if form and not form.format else "")
        return found

    def by_form(self, parameter: Parameter, form: Form) -> Stored | None:
        """Return how a form stores a parameter, None if that does not follow from the config."""
        is_stacked = len(parameter.dims) == len(("experts", "in", "out"))
        if not form.format or is_stacked != (form.format == "mxfp4"):
            return None
        inputs = sum(segment.length for segment in inputs_of(parameter))
        if form.whole_groups and inputs % form.group:
            return Stored((parameter,), (), "")
        pieces = FORMATS[form.format].pieces
        found = {
            suffix: Assumed(form.dtypes.get(suffix, piece.dtypes[0]) or self.dtype, form.ranks.get(suffix))
            for suffix, piece in pieces.items()
            if piece.required or suffix in form.extra
        }
        return store(parameter, form.format, form, found)

    def cache_scales(self, parameter: Parameter, stem: str, stored: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
        """Return the scales of the cache that a projection comes with."""
        name = stem.rpartition(".")[2]
        if self.caches is None or self.scheme.caches is None or name not in {"k_proj", "v_proj"}:
            return ()
        if not parameter.name.endswith(".weight"):
            return ()
        module = parameter.name.removesuffix(".weight")
        module = module if self.scheme.caches.in_projections else module.rpartition(".")[0]
        name = f"{module}.{name[0]}_scale"
        dtype = self.scheme.caches.dtype or self.dtype
        if any(p.name == name for p in stored):
            return ()
        is_cut = any(segment.axis for dim in self.caches for segment in dim)
        return (Parameter(name, dtype, self.caches, out=0 if is_cut else None, home=Axis.KV_HEADS),)


def _cache_dims(logical: ModelSpec, scheme: Scheme) -> tuple[tuple[Segment, ...], ...] | None:
    """Return the dimensions of the scales of a cache, None without."""
    heads = next((block.attention.kv_heads for block in logical.blocks if block.attention), 0)
    if scheme.caches is None or not heads:
        return None
    return tuple((Segment(Axis.KV_HEADS, heads) if dim == "heads" else Segment(None, 1),) for dim in scheme.caches.dims)


def _kind(parameter: Parameter, stem: str, suffix: str, layer: int | None) -> str:
    """Return what a parameter is for the rules of a scheme, empty if no tool quantises it."""
    axes = {segment.axis for dim in parameter.dims for segment in dim}
    if len(parameter.dims) == len(("experts", "in", "out")) and Axis.EXPERT_INTERMEDIATE in axes:
        return EXPERTS
    if suffix != ".weight" or len(parameter.dims) != len(("out", "in")) or "norm" in stem:
        return ""
    if layer is not None:
        return LINEAR
    if Axis.VOCAB not in axes:
        return ""
    return EMBEDDING if parameter.lookup or "embed" in stem or stem.endswith("wte") else HEAD
