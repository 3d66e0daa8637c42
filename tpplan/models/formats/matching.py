"""Matching the model that a config describes with the headers of its checkpoint, which give the exact sizes.

Tools store the experts of a layer one by one, all in one tensor, or renamed. Files also hold tensors that no plan has.
"""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import translate
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.axes import Axis
from tpplan.core.model import PREDICTION, NotPlanned, Parameter, Segment
from tpplan.errors import ModelError
from tpplan.models.families.wrappers import HEARS, NGRAMS, SEES
from tpplan.models.formats.formula import rebuild
from tpplan.models.formats.scheme import Form
from tpplan.models.formats.storage import Stored, split_name, store
from tpplan.models.formats.table import FLOATS, FORMATS, INTEGERS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from tpplan.core.model import ModelSpec
    from tpplan.models.checkpoint import Headers, Tensor
    from tpplan.models.families import Tolerated
    from tpplan.models.formats.scheme import Scheme

    Forms = Mapping[str, Tensor]


BUFFERS: Final = "buffers"
OTHERS: Final = "other parts"

#: What tensors are, by a part of their names; the first that matches decides.
_PARTS: Final = {
    "adapters": r"(?:^|\.)lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(?:\.|$)",
    HEARS: (
        r"(?:^|\.)(?:audio_tower|audio_model|audio_encoder|audio_embed|embed_audio|apm|whisper|"
        r"multi_modal_projector\.audio|audio_projection_layer|audio_multi_modal_projector|audio_adapter)(?:\.|$)"
    ),
    "image projector": (
        r"^(?:model\.|thinker\.)?(?:multi_modal_projector|multimodal_projector|mm_projector|vision_projector|"
        r"image_projector|image_newline|view_seperator|mlp1|aligner|connector|embed_vision)(?:\.|$)"
    ),
    SEES: (
        r"(?:^|\.)(?:vision|vision_tower|vision_model|vision_encoder|visual|vision_embed_tokens|image_tower|image_encoder|"
        r"img_processor|image_embed|vision_embedder|vpm|vit)(?:\.|$)"
    ),
    NGRAMS: r"(?:^|\.)ngram_embedding(?:\.|$)",
    PREDICTION: r"^(?:model\.|language_model\.)?mtp(?:[._]|$)|(?:^|\.)(?:mtp|nextn)(?:_\w+)?\.",
    BUFFERS: (
        r"(?:^|\.)(?:rotary_emb|rotary_pos_emb|rotary|rope|maybe_rotary)\."
        r"(?:inv_freq|original_inv_freq|\w*(?:cos|sin)\w*|freqs\w*)$|\.masked_bias$|(?:^|\.)position_ids$"
    ),
}
_WHAT: Final = re.compile("|".join(f"({pattern})" for pattern in _PARTS.values()))
_LABELS: Final = tuple(_PARTS)

#: Masks that older models keep as buffers under a name that is a bias in others.
_MASK: Final = re.compile(r"\.(?:attn|attention|self_attention)\.bias$")
_MASK_DIMS: Final = 4


def label(name: str, tensor: Tensor) -> str:
    """Return what a tensor that is not planned is part of, in words; empty if that is not known."""
    if match := _WHAT.search(name):
        return _LABELS[match.lastindex - 1] if match.lastindex else ""
    return BUFFERS if _MASK.search(name) and len(tensor.shape) == _MASK_DIMS else ""


#: All experts in one tensor; and each in tensors of its own.
_STACKED: Final = re.compile(r"(?P<start>.*)experts\.(?P<matrix>gate_up_proj|down_proj)(?P<bias>_bias)?")
_SINGLE: Final = re.compile(r"(?P<start>.*)experts\.\{expert\}\.(?P<matrix>\w+)\.(?P<kind>weight|bias)")

#: Mixtral's names of an expert's matrices, and those of most other models.
_NAMES: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_OLDER: Final = {new: old for old, new in _NAMES.items()}
_MODULES: Final = ("block_sparse_moe.", "mlp.")


def variants(parameter: Parameter, experts: int) -> Iterator[tuple[Parameter, ...]]:
    """Yield the tensors that other tools store in place of a parameter of a mixture's layer.

    Args:
        parameter: weights or biases of experts, or a router; there are no variants of anything else.
        experts: number of routed experts.

    Yields:
        Parameters whose names may have ``{expert}`` in them. There are none where another parameter of the layer has
        these weights too: the up projection, if it is in one tensor with the gate.
    """
    if match := _STACKED.fullmatch(parameter.name):
        yield from _apart(parameter, match)
    elif match := _SINGLE.fullmatch(parameter.name):
        yield from _single(parameter, match, experts)
    elif _MODULES[0] in parameter.name:
        yield (evolve(parameter, name=parameter.name.replace(*_MODULES)),)


