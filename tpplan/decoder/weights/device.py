"""The weights of a model on one device, in the form that the decoder computes with."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen
from torch import Tensor

from tpplan.decoder.weights.quantised import Matrix, Quantised
from tpplan.decoder.weights.stacked import Projection, Stacked


@frozen(eq=False)
class DeviceWeights:
    """The weights of one device by name, with matrices fused and experts stacked where possible.

    Attributes:
        tensors: all weights that are not quantised.
        quantised: quantised matrices, under the names that they would have unquantised.
        stacked: quantised experts of a layer, under the name with ``{expert}`` in it.
    """

    tensors: Mapping[str, Tensor]
    quantised: Mapping[str, Quantised] = field(factory=dict)
    stacked: Mapping[str, Stacked] = field(factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def find(self, name: str) -> Matrix | None:
        """Return the matrix of a module; None if the device has none."""
        found = self.tensors.get(f"{name}.weight")
        return self.quantised.get(f"{name}.weight") if found is None else found

    def matrix(self, name: str) -> Matrix:
        """Return the matrix of a module.

        Raises:
            KeyError: the device has none.
        """
        found = self.find(name)
        if found is None:
            raise KeyError(name)
        return found

    def bias(self, name: str) -> Tensor | None:
        """Return the bias of a module, or None if it has none."""
        return self.tensors.get(f"{name}.bias")

    def experts(self, name: str, *, bias: bool = True) -> Projection:
        """Return a projection of a layer's experts; with its biases if it has them and ``bias`` is true."""
        found = self.tensors.get(name)
        return Projection(self.stacked[name] if found is None else found, self.bias(name) if bias else None)
