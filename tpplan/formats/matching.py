"""Matching the model that a config describes with the headers of its checkpoint, which give the exact sizes."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import translate
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.errors import ModelError
from tpplan.formats.formula import rebuild
from tpplan.formats.storage import Stored, split_name, store
from tpplan.formats.table import FLOATS, FORMATS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tpplan.checkpoint import Headers, Tensor
    from tpplan.families import Tolerated
    from tpplan.formats.scheme import Scheme
    from tpplan.model import ModelSpec, Parameter

    Forms = Mapping[str, Tensor]

_HINT: Final = "the config and the checkpoint are of different models, or one was edited: fetch both again"
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EXPERT: Final = re.compile(r"\.experts\.(\d{1,9})\.")
_SHOWN: Final = 3

#: Fused matrices of models whose parts some formats (EXL2, EXL3) store separately.
_FUSED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def stored_by_headers(logical: ModelSpec, scheme: Scheme, headers: Headers, tolerated: Tolerated) -> ModelSpec:
    """Return the model as its checkpoint stores it, exact to the byte.

    Names are those of the family, even if the checkpoint omits a prefix. Experts of a layer whose stored shapes
    differ (EXL2 may use more bits for some) become one parameter per shape under the same name; their copies add up
    to the number of experts.

    Raises:
        ModelError: the checkpoint contradicts the config, lacks tensors, or has unexpected tensors or unknown formats.
    """
    match = _Match(logical, scheme, headers, tolerated)
    try:
        spec = rebuild(logical, match.stored)
    except ModelError:
        match.check_counts()
        raise
    match.check_complete()
    quantised = match.sizes.keys() - set(FLOATS)
    text = max(
        quantised or match.sizes.keys(), key=lambda text: (match.sizes[text], text), default=logical.weight_format
    )
    if "{bpw}" in text:
        text = text.format(bpw=f"{8 * match.sizes[text] / match.elements[text]:.2f}")
    return evolve(
        spec,
        dtype=_DTYPES.get(text, logical.dtype),
        weight_format=text,
        gather_only=next(iter(match.gather_only), ""),
    )


class _Match:
    """Matcher of a model's parameters with the tensors of a checkpoint; it records sizes, formats and mismatches."""

    def __init__(self, logical: ModelSpec, scheme: Scheme, headers: Headers, tolerated: Tolerated) -> None:
        self.logical = logical
        self.scheme = scheme
        self.sizes: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.gather_only: dict[str, None] = {}
        self.missing: list[str] = []
        self.kinds: dict[tuple[object, ...], Stored] = {}
        self.split: dict[str, tuple[Parameter, ...]] = {}
        names = [p.name for p in (*logical.parameters, *(p for block in logical.blocks for p in block.parameters))]
        self.own: dict[str, set[str]] = {}
        for name in names:
            stem, suffix = split_name(name)
            self.own.setdefault(stem, set()).add(suffix)
        there = any(name.startswith(tolerated.prefix) for name in headers.tensors)
        self.prefix = "" if there else tolerated.prefix
        layers = next((name.partition("{layer}")[0] for name in names if "{layer}" in name), "")
        self.layers = re.compile(re.escape(layers.removeprefix(self.prefix)) + r"(\d{1,9})\.")
        ignored = re.compile("|".join(map(translate, tolerated.ignored)))
        self.found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in headers.tensors.items():
            if tolerated.extra_layers and _number(self.layers.match(name)) >= logical.layer_count:
                continue
            if not (tolerated.ignored and ignored.match(name)):
                stem, suffix = split_name(name)
                self.found.setdefault(stem, {})[suffix] = tensor
        self.left = {(stem, suffix) for stem, forms in self.found.items() for suffix in forms}

    def stored(self, parameter: Parameter, layer: int | None) -> tuple[Parameter, ...]:
        """Return the stored parameters of a parameter in a layer."""
        template, suffix = split_name(parameter.name)
        if parts := self.parts(parameter, layer):
            return tuple(chain.from_iterable(self.stored(part, layer) for part in parts))
        others = self.own.get(template, {suffix}) - {suffix}
        template = template.removeprefix(self.prefix).replace("{layer}", str(layer))
        experts = "{expert}" in template
        kinds: Counter[tuple[object, ...]] = Counter()
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
            key = (id(parameter), *((suffix, tensor.dtype, tensor.shape) for suffix, tensor in sorted(forms.items())))
            if key not in self.kinds:
                self.kinds[key] = self.kind(parameter, stem, suffix, forms)
            kinds[key] += 1
            self.left.difference_update((stem, suffix) for suffix in self.kinds[key].suffixes)
        counts = [(self.kinds[key], count) for key, count in kinds.items()]
        for kind, count in counts:
            if layer is not None or kind.text in FLOATS:
                self.sizes[kind.text] += sum(p.bytes for p in kind.parameters) * count // parameter.copies
                self.elements[kind.text] += prod(parameter.shape) * count
            if kind.gather_only:
                self.gather_only[kind.gather_only] = None
        return tuple(evolve(p, copies=count) for kind, count in counts for p in kind.parameters)

    def parts(self, parameter: Parameter, layer: int | None) -> tuple[Parameter, ...]:
        """Return the parts of a fused matrix or bias if the checkpoint stores these separately, else nothing."""
        module, _, fused = split_name(parameter.name)[0].rpartition(".")
        names = _FUSED.get(fused, ())
        stem = f"{module}.{fused}".removeprefix(self.prefix).replace("{layer}", str(layer))
        if not names or stem in self.found or len(parameter.dims[0]) != len(names):
            return ()
        if parameter.name not in self.split:
            self.split[parameter.name] = tuple(
                evolve(parameter, name=parameter.name.replace(fused, name), dims=((segment,), *parameter.dims[1:]))
                for name, segment in zip(names, parameter.dims[0], strict=True)
            )
        there = stem.replace(fused, names[0]) in self.found
        return self.split[parameter.name] if there else ()

    def kind(self, parameter: Parameter, stem: str, suffix: str, forms: Forms) -> Stored:
        """Return how a parameter is stored, given its tensors by suffix.

        Raises:
            ModelError: they match no known format, or not the size in the config.
        """
        candidates = [name for name, form in FORMATS.items() if form.required <= forms.keys()]
        candidates.sort(key=lambda name: len(forms.keys() - FORMATS[name].pieces.keys()))
        for name in candidates if len(parameter.dims) > 1 else ():
            if found := store(parameter, name, self.scheme, forms):
                return found
        plain = forms.get(suffix)
        if plain and plain.dtype in FLOATS and plain.shape == parameter.shape:
            return Stored((evolve(parameter, dtype=plain.dtype),), (suffix,), plain.dtype)
        forms = {suffix: plain} if plain else forms
        file = next(iter(forms.values())).file
        shown = (f"{stem}{s} of {t.dtype} {list(t.shape)!s:.60}" for s, t in list(forms.items())[:_SHOWN])
        what, asked = f"{file} has {', '.join(shown)}", f"{self.scheme.source} asks for {list(parameter.shape)}"
        if plain and plain.dtype in FLOATS:
            raise ModelError(f"{what}, but {asked}", _HINT)
        if candidates:
            named = _named(FORMATS[candidates[0]].text, self.scheme)
            raise ModelError(f"{what}, which cannot be {named} where {asked}", _HINT)
        raise ModelError(f"{what}; no format that tpplan knows stores a matrix so where {asked}", _KNOWN)

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
                source = self.scheme.source
                raise ModelError(f"the checkpoint has {there} {what}, but {source} asks for {asked} ({where})", _HINT)

    def check_complete(self) -> None:
        """Check that the checkpoint has all tensors of the model, and no others.

        Raises:
            ModelError: tensors are missing or unexpected. The error gives the numbers of layers or experts if these
                differ, and otherwise names tensors.
        """
        if not self.missing and not self.left:
            return
        self.check_counts()
        source = self.scheme.source
        parts = []
        if self.missing:
            parts.append(
                f"the checkpoint lacks {len(self.missing)} tensors that {source} asks for: {_some(self.missing)}"
            )
        if self.left:
            names = sorted(stem + suffix for stem, suffix in self.left)
            parts.append(f"the checkpoint has {len(names)} tensors that {source} does not ask for: {_some(names)}")
        raise ModelError("; ".join(parts), _HINT if self.scheme.is_known else f"{self.scheme.method!r:.60}: {_KNOWN}")


_KNOWN: Final = "tpplan knows plain floats, " + ", ".join(
    dict.fromkeys(form.text.split()[0] for form in FORMATS.values())
)


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
