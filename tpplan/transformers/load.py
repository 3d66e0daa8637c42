"""The weights of a device where transformers has them: its names, its stacked experts, its dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from tpplan.core.model import Parameter
from tpplan.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@frozen
class Stored:
    """A tensor of a checkpoint.

    Attributes:
        parameter: what it is in the model.
        layer: its layer; None outside of layers.
    """

    parameter: Parameter
    layer: int | None


class Names:
    """Where transformers has the tensors of a checkpoint, and what it makes of them.

    Attributes:
        sources: for each parameter or buffer of the model a tensor that it is made of.
    """

    def __init__(self, model: Any, stored: Mapping[str, Stored], rename: Mapping[str, str]) -> None:
        """Look up all names.

        Args:
            model: a model of transformers, whole or not.
            stored: the tensors of the checkpoint.
            rename: starts of names, and what the model has in their place.

        Raises:
            ModelError: the model has no such parameter.
        """
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._converter = {pattern: each for each in converters for pattern in each.source_patterns}
        self._stored = stored
        self._targets: dict[str, tuple[str, str | None]] = {}
        self.sources: dict[str, Stored] = {}
        known = model.state_dict()
        for name in sorted(stored, key=dot_natural_key):
            start = next(filter(name.startswith, rename), "")
            own = rename.get(start, "") + name.removeprefix(start)
            target, pattern = rename_source_key(own, renamings, converters, model.base_model_prefix, known)
            if target not in known and own in known:
                target, pattern = own, None
            if target not in known:
                message = f"{type(model).__name__} of transformers has no place for the tensor {name[:120]}"
                raise ModelError(
                    message, "run it by tpplan's decoder (--engine tpplan), or by another release of transformers"
                )
            self._targets[name] = target, pattern
            self.sources[target] = stored[name]
        self._made = {target for target, pattern in self._targets.values() if pattern is not None}

    def written(self, state: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield a model's tensors as its checkpoints have them.

        Args:
            state: what the model has, by its own names.
            known: some of the tensors; others are rows of the model's.
        """
        together: dict[str, list[tuple[int, str]]] = {}
        for name, (target, pattern) in self._targets.items():
            place = self._converter[pattern].source_patterns.index(pattern) if pattern else 0
            together.setdefault(target, []).append((place, name))
        for target, places in together.items():
            parts = [name for _, name in sorted(places)]
            if known.keys() >= {*parts}:
                yield from ((name, known[name]) for name in parts)
                continue
            rows = [self._stored[name].parameter.shape[0] for name in parts]
            yield from zip(parts, torch.split(state[target], rows), strict=True)

    def converts(self, target: str) -> bool:
        """Tell whether a parameter of the model is made of tensors in a way of its own, such as several together."""
        return target in self._made

    def stacks(self, tensors: Mapping[str, Tensor]) -> bool:
        """Tell whether some of a device's tensors are put together in new ones."""
        return any(pattern is not None and name in tensors for name, (_, pattern) in self._targets.items())

    def converted(self, model: Any, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers that a device's tensors make.

        Args:
            model: the model of the device.
            tensors: its slices by name.
        """
        collected: dict[str, Any] = {}
        for name, (target, pattern) in self._targets.items():
            if name not in tensors:
                continue
            if pattern is None:
                yield target, tensors[name]
                continue
            if target not in collected:
                collected[target] = deepcopy(self._converter[pattern])
            collected[target].add_tensor(target, name, pattern, tensors[name])
        for target in [*collected]:
            made = collected.pop(target).convert(target, model=model, config=model.config)
            for name, value in made.items():
                yield name, value[0] if isinstance(value, Sequence) else value


def put(model: Any, name: str, tensor: Tensor) -> None:
    """Make a tensor a parameter or buffer of a model, whatever shape it had."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:  # noqa: SLF001 (what register_buffer fills)
        module._buffers[leaf] = tensor  # noqa: SLF001
    else:
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))


def dtypes(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of every parameter and buffer of a model, as ``from_pretrained`` would give it."""
    kept = model._get_dtype_plan(dtype)  # noqa: SLF001 (what from_pretrained asks)
    return {
        name: next((of for part, of in kept.items() if part in name), tensor.dtype)
        for name, tensor in model.state_dict().items()
    }
