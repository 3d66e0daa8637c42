"""A model's shapes and sizes, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.core.model import NotPlanned
from tpplan.core.sizes import format_bytes
from tpplan.render.text import BLANK, PLAIN_COLUMNS, line, table

if TYPE_CHECKING:
    from tpplan.render.text import Line

_BILLION = 10**9
_MILLION = 10**6


def inspection(data: dict[str, Any], _columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out an :class:`~tpplan.reports.inspect.Inspection`."""
    d = data
    linear = f"{d['linear_key_heads']} key heads", f"{d['linear_value_heads']} value heads"
    tied = "tied to the embedding" if d["tied_embeddings"] else "apart from the embedding"
    missing = [NotPlanned(**part) for part in d.get("not_planned", ())]
    rows = [
        ("parameters", f"{d['parameters']:,}", _count(d["parameters"])),
        ("weights", f"{d['weight_bytes']:,} bytes", f"{format_bytes(d['weight_bytes'])} in {d['weight_format']}"),
        *([("assumed", "", d["assumed"])] if "assumed" in d else []),
        *(("not planned", f"{part.bytes:,} bytes" if part.bytes else "", part.text) for part in missing),
        ("layers", str(d["layers"]), ""),
        ("hidden size", str(d["hidden_size"]), ""),
        ("intermediate size", str(d["intermediate_size"]), f"{d['experts']} experts" if d["experts"] else ""),
        ("attention", f"{d['q_heads']} query heads", f"{d['kv_heads']} KV heads of {d['head_dim']}"),
        *([("linear attention", *linear)] if d["linear_key_heads"] else []),
        ("vocabulary", str(d["vocab_size"]), f"output matrix {tied}"),
        ("context", f"{d['max_context']} tokens", d["context_basis"] or "the longest that the model was made for"),
    ]
    each, whole, tokens = d["cache_bytes_per_token"], d["max_context_cache_bytes"], d["max_context"]
    cache = [
        (kind, f"{size:,} bytes", f"{format_bytes(whole[kind])} for {tokens} tokens") for kind, size in each.items()
    ]
    state = d["state_bytes_per_sequence"]
    windows = ", until the sliding windows are full" if whole["fp16"] - state < each["fp16"] * tokens else ""
    beside = f", beside {format_bytes(state)} of state per sequence" if state else ""
    return [
        ((d["architecture"], "title"), (f"  {d['model_type']}", "dim")),
        *table([[("", ""), (label, "dim"), (value, ""), (more, "dim")] for label, value, more in rows], "<<><"),
        BLANK,
        line(f"Cache per token{windows}{beside}", "head"),
        *table([[("", ""), (label, "dim"), (value, ""), (more, "dim")] for label, value, more in cache], "<<><"),
        BLANK,
        line(d["fingerprint"], "dim"),
    ]


def _count(number: int) -> str:
    """Write a number of parameters as people say it: ``8.03 billion``."""
    return f"{number / _BILLION:.2f} billion" if number >= _BILLION else f"{number / _MILLION:.2f} million"
