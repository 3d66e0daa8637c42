"""A model's files as a ModelSpec, with a note on files with weights beside them that are not read."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.limits import LONGEST_NAME
from tpplan.core.model import PREDICTION, NotPlanned
from tpplan.core.sizes import format_bytes
from tpplan.errors import ModelError
from tpplan.files.jsontext import UNSEEN, NotJSONError, read_json
from tpplan.models.checkpoint import Headers, read_headers
from tpplan.models.config import Config, are_meant, read_config
from tpplan.models.families import LANGUAGE_MODELS, Tolerated, spec_from_config, tolerated
from tpplan.models.families.aside import parts_aside
from tpplan.models.families.drafts import BY_NAME, as_draft
from tpplan.models.families.predictions import PREDICTIONS, UNKNOWN_HINT, UNPUBLISHED
from tpplan.models.families.shape import layer_count
from tpplan.models.families.wrappers import WRAPPERS, text_part
from tpplan.models.formats import read_scheme, stored_by_formula, stored_by_headers
from tpplan.models.formats.scheme import Rule
from tpplan.models.formats.storage import split_name
from tpplan.models.formats.tools import DESCRIPTIONS
from tpplan.models.gguf.reader import gguf_at, gguf_predictions, read_gguf_model
from tpplan.models.hub import local

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from tpplan.core.model import ModelSpec
    from tpplan.models.families.wrappers import Wrapper
    from tpplan.models.formats import Scheme
    from tpplan.models.gguf.reader import GgufModel


_ADAPTER: Final = "adapter_config.json"
_SAFETENSORS: Final = ".safetensors"
_SUFFIXES: Final = (_SAFETENSORS, ".gguf", ".bin", ".pt", ".pth", ".h5", ".msgpack")
#: What training and tokenizers keep beside a model.
_NO_WEIGHTS: Final = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "tokenizer")
#: Starts of files that hold all weights of a model once more, in another format or under other names.
_COPIES: Final = re.compile(
    r"consolidated.*|(?:pytorch_model|tf_model|flax_model|model)(?:[-.].*)?\.(?:bin|pt|pth|h5|msgpack)|ggml.*\.bin|(?!mmproj).*\.gguf"
)
_SHARD: Final = re.compile(r"-\d+-of-\d+(?=\.)")
_MOST: Final = 8
_LONGEST: Final = 100
_LARGEST_CONFIG: Final = 2**20
_LENGTH_BYTES: Final = 8


def beside(directory: Path, read: Collection[str]) -> tuple[tuple[NotPlanned, ...], tuple[str, ...]]:
    """Return what else a model's directory has of weights.

    Args:
        directory: the model's.
        read: names of the files whose headers were read.

    Returns:
        The files that are no part of what was read, those of several parts together; and notes on those that are taken
        for a second copy of it.

    Raises:
        ModelError: a safetensors file that was not read is none.
    """
    parts: dict[str, int] = {}
    copies: dict[str, int] = {}
    for path in sorted(directory.iterdir()):
        if path.suffix not in _SUFFIXES or path.name in read or path.name.startswith(_NO_WEIGHTS):
            continue
        if path.is_file():
            which = copies if _COPIES.fullmatch(path.name) else parts
            name = _readable(_SHARD.sub("-*", path.name))
            which[name] = which.get(name, 0) + (_size(path) if which is parts else path.stat().st_size)
    notes = []
    if copies:
        files = [f"{name} ({format_bytes(size)})" for name, size in copies.items()]
        notes.append(f"not read, taken for further copies of the same weights: {', '.join(_some(files))}")
    sizes = [NotPlanned(name, size) for name, size in parts.items() if size]
    if len(sizes) > _MOST:
        rest = sizes[_MOST - 1 :]
        sizes[_MOST - 1 :] = [NotPlanned(f"{len(rest)} further files", sum(part.bytes for part in rest))]
    return tuple(sizes), tuple(notes)


def instead_of_headers(path: Path, weight_format: str) -> str:
    """Return in words what is assumed of a model without safetensors files, empty for a config.json alone.

    Args:
        path: the model's directory, or its config.json.
        weight_format: what the config says of the weights.
    """
    names = sorted(file.name for file in _weights(path)) if path.is_dir() else []
    return f"weights in {weight_format}: {_readable(names[0])} is not read" if names else ""


def refuse_adapter(path: Path) -> None:
    """Refuse an adapter in place of a model: a directory with nothing but its config and weights, or its config.

    Raises:
        ModelError: it is one; the error names the model that it was made for.
    """
    config = path / _ADAPTER if path.is_dir() else path
    if config.name != _ADAPTER or not config.is_file():
        return
    try:
        if path.is_dir() and any(_weights(path)):
            return
        with config.open("rb") as file:
            data = read_json(file.read(_LARGEST_CONFIG))
    except (OSError, NotJSONError):
        data = None
    data = data if isinstance(data, dict) else {}
    base, kind = data.get("base_model_name_or_path"), data.get("peft_type")
    of = f" for {_readable(base)}" if isinstance(base, str) and base else ""
    what = f" ({_readable(kind)})" if isinstance(kind, str) else ""
    hint = f"plan for the directory of {'that' if of else 'its'} model, and keep room for the adapter with --reserve"
    raise ModelError(f"{_readable(path.resolve().name)} is an adapter{what}{of}, not a model", hint)


def _weights(directory: Path) -> Iterator[Path]:
    """Yield the files with weights that are no adapter's."""
    for path in directory.iterdir():
        if path.suffix in _SUFFIXES and not path.name.startswith(("adapter_", *_NO_WEIGHTS)):
            yield path


