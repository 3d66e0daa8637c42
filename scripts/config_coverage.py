"""Read a folder of models, and count which are planned, which are refused and why, and which are counted wrongly.

A model is a folder below the given one with a ``config.json``. What tpplan counts is compared with what is known
otherwise: the data in safetensors files, the ``total_size`` of an index, and with ``--transformers`` the parameters of
the model that transformers builds. Run it as ``python scripts/config_coverage.py FOLDER [--transformers]``; the exit
code is 1 if a model is counted wrongly.

With ``--architectures FILE`` it counts names instead: each line of the file has that of a class, as a config.json has
it under ``architectures``, and, behind a blank, how much it weighs (1 if nothing is there); ``#`` begins a comment. It
prints which are computed by tpplan's decoder, which by transformers, which are planned only, and which are refused,
with their shares. Such a list is an engine's registry of models, or the classes of the most downloaded models with
their downloads: of a folder of configs, ``jq -r '.architectures[0]' */config.json | sort | uniq -c | awk '{print $2,
$1}'`` makes one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

import tpplan
from tpplan.models import families
from tpplan.models.families.drafts import DRAFTS
from tpplan.models.families.wrappers import WRAPPERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tpplan.core.model import ModelSpec
    from tpplan.models.families.table import Family
    from tpplan.models.families.wrappers import Wrapper

_LENGTH_BYTES = 8
_INDEX = "model.safetensors.index.json"
_COLUMNS = 96


@frozen
class Outcome:
    """What became of a model.

    Attributes:
        name: its path below the folder.
        kind: ``planned``, ``refused`` or ``wrong``.
        why: the format and size of its weights; or the error; or both counts.
        confirmed: how many other counts agree.
    """

    name: str
    kind: str
    why: str
    confirmed: int = 0


def outcomes(folder: Path, *, transformers: bool = False) -> Iterator[Outcome]:
    """Yield what becomes of each model in a folder, in order of their paths.

    Args:
        folder: a folder of folders with a ``config.json``.
        transformers: also compare with the number of parameters of the model that transformers builds.
    """
    for config in sorted(folder.rglob("config.json")):
        name = str(config.parent.relative_to(folder))
        try:
            model = tpplan.read_model(config.parent)
        except tpplan.TpplanError as error:
            yield Outcome(name, "refused", error.message.replace(f"{config.parent}/", ""))
            continue
        others = [*_bytes_elsewhere(config.parent), *(_parameters_elsewhere(config) if transformers else ())]
        counted = {"bytes": _file_bytes(model), "parameters": model.parameter_count}
        open_ended = any(not part.bytes for part in model.not_planned)  # no file says how large that part is
        wrong = [
            f"{counted[what]} {what}, {where} has {count}"
            for what, where, count in others
            if (count < counted[what] if open_ended and what == "bytes" else count != counted[what])
        ]
        told = f"{counted['bytes'] / 2**30:.2f} GiB, {model.weight_format}"
        yield Outcome(name, "wrong" if wrong else "planned", "; ".join(wrong) or told, len(others) - len(wrong))


def _file_bytes(model: ModelSpec) -> int:
    """Return the bytes of all tensors in a model's files: those that a plan counts, and the others."""
    return model.weight_bytes + sum(part.bytes for part in model.not_planned)


def _bytes_elsewhere(directory: Path) -> Iterator[tuple[str, str, int]]:
    """Yield the bytes of a checkpoint's tensors as its files say them."""
    files = sorted(directory.glob("model*.safetensors"))
    if files:
        yield "bytes", "the data of all files", sum(map(_data_bytes, files))
    if (index := directory / _INDEX).is_file():
        size = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
        if isinstance(size, int):
            yield "bytes", _INDEX, size


def _data_bytes(file: Path) -> int:
    """Return the bytes behind a safetensors file's header."""
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
    return file.stat().st_size - _LENGTH_BYTES - header


