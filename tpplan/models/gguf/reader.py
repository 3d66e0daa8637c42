"""A GGUF file as a model: what its metadata describes, and its weights to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import lcm
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from tpplan.core.model import GGUF, PREDICTION, ModelSpec, NotPlanned
from tpplan.errors import ModelError
from tpplan.models.checkpoint import Headers, Tensor
from tpplan.models.config import Config
from tpplan.models.families import FAMILIES, spec_from_config
from tpplan.models.families.predictions import PREDICTIONS, UNKNOWN_HINT
from tpplan.models.formats.formula import rebuild
from tpplan.models.formats.matching import BUFFERS
from tpplan.models.gguf.architectures import PREDICTION_NAMES, Architecture, architecture_of, name_of
from tpplan.models.gguf.header import SPLIT, Gguf, read_gguf
from tpplan.models.gguf.metadata import config_of

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.core.model import Parameter, Segment
    from tpplan.models.gguf.header import GgufTensor

SUFFIX: Final = ".gguf"
#: Types of tensors that safetensors has too.
_PLAIN: Final = frozenset({"F32", "F16", "BF16", "F64"})
#: Tensors that follow from the metadata.
FACTORS: Final = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_HINT: Final = "the file may be of a variant of the architecture that tpplan does not know"
_SHOWN: Final = 3
#: Digits of a number that no layer has.
_LONGEST_NUMBER: Final = 10
#: Weights that a directory has beside copies of them in GGUF.
_OTHERS: Final = ("*.safetensors", "pytorch_model*.bin", "*.pt", "*.pth")


@frozen
class GgufModel:
    """A model in GGUF.

    Attributes:
        spec: the model.
        config: the config.json that the metadata stands for.
        headers: the tensors of the model under transformers' names; those in blocks are ``U8``, and experts are apart.
        kinds: type of each of these tensors, such as ``Q4_K``.
        architecture: what its architecture's files have in common.
        file: the whole header.
    """

    spec: ModelSpec
    config: Config
    headers: Headers
    kinds: Mapping[str, str]
    architecture: Architecture
    file: Gguf


def gguf_at(path: Path) -> Path | None:
    """Return the GGUF file that a path stands for: itself, or the one in a directory without other weights.

    Raises:
        ModelError: a directory has several.
    """
    if path.suffix == SUFFIX and path.is_file():
        return path
    return gguf_in(path) if path.is_dir() else None


def gguf_in(directory: Path) -> Path | None:
    """Return the one model in GGUF that a directory without other weights has; None if it has none.

    Of a model in several files, that is the first.

    Raises:
        ModelError: there are several.
    """
    files = sorted(path for path in directory.glob(f"*{SUFFIX}") if not path.name.startswith("mmproj"))
    others = (path for pattern in _OTHERS for path in directory.glob(pattern))
    if not files or next(others, None):
        return None
    numbers = {path: SPLIT.fullmatch(path.name) for path in files}
    first = [path for path, split in numbers.items() if not split or int(split["number"]) == 1]
    if len(first) > 1:
        names = ", ".join(path.name for path in first[:_SHOWN]) + (", …" if first[_SHOWN:] else "")
        raise ModelError(f"{directory.name} has {len(first)} models in GGUF: {names}", "name one of the files")
    return (first or files)[0]


def read_gguf_model(path: Path) -> GgufModel:
    """Read a model from the header of its GGUF file, or of the first of its files.

    Raises:
        ModelError: a file is damaged, the architecture is not supported, or a tensor is missing, has another shape than
            the metadata says, or blocks that no cut can respect.
    """
    file = read_gguf(path)
    architecture = architecture_of(file, path.name)
    config = config_of(file, architecture, path.name)
    logical = spec_from_config(config, path.stem, stored=architecture.stored)
    match = _Match(file, architecture, path.name)
    spec = match.model(logical)
    spec = evolve(spec, not_planned=(*spec.not_planned, *match.aside(logical.layer_count)))
    headers = Headers(match.tensors, file.file_bytes)
    return GgufModel(spec, config, headers, match.kinds, architecture, file)


def gguf_predictions(model: GgufModel, name: str) -> ModelSpec:
    """Return the prediction layers of a model in GGUF, which are blocks behind its own, as a model of this name.

    Raises:
        ModelError: the file has none, or those of its architecture are not known; or as for :func:`read_gguf_model`.
    """
    source, model_type = model.config.source, model.architecture.model_type
    count = model.file.metadata.get(f"{model.file.metadata['general.architecture']}.nextn_predict_layers")
    if not isinstance(count, int) or not count:
        raise ModelError(f"{source} has no prediction layers", "leave out --mtp, or mtp in a manifest")
    known = PREDICTIONS.get(model_type)
    if known is None or not known.is_behind:
        raise ModelError(f"{source}: prediction layers of {model_type} in GGUF are not known", UNKNOWN_HINT)
    layers = model.spec.layer_count
    alone = model.config.overlaid(known.told(model.config, layers, count, known.kind))
    family = evolve(known.of(model.architecture.stored or FAMILIES[model_type]), layers="model.layers.{layer}.")
    architecture = evolve(model.architecture, names={**model.architecture.names, **PREDICTION_NAMES})
    return _Match(model.file, architecture, source, layers).model(spec_from_config(alone, name, stored=family))


class _Match:
    """The tensors of a file as a model's parameters.

    Attributes:
        sizes: bytes by type.
        tensors: tensors by transformers' names.
        kinds: their types.
    """

    def __init__(self, file: Gguf, architecture: Architecture, source: str, first: int = 0) -> None:
        self._file, self._architecture, self._source, self._first = file, architecture, source, first
        self._used: set[str] = set()
        self.sizes: Counter[str] = Counter()
        self.tensors: dict[str, Tensor] = {}
        self.kinds: dict[str, str] = {}

    def model(self, logical: ModelSpec) -> ModelSpec:
        """Return a model, whose first layer is the file's block ``first``, as the file stores it."""
        spec = rebuild(logical, self.stored)
        kind = max(self.sizes, key=lambda kind: (self.sizes[kind], kind))
        return evolve(spec, weight_format=f"{GGUF}{kind}", assumed="")

    def stored(self, parameter: Parameter, layer: int | None) -> tuple[Parameter, ...]:
        """Return a parameter of a layer as the file stores it."""
        layer = None if layer is None else layer + self._first
        pattern = name_of(parameter.name, self._architecture)
        name = pattern.replace("{layer}", str(layer))
        tensor = self._file.tensors.get(name)
        if tensor is None:
            what = parameter.name.replace("{layer}", str(layer))
            raise ModelError(f"{self._source} has no tensor {name or 'for ' + what}", _HINT)
        wanted = (*((parameter.copies,) if parameter.copies > 1 else ()), *parameter.shape)
        if tensor.shape != wanted and tensor.shape != tuple(size for size in wanted if size > 1):  # some are squeezed
            message = f"{self._source}: {name} has the shape {list(tensor.shape)}, by the metadata it is {list(wanted)}"
            raise ModelError(message, _HINT)
        self._used.add(name)
        self.sizes[tensor.kind] += tensor.nbytes
        own = evolve(parameter, dtype=tensor.kind)
        if tensor.kind not in _PLAIN:
            own = _in_blocks(parameter, tensor, name, self._source)
        size = tensor.nbytes // parameter.copies
        for expert in range(parameter.copies):
            each = parameter.name.replace("{layer}", str(layer)).replace("{expert}", str(expert))
            self.tensors[each] = Tensor(own.dtype, own.shape, size, tensor.file, tensor.start + expert * size)
            self.kinds[each] = tensor.kind
        return (own,)

    def aside(self, layers: int) -> list[NotPlanned]:
        """Return what else the file holds."""
        sizes: Counter[str] = Counter()
        for name, tensor in self._file.tensors.items():
            if name not in self._used:
                sizes[_label(name, layers)] += tensor.nbytes
        return [NotPlanned(what, size) for what, size in sorted(sizes.items())]


