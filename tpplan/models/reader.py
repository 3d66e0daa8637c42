"""A model's files as a ModelSpec."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import evolve

from tpplan.core.limits import LONGEST_NAME
from tpplan.files.jsontext import UNSEEN
from tpplan.models.beside import beside, instead_of_headers, refuse_adapter
from tpplan.models.checkpoint import read_headers
from tpplan.models.config import read_config
from tpplan.models.families import spec_from_config, tolerated
from tpplan.models.families.wrappers import text_part
from tpplan.models.formats import read_scheme, stored_by_formula, stored_by_headers
from tpplan.models.formats.storage import split_name
from tpplan.models.formats.tools import DESCRIPTIONS

if TYPE_CHECKING:
    from tpplan.core.model import ModelSpec
    from tpplan.models.checkpoint import Headers
    from tpplan.models.config import Config

_TIED: Final = "tie_word_embeddings"
_LAYERS: Final = "model.layers."
_STACKED: Final = ".experts.gate_up_proj"


def read_model(path: str | Path) -> ModelSpec:
    """Read a model: its shapes from config.json, its bytes from the headers of its safetensors files.

    Args:
        path: a model's directory; or a config.json, and then no other file is read, even if there are some beside it.

    Returns:
        The model, named after the directory (after the repository in a hub cache), or after a loose file.

    Raises:
        ModelError: a file is missing or damaged, the architecture is not supported, or config and headers contradict
            each other.
    """
    return read_checkpoint(Path(path))[0]


def read_checkpoint(path: Path) -> tuple[ModelSpec, Headers | None]:
    """Read what :func:`read_model` does.

    Returns:
        The model, and the headers with the names that tensors have in it; None where there are none.

    Raises:
        ModelError: see :func:`read_model`.
    """
    refuse_adapter(path)
    config = read_config(path)
    headers = read_headers(path) if path.is_dir() else None
    name = _name(path)
    scheme = read_scheme(config, path if path.is_dir() else None)
    if headers is None:
        spec = stored_by_formula(spec_from_config(config, name), scheme)
        beside_config = path.parent if path.is_file() and not scheme.method else None
        unread = next((name for name in DESCRIPTIONS if beside_config and (beside_config / name).exists()), "")
        what = f"weights in {spec.weight_format}: {unread} is read if you name the directory" if unread else ""
        return evolve(spec, assumed=what or instead_of_headers(path, spec.weight_format) or spec.assumed), None
    known = tolerated(spec_from_config(config, name).model_type, text_part(config)[0])
    parts, notes = beside(path, {tensor.file for tensor in headers.tensors.values()})
    headers = headers.renamed(known.renamed)
    spec = stored_by_headers(_in_form(config, headers, name), scheme, headers, known)
    if scheme.problem:
        notes = (f"not needed beside the files' headers: {scheme.problem.message}", *notes)
    # Whatever the config says of dtypes and of other parts, the files have them or not.
    return evolve(spec, assumed="", not_planned=(*spec.not_planned, *parts), notes=(*spec.notes, *notes)), headers


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


def are_stacked(headers: Headers) -> bool:
    """Return whether a checkpoint has all experts of a layer in one tensor; layers for prediction do not count."""
    return any(name.startswith(_LAYERS) and name.endswith(_STACKED) for name in headers.tensors)


def _name(path: Path) -> str:
    """Return what to call the model at ``path``: never more than one part of the path, and fit for a plan."""
    directory = (path.parent if path.is_file() else path).resolve()
    name = directory.name
    if path.is_file() and path.name != "config.json":
        name = path.stem
    elif directory.parent.name == "snapshots":  # a hub cache: models--org--name/snapshots/revision
        name = directory.parent.parent.name.rpartition("--")[2]
    return UNSEEN.sub("", name)[:LONGEST_NAME].strip() or "model"
