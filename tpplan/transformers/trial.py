"""A trial of a small random model of a config's kind, whole and sharded, before anything large is loaded.

transformers has hundreds of models, and each release changes some. What :mod:`tpplan.transformers` does to modules
follows rules; the trial finds where they do not hold.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from tpplan.core.axes import bounds_of, minimum_units
from tpplan.core.device import Device
from tpplan.core.plan import Cache, Request
from tpplan.errors import RequestError, TpplanError
from tpplan.exec import compile as compile_plan
from tpplan.models.reader import read_model
from tpplan.planner.attempt import Attempt
from tpplan.planner.ledger import demands, ledger
from tpplan.transformers.assembly import assemble, names_of
from tpplan.transformers.build import initialise_buffers
from tpplan.transformers.classes import on_meta, runnable, text_of
from tpplan.transformers.small import small
from tpplan.weights import load_weights
from tpplan.weights.source import Source

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan
    from tpplan.planner.costs import Demand

#: The hint where transformers cannot run a model on several devices.
ELSEWHERE: Final = "run it by tpplan's decoder (--engine tpplan) if that knows it; docs/run-a-model.md lists what runs"

#: Tokens of the trial's prompt, and those that follow.
_PROMPT: Final = 11
_NEW: Final = 3
#: Most difference of logits, as a part of the largest; sums of float32 in other orders differ by a hundredth of it.
_MOST_ERROR: Final = 1e-4

#: Families of which transformers writes tensors under names of others, though it reads both; and what is in the names
#: of those that are right.
_MISNAMED: Final = {"kimi_linear": ".experts.", "olmo_hybrid": "embed_tokens"}


def check_small_model(config: Any, layout: str, kv: str) -> None:
    """Compare a small random model of a kind, whole and sharded over three virtual devices.

    Args:
        config: a language model's config, of transformers.
        layout: layout of the plan.
        kv: where the plan has KV heads.

    Raises:
        RequestError: the logits differ, or the model cannot be sharded; with the reason.
    """
    name = type(config).__name__.removesuffix("Config")
    try:
        error = _difference(config, layout, kv)
    except TpplanError as reason:
        message = f"transformers' {name} does not run on several devices: {reason.message}"
        raise RequestError(message, reason.hint or ELSEWHERE) from reason
    except Exception as reason:
        message = f"transformers' {name} does not run on several devices: a small one failed ({_line(reason)})"
        raise RequestError(message, ELSEWHERE) from reason
    if not error < _MOST_ERROR:
        message = f"transformers' {name} does not run on several devices: logits of a small one differ by {error:.1e}"
        raise RequestError(message, ELSEWHERE)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"


def _difference(config: Any, layout: str, kv: str) -> float:
    """Return the largest difference of logits between a small model and its parts, over the largest of them."""
    tiny = small(config)
    with torch.random.fork_rng(devices=[]), TemporaryDirectory() as name:
        torch.manual_seed(0)
        whole = _random_model(tiny)
        _save(whole, name)
        tokens = torch.randint(0, text_of(tiny).vocab_size, (2, _PROMPT + _NEW))
        source = Source.read(Path(name))
        plan = uneven_plan(source, layout, kv)
        with compile_plan(plan, backend="cpu", scratch=False) as context, torch.no_grad():
            weights = load_weights(plan, source, context)
            sharded = assemble(source, plan, context, runnable(AutoConfig.from_pretrained(name)), weights.tensors)
            wanted, found = (_logits(model, tokens) for model in (whole, sharded))
    return float((wanted - found).abs().max() / wanted.abs().max())


def _random_model(config: Any) -> Any:
    """Return a model with random values."""
    made = on_meta(config).to_empty(device="cpu").eval()
    made.tie_weights()
    for buffer in made.buffers():
        buffer.data.fill_(1)
    initialise_buffers(made)
    for parameter in made.parameters():
        parameter.data.normal_(0 if parameter.dim() > 1 else 0.5, 0.1)
    return made


def _save(model: Any, directory: str) -> None:
    """Save a model in this process, whichever it is of a group: ``save_pretrained`` writes in the first one only."""
    tied = model.all_tied_weights_keys
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    config = Path(directory, "config.json")
    config.write_text(model.config.to_json_string(use_diff=False), encoding="utf-8")
    made = revert_weight_conversion(model, tensors)
    if model.config.model_type in _MISNAMED:
        known = {name: made[name] for name in made if _MISNAMED[model.config.model_type] in name}
        made = dict(names_of(read_model(config), model).written(tensors, known))
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, Path(directory, "model.safetensors"))


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of a prompt and of some tokens after it, one by one, with a cache."""
    first = model(tokens[:, :_PROMPT], use_cache=True)
    cache, after = first.past_key_values, torch.split(tokens[:, _PROMPT:], 1, 1)
    return torch.cat([first.logits, *(model(token, past_key_values=cache).logits for token in after)], 1)


def uneven_plan(source: Source, layout: str, kv: str) -> SplitPlan:
    """Return a plan for three devices, of which the second has no heads and the third little of the vocabulary."""
    model = source.model
    request = Request(layout, "balanced", Cache("fp16", 64), 2, 64, kv)
    wanted = demands(model, request, 3)
    devices = tuple(Device(name=f"device {i}", budget_bytes=2**40) for i in range(3))

    def bounds(demand: Demand) -> tuple[int, ...]:
        least = minimum_units(demand.axis, demand.size, demand.unit)
        few = min(least, demand.units)
        rest = demand.units - few
        middle = rest // 3 if rest // 3 >= least else 0
        return bounds_of((rest - middle, middle, few) if rest else (few, 0, 0), demand.unit, demand.size)

    found = tuple(bounds(demand) for demand in wanted.axes)
    return Attempt(model, devices, request, wanted, found, ledger(found, wanted, devices, request)).plan()
