"""SGLang, which cuts evenly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.core.sizes import format_bytes
from tpplan.export.engine import DRAFT, MODEL, Engine, with_fp8
from tpplan.export.even import even_bytes, even_draft_bytes, uneven_parts
from tpplan.export.facts import share
from tpplan.export.names import EngineName
from tpplan.models.families.drafts import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.export.facts import Facts

_CACHES = with_fp8("fp8_e4m3")


def _static_share(plan: Facts) -> str:
    """Return the largest part that weights and cache, also of what drafts, take of what is free once a process runs."""
    need, _ = even_bytes(plan, plan.count, _CACHES[plan.request.cache.kind].sixteenths)
    need += even_draft_bytes(plan, plan.count) - min(entry.workspace_bytes for entry in plan.memory)
    pairs = zip(plan.devices, plan.whole_bytes, strict=True)
    return max(share(need, whole - device.overhead_bytes) for device, whole in pairs)


def _differs(plan: Facts) -> Iterator[str]:
    yield from uneven_parts(plan)
    least = min(whole - device.overhead_bytes for device, whole in zip(plan.devices, plan.whole_bytes, strict=True))
    yield (
        "its share is that of weights and cache in what is free when it starts, which is taken as "
        f"{format_bytes(least)}; activations and CUDA graphs take from the rest, beyond the plan's budget too"
    )
    yield "it pads the vocabulary and does not cut the residual stream"


def _draft(kind: str) -> str:
    algorithm = KINDS[kind].sglang if kind else "STANDALONE"
    return algorithm and f"--speculative-draft-model-path {DRAFT} --speculative-algorithm {algorithm}"


ENGINE = Engine(
    name=EngineName.SGLANG,
    version="SGLang 0.5.23",
    command=("sglang", "serve", "--model-path", MODEL),
    flags={
        "--tp-size": lambda plan: plan.count,
        "--mem-fraction-static": _static_share,
        "--context-length": lambda plan: plan.request.sequence_tokens,
        "--max-running-requests": lambda plan: plan.request.batch,
        "--chunked-prefill-size": lambda plan: plan.request.max_rows,
        "--kv-cache-dtype": lambda plan: _CACHES[plan.request.cache.kind].name,
    },
    caches=_CACHES,
    allows_beyond="SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    differs=_differs,
    draft=_draft,
    mtp="--speculative-algorithm NEXTN",
    no_gguf="and tpplan does not know which GGUF files it reads, and by which cuts",
    counts_draft=True,
    cuts_evenly=True,
    repeats_heads=True,
)
