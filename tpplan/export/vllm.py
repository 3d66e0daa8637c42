"""vLLM, which cuts evenly."""

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

_CACHES = with_fp8("fp8")


def _used_share(plan: Facts) -> str:
    """Return the largest part of a device's whole memory that the plan uses or leaves to what drafts.

    The engine loads a draft model, and caches its keys and values, within its share. It refuses a share that is not
    free when it starts: then a part of the overhead is taken, so a plan that fills a device gets what budgets allow.
    """
    need, _ = even_bytes(plan, plan.count, _CACHES[plan.request.cache.kind].sixteenths)
    need += even_draft_bytes(plan, plan.count)
    pairs = zip(plan.devices, plan.whole_bytes, strict=True)
    return min(max(share(need + device.overhead_bytes, whole) for device, whole in pairs), _budget_share(plan))


def _budget_share(plan: Facts) -> str:
    """Return the least part of a device's whole memory that is free once a process runs and in its budget."""
    rows = zip(plan.memory, plan.whole_bytes, strict=True)
    ppt = min(
        (entry.used_bytes - entry.overhead_bytes + entry.draft_bytes + entry.free_bytes) * 1000 // whole
        for entry, whole in rows
    )
    return f"{ppt // 1000}.{ppt % 1000:03}"


def _differs(plan: Facts) -> Iterator[str]:
    yield from uneven_parts(plan)
    most = _budget_share(plan)
    more = "no more" if most == _used_share(plan) else f"--gpu-memory-utilization {most}"
    yield (
        "of its share of memory, all that weights and its own buffers leave is cache; if that is too little, the "
        f"budgets allow {more}"
    )
    whole = min(plan.whole_bytes)
    yield f"shares are of all memory of a GPU, which is taken as {format_bytes(whole)}"
    yield "it pads the vocabulary to a multiple of 64 and does not cut the residual stream"


def _draft(kind: str) -> str:
    method = f"{KINDS[kind].vllm}, " if kind else ""
    return f'--speculative-config \'{{"model": "{DRAFT}", {method}"num_speculative_tokens": N}}\''


ENGINE = Engine(
    name=EngineName.VLLM,
    version="vLLM 0.33.0",
    command=("vllm", "serve", MODEL),
    flags={
        "--tensor-parallel-size": lambda plan: plan.count,
        "--gpu-memory-utilization": _used_share,
        "--max-model-len": lambda plan: plan.request.sequence_tokens,
        "--max-num-seqs": lambda plan: plan.request.batch,
        "--max-num-batched-tokens": lambda plan: max(plan.request.max_rows, plan.request.batch),
        "--kv-cache-dtype": lambda plan: _CACHES[plan.request.cache.kind].name,
    },
    caches=_CACHES,
    allows_beyond="VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    differs=_differs,
    draft=_draft,
    mtp='--speculative-config \'{"method": "mtp", "num_speculative_tokens": N}\'',
    no_gguf="which it reads by a plugin only (vllm-gguf-plugin), of whose cuts and bytes tpplan knows nothing",
    counts_draft=True,
    cuts_evenly=True,
    repeats_heads=True,
)
