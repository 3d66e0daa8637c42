"""Every engine with every example: which can run it, what the report has, and that refusals help."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from tests.export_cases import ALIKE, EVEN, NAMES, ROOT, data_of, made, plan_of
from tpplan.core.plan import CACHE_KINDS, HEADS, Cache, Draft, Reserve
from tpplan.errors import RequestError
from tpplan.export.export import ENGINES, engine_of, export
from tpplan.hardware.spec import parse_devices
from tpplan.models.reader import read_model
from tpplan.planner.draft import split_draft
from tpplan.planner.options import Options
from tpplan.planner.plan import plan_request

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan

MODELS = ROOT / "examples/models"

#: Architectures of the examples that an engine refuses, whatever the plan.
REFUSED = {
    "llama.cpp": {"DeepseekV3ForCausalLM"},
    "exllamav2": {"DeepseekV3ForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM", "Qwen3NextForCausalLM"},
    "transformers": {"DeepseekV3ForCausalLM", "GptOssForCausalLM"},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_which_engine_runs_which_plan(engine: str, name: str) -> None:
    """Engines that cut evenly run plans for alike devices; others run all but architectures that they do not know."""
    evenly = engine in {"vllm", "sglang", "transformers"}
    known = data_of(name)["model"]["architecture"] not in REFUSED.get(engine, ())
    report = export(plan_of(name), engine)
    assert report.possible == (known and (not evenly or name in EVEN | ALIKE))
    assert bool(report.reasons) != report.possible
    assert bool(report.argv) == bool(report.environment) == bool(report.differences) == report.possible
    assert report.version == ENGINES[engine].version
    assert (engine in report.engines) is False


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_other_engines_do_run_it(engine: str, name: str) -> None:
    """The engines that a refusal names run the plan, and no others do."""
    report = export(plan_of(name), engine)
    if not report.possible:
        assert report.engines == tuple(other for other in ENGINES if export(plan_of(name), other).possible)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_the_devices_of_a_refusal_do(engine: str, name: str) -> None:
    """A plan of the same request for the devices that a refusal names exists, and the engine can run it."""
    report = export(plan_of(name), engine)
    if not report.possible and report.works_with:
        old = plan_of(name).request
        options: dict[str, Any] = {"cache": old.cache, "layout": old.layout, "strategy": old.strategy, "kv": old.kv}
        again = made(name.partition("/")[0], report.works_with, batch=old.batch, max_rows=old.max_rows, **options)
        assert export(again, engine).possible


def test_every_uneven_example_has_devices_that_do() -> None:
    """For vLLM each refused example names GPUs: of those that there are, where these are enough."""
    found = {name: export(plan_of(name), "vllm").works_with for name in NAMES}
    assert {name for name, devices in found.items() if not devices} == EVEN | ALIKE
    assert found["Llama-3.1-8B/RTX4090+RTX3060"] == "RTX4090"
    assert found["Mixtral-8x7B/4xRTX4090+RTX3090"] == "4xRTX4090"
    assert found["Qwen2.5-7B/3xRTX3060"] == "2xRTX3060"


def test_idle_devices_are_left_out() -> None:
    """A device without a part of the model is not shown to the engine, and has no place in lists."""
    plan = plan_of("Llama-3.1-8B/2xRTX3060")
    idle = attrs.evolve(plan.memory[0], device=1, **dict.fromkeys(
        ("weights_bytes", "cache_bytes", "workspace_bytes", "overhead_bytes"), 0))  # fmt: skip
    wider = attrs.evolve(
        plan,
        devices=(plan.devices[0], plan.devices[0], plan.devices[1]),
        memory=(plan.memory[0], idle, attrs.evolve(plan.memory[1], device=2)),
        splits=tuple(attrs.evolve(s, bounds=(s.bounds[0], s.bounds[1], *s.bounds[1:])) for s in plan.splits),
    )
    for engine in ENGINES:
        report = export(wider, engine)
        assert {v.name: v.value for v in report.environment}["CUDA_VISIBLE_DEVICES"] == "0,2"
        assert report.argv == export(plan, engine).argv
        assert report.files == export(plan, engine).files


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_of_another_kind_of_cache_are_told(engine: str, kind: str) -> None:
    """A line has the bytes of the engine's kind and of the plan's, if these differ, in the ratio of their bits."""
    plan = made("Llama-3.1-8B", "2xRTX4090", cache=Cache(kind, 65536))
    kinds = {"vllm": 16, "sglang": 16, "accelerate": 32, "transformers": 32, "exllamav3": 17 if kind == "fp8" else 0}
    llama = {"fp8": 17, "q6": 12}
    own = llama.get(kind, 0) if engine.startswith("llama") else 0 if engine == "exllamav2" else kinds[engine]
    sixteenths = 32 if kind == "fp16" else own or CACHE_KINDS[kind]
    lines = [line for line in export(plan, engine).differences if re.search(r"the cache is \S+ instead", line)]
    assert bool(lines) == (sixteenths != CACHE_KINDS[kind])
    # 2 × 8 KV heads of 128, in 32 layers, for 65536 tokens.
    whole = {k: 2 * 8 * 128 * 32 * 65536 * k / 16 / 2**30 for k in (sixteenths, CACHE_KINDS[kind])}
    for line in lines:
        assert line.endswith(f"on all devices {' instead of '.join(f'{size:.2f} GiB' for size in whole.values())}")


def test_a_cache_that_no_longer_fits_is_refused() -> None:
    """Where the engine's kind takes more than the budget leaves, the answer is no, with the bytes."""
    plan = made("Llama-3.1-8B", "2xRTX3060", cache=Cache("q4", 131072))
    assert export(plan, "llama.cpp").possible
    for engine in ("vllm", "sglang", "accelerate"):
        report = export(plan, engine)
        assert not report.possible
        assert report.reasons
        assert "GiB" in report.reasons[0]
        assert "cache" in report.reasons[0]


