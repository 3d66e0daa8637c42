"""Plans of models in GGUF: which engines take them, and what is said of their files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from tests.export_cases import plan_of
from tests.models.gguf.test_gguf import Q, write
from tpplan.core.device import Device
from tpplan.core.plan import Cache
from tpplan.export.export import ENGINES, export
from tpplan.export.facts import Facts
from tpplan.export.layers import Layers
from tpplan.models.reader import read_model
from tpplan.planner.plan import plan
from tpplan.planner.recount import differences

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.core.plan import SplitPlan

DEVICES = (Device(name="A", budget_bytes=2**31), Device(name="B", budget_bytes=2**31))
LLAMA_CPP = ("llama.cpp", "llama.cpp-layer")


def planned(path: Path, name: str = "qwen3") -> tuple[SplitPlan, dict[str, int]]:
    """Return the plan of a small file that the gguf package writes, and the bytes of its tensors."""
    sizes = write(path, name, (Q.Q4_K,))
    return plan(read_model(path), DEVICES, cache=Cache("fp16", 1024)), sizes


@pytest.mark.parametrize("engine", ENGINES)
def test_only_llama_cpp_takes_it(engine: str, tmp_path: Path) -> None:
    """Every other engine refuses it, naming the format and its reason, and names llama.cpp instead."""
    report = export(planned(tmp_path / "small.gguf")[0], engine)
    assert report.possible == (engine in LLAMA_CPP)
    if not report.possible:
        assert len(report.reasons) == 1
        assert report.reasons[0].startswith("the plan's weights are in GGUF Q4_K, ")
        assert report.engines == LLAMA_CPP
        assert not report.works_with


@pytest.mark.parametrize("engine", LLAMA_CPP)
def test_whether_the_file_is_the_planned_one(engine: str, tmp_path: Path) -> None:
    """Of a plan of a GGUF file the command takes that file; of another, one that is converted, with other bytes."""
    own = " ".join(export(planned(tmp_path / "small.gguf")[0], engine).differences)
    assert "MODEL.gguf is the file that was planned, in GGUF Q4_K" in own
    assert "convert_hf_to_gguf.py" not in own
    other = " ".join(export(plan_of("Llama-3.1-8B/2xRTX3060"), engine).differences)
    assert "convert_hf_to_gguf.py makes of the model, with bytes of its own" in other
    assert "was planned" not in other


def test_a_converter_is_not_asked_of_a_file_that_is_converted(tmp_path: Path) -> None:
    """An architecture that the converter does not know does not matter to a plan of GGUF."""
    made, _ = planned(tmp_path / "small.gguf")
    other = evolve(made, model=evolve(made.model, architecture="OPTForCausalLM"))
    assert export(other, "llama.cpp").possible
    assert not export(evolve(other, model=evolve(other.model, weight_format="")), "llama.cpp").possible


def test_layers_are_not_counted_too_small(tmp_path: Path) -> None:
    """A mean layer has no fewer bytes than the file's, though embedding and output matrix have few bits each."""
    made, sizes = planned(tmp_path / "small.gguf")
    of_layers = sum(size for name, size in sizes.items() if name.startswith("blk.")) // made.model.layers
    cache = sum(entry.cache_bytes for entry in made.memory) // made.model.layers
    mean = Layers.but_embedding(Facts(made), 32).mean_bytes - cache
    held = sum(entry.weights_bytes for entry in made.memory)
    assert of_layers <= mean <= -(-held // made.model.layers)


def test_plans_without_it_still_run(tmp_path: Path) -> None:
    """What only tells of the weights decides nothing, and no other plan has it."""
    made, _ = planned(tmp_path / "small.gguf")
    assert made.format_version == "1.3"
    silent = evolve(made, format_version="1.0", model=evolve(made.model, weight_format=""))
    assert differences(silent, read_model(tmp_path / "small.gguf")) == []
    assert plan_of("gpt-oss-20b/2xRTX4060Ti-16GB").model.weight_format == ""