def _readable(name: str) -> str:
    return UNSEEN.sub("", name)[:_LONGEST]


def _size(path: Path) -> int:
    """Return the bytes of a file's tensors, or of the file where it has another format than safetensors.

    Raises:
        ModelError: it is named as a safetensors file, but is none, or cannot be read.
    """
    size = path.stat().st_size
    if path.suffix != _SAFETENSORS:
        return size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            begins = file.read(1)
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}", "check the file's permissions") from None
    if begins != b"{" or length > size - _LENGTH_BYTES:
        hint = "fetch it again, or move it elsewhere if the model does without"
        raise ModelError(f"{path.name}, which no index names, is damaged, incomplete or no safetensors file", hint)
    return size - _LENGTH_BYTES - length


def _some(files: list[str]) -> list[str]:
    more = len(files) - _MOST
    return [*files[:_MOST], f"and {more} more"] if more > 0 else files


_TIED: Final = "tie_word_embeddings"
_LAYERS: Final = "model.layers."
_STACKED: Final = ".experts.gate_up_proj"


def read_model(path: str | Path) -> ModelSpec:
    """Read a model: its shapes from config.json, its bytes from the headers of its safetensors files.

    Args:
        path: a model's directory; or a config.json, and then no other file is read, even if there are some beside it;
            or a name on the Hugging Face Hub such as ``org/name`` or ``org/name@revision``, if the hub's cache has it.

    Returns:
        The model, named after the directory (after the repository in a hub cache), or after a loose file.

    Raises:
        ModelError: a file is missing or damaged, the architecture is not supported, or config and headers contradict
            each other.
    """
    return read_checkpoint(local(path))[0]


def read_checkpoint(path: Path) -> tuple[ModelSpec, Headers | None]:
    """Read what :func:`read_model` does.

    Returns:
        The model, and the headers with the names that tensors have in it; None where there are none.

    Raises:
        ModelError: see :func:`read_model`.
    """
    refuse_adapter(path)
    if model := gguf_model_at(path):
        return model.spec, model.headers
    headers = read_headers(path) if path.is_dir() else None
    name = _name(path)
    config = as_draft(read_config(path), headers.tensors if headers else {}, name)
    scheme = read_scheme(config, path if path.is_dir() else None)
    if headers is None:
        logical = spec_from_config(config, name)
        with _hinting_at_slips(config, scheme):
            spec = stored_by_formula(logical, scheme)
        beside_config = path.parent if path.is_file() and not scheme.method else None
        unread = next((name for name in DESCRIPTIONS if beside_config and (beside_config / name).exists()), "")
        what = f"weights in {spec.weight_format}: {unread} is read if you name the directory" if unread else ""
        if config.flag(BY_NAME):
            spec = evolve(spec, notes=(*spec.notes, "taken for an EAGLE head by its name"))
        return evolve(spec, assumed=what or instead_of_headers(path, spec.weight_format) or spec.assumed), None
    known = tolerated(spec_from_config(config, name).model_type, text_part(config)[0])
    parts, notes = beside(path, headers.files)
    headers = headers.renamed(known.renamed)
    logical = _in_form(config, headers, name)
    with _hinting_at_slips(config, scheme):
        spec = stored_by_headers(logical, scheme, headers, known)
    if scheme.problem:
        notes = (f"not needed beside the files' headers: {scheme.problem.message}", *notes)
    # Whatever the config says of dtypes and of other parts, the files have them or not.
    return evolve(spec, assumed="", not_planned=(*spec.not_planned, *parts), notes=(*spec.notes, *notes)), headers


@contextmanager
def _hinting_at_slips(config: Config, scheme: Scheme) -> Iterator[None]:
    """Put keys that are probably misspelt before the hint of an error that may follow from the defaults of others."""
    try:
        yield
    except ModelError as error:
        slips = dict.fromkeys((*config.slips_within(), *scheme.slips))
        if slips and " meant as " not in error.hint:
            error.hint = f"{are_meant(*slips)} if not, {error.hint}"
        raise