def _apart(parameter: Parameter, match: re.Match[str]) -> Iterator[tuple[Parameter, ...]]:
    """Yield what may be there in place of a tensor of all experts."""
    start, matrix = f"{match['start']}experts.", match["matrix"]
    kind = "bias" if match["bias"] else "weight"
    ((experts,), *_) = parameter.dims
    outputs = parameter.dims[len(parameter.dims) - 1 if parameter.out is None else parameter.out]
    inputs = () if match["bias"] else (parameter.dims[3 - (parameter.out or 2)],)
    one = evolve(parameter, dims=(outputs, *inputs), out=0, copies=experts.length)
    for name in (f"{start}{matrix}s.{{expert}}", f"{start}{{expert}}.{matrix}"):
        yield (evolve(one, name=f"{name}.{kind}"),)
    halves = {"down_proj": outputs} if matrix == "down_proj" else _halves(outputs)
    for names in ({}, _OLDER):
        yield tuple(
            evolve(one, name=f"{start}{{expert}}.{names.get(name, name)}.{kind}", dims=(half, *inputs))
            for name, half in halves.items()
        )
    for at in (start, f"{match['start']}switch_mlp."):
        yield tuple(
            evolve(parameter, name=f"{at}{name}.{kind}", dims=((experts,), half, *inputs), out=1)
            for name, half in halves.items()
        )


