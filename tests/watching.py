"""What watches everything that torch is told to do."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of torch's, of which its compiler is told nothing: that would load it, for seconds."""

    def __init_subclass__(cls) -> None:
        """Leave everything as it is."""
