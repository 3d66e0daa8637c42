"""A model's shapes and sizes, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpplan.core.model import NotPlanned
from tpplan.core.sizes import counted, format_bytes
from tpplan.render.text import BLANK, PLAIN_COLUMNS, line, shorten_layers, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpplan.render.text import Line

_BILLION = 10**9
_MILLION = 10**6
_LONGEST_LAYERS = 24
#: What layers may differ in.
_HEADS = ("q_heads", "kv_heads", "head_dim")
#: Headings of the columns of a kind.
_COLUMNS = {
    "q_heads": "query heads",
    "kv_heads": "KV heads",
    "head_dim": "head size",
    "window": "window",
    "linear_key_heads": "linear key",
    "linear_value_heads": "value heads",
    "intermediate_size": "MLP",
    "experts": "experts",
    "expert_intermediate_size": "expert size",
    "shared_intermediate_size": "shared",
}
_LINEAR = ("linear_key_heads", "linear_value_heads")
_MLP = ("intermediate_size", "experts", "expert_intermediate_size")


def inspection(data: dict[str, Any], _columns: int = PLAIN_COLUMNS) -> list[Line]:
    """Lay out an :class:`~tpplan.reports.inspect.Inspection`."""
    d = data
    linear = f"{d['linear_key_heads']} key heads", f"{d['linear_value_heads']} value heads"
    tied = "tied to the embedding" if d["tied_embeddings"] else "apart from the embedding"
    missing = [NotPlanned(**part) for part in d.get("not_planned", ())]
    kinds = d.get("layer_kinds", ())
    width = str(d["intermediate_size"]), counted(d["experts"], "expert") if d["experts"] else ""
    heads = f"{d['q_heads']} query heads", f"{d['kv_heads']} KV heads of {d['head_dim']}"
    rows = [
        ("parameters", f"{d['parameters']:,}", _count(d["parameters"])),
        ("weights", f"{d['weight_bytes']:,} bytes", f"{format_bytes(d['weight_bytes'])} in {d['weight_format']}"),
        *([("assumed", "", d["assumed"])] if "assumed" in d else []),
        *(("not planned", f"{part.bytes:,} bytes" if part.bytes else "", part.text) for part in missing),
        ("layers", str(d["layers"]), f"of {len(kinds)} kinds" if kinds else ""),
        ("hidden size", str(d["hidden_size"]), ""),
        *(
            (label, *told)
            for label, told, keys in (
                ("intermediate size", width, _MLP),
                ("attention", heads, _HEADS),
                ("linear attention", linear, _LINEAR),
            )
            if d[keys[0]] and not _differ(kinds, keys)
        ),
        ("vocabulary", str(d["vocab_size"]), f"output matrix {tied}"),
    ]
    each, whole, tokens = d["cache_bytes_per_token"], d["max_context_cache_bytes"], d["max_context"]
    if has_cache := whole["fp16"] > 0:
        basis = d["context_basis"] or "the longest that the model was made for"
        rows.append(("context", counted(tokens, "token"), basis))
    cache = [
        (kind, f"{size:,} bytes", f"{format_bytes(whole[kind])} for {counted(tokens, 'token')}")
        for kind, size in each.items()
        if has_cache
    ]
    state = d["state_bytes_per_sequence"]
    windows = ", until the sliding windows are full" if whole["fp16"] - state < each["fp16"] * tokens else ""
    beside = f", beside {format_bytes(state)} of state per sequence" if state else ""
    return [
        ((d["architecture"], "title"), (f"  {d['model_type']}", "dim")),
        *table([[("", ""), (label, "dim"), (value, ""), (more, "dim")] for label, value, more in rows], "<<><"),
        BLANK,
        *(_kinds(kinds) if kinds else []),
        line(f"Cache per token{windows}{beside}" if has_cache else "No cache", "head"),
        *table([[("", ""), (label, "dim"), (value, ""), (more, "dim")] for label, value, more in cache], "<<><"),
        BLANK,
        line(d["fingerprint"], "dim"),
    ]


def _differ(kinds: Sequence[dict[str, Any]], keys: tuple[str, ...]) -> bool:
    """Tell whether layers that have something differ in it; what has no MLP, or no attention, is no other size."""
    found = {tuple(kind.get(key, 0) for key in keys) for kind in kinds}
    return len(found - {(0,) * len(keys)}) > 1


def _kinds(kinds: Sequence[dict[str, Any]]) -> list[Line]:
    """Return a row for each kind of layers, with a column for each number that one of them has."""
    keys = [key for key in _COLUMNS if any(key in kind for kind in kinds)]
    rows = [[("", ""), ("layers", "dim"), *((_COLUMNS[key], "dim") for key in keys)]]
    for kind in kinds:
        layers = (shorten_layers(kind["layers"], _LONGEST_LAYERS), "")
        rows.append([("", ""), layers, *((str(kind.get(key, "-")), "") for key in keys)])
    return [line("Kinds of layers", "head"), *table(rows, "<<" + ">" * len(keys)), BLANK]


def _count(number: int) -> str:
    """Write a number of parameters as people say it: ``8.03 billion``."""
    return f"{number / _BILLION:.2f} billion" if number >= _BILLION else f"{number / _MILLION:.2f} million"