def _parameters_elsewhere(config: Path) -> Iterator[tuple[str, str, int]]:
    """Yield the parameters of a language model that transformers builds without weights; nothing where it cannot."""
    import torch  # noqa: PLC0415 (only where asked for)
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    data = json.loads(config.read_text(encoding="utf-8"))
    if "text_config" in data:
        return
    try:
        data.pop("quantization_config", None)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**data))
    except Exception as error:  # noqa: BLE001 (whatever keeps transformers from building it)
        print(f"{config}: transformers does not build it: {error!s:.200}", file=sys.stderr)
    else:
        saved = model.state_dict()
        buffers = sum(buffer.numel() for name, buffer in model.named_buffers() if name in saved)
        yield "parameters", "transformers", buffers + sum(parameter.numel() for parameter in model.parameters())


def weights_of(lines: Iterable[str]) -> dict[str, float]:
    """Return how much each architecture of a list weighs.

    Raises:
        ValueError: a weight is no number.
    """
    weights: dict[str, float] = {}
    for line in lines:
        name, *rest = line.partition("#")[0].split() or ("",)
        if name:
            weights[name] = weights.get(name, 0) + float(rest[0] if rest else 1)
    return weights


def standing(architecture: str) -> str:
    """Return what becomes of models of an architecture, as far as its name tells: one of :data:`STANDINGS`.

    Which of those that transformers has it runs on several devices, only its trial of a small model tells.
    """
    import transformers  # noqa: PLC0415 (only where asked for)

    from tpplan.decoder.model.settings import AROUND, FAMILIES  # noqa: PLC0415 (imports torch)

    tables: dict[str, Family | Wrapper] = {**families.FAMILIES, **WRAPPERS, **DRAFTS}
    known = {name for name, table in tables.items() if architecture in table.architectures}
    if not known:
        return _REFUSED
    if known & {*FAMILIES, *AROUND}:
        return _DECODER
    own = {name for model_type in known for name in tables[model_type].architectures}
    return _TRANSFORMERS if any(hasattr(transformers, name) for name in own) else _PLANNED


_DECODER, _TRANSFORMERS, _PLANNED, _REFUSED = "decoder", "transformers", "planned only", "refused"
#: What may become of an architecture; all but the last are planned.
STANDINGS = (_DECODER, _TRANSFORMERS, _PLANNED, _REFUSED)


def print_standings(weights: Mapping[str, float]) -> None:
    """Print the architectures of each standing, with its share of all weights."""
    total = sum(weights.values())
    groups: dict[str, list[str]] = {each: [] for each in STANDINGS}
    for name in weights:
        groups[standing(name)].append(name)
    for each, names in groups.items():
        share = sum(weights[name] for name in names) / total
        print(f"{each}: {len(names)} of {len(weights)}, {share:.1%}: {', '.join(sorted(names)) or '-'}")
    planned = sum(weights[name] for name in weights if name not in groups[_REFUSED])
    print(f"{len(weights) - len(groups[_REFUSED])} of {len(weights)} architectures are planned, {planned / total:.1%}")


def main() -> int:
    """Print a line for each model and how many there are of each kind, or what becomes of architectures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asks = parser.add_mutually_exclusive_group(required=True)
    asks.add_argument("folder", type=Path, nargs="?")
    asks.add_argument("--architectures", type=Path, metavar="FILE", help="count the architectures of a list instead")
    parser.add_argument("--transformers", action="store_true", help="compare parameters with transformers")
    asked = parser.parse_args()
    if asked.architectures:
        print_standings(weights_of(asked.architectures.read_text(encoding="utf-8").splitlines()))
        return 0
    kinds: Counter[str] = Counter()
    confirmed = 0
    for outcome in outcomes(asked.folder, transformers=asked.transformers):
        kinds[outcome.kind] += 1
        confirmed += outcome.kind == "planned" and outcome.confirmed > 0
        print(f"{outcome.kind:8} {outcome.name}: {outcome.why if outcome.kind == 'wrong' else outcome.why[:_COLUMNS]}")
    of = f"{kinds['planned']} planned ({confirmed} confirmed by another count)"
    print(f"{kinds.total()} models: {of}, {kinds['refused']} refused, {kinds['wrong']} wrong")
    return 1 if kinds["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
