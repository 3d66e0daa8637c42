"""Accelerate, through transformers: whole layers on devices, in proportion to what the plan gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.core.plan import CACHE_KINDS
from tpplan.core.sizes import counted, listed
from tpplan.export.engine import MODEL, CacheKind, Engine, models_only
from tpplan.export.facts import MIB, bytes_each
from tpplan.export.layers import Layers
from tpplan.export.names import EngineName
from tpplan.models.families import FAMILIES
from tpplan.models.families.hybrid import SUMS
from tpplan.models.families.remote import REMOTE
from tpplan.reports.export import TextFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.export.facts import Facts
    from tpplan.models.families.table import Family

#: The cache of transformers' models has the dtype of their activations.
_SIXTEEN_BITS = CacheKind(name="16-bit", sixteenths=32)
CACHES = dict.fromkeys(CACHE_KINDS, _SIXTEEN_BITS)
#: Packed weights need a kernel of the Hub for the GPU.
NO_GGUF = "which transformers mostly dequantises as it loads, to bytes that the plan does not tell"

#: How the generate method of transformers' models takes a draft model, and uses prediction layers, on one device.
ASSISTANT = "assistant_model=… to the model's generate"
USE_MTP = "use_mtp=True to the model's generate, which puts them on the device of the last layer"

#: Architectures without RoPE, or with its tables in each layer.
_NO_TABLES = frozenset({
    *("BloomForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM"),
    *("GPTNeoForCausalLM", "MPTForCausalLM", "MptForCausalLM", "OPTForCausalLM"),
    *("GraniteMoeHybridForCausalLM", "JambaForCausalLM", "KimiLinearForCausalLM", "Lfm2MoeForCausalLM"),
})  # fmt: skip
#: Modules that transformers calls otherwise than the checkpoints, or has besides.
_RENAMED = {"embed_out": "lm_head", "head": "lm_head", "model.hc_pre.hc_head": "model.hc_head"}
#: Architectures that transformers does not have.
CODE_OF_THEIR_OWN = frozenset(name for family in REMOTE.values() for name in family.architectures)
#: Architectures whose layers transformers calls otherwise.
OTHER_LAYERS = frozenset({
    *("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM", "NemotronHForCausalLM", "Step3p5ForCausalLM"),
})  # fmt: skip
#: Architectures of which layers have weights in common, and which may have RoPE or not.
SHARED_LAYERS = frozenset({"Zamba2ForCausalLM"})
_BESIDES = {
    **dict.fromkeys(("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"), ("model.rotary_embs",)),
    "Phi4MultimodalForCausalLM": ("model.embed_tokens_extend",),
}


def family_of(architecture: str) -> Family | None:
    """Return the tables of a language model by its architecture, None for a model that has one as a part."""
    return next((family for family in FAMILIES.values() if architecture in family.architectures), None)


def modules(architecture: str, family: Family) -> tuple[str, ...]:
    """Return the modules of transformers' model outside the layers."""
    names = [row.name.rpartition(".")[0].partition(".{")[0] for row in family.outside if row.when != SUMS]
    root = family.layers.partition("{layer}")[0].removesuffix(".").rpartition(".")
    tables = () if architecture in _NO_TABLES else (f"{root[0]}{root[1]}rotary_emb",)
    return tuple(
        dict.fromkeys((*(_RENAMED.get(name, name) for name in names), *tables, *_BESIDES.get(architecture, ())))
    )


def home(plan: Facts) -> int:
    """Return the device with the most room, which gets all that is outside the layers."""
    return plan.room_bytes.index(max(plan.room_bytes))


def layers(plan: Facts) -> Layers:
    """Return how layers go to the devices."""
    beside = (plan.outside_bytes if i == home(plan) else 0 for i in range(plan.count))
    return Layers(plan, _SIXTEEN_BITS.sixteenths, tuple(beside), plan.outside_bytes)


def _refused(plan: Facts) -> Iterator[str]:
    if plan.model.architecture in CODE_OF_THEIR_OWN:
        yield f"transformers has no {plan.model.architecture}: its code comes with the model"
    if plan.model.architecture in OTHER_LAYERS:
        yield f"transformers calls the layers of {plan.model.architecture} otherwise than its checkpoints"
    if plan.model.architecture in SHARED_LAYERS:
        yield f"layers of {plan.model.architecture} share weights, which accelerate would copy to several devices"
    yield from layers(plan).obstacles()


def _load_py(plan: Facts) -> tuple[TextFile, ...]:
    memory = "\n".join(
        f'    {i}: "{max(0, size - cache) // MIB}MiB",'
        for i, (size, cache) in enumerate(zip(plan.room_bytes, plan.cache_bytes(_SIXTEEN_BITS.sixteenths), strict=True))
    )
    architecture = plan.model.architecture
    family = family_of(architecture)
    text = f"""\
import torch
from transformers import {"AutoModelForCausalLM" if family else "AutoModelForImageTextToText"}

max_memory = {{  # of weights; for device_map="auto" only
{memory}
}}
{_device_map(plan, family) if family else 'device_map = "auto"'}
model = {"AutoModelForCausalLM" if family else "AutoModelForImageTextToText"}.from_pretrained(
    "{MODEL}", dtype=torch.{plan.model.dtype}, device_map=device_map, max_memory=max_memory
)
"""
    return (TextFile("load.py", text),)


def _device_map(plan: Facts, family: Family) -> str:
    lines, start = [], 0
    for i, count in enumerate(layers(plan).counts):
        if count:
            layer = f"{family.root}{family.layers}".rstrip(".")
            lines.append(f'    **{{f"{layer}": {i} for layer in range({start}, {start + count})}},')
            start += count
    lines += [f'    "{name}": {home(plan)},' for name in modules(plan.model.architecture, family)]
    return "\n".join(("device_map = {", *lines, "}"))


def _differs(plan: Facts) -> Iterator[str]:
    if plan.count > 1:
        yield "it cuts no matrix: a token goes through whole layers on one device after the other, which wait for it"
        if family_of(plan.model.architecture):
            yield (
                f"the devices get {listed(layers(plan).counts)} of {counted(plan.model.layers, 'layer')}, each with "
                f"its cache; embedding, last norm and output matrix are on {plan.name(home(plan))}"
            )
        else:
            yield 'device_map="auto" fills the devices by their max_memory, the model\'s vision tower too'
    caches = bytes_each(plan.cache_bytes(_SIXTEEN_BITS.sixteenths))
    yield f"max_memory counts weights only; the plan's cache was taken off it ({caches}), and nothing holds it there"


ENGINE = Engine(
    name=EngineName.ACCELERATE,
    version="Accelerate 1.15.0 and transformers 5.24.0",
    command=("python", "load.py"),
    flags={},
    caches=CACHES,
    files=_load_py,
    refused=_refused,
    no_gguf=NO_GGUF,
    differs=_differs,
    draft=models_only(ASSISTANT),
    mtp=USE_MTP,
)
