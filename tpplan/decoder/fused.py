"""What a CUDA device computes in a layer by kernels of tpplan, each of which does what torch does in several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.decoder.plain import Plain
from tpplan.decoder.pointwise import DTYPES, Places, Pointwise
from tpplan.decoder.settings import ACTIVATIONS
from tpplan.exec import kernel_cache

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tpplan.decoder.heads import Heads
    from tpplan.decoder.plain import Turn
    from tpplan.decoder.settings import Settings


def steps_on(place: torch.device, dtype: torch.dtype, settings: Settings) -> Plain:
    """Return what computes the steps of layers on a device: by kernels where there are any.

    Args:
        place: the device.
        dtype: of the activations.
        settings: of the model.
    """
    if has_kernels(place, dtype):
        return Fused(place, dtype, settings)
    return Plain(settings.norm_eps, settings.activation)


def has_kernels(place: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether there are kernels for activations of a dtype on a device."""
    return place.type == "cuda" and dtype in DTYPES and not kernel_cache.lacks()


class Fused(Plain):
    """The steps of a layer in 16 bits; what its kernels do not take is left to torch."""

    def __init__(self, place: torch.device, dtype: torch.dtype, settings: Settings) -> None:
        """Load the kernels.

        Args:
            place: a CUDA device.
            dtype: of the activations, of 16 bits.
            settings: of the model.
        """
        super().__init__(settings.norm_eps, settings.activation)
        activation = next(name for name, each in ACTIVATIONS.items() if each is settings.activation)
        self._pointwise = Pointwise(place, dtype, settings.norm_eps, activation)

    def norm(self, x_RD: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Return rows behind a norm."""
        found = self._pointwise.norm(x_RD, weight, out)
        return super().norm(x_RD, weight, out) if found is None else found

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Multiply the activation of one tensor by another, and return the former, which is written over."""
        return gate if self._pointwise.gate(gate, up) else super().gate(gate, up)

    def turn(self, qkv_RHK: Tensor, heads: Heads, turn: Turn) -> None:
        """Turn the query and key heads of rows where they are, behind their norms."""
        if not self._pointwise.turn(qkv_RHK, (heads.queries, heads.keys), turn.angles, turn.norms):
            super().turn(qkv_RHK, heads, turn)

    def keep(
        self,
        qkv_RHK: Tensor,
        heads: Heads,
        turn: Turn,
        sequences: Tensor,
        places: Tensor,
        *,
        kept: Tensor | None = None,
    ) -> None:
        """Do that, and write the keys and values to the heads' cache."""
        if heads.cache.is_plain:
            to = Places(*heads.cache.in_a_row(), sequences, places)
            if self._pointwise.turn(qkv_RHK, (heads.queries, heads.keys), turn.angles, turn.norms, to):
                return
        super().keep(qkv_RHK, heads, turn, sequences, places, kept=kept)
