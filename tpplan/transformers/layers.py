"""What modules of a device's model do otherwise than in transformers: the devices' partial results are put together.

A plan's layout ``reduce`` cuts the matrices that project back to the residual stream by their inputs, so that their
outputs are summed; ``gather`` cuts them by their outputs, so that inputs and outputs are joined.
"""

from __future__ import annotations

from itertools import starmap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tpplan.core.axes import Axis
from tpplan.errors import RequestError
from tpplan.transformers.divided import norm_groups, sparsify

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpplan.core.model import Block
    from tpplan.transformers.load import Stored
    from tpplan.transformers.operations import Operations


class Layers:
    """Changes the modules of one device's model."""

    def __init__(
        self,
        model: Any,
        device: int,
        operations: Operations,
        missing: Mapping[int, frozenset[Axis]],
        blocks: Mapping[int, Block],
    ) -> None:
        """Change nothing yet.

        Args:
            model: the device's model.
            device: index of the device.
            operations: the context's.
            missing: for each layer the axes of which the device has no part.
            blocks: what each layer is.
        """
        self._model, self._device, self._operations = model, device, operations
        self._missing, self._blocks = missing, blocks
        self._context = operations.context
        self._layout = self._context.plan.request.layout

    def change(self, sources: Mapping[str, Stored]) -> None:
        """Put operations behind and before modules.

        Args:
            sources: for each parameter of the model a tensor that it is made of.

        Raises:
            RequestError: the plan cuts something that cannot be put together.
        """
        by_module: dict[str, dict[str, Stored]] = {}
        for name, stored in sources.items():
            path, _, leaf = name.rpartition(".")
            by_module.setdefault(path, {})[leaf] = stored
        for path, leaves in by_module.items():
            self._change(path, self._model.get_submodule(path), leaves)
        for path, module in self._model.named_modules():
            if getattr(module, "activation_sparsity", 0):
                layer = by_module[f"{path}.gate_proj"]["weight"].layer or 0
                lacks, columns = self._lacks(Axis.INTERMEDIATE, layer), self._blocks[layer].intermediate
                sparsify(path, module, self._operations, layer, columns, lacks=lacks)
        head = self._model.get_output_embeddings()
        if head.weight is (embedding := self._model.get_input_embeddings()).weight:
            path = next(name for name, module in self._model.named_modules() if module is embedding)
            self._project("the output matrix", head, by_module[path]["weight"])

    def _change(self, path: str, module: nn.Module, leaves: Mapping[str, Stored]) -> None:
        cut = {leaf: axis for leaf, stored in leaves.items() if (axis := self._cut(stored))}
        if isinstance(module, nn.Embedding):
            if cut.get("weight") is Axis.VOCAB:
                self._embed(path, module)
            return
        if "weight" in leaves and self._routes(leaves["weight"]):
            self._decide(path, module, leaves["weight"].layer)
            return
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            self._project(path, module, leaves["weight"])
            return
        if "Norm" in type(module).__name__:
            weight = leaves["weight"]
            if "weight" in cut and len(weight.parameter.shape) == 1:
                self._norm(path, module, weight, cut["weight"])
            return
        for leaf, axis in cut.items():
            if axis is Axis.RESIDUAL:
                message = f"layout gather cuts {path}, whose matrices transformers multiplies together"
                raise RequestError(message, "plan with --layout reduce")
            if self._leads_back(leaves[leaf]):
                self._sum_behind(path, module, axis, leaves)
                return

    def _project(self, path: str, module: nn.Module, weight: Stored) -> None:
        """Join what a matrix leads to or from, if that is cut otherwise than by heads and columns of a layer."""
        axis = self._cut(weight)
        if axis is Axis.VOCAB:
            self._join_behind(path, module, axis, weight)
        elif axis is Axis.RESIDUAL:
            self._join_around(path, module, weight)
        elif axis and self._leads_back(weight):
            self._sum_linear(path, module, axis, weight.layer)
        elif axis is None and weight.parameter.home in {Axis.EXPERT_INTERMEDIATE, Axis.SHARED_INTERMEDIATE}:
            self._spread_behind(path, module, weight.parameter.home, weight.layer)

    def _routes(self, stored: Stored) -> bool:
        """Tell whether a tensor is a router's matrix, which every device with experts has and none cuts."""
        parameter, layer = stored.parameter, stored.layer
        if layer is None or parameter.home is not Axis.EXPERT_INTERMEDIATE or len(parameter.shape) == 1:
            return False
        whole = all(segment.axis is None for dim in parameter.dims for segment in dim)
        return whole and parameter.shape[0] == self._blocks[layer].experts

    def _decide(self, path: str, module: Any, layer: int | None) -> None:
        """Let the first device with experts route tokens for all: unlike GPUs may choose differently at a near tie."""
        before, axis = module.forward, Axis.EXPERT_INTERMEDIATE
        if len(self._context.plan.slices(axis, layer)) == 1:
            return

        def spread(part: int, x: Any) -> Any:
            return self._operations.spread(f"{path}[{part}]", x, axis, layer) if isinstance(x, Tensor) else x

        def forward(*args: Any, **kwargs: Any) -> Any:
            found = before(*args, **kwargs)
            return tuple(starmap(spread, enumerate(found))) if isinstance(found, tuple) else spread(0, found)

        module.forward = forward

    def _cut(self, stored: Stored) -> Axis | None:
        """Return the axis by which a tensor is cut; None if it is not."""
        dim = stored.parameter.cut_dim(self._layout)
        if dim is None:
            return None
        return next((segment.axis for segment in stored.parameter.dims[dim] if segment.axis), None)

    def _leads_back(self, stored: Stored) -> bool:
        """Tell whether a tensor is cut by what it multiplies, so that products are partial sums."""
        dim = stored.parameter.cut_dim(self._layout)
        return dim is not None and dim != stored.parameter.out and len(stored.parameter.shape) > 1

    def _lacks(self, axis: Axis, layer: int | None) -> bool:
        if layer is None:
            return self._device not in self._context.devices_of(axis)
        return axis in self._missing[layer]

    def _sum_linear(self, path: str, module: Any, axis: Axis, layer: int | None) -> None:
        """Sum the products of a matrix, to which its bias is added once."""
        lacks, bias = self._lacks(axis, layer), module.bias
        is_linear = isinstance(module, nn.Linear)
        columns = module.weight.shape[0 if is_linear else 1]

        def forward(x: Tensor) -> Tensor:
            if lacks:
                y = x.new_zeros(*x.shape[:-1], columns)
            else:
                y = functional.linear(x, module.weight) if is_linear else x @ module.weight
            whole = self._operations.sum(path, y, axis, layer)
            return whole if bias is None else whole + bias

        module.forward = forward

    def _spread_behind(self, path: str, module: Any, axis: Axis, layer: int | None) -> None:
        """Tell all devices what a matrix beside experts makes, if only those that have some of these have it.

        Such are the gate of shared experts, and the matrix that leads back from latents: all devices have the sums.
        """
        before = module.forward
        holders = {each.device for each in self._context.plan.slices(axis, layer)}
        if holders.issuperset(self._context.all_devices):
            return

        def forward(x: Tensor) -> Tensor:
            return self._operations.spread(path, before(x), axis, layer)

        module.forward = forward

    def _join_behind(self, path: str, module: Any, axis: Axis, weight: Stored) -> None:
        before, columns = module.forward, weight.parameter.shape[weight.parameter.out or 0]
        lacks = self._lacks(axis, weight.layer)

        def forward(x: Tensor) -> Tensor:
            y = x.new_empty(*x.shape[:-1], 0) if lacks else before(x)
            return self._operations.join(path, y, axis, weight.layer, columns=columns, dim=1)

        module.forward = forward

    def _join_around(self, path: str, module: Any, weight: Stored) -> None:
        """Join what a matrix multiplies, and its products."""
        before, parameter, layer = module.forward, weight.parameter, weight.layer
        out = parameter.out or 0
        inputs = parameter.dims[1 - out]
        axis = next((segment.axis for segment in inputs if segment.axis), None)
        lacks = self._lacks(Axis.RESIDUAL, None)
        width = sum(segment.length for segment in inputs)
        dim = 0
        if axis:
            split = self._context.plan.split(axis, layer)
            dim = width // (split.size // split.replicas)

        def forward(x: Tensor) -> Tensor:
            if axis:
                x = self._operations.join(f"{path} input", x, axis, layer, columns=width, dim=dim)
            y = x.new_empty(*x.shape[:-1], 0) if lacks else before(x)
            return self._operations.join(path, y, Axis.RESIDUAL, None, columns=parameter.shape[out], dim=1)

        module.forward = forward

    def _sum_behind(self, path: str, module: Any, axis: Axis, leaves: Mapping[str, Stored]) -> None:
        """Sum what a module of several matrices gives, such as experts; biases behind the cut count on one device."""
        layer = next(iter(leaves.values())).layer
        before, lacks = module.forward, self._lacks(axis, layer)
        if not lacks and self._context.plan.slices(axis, layer)[0].device != self._device:
            for leaf, stored in leaves.items():
                if "bias" in leaf and self._cut(stored) is None:
                    zeros = torch.zeros_like(getattr(module, leaf))
                    setattr(module, leaf, nn.Parameter(zeros, requires_grad=False))

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            y = torch.zeros_like(x) if lacks else before(x, *args, **kwargs)
            return self._operations.sum(path, y, axis, layer)

        module.forward = forward

    def _embed(self, path: str, module: Any) -> None:
        """Look tokens up on the device that has their row, and sum what all find: nothing, but on one of them."""
        before, module.padding_idx = module.forward, None  # of the whole vocabulary; it only matters in training
        part = {each.device: each for each in self._context.plan.slices(Axis.VOCAB)}.get(self._device)

        def forward(tokens: Tensor) -> Tensor:
            if part is None:
                y = module.weight.new_zeros(*tokens.shape, module.weight.shape[-1])
            else:
                inside = (tokens >= part.start) & (tokens < part.end)
                y = before((tokens - part.start).clamp(0, part.end - part.start - 1)) * inside.unsqueeze(-1)
            return self._operations.sum(path, y, Axis.VOCAB, None)

        module.forward = forward

    def _norm(self, path: str, module: Any, weight: Stored, axis: Axis) -> None:
        """Normalise columns of all devices together.

        Raises:
            RequestError: it is no norm by the root of the mean square.
        """
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if epsilon is None or getattr(module, "bias", None) is not None:
            message = f"{path} ({type(module).__name__}) normalises columns that the plan divides"
            raise RequestError(message, "run it by tpplan's decoder (--engine tpplan)")
        layer, columns = weight.layer, weight.parameter.shape[0]
        linear = self._blocks[layer].linear if layer is not None else None
        if axis is Axis.LINEAR_HEADS and linear and layer is not None:
            norm_groups(path, module, self._operations, linear, layer, device=self._device, epsilon=epsilon)
            return
        lacks = self._lacks(axis, layer)

        def forward(x: Tensor) -> Tensor:
            wide = x.float()
            own = wide.new_zeros(*x.shape[:-1], 1) if lacks else wide.square().sum(-1, keepdim=True)
            mean = self._operations.sum(path, own, axis, layer) / columns
            normed: Tensor = module.weight * (wide * torch.rsqrt(mean + epsilon))
            return normed.to(x.dtype)

        module.forward = forward
