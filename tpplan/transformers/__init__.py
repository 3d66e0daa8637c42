"""Models of transformers, sharded by a plan, unevenly, and run by transformers' own code.

:func:`shard` builds a model on every device with the device's slices as its parameters. ``build`` sets the counts that
modules read, ``load`` puts weights where transformers has them, ``layers`` puts the context's operations behind the
modules whose outputs are partial, ``lockstep`` runs the devices' models side by side, and ``cache`` gives each device a
cache of its own behind the one that transformers sees.

Names are imported when they are first used, as in ``tpplan`` itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.core.missing import needing

if TYPE_CHECKING:
    from tpplan.transformers.sharding import shard

__all__ = ["shard"]


def __getattr__(name: str) -> object:
    """Import a public name from its module.

    Raises:
        MissingError: torch or transformers is not installed.
    """
    if name != "shard":
        message = f"module 'tpplan.transformers' has no attribute {name!r}"
        raise AttributeError(message)
    with needing("tpplan.transformers.shard", "transformers"):
        from tpplan.transformers.sharding import shard  # noqa: PLC0415

        return shard