def read_prediction_layers(path: str | Path) -> ModelSpec:
    """Read a model's prediction layers (MTP) as a model: they draft tokens, and have a cache of their own.

    Args:
        path: the model's, as for :func:`read_model`.

    Returns:
        The layers without embedding and output matrix, which are the model's; bytes are exact where files with headers
        have them.

    Raises:
        ModelError: the model has none, they are not known or not in its files; or see :func:`read_model`.
    """
    path = local(path)
    name = f"prediction layers of {_name(path)}"
    if model := gguf_model_at(path):
        return gguf_predictions(model, name)
    config = read_config(path)
    model_type, text = text_part(config)
    known = PREDICTIONS.get(model_type)
    if model_type in UNPUBLISHED:
        told = f"no published files of {model_type} have the prediction layers that its config.json tells of"
        raise config.error(told, "leave out --mtp, or mtp in a manifest")
    if known is None and any(part.what == PREDICTION for part in parts_aside(config, text)):
        raise config.error(f"prediction layers of {model_type[:60]!r} are not known", UNKNOWN_HINT)
    count, key = known.count(text, config) if known else (0, "")
    if known is None or not count:
        raise config.error("the model has no prediction layers", "leave out --mtp, or mtp in a manifest")
    wrapper = WRAPPERS.get(config.text("model_type"))
    whole = LANGUAGE_MODELS[model_type]
    family = known.of(wrapper.around(whole) if wrapper else whole)
    layers = layer_count(text, whole)
    headers = read_headers(path) if path.is_dir() else None
    if headers is not None:
        headers = _alone(headers, wrapper) if wrapper else headers
        count = count if key else known.numbered(headers.tensors) or count
    starts = known.starts(count, layers)
    named = {"model_type": model_type, "architectures": config.raw("architectures")}
    alone = text.overlaid({**known.told(text, layers, count, known.kind), **named})
    scheme = read_scheme(config, path if path.is_dir() else None)
    if headers is None:
        joins = Rule(form=None, names=known.joins)
        rules = (joins, *scheme.rules) if scheme.rules else ()
        spec = spec_from_config(alone, name, stored=family)
        return stored_by_formula(spec, evolve(scheme, rules=rules), {new: old for old, new in starts.items()})
    own = {each: tensor for each, tensor in headers.tensors.items() if each.startswith(tuple(starts))}
    if not own:
        told_by = f", {count} of which {key} tells" if key else ""
        raise config.error(f"the files have no prediction layers{told_by}", "leave out --mtp")
    found = Headers(own, headers.file_bytes).renamed({**starts, **known.renamed})
    stacked = are_stacked(found, known.layers.partition("{layer}")[0])
    spec = spec_from_config(alone, name, stored=family, stacked=stacked)
    return evolve(
        stored_by_headers(spec, scheme, found, Tolerated(family.ignored, "", {}, extra_layers=False)), assumed=""
    )


def _alone(headers: Headers, wrapper: Wrapper) -> Headers:
    """Return a checkpoint's tensors under the names that they have where there is nothing around the language model."""
    renamed = headers.renamed(wrapper.renamed)
    return renamed.renamed({wrapper.root: ""}) if wrapper.root else renamed


def gguf_model_at(path: Path) -> GgufModel | None:
    """Return the model in GGUF that a path stands for, see :func:`gguf_at`; None if there is none.

    Raises:
        ModelError: see :func:`read_gguf_model`.
    """
    file = gguf_at(path)
    if file is None:
        return None
    model = read_gguf_model(file)
    return evolve(model, spec=evolve(model.spec, name=_name(path)))


def _in_form(config: Config, headers: Headers, name: str) -> ModelSpec:
    """Return the unquantised model in the form that the checkpoint stores it in.

    Experts are stacked if the checkpoint stacks them, and the output matrix is one of its own if it stores one.

    The checkpoint decides: many configs leave ``tie_word_embeddings`` out, and some checkpoints (quantised ones above
    all) have an output matrix although it is true. Only a config that says false while there is none cannot be right.
    """
    stacked = are_stacked(headers)
    tied, untied = (spec_from_config(config.having(_TIED, value), name, stacked=stacked) for value in (True, False))
    shared = {parameter.name for parameter in tied.parameters}
    heads = [split_name(parameter.name)[0] for parameter in untied.parameters if parameter.name not in shared]
    if any(split_name(tensor)[0] in heads for tensor in headers.tensors if tensor not in shared):
        return untied
    if heads and config.raw(_TIED) is False:
        problem = f"{_TIED} is false, but the checkpoint has no {heads[0]}"
        raise config.error(problem, "fetch the checkpoint's missing file, or the config that belongs to it")
    return tied


def are_stacked(headers: Headers, start: str = _LAYERS) -> bool:
    """Return whether a checkpoint has all experts of a layer in one tensor; only layers whose names so start count."""
    return any(name.startswith(start) and name.endswith(_STACKED) for name in headers.tensors)


def _name(path: Path) -> str:
    """Return what to call the model at ``path``: never more than one part of the path, and fit for a plan."""
    directory = (path.parent if path.is_file() else path).resolve()
    name = directory.name
    if path.is_file() and path.name != "config.json":
        name = path.stem
    elif directory.parent.name == "snapshots":  # a hub cache: models--org--name/snapshots/revision
        name = directory.parent.parent.name.rpartition("--")[2]
    return UNSEEN.sub("", name)[:LONGEST_NAME].strip() or "model"
