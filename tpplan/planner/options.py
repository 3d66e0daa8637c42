"""The options of ``tpplan plan``, with their defaults: what a plan is asked for beside its model and its devices."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from attrs import fields, frozen

from tpplan.core.plan import AUTO, CACHE_KINDS, KV_MODES, LAYOUTS, STRATEGIES, Cache, Request, Reserve
from tpplan.core.sizes import parse_bytes
from tpplan.errors import DeviceError, RequestError

if TYPE_CHECKING:
    from tpplan.core.model import ModelSpec

DEFAULT_MAX_ROWS: Final = 2048

#: The values of those options that have a few.
CHOICES: Final = {
    "cache": tuple(CACHE_KINDS),
    "layout": LAYOUTS,
    "strategy": (AUTO, *STRATEGIES),
    "kv": KV_MODES,
}

_INDEX: Final = re.compile("[0-9]{1,9}")
_HINT: Final = "write --reserve 2GiB for every device, or --reserve 2GiB@0 for the first one"


@frozen(kw_only=True)
class Options:
    """What a plan is asked for.

    Attributes:
        context: tokens per sequence; None for the longest that the model was made for.
        batch: sequences that share the cache.
        cache: kind of the cache.
        layout: ``reduce`` or ``gather``; empty for ``reduce``, and ``gather`` where the weights' rows cannot be cut.
        strategy: ``auto`` or one of the planner's.
        max_rows: tokens in the largest forward pass.
        kv: use of devices in excess of the KV heads.
        tokens: in the cache, a pool that the sequences share; None for equal parts.
        full_window: whether layers with a sliding window keep all tokens.
        beyond: whether a context longer than the model's is accepted.
        reserve: memory to leave to something else, each as :func:`parse_reserve` takes it.
        mtp: whether to leave room for the model's prediction layers, split like the model.
    """

    context: int | None = None
    batch: int = 1
    cache: str = "fp16"
    layout: str = ""
    strategy: str = AUTO
    max_rows: int = DEFAULT_MAX_ROWS
    kv: str = "idle"
    tokens: int | None = None
    full_window: bool = False
    beyond: bool = False
    reserve: tuple[str, ...] = ()
    mtp: bool = False

    def request(self, model: ModelSpec) -> Request:
        """Return the request for a model, before the planner fills in what depends on it.

        Raises:
            RequestError: the context or the tokens are less than 1, or a reserve is no size.
        """
        for option, value, usual in (("context", self.context, "the longest"), ("tokens", self.tokens, "equal parts")):
            if value is not None and value < 1:
                raise RequestError(f"--{option} is {value}, expected 1 or more tokens", f"leave it out for {usual}")
        return Request(
            layout=self.layout,
            strategy=self.strategy,
            cache=Cache(self.cache, self.tokens or 0),
            batch=self.batch,
            max_rows=self.max_rows,
            kv=self.kv,
            context=self.context or min(self.tokens or 0, model.max_context),
            full_window=self.full_window,
            beyond=self.beyond,
            reserve=tuple(map(parse_reserve, self.reserve)),
            mtp=self.mtp,
        )


#: The options' defaults by their names on the command line and in a manifest.
USUAL: Final = {field.name.replace("_", "-"): field.default for field in fields(Options)}


def parse_reserve(text: str) -> Reserve:
    """Parse ``SIZE`` (on every device that has no reserve of its own) or ``SIZE@DEVICE``, such as ``2GiB@0``.

    Raises:
        RequestError: the size is none, or the device is no index.
    """
    size, at, device = (part.strip() for part in text.partition("@"))
    if at and not _INDEX.fullmatch(device):
        raise RequestError(f"--reserve is {text[:40]!r}, and {device[:20]!r} is not the index of a device", _HINT)
    try:
        return Reserve(parse_bytes(size), int(device) if at else -1)
    except DeviceError as error:
        raise RequestError(f"--reserve is {text[:40]!r}: {error.message}", error.hint) from error
