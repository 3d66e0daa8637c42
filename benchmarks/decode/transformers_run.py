"""transformers, greedy with a static cache, in one process for each GPU; the first prints a line for each figure.

More than one process split the model among themselves, as ``tp_plan="auto"`` has it.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import transformers

from benchmarks.decode.order import WARM, Order, long_prompt, prompts, synchronize
from benchmarks.decode.rows import Part

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from benchmarks.decode.rows import Row

_PREFILLS = 3


@torch.inference_mode()
def measure(order: Order, rank: int, tell: Callable[[Row], None]) -> None:
    """Load the checkpoint and measure the same as of tpplan."""
    transformers.logging.set_verbosity_error()
    place = order.places()[rank]
    if place.type == "cuda":
        torch.cuda.set_device(place)
    part = Part(tell, gpus=order.gpus, cut="even", who="transformers")
    began = time.perf_counter()
    model = _load(order, place)
    synchronize([place])
    note = f"transformers {transformers.__version__}, torch {torch.__version__}"
    part.row("load", time.perf_counter() - began, "s", note=note)
    given = torch.tensor(prompts(max(order.batches), model.config.vocab_size), device=place)
    for batch in order.batches:
        what = f"decode, batch {batch}"
        with part.guarded(what):
            first, seconds, tokens = _decode(model, given[:batch], order.tokens)
            if batch == order.batches[0]:
                part.row("first token, after the process started", first - order.started, "s")
            median = statistics.median(seconds)
            part.row(what, batch / median, "tokens/s", note=f"{median * 1e3:.2f} ms a step", tokens=tokens)
    what = f"prefill of {order.prefill} tokens"
    with part.guarded(what):
        prompt = torch.tensor([long_prompt(order.prefill, model.config.vocab_size)], device=place)
        median = statistics.median(_prefill(model, prompt))
        part.row(what, order.prefill / median, "tokens/s", note=f"{median * 1e3:.1f} ms")
    if place.type == "cuda":
        part.row("device 0, torch's peak", torch.cuda.max_memory_allocated(place) / 2**20, "MiB")


def _load(order: Order, place: torch.device) -> Any:
    load = transformers.AutoModelForCausalLM.from_pretrained
    if order.gpus > 1:
        return load(order.directory, dtype="auto", tp_plan="auto").eval()
    return load(order.directory, dtype="auto").to(place).eval()


def _decode(model: Any, given: Tensor, count: int) -> tuple[float, list[float], list[int]]:
    """Return when the first token was there, the seconds of each step, and the tokens of the first sequence."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=given.shape[1] + WARM + count + 1)
    found = _step(model, given, cache)
    first, tokens, seconds = time.time(), [found[0]], []
    for _ in range(WARM + count):
        start = time.perf_counter()
        found = _step(model, torch.tensor(found, device=given.device)[:, None], cache)
        seconds.append(time.perf_counter() - start)
        tokens.append(found[0])
    return first, seconds[WARM:], tokens


def _step(model: Any, tokens: Tensor, cache: Any) -> list[int]:
    """Return the token that follows each sequence, on the host."""
    logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    found: list[int] = logits[:, -1].argmax(-1).tolist()
    return found


def _prefill(model: Any, prompt: Tensor) -> list[float]:
    """Return the seconds that a long prompt takes, each time with a new cache."""
    seconds = []
    for _ in range(1 + _PREFILLS):
        start = time.perf_counter()
        model(prompt, use_cache=True, logits_to_keep=1)
        synchronize([prompt.device])
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def _tell(row: Row) -> None:
    print(row.line(), flush=True)


if __name__ == "__main__":
    _rank = int(os.environ["RANK"])
    measure(Order.load(sys.argv[1]), _rank, _tell if _rank == 0 else lambda _: None)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
