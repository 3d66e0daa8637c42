"""Tensor parallelism of transformers, which cuts evenly and has a process for each device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpplan.core.sizes import counted
from tpplan.export.accelerate import ASSISTANT, CACHES, CODE_OF_THEIR_OWN, NO_GGUF, USE_MTP
from tpplan.export.engine import MODEL, Engine, models_only
from tpplan.export.even import uneven_parts
from tpplan.export.names import EngineName
from tpplan.reports.export import TextFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.export.facts import Facts

#: Architectures of tpplan's families without a ``base_model_tp_plan`` that cuts anything within layers.
NO_PLAN = frozenset({
    *("DbrxForCausalLM", "GPTNeoForCausalLM", "MptForCausalLM", "MPTForCausalLM", "PersimmonForCausalLM"),
    *("BloomForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM"),
    *("GptOssForCausalLM", "HunYuanDenseV1ForCausalLM", "OPTForCausalLM", "RWForCausalLM", "StableLmForCausalLM"),
    *("BambaForCausalLM", "BitNetForCausalLM", "FalconH1ForCausalLM", "Lfm2ForCausalLM", "Lfm3ForCausalLM"),
    "Zamba2ForCausalLM",
    *CODE_OF_THEIR_OWN,
})  # fmt: skip

#: Those whose plan leaves attention whole on each device.
WHOLE_ATTENTION = frozenset({"FlintForCausalLM",
    *("AXK1ForCausalLM", "AXK2ForCausalLM", "BailingHybridForCausalLM", "BailingMoeV3ForCausalLM", "YoutuForCausalLM"),
    *("AfmoeForCausalLM", "DeepseekV3ForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    *("HunYuanMoEV1ForCausalLM", "PhiMoEForCausalLM", "PhimoeForCausalLM"),
    *("DeepseekV4ForCausalLM", "GraniteMoeHybridForCausalLM", "JambaForCausalLM", "KimiLinearForCausalLM"),
    *("Lfm2MoeForCausalLM", "Mistral4ForCausalLM", "NemotronHForCausalLM"),
})  # fmt: skip


def _refused(plan: Facts) -> Iterator[str]:
    architecture = plan.model.architecture
    if architecture in NO_PLAN:
        yield f"{architecture} has no base_model_tp_plan there"
    if architecture in WHOLE_ATTENTION:
        yield (
            f"the base_model_tp_plan of {architecture} leaves attention whole on each device, "
            "whose bytes a plan that cuts it does not tell"
        )


def _load_py(plan: Facts) -> tuple[TextFile, ...]:
    text = f"""\
import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

model = AutoModelForCausalLM.from_pretrained(
    "{MODEL}",
    dtype=torch.{plan.model.dtype},
    distributed_config=DistributedConfig(tp_size={plan.count}, tp_plan="auto"),
)
"""
    return (TextFile("load.py", text),)


def _differs(plan: Facts) -> Iterator[str]:
    yield from uneven_parts(plan)
    yield 'releases that do not know DistributedConfig take tp_plan="auto" instead'
    yield "what the model's base_model_tp_plan does not name is whole on each device, in most models the embedding"
    yield f"nothing limits the cache to {counted(plan.request.cache.tokens, 'token')} or a device to its budget"


ENGINE = Engine(
    name=EngineName.TRANSFORMERS,
    version="transformers 5.24.0",
    command=("torchrun",),
    flags={"--nproc-per-node": lambda plan: plan.count, "load.py": lambda _: True},
    caches=CACHES,
    files=_load_py,
    refused=_refused,
    no_gguf=NO_GGUF,
    differs=_differs,
    draft=models_only(ASSISTANT),
    mtp=USE_MTP,
    cuts_evenly=True,
)