def _label(name: str, layers: int) -> str:
    """Return what a tensor that is not planned is part of."""
    if name in FACTORS:
        return BUFFERS
    number = name.removeprefix("blk.").partition(".")[0]
    if number.isdecimal() and len(number) < _LONGEST_NUMBER and int(number) >= layers:
        return PREDICTION
    return "other tensors"


def _in_blocks(parameter: Parameter, tensor: GgufTensor, name: str, source: str) -> Parameter:
    """Return a parameter whose last dimension is stored in blocks, in bytes."""
    *outer, inner = parameter.dims
    segments = []
    for segment in inner:
        if segment.length % tensor.block:
            message = f"{source}: a part of {segment.length} columns of {name} is no whole number of blocks"
            raise ModelError(f"{message} of {tensor.block} ({tensor.kind})", _HINT)
        segments.append(_in_bytes(segment, tensor))
    return evolve(parameter, dtype="U8", dims=(*outer, tuple(segments)))


def _in_bytes(segment: Segment, tensor: GgufTensor) -> Segment:
    """Return a segment of columns as the bytes of its blocks, which no cut may divide."""
    block = lcm(segment.block, tensor.block)
    return evolve(
        segment,
        length=segment.length // tensor.block * tensor.block_bytes,
        block=block // tensor.block * tensor.block_bytes,
    )
