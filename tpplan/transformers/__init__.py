"""Models of transformers, sharded by a plan, unevenly, and run by transformers' own code.

:func:`shard` builds a model on every device with the device's slices as its parameters. ``build`` sets the counts that
modules read, ``load`` puts weights where transformers has them, ``layers`` puts the context's operations behind the
modules whose outputs are partial, ``lockstep`` runs the devices' models side by side, and ``cache`` gives each device a
cache of its own behind the one that transformers sees.

Names are imported when they are first used, as in ``tpplan`` itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.core.missing import on_first_use

if TYPE_CHECKING:
    from tpplan.transformers.sharding import shard

__all__ = ["shard"]

__getattr__ = on_first_use(__name__, {"shard": "sharding"}, "transformers")