def _halves(outputs: tuple[Segment, ...]) -> dict[str, tuple[Segment, ...]]:
    """Return the outputs of gate and up projection, which are behind each other, or interleaved in one segment."""
    gate, up = outputs if len(outputs) > 1 else (evolve(outputs[0], length=outputs[0].length // 2),) * 2
    return {"gate_proj": (gate,), "up_proj": (up,)}


def _single(parameter: Parameter, match: re.Match[str], experts: int) -> Iterator[tuple[Parameter, ...]]:
    """Yield what may be there in place of the tensors of single experts."""
    kind, name = match["kind"], _NAMES.get(match["matrix"], match["matrix"])
    starts = dict.fromkeys((match["start"], match["start"].replace(*_MODULES)))
    for start in starts:
        for own in (name, _OLDER.get(name, name)):
            yield (evolve(parameter, name=f"{start}experts.{{expert}}.{own}.{kind}"),)
    dims = ((Segment(None, experts),), *parameter.dims)
    all_of = evolve(parameter, dims=dims, out=None if parameter.out is None else parameter.out + 1, copies=1)
    bias = "_bias" if kind == "bias" else ""
    for start in starts:
        for module in ("switch_mlp", "experts"):
            yield (evolve(all_of, name=f"{start}{module}.{name}.{kind}"),)
        if name == "down_proj":
            yield (evolve(all_of, name=f"{start}experts.down_proj{bias}"),)
        else:
            both = (dims[0], dims[1] * 2, *dims[2:])
            yield (evolve(all_of, name=f"{start}experts.gate_up_proj{bias}", dims=both),)


_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EXPERT: Final = re.compile(r"\.experts\.(\d{1,9})\.")
_SHOWN: Final = 3

#: Fused matrices of models whose parts some formats (EXL2, EXL3) store separately.
_FUSED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

#: Scales that a calibrated cache or attention has, and their zero points.
_CALIBRATED: Final = re.compile(
    r"\.(?:self_attn|attn|attention|self_attention|mixer)(?:\.\w+)*?"
    r"\.(?:(?:q|k|v|kv|qk|p|prob|prob_output|softmax)_(?:scale|zero_point|global_scale|offset)|output_(?:scale|zero_point))$"
)
#: What layers that attend to the keys and values of others may have of these nevertheless, which nothing reads.
_UNREAD: Final = re.compile(r"self_attn\.[kv]_(?:proj|norm)(?:\.|$)")
_IDLE_TEXT: Final = "matrices of experts that do nothing"
_UNREAD_TEXT: Final = "key and value projections that no layer uses"

#: The projections that they come with.
_CACHED: Final = {"k_proj": "k", "v_proj": "v"}

#: Texts in JSON about matrices, whose numbers have any length.
_TOLD: Final = re.compile(r"\.weight\.quant_state\.")

#: Dtypes of tables of tokens, which say nothing of the weights.
_TABLES: Final = frozenset({"I32", "I64"})

_KNOWN: Final = "tpplan knows plain floats, " + ", ".join(
    dict.fromkeys(re.sub(r"[ -]?g?\{.*", "", form.text) for form in FORMATS.values())
)
_OTHER_MODEL: Final = "the config and the checkpoint are of different models, or one was edited: fetch both again"
_INCOMPLETE: Final = "the download may be incomplete, or the config of another model: fetch both again"
_VARIANT: Final = "the files may be of a variant of the architecture that tpplan does not know"


def stored_by_headers(logical: ModelSpec, scheme: Scheme, headers: Headers, tolerated: Tolerated) -> ModelSpec:
    """Return the model as its checkpoint stores it, exact to the byte.

    Names are those of the family, even if the checkpoint omits a prefix; experts that are stored in another form than
    the family's have the names of the checkpoint. Experts of a layer whose stored shapes differ (EXL2 may use more bits
    for some) become one parameter per shape under the same name; their copies add up to the number of experts. Tensors
    that are no part of the planned model are in its ``not_planned``.

    Raises:
        ModelError: the checkpoint contradicts the config, lacks tensors, or has unexpected tensors or unknown formats.
    """
    match = _Match(logical, scheme, headers, tolerated)
    try:
        spec = rebuild(logical, match.stored, match.calibrated)
    except ModelError:
        match.check_counts()
        raise
    match.check_complete()
    weights = match.sizes.keys() - _TABLES
    text = max(
        weights - set(FLOATS) or weights, key=lambda text: (match.sizes[text], text), default=logical.weight_format
    )
    if "{bpw}" in text:
        text = text.format(bpw=f"{8 * match.sizes[text] / match.elements[text]:.2f}")
    return evolve(
        spec,
        dtype=_dtype(match.sizes, text, logical.dtype),
        weight_format=text,
        gather_only=next(iter(match.gather_only), ""),
        not_planned=tuple(NotPlanned(what, match.aside[what]) for what in sorted(match.aside)),
        notes=(*spec.notes, *match.notes),
    )


def _dtype(sizes: Mapping[str, int], text: str, said: str) -> str:
    """Return the dtype of the activations: that of most unquantised bytes, unless any have the one that a config names.

    Args:
        sizes: bytes by format or dtype.
        text: the format or dtype of most matrices.
        said: dtype in the config.
    """
    floats = {_DTYPES[name]: size for name, size in sizes.items() if name in _DTYPES and size}
    return _DTYPES.get(text) or (said if said in floats or not floats else max(floats, key=lambda each: floats[each]))


class _Match:
    """Matcher of a model's parameters with the tensors of a checkpoint; it records sizes, formats and mismatches."""

    def __init__(self, logical: ModelSpec, scheme: Scheme, headers: Headers, tolerated: Tolerated) -> None:
        self.logical = logical
        self.scheme = scheme
        self.sizes: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.aside: Counter[str] = Counter()
        self.gather_only: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.missing: list[str] = []
        self.kinds: dict[tuple[object, ...], Stored] = {}
        self.split: dict[str, tuple[tuple[Parameter, ...], ...]] = {}
        self.given: dict[str, str] = {}
        names = [p.name for p in (*logical.parameters, *(p for block in logical.blocks for p in block.parameters))]
        self.own: dict[str, set[str]] = {}
        for name in names:
            stem, suffix = split_name(name)
            self.own.setdefault(stem, set()).add(suffix)
        there = any(name.startswith(tolerated.prefix) for name in headers.tensors)
        self.prefix = "" if there else tolerated.prefix
        self.start = next((name.partition("{layer}")[0] for name in names if "{layer}" in name), "")
        self.layers = re.compile(re.escape(self.start.removeprefix(self.prefix)) + r"(\d{1,9})\.")
        ignored = re.compile("|".join(map(translate, tolerated.ignored)) or r"(?!)")
        self.found: dict[str, dict[str, Tensor]] = {}
        self.scales: dict[int, list[str]] = {}
        shares = {n for block in logical.blocks if block.attention and block.attention.shared for n in block.layers}
        experts = max((block.experts for block in logical.blocks), default=0)
        for name, tensor in headers.tensors.items():
            at = self.layers.match(name)
            layer = _number(at)
            if at and layer in shares and _UNREAD.match(name, at.end()):
                self.aside[_UNREAD_TEXT] += tensor.nbytes
            elif tolerated.extra_layers and layer >= logical.layer_count:
                self.aside[PREDICTION] += tensor.nbytes
            elif tolerated.extra_experts and _number(_EXPERT.search(name)) >= experts:
                self.aside[_IDLE_TEXT] += tensor.nbytes
            elif ignored.match(name) and name not in names:
                self.aside[label(name, tensor) or OTHERS] += tensor.nbytes
            else:
                stem, suffix = split_name(name)
                self.found.setdefault(stem, {})[suffix] = tensor
                if layer >= 0 and name.endswith(("_scale", "_point", "_offset")) and _CALIBRATED.search(name):
                    self.scales.setdefault(layer, []).append(name)
        self.left = {(stem, suffix) for stem, forms in self.found.items() for suffix in forms}

    def stored(self, parameter: Parameter, layer: int | None) -> tuple[Parameter, ...]:
        """Return the stored parameters of a parameter in a layer."""
        parts = self.parts(parameter, layer)
        if parts is not None:
            return tuple(chain.from_iterable(self.stored(part, layer) for part in parts))
        template, suffix = split_name(parameter.name)
        others = self.own.get(template, {suffix}) - {suffix}
        template = template.removeprefix(self.prefix).replace("{layer}", str(layer))
        experts = "{expert}" in template
        kinds: dict[tuple[object, ...], dict[int, str]] = {}
        for expert in range(parameter.copies if experts else 1):
            stem = template.replace("{expert}", str(expert)) if experts else template
            forms = self.found.get(stem, {})
            if len(parameter.dims) == 1:
                forms = {suffix: forms[suffix]} if suffix in forms else {}
            elif others:
                forms = {suffix: tensor for suffix, tensor in forms.items() if suffix not in others}
            if not forms:
                self.missing.append(stem + suffix)
                continue
            shapes = ((each, tensor.dtype, not _TOLD.match(each) and tensor.shape) for each, tensor in forms.items())
            key = (id(parameter), *sorted(shapes))
            if key not in self.kinds:
                self.kinds[key] = self.kind(parameter, stem, suffix, forms)
            kinds.setdefault(key, {})[expert] = stem
            self.left.difference_update((stem, suffix) for suffix in self.kinds[key].suffixes)
        found: list[Parameter] = []
        for key, stems in kinds.items():
            kind = self.kinds[key]
            own = [each for p in kind.parameters for each in self.copies(p, stems)]
            found += own
            if layer is not None or kind.text in FLOATS:
                self.sizes[kind.text] += sum(p.bytes for p in own)
                self.elements[kind.text] += prod(parameter.shape) * len(stems)
            if kind.gather_only:
                self.gather_only[kind.gather_only] = None
        return (*found, *self.scales_of(template + suffix, layer))

    def copies(self, parameter: Parameter, stems: Mapping[int, str]) -> Iterator[Parameter]:
        """Yield a stored parameter of matrices, by expert; one for each where texts about them differ in length."""
        template, suffix = split_name(parameter.name)
        if not _TOLD.match(suffix):
            yield evolve(parameter, copies=len(stems))
            return
        sizes = {expert: self.found[stem][suffix].shape[0] for expert, stem in stems.items()}
        if len({*sizes.values()}) == 1:
            yield evolve(parameter, copies=len(stems), dims=((Segment(None, max(sizes.values())),),))
            return
        for expert, size in sizes.items():
            name = template.replace("{expert}", str(expert)) + suffix
            yield evolve(parameter, name=name, copies=1, dims=((Segment(None, size),),))

    def parts(self, parameter: Parameter, layer: int | None) -> tuple[Parameter, ...] | None:
        """Return the tensors that the checkpoint has in place of a parameter; None if it is stored as it is.

        They are the parts of a fused matrix, or experts in another form. There are none if another parameter has them.
        """
        if self.has(parameter, layer):
            return None
        if parameter.name not in self.split:
            experts = max((block.experts for block in self.logical.blocks), default=0)
            self.split[parameter.name] = (*_fused(parameter), *(variants(parameter, experts) if experts else ()))
            for part in chain.from_iterable(self.split[parameter.name]):
                stem, suffix = split_name(part.name)
                self.own.setdefault(stem, set()).add(suffix)
        parts = next((parts for parts in self.split[parameter.name] if self.has(parts[0], layer)), None)
        if parts and self.given.setdefault(parts[0].name, parameter.name) != parameter.name:
            return ()
        return parts

    def has(self, parameter: Parameter, layer: int | None) -> bool:
        """Return whether the checkpoint has anything under a parameter's name."""
        stem, suffix = split_name(parameter.name)
        at = stem.removeprefix(self.prefix).replace("{layer}", str(layer)).replace("{expert}", "0")
        forms = self.found.get(at, {})
        others = self.own.get(stem, {suffix}) - {suffix}
        return suffix in forms if len(parameter.dims) == 1 else bool(forms.keys() - others)

    def scales_of(self, name: str, layer: int | None) -> tuple[Parameter, ...]:
        """Return the scales of a quantised cache that a projection comes with."""
        module, _, weight = name.rpartition(".")
        attention, _, projection = module.rpartition(".")
        if layer is None or weight != "weight" or projection not in _CACHED or layer not in self.scales:
            return ()
        scale = f"{_CACHED[projection]}_scale"
        wanted = (f"{module}.{scale}", f"{attention}.{scale}")
        return self.take([name for name in wanted if name in self.scales[layer]])

    def calibrated(self, layer: int) -> tuple[Parameter, ...]:
        """Return what else a layer has of scales of its attention."""
        return self.take(sorted(self.scales.get(layer, ())))

    def take(self, names: Collection[str]) -> tuple[Parameter, ...]:
        """Return tensors of a layer that are no part of a matrix as parameters, which live where its KV heads do."""
        heads = next((block.attention.kv_heads for block in self.logical.blocks if block.attention), 0)
        taken = []
        for name in names:
            stem, suffix = split_name(name)
            if (stem, suffix) in self.left:
                self.left.discard((stem, suffix))
                tensor = self.found[stem][suffix]
                at = self.layers.match(name)
                assert at  # noqa: S101 - they were chosen by it
                dims = tuple((Segment(Axis.KV_HEADS if 1 < n == heads else None, n),) for n in tensor.shape)
                own = f"{self.start}{{layer}}.{name[at.end() :]}"
                taken.append(Parameter(own, tensor.dtype, dims, home=Axis.KV_HEADS))
                self.sizes[tensor.dtype] += 0
        return tuple(taken)

    def kind(self, parameter: Parameter, stem: str, suffix: str, forms: Forms) -> Stored:
        """Return how a parameter is stored, given its tensors by suffix.

        Raises:
            ModelError: they match no known format, or not the size in the config.
        """
        candidates = [name for name, form in FORMATS.items() if form.required <= forms.keys()]
        candidates.sort(key=lambda name: len(forms.keys() - FORMATS[name].pieces.keys()))
        candidates = candidates if len(parameter.dims) > 1 else []
        for each in (parameter, *_turned(parameter)):
            for name in candidates:
                if found := store(each, name, self.scheme, forms):
                    return found
        # Headers decide, whatever the config says of groups and bits.
        for name in candidates if self.scheme.method else ():
            if found := store(parameter, name, Form(permuted=self.scheme.permuted), forms):
                said = _named(FORMATS[self.scheme.format or name].text, self.scheme)
                self.notes[f"{self.scheme.source} says {said}, but the files have {found.text}, which is planned"] = (
                    None
                )
                return found
        plain = forms.get(suffix)
        if plain and plain.dtype in (FLOATS if parameter.dtype in FLOATS else INTEGERS):
            for each in (parameter, *_turned(parameter)):
                if plain.shape == each.shape:
                    return Stored((evolve(each, dtype=plain.dtype),), (suffix,), plain.dtype)
        raise self.unknown(parameter, stem, suffix, forms)

    def unknown(self, parameter: Parameter, stem: str, suffix: str, forms: Forms) -> ModelError:
        """Return the error for a parameter that is stored in no form that fits."""
        plain = forms.get(suffix)
        file = next(iter(forms.values())).file
        asked = f"{self.scheme.source} asks for {list(parameter.shape)}"
        if plain and plain.dtype in FLOATS and forms.keys() <= {suffix, ".bias"}:
            what = f"{file} has {stem}{suffix} of {plain.dtype} {list(plain.shape)!s:.60}"
            return ModelError(f"{what}, but {asked}", _OTHER_MODEL)
        shown = [f"{stem}{s} of {t.dtype} {list(t.shape)!s:.60}" for s, t in list(forms.items())[:_SHOWN]]
        return self.unread(f"{file} has {', '.join(shown)}", asked)

    def unread(self, what: str, asked: str) -> ModelError:
        """Return the error for tensors in a format that tpplan does not know, with what the config calls it."""
        told = f" ({self.scheme.source} says {self.scheme.method[:60]!a})" if self.scheme.method else ""
        return ModelError(f"{what}; no format that tpplan knows stores a matrix so{told}, and {asked}", _KNOWN)

    def check_counts(self) -> None:
        """Check that the numbers of layers and experts match the config, the most common cause of mismatches.

        Raises:
            ModelError: a number differs; the error has both.
        """
        experts = max((block.experts for block in self.logical.blocks), default=0)
        for what, search, asked, where in (
            ("layers", self.layers.match, self.logical.layer_count, "num_hidden_layers"),
            ("experts", _EXPERT.search, experts, "in each layer"),
        ):
            there = 1 + max((_number(search(f"{stem}.")) for stem in self.found), default=-1)
            if there not in {0, asked}:
                hint = _OTHER_MODEL if there > asked else _INCOMPLETE
                source = self.scheme.source
                raise ModelError(f"the checkpoint has {there} {what}, but {source} asks for {asked} ({where})", hint)

    def check_complete(self) -> None:
        """Check that the checkpoint has all tensors of the model, and no others but those of known other parts.

        Raises:
            ModelError: tensors are missing or unexpected. The error gives the numbers of layers or experts if these
                differ, names a format that is unknown, and otherwise names tensors.
        """
        for stem, suffix in list(self.left):
            tensor = self.found[stem][suffix]
            if what := label(stem + suffix, tensor):
                self.aside[what] += tensor.nbytes
                self.left.discard((stem, suffix))
        if not self.missing and not self.left:
            return
        self.check_counts()
        left = sorted(stem + suffix for stem, suffix in self.left)
        modules = {name.rpartition(".")[0]: name for name in self.missing}
        for name in left:
            parts = name.split(".")
            starts = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
            if module := next((start for start in starts if start in modules or start in self.missing), ""):
                beside = [other for other in left if other.startswith(module)][:_SHOWN]
                shown = [f"{other} of {t.dtype} {list(t.shape)!s:.60}" for other in beside for t in [self.at(other)]]
                asked = f"{self.scheme.source} asks for {modules.get(module, module)}"
                raise self.unread(f"{self.at(name).file} has {', '.join(shown)}", asked)
        source = self.scheme.source
        parts = []
        if self.missing:
            parts.append(
                f"the checkpoint lacks {len(self.missing)} tensors that {source} asks for: {_some(self.missing)}"
            )
        if left:
            parts.append(f"the checkpoint has {len(left)} tensors that {source} does not ask for: {_some(left)}")
        raise ModelError("; ".join(parts), _VARIANT if left else _INCOMPLETE)

    def at(self, name: str) -> Tensor:
        """Return a tensor of the checkpoint by its name."""
        stem, suffix = split_name(name)
        return self.found[stem][suffix]


def _fused(parameter: Parameter) -> tuple[tuple[Parameter, ...], ...]:
    """Return the parts of a fused matrix or bias, which some checkpoints have in its place."""
    fused = split_name(parameter.name)[0].rpartition(".")[2]
    names = _FUSED.get(fused, ())
    if not names or len(parameter.dims[0]) != len(names):
        return ()
    return (
        tuple(
            evolve(parameter, name=parameter.name.replace(fused, name), dims=((segment,), *parameter.dims[1:]))
            for name, segment in zip(names, parameter.dims[0], strict=True)
        ),
    )


def _turned(parameter: Parameter) -> tuple[Parameter, ...]:
    """Return a tensor of all experts with inputs and outputs exchanged; nothing for other parameters."""
    if len(parameter.dims) != len(("experts", "in", "out")) or any(segment.axis for segment in parameter.dims[0]):
        return ()
    experts, rows, columns = parameter.dims
    return (evolve(parameter, dims=(experts, columns, rows), out=parameter.out and 3 - parameter.out),)


def _named(text: str, scheme: Scheme) -> str:
    """Fill in a format's name with the parameters in the config."""
    known = {"group": scheme.group or "?", **scheme.known}
    return re.sub(r"\{(\w+)\}", lambda match: str(known.get(match[1], "?")), text)


def _number(match: re.Match[str] | None) -> int:
    """Return the number that matched, -1 without a match."""
    return int(match[1]) if match else -1


def _some(names: Collection[str]) -> str:
    """Format a few tensor names that differ in more than numbers, and the number of remaining ones."""
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "#", name), name)
    shown = [f"{name[:120]!a}" for name in list(kinds.values())[:_SHOWN]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
