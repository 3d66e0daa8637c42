"""What a device holds of a model's weights, as the decoder computes with them."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen
from torch import Tensor

from tpplan.decoder.quantised import Matrix, Quantised, Stacked


@frozen(eq=False)
class Held:
    """Weights by name, those of matrices and experts fused or stacked where they can be.

    Attributes:
        tensors: all that are not quantised.
        quantised: matrices that are, under the name that such a one has otherwise.
        stacked: quantised experts of a layer, under the name that has ``{expert}`` in it.
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
        """Return the matrix of a module, which the device has."""
        found = self.find(name)
        if found is None:
            raise KeyError(name)
        return found

    def bias(self, name: str) -> Tensor | None:
        """Return the bias of a module, if it has one."""
        return self.tensors.get(f"{name}.bias")

    def experts(self, name: str) -> Tensor | Stacked:
        """Return the matrices of a layer's experts."""
        found = self.tensors.get(name)
        return self.stacked[name] if found is None else found