def test_names_of_engines() -> None:
    """Capitals and aliases do not matter; an unknown name gets the list."""
    assert engine_of("vLLM").name == "vllm"
    assert engine_of("TabbyAPI").name == "exllamav3"
    with pytest.raises(RequestError, match="'ollama', which is no engine") as error:
        engine_of("ollama")
    assert all(name in error.value.hint for name in ENGINES)


def test_a_context_beyond_the_models_is_allowed() -> None:
    """Both vLLM and SGLang take it only with a variable of their own."""
    plan = made("Mixtral-8x7B", "2xA100-80GB", cache=Cache("fp16", 65536), beyond=True)
    for engine, name in (
        ("vllm", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"),
        ("sglang", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"),
    ):
        assert {v.name: v.value for v in export(plan, engine).environment}[name] == "1"
        assert name not in {v.name for v in export(plan_of("Mixtral-8x7B/2xA100-80GB"), engine).environment}


def test_what_is_not_planned_is_told() -> None:
    """An engine may load what the plan does not count."""
    assert any("prediction layers" in line for line in export(plan_of("DeepSeek-V3/8xH200"), "vllm").differences)


def test_the_page_has_every_engine_and_version() -> None:
    """docs/engines.md has a row for each engine, with the version that its table names, and the kinds of cache."""
    page = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(r"^\| `([a-z][a-z0-9.-]+)`(?:, `[a-z]+`)? \| ([^|]+) \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    )
    assert rows == {name: engine.version for name, engine in ENGINES.items()}
    caches = re.findall(r"^\| `(fp16|fp8|q8|q6|q4)` \| (.+) \|$", page, re.MULTILINE)
    order = ("llama.cpp", "exllamav3", "exllamav2", "vllm", "sglang")
    assert {kind: re.findall("`(.+?)`", row) for kind, row in caches} == {
        kind: [ENGINES[name].caches[kind].name for name in order] for kind in CACHE_KINDS
    }


#: What engines are told of a draft model, and of prediction layers, by their own documentation.
DRAFTS = {
    "llama.cpp": ("--model-draft DRAFT.gguf", "--spec-type draft-mtp"),
    "llama.cpp-layer": ("--model-draft DRAFT.gguf", "--spec-type draft-mtp"),
    "exllamav3": ("draft_model_name: DRAFT", "draft_mode: mtp"),
    "exllamav2": ("draft_model=", "which it does not use"),
    "accelerate": ("assistant_model=", "use_mtp=True"),
    "transformers": ("assistant_model=", "use_mtp=True"),
    "vllm": ('{"model": "DRAFT", "num_speculative_tokens": N}', '{"method": "mtp", "num_speculative_tokens": N}'),
    "sglang": ("--speculative-draft-model-path DRAFT", "--speculative-algorithm NEXTN"),
}
#: What those that take heads are told of each kind, by their own documentation.
METHODS = {
    "vllm": {
        "eagle": '{"model": "DRAFT", "method": "eagle", "num_speculative_tokens": N}',
        "eagle3": '{"model": "DRAFT", "method": "eagle3", "num_speculative_tokens": N}',
        "peagle": '{"model": "DRAFT", "method": "eagle3", "parallel_drafting": true, "num_speculative_tokens": N}',
        "dflash": '{"model": "DRAFT", "method": "dflash", "num_speculative_tokens": N}',
        "medusa": '{"model": "DRAFT", "method": "medusa", "num_speculative_tokens": N}',
        "mlp_speculator": '{"model": "DRAFT", "method": "mlp_speculator", "num_speculative_tokens": N}',
    },
    "sglang": {
        "eagle": "--speculative-algorithm EAGLE",
        "eagle3": "--speculative-algorithm EAGLE3",
        "dflash": "--speculative-algorithm DFLASH",
    },
    "llama.cpp": {"eagle3": "--spec-type draft-eagle3", "dflash": "--spec-type draft-dflash"},
}
METHODS["llama.cpp-layer"] = METHODS["llama.cpp"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mtp", [False, True])
def test_what_drafts_is_told(engine: str, mtp: bool) -> None:
    """A line says how an engine takes what the plan leaves room for, and how much room that is."""
    alone = made("Llama-3.1-8B", "2xRTX4090")
    plan = beside_draft(2**30, 2**30, mtp=mtp)
    told = [text for text in export(plan, engine).differences if "the plan leaves 1.00 GiB on each device to" in text]
    assert len(told) == 1
    assert ("share of memory includes" in told[0]) == (engine in {"vllm", "sglang"})
    assert DRAFTS[engine][mtp] in told[0]
    assert ("prediction layers" if mtp else "the draft model small") in told[0]
    assert not [text for text in export(alone, engine).differences if "the plan leaves 1.00 GiB" in text]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_is_told_by_the_method_of_its_kind(engine: str, kind: str) -> None:
    """An engine is told of no head that it does not take."""
    plan = beside_draft(2**30, 2**30)
    assert plan.request.draft
    head = attrs.evolve(plan.request.draft, head=kind)
    plan = attrs.evolve(plan, request=attrs.evolve(plan.request, draft=head))
    (told,) = (
        text for text in export(plan, engine).differences if "the plan leaves 1.00 GiB on each device to" in text
    )
    method = METHODS.get(engine, {}).get(kind)
    assert told.partition(": add ")[2].startswith(("--model-draft", "--spec")) == bool(method)
    assert (method or "small, for which tpplan knows no option of it") in told


def beside_draft(*room: int, split: bool = False, reserve: tuple[Reserve, ...] = (), mtp: bool = False) -> SplitPlan:
    """Return a plan for two GPUs beside a draft model that takes so many bytes on each."""
    asked = Options(context=32768, strategy="balanced", mtp=mtp).request(model := read_model(MODELS / "Llama-3.1-8B"))
    asked = attrs.evolve(asked, draft=Draft("small", room, split=split), reserve=reserve)
    return plan_request(model, parse_devices("2xRTX4090"), asked)


@pytest.mark.parametrize(("split", "room"), [(False, (2**31, 2**31)), (True, (2**31, 2**30))])
def test_shares_of_memory_have_a_draft_model_in_them_and_no_reserve(split: bool, room: tuple[int, int]) -> None:
    """Both engines load it within their share; what is reserved is somebody else's.

    An even part of what is split is taken for no less than the plan's larger one.
    """
    whole, overhead = 25249710080, 933232640
    for engine, flag, of in (
        ("vllm", "--gpu-memory-utilization", whole),
        ("sglang", "--mem-fraction-static", whole - overhead),
    ):
        shares = []
        for plan in (
            made("Llama-3.1-8B", "2xRTX4090", cache=Cache(tokens=32768)),
            beside_draft(*room, split=split, reserve=(Reserve(2**30),)),
        ):
            argv = export(plan, engine).argv
            shares.append(float(argv[argv.index(flag) + 1]))
        assert shares[1] - shares[0] == pytest.approx(2**31 / of, abs=0.0011)
    (most,) = (text for text in export(plan, "vllm").differences if "the budgets allow" in text)
    assert float(most.split()[-1]) == pytest.approx((whole - overhead - 2**30) / whole, abs=0.0011)


def test_a_share_is_free_when_the_engine_starts() -> None:
    """A plan that fills a GPU gets the share that is left beside its overhead, by which vLLM would refuse to start."""
    plan = plan_request(
        read_model(MODELS / "Llama-3.1-8B"),
        parse_devices("RTX3090"),
        Options(context=61440).request(read_model(MODELS / "Llama-3.1-8B")),
    )
    (entry,), (device,) = plan.memory, plan.devices
    assert entry.free_bytes < entry.overhead_bytes
    found = export(plan, "vllm")
    given = float(found.argv[found.argv.index("--gpu-memory-utilization") + 1])
    assert given <= (device.budget_bytes - entry.overhead_bytes) / device.budget_bytes
    assert given > (entry.used_bytes - entry.overhead_bytes) / device.budget_bytes - 0.001
    assert any(text.endswith("the budgets allow no more") for text in found.differences)


def test_an_even_part_with_a_draft_model_has_to_fit() -> None:
    """It is refused where the room of the draft model is what lacks, and told."""
    plan = beside_draft(9 * 2**30, 7 * 2**30, split=True)
    assert export(plan, "llama.cpp").possible
    assert export(beside_draft(8 * 2**30, 8 * 2**30, split=True), "vllm").possible
    plan = attrs.evolve(plan, devices=tuple(attrs.evolve(d, budget_bytes=19 * 2**30) for d in plan.devices))
    (reason,) = export(plan, "vllm").reasons
    assert reason.endswith("for the cache and 9.00 GiB for what drafts")


def test_the_plan_of_a_draft_model_is_for_no_engine_alone() -> None:
    """Engines load it beside its model, and cut it as that."""
    model, draft = read_model(MODELS / "Llama-3.1-8B"), read_model(MODELS / "Qwen2.5-7B")
    _, plan = split_draft(Options(context=4096).request(model), draft, model, parse_devices("2xH100"))
    for engine in ENGINES:
        found = export(plan, engine)
        assert found.reasons == (
            "the plan is that of a draft model of Llama-3.1-8B, which it loads and cuts with that",
        )
        assert not found.engines
