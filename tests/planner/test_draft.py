"""Room for draft models: what they take, where, and what is said of those that do not fit."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import tpplan
from tests.checkpoints import Tensors, tensor_bytes, write_checkpoint
from tests.cli_cases import LLAMA_8B, ROOT
from tests.command import Done, command
from tests.examples import examples
from tests.planning_cases import case
from tests.published import shape
from tpplan.core.plan import LAYOUTS, Draft, Reserve, reserves_told, rooms_told
from tpplan.core.sizes import format_bytes
from tpplan.errors import ModelError
from tpplan.export.export import ENGINES
from tpplan.models.reader import read_prediction_layers
from tpplan.planfile.verify import problems
from tpplan.planner.draft import reserve_for_draft, split_draft
from tpplan.planner.infeasible import InfeasibleError
from tpplan.planner.options import Options
from tpplan.planner.plan import plan_request, replan
from tpplan.planner.recount import differences

#: As of EAGLE3-LLaMA3.1-Instruct-8B on the hub.
EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    **shape(vocab=128256, hidden=4096, dense=14336, layers=1, q=32, kv=8, context=2048),
    "draft_vocab_size": 32000,
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
}
#: Its tensors in a file, with the starts of their names as SGLang writes them.
TENSORS = {
    "fc.weight": (4096, 3 * 4096),
    "midlayer.input_layernorm.weight": (4096,),
    "midlayer.hidden_norm.weight": (4096,),
    "midlayer.post_attention_layernorm.weight": (4096,),
    "midlayer.self_attn.q_proj.weight": (4096, 2 * 4096),
    "midlayer.self_attn.k_proj.weight": (1024, 2 * 4096),
    "midlayer.self_attn.v_proj.weight": (1024, 2 * 4096),
    "midlayer.self_attn.o_proj.weight": (4096, 4096),
    "midlayer.mlp.gate_proj.weight": (14336, 4096),
    "midlayer.mlp.up_proj.weight": (14336, 4096),
    "midlayer.mlp.down_proj.weight": (4096, 14336),
    "norm.weight": (4096,),
    "lm_head.weight": (32000, 4096),
}
PARAMETERS = 424_689_664

MIB, GIB = 2**20, 2**30
DEEPSEEK, QWEN = (ROOT / "examples/models" / name for name in ("DeepSeek-V3", "Qwen3-Next-80B-A3B"))


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """Return a config.json alone."""
    path = tmp_path / "head" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(EAGLE3))
    return path


def test_a_head_of_the_hub_is_read_from_its_config_and_from_its_file(head: Path, tmp_path: Path) -> None:
    """Its parameters are those of its tensors; tables of tokens and a copy of the embedding are not planned."""
    beside = {
        "d2t": ("I64", (32000,)),
        "t2d": ("BOOL", (128256,)),
        "embed_tokens.weight": ("F16", (128256, 4096)),
    }
    tensors = {name: ("F16", shape) for name, shape in TENSORS.items()}
    spec = tpplan.read_model(write_checkpoint(tmp_path / "stored", EAGLE3, tensors | beside))
    alone = tpplan.read_model(head)
    assert (spec.parameter_count, spec.weight_bytes) == (PARAMETERS, 2 * PARAMETERS)
    assert (alone.parameter_count, alone.weight_bytes) == (PARAMETERS, 2 * PARAMETERS)
    assert {name: p.shape for name, p, _ in spec.tensors()} == {
        name.replace("midlayer.", "layers.0."): shape for name, shape in TENSORS.items()
    }


def test_a_head_of_speculators(head: Path) -> None:
    """Its config has the layers in a section; the model's hidden states may be wider than its own."""
    layers = {key: value for key, value in EAGLE3.items() if key not in {"architectures", "draft_vocab_size"}}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 32000,
        "target_hidden_size": None,
        "torch_dtype": "float16",
        "transformer_layer_config": layers,
    }
    head.write_text(json.dumps(config))
    assert tpplan.read_model(head).parameter_count == PARAMETERS
    head.write_text(json.dumps(config | {"target_hidden_size": 5120}))
    embedding = 128_256 * 4096  # that of a model that is wider is none for the head
    assert tpplan.read_model(head).parameter_count == PARAMETERS + 4096 * 3 * (5120 - 4096) + embedding
    layers["num_hidden_layers"] = 2
    head.write_text(json.dumps(config))
    second = 2 * 4096 + 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336  # reads one hidden state, not two
    assert tpplan.read_model(head).parameter_count == PARAMETERS + second


def test_room_on_every_device(head: Path) -> None:
    """It is that of the weights, of a cache as long as the model's, and of the workspace, beside other reserves."""
    model, draft = tpplan.read_model(LLAMA_8B), tpplan.read_model(head)
    devices = tpplan.parse_devices("24GiB,12GiB")
    asked = Options(context=16384, batch=2, reserve=("1GiB@1",)).request(model)
    request = reserve_for_draft(asked, draft, model, devices)
    cache = 2 * 16384 * 2 * 8 * 128 * 2  # sequences, tokens, K and V, heads, elements, bytes
    assert request.draft
    room, again = request.draft.room_bytes
    workspace = room - 2 * PARAMETERS - cache
    assert 0 < workspace < 256 * MIB
    assert (room, request.draft.split, request.reserve) == (again, False, (Reserve(GIB, 1),))
    plan = plan_request(model, devices, request)
    assert [entry.draft_bytes for entry in plan.memory] == [room, room]
    assert [entry.reserved_bytes for entry in plan.memory] == [0, GIB]


def test_a_draft_model_split_like_the_model(head: Path) -> None:
    """What each device leaves is what the plan of the draft model takes there, which has no overhead of its own."""
    model, draft = tpplan.read_model(LLAMA_8B), tpplan.read_model(head)
    devices = tpplan.parse_devices("2xRTX3060")
    asked = Options(context=4096, strategy="balanced", reserve=("64MiB",)).request(model)
    request, plan = split_draft(asked, draft, model, devices)
    parts = [entry.weights_bytes + entry.cache_bytes + entry.workspace_bytes for entry in plan.memory]
    assert request.draft == Draft("head", tuple(parts), split=True, head="eagle3")
    assert request.reserve == asked.reserve
    assert [entry.overhead_bytes for entry in plan.memory] == [0, 0]
    assert plan.request.drafts_for == "Llama-3.1-8B"
    assert replan(draft, plan) == plan
    assert differences(plan, draft) == []
    assert (plan.request.sequence_tokens, plan.request.beyond) == (4096, True)
    assert min(parts) > PARAMETERS // 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--gpus", "24GiB", "--draft-output", "d.json"), "--draft-output writes the plan of a draft model"),
        (("--gpus", "24GiB", "--draft", "HEAD", "--reserve", "1GiB@3"), "1.00 GiB are reserved on device 3"),
        (("--gpus", "24GiB", "--draft", "HEAD", "--draft-output", "o.json", "-o", "o.json"), "written by the same"),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...], problem: str, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error with names and numbers, and no file."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    named = [str(head) if each == "HEAD" else each for each in arguments]
    done = command("plan", LLAMA_8B, "--context", "4096", *named)
    assert (done.code, problem in done.err.replace("\n", " ")) == (2, True), done.err
    assert "hint: " in done.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_draft_model_too_large_for_a_device(head: Path) -> None:
    """It does not fit, which is an answer, and what is advised fits both models."""
    asked = ("plan", LLAMA_8B, "--context", "4096", "--draft", head)
    done = command(*asked, "--gpus", "48GiB,900MiB")
    assert done.code == 1
    assert "a budget of 900.00 MiB, all of head takes 1020.15 MiB" in done.err.replace("\n", " ")
    found = json.loads(command(*asked, "--gpus", "48GiB,900MiB", "--json").out)["error"]
    assert found["kind"] == "infeasible"
    assert found["hint"].startswith("split the draft model over the devices, too; or ")
    (advice,) = (each for each in found["suggestions"] if each["kind"] == "memory")
    assert command(*asked, *advice["option"].split()).code == 0


@pytest.mark.parametrize(("gpus", "is_advised"), [("48GiB,900MiB", True), ("2x18GiB", True), ("2x8GiB", False)])
def test_splitting_a_draft_model_is_advised_where_it_helps(
    gpus: str, is_advised: bool, head: Path, inside: Path
) -> None:
    """Where a device cannot hold all of it, or not beside its part of the model; followed, both fit."""
    small = head if "900MiB" in gpus else LLAMA_8B / "config.json"
    asked = ("plan", LLAMA_8B / "config.json", "--gpus", gpus, "--context", "4096", "--draft", small, "--json")
    done = command(*asked)
    assert done.code == 1
    error = json.loads(done.out)["error"]
    if gpus == "2x18GiB":
        assert (
            "36.00 GiB together, of which 4.71 GiB are left beside 31.29 GiB for Llama-3.1-8B, and" in error["message"]
        )
    options = [each["option"] for each in error.get("suggestions", ())]
    assert ("--draft-output draft.json" in options[:1]) == is_advised
    assert any(option.startswith("--draft-output") for option in options) == is_advised
    entry = f'[[plan]]\nfile = "p.json"\nmodel = "{LLAMA_8B / "config.json"}"\ngpus = "{gpus}"\ncontext = 4096\n'
    (inside / "tpplan.toml").write_text(f'{entry}draft = "{small}"\n')
    line = 'draft-output = "draft.json"'
    assert (line in command("plan", "--all").err) == is_advised
    if is_advised:
        assert command(*asked, *options[0].split()).code == 0
        (inside / "tpplan.toml").write_text(f'{entry}draft = "{small}"\n{line}\n')
        assert command("plan", "--all").code == 0


@pytest.mark.parametrize("gpus", ["2x6GiB", "3x4GiB", "8GiB,4GiB,2GiB"])
def test_a_split_draft_model_that_does_not_fit(gpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice is for the model with its draft model: followed, both fit."""
    monkeypatch.chdir(tmp_path)
    asked = ("plan", LLAMA_8B, "--context", "4096", "--draft", LLAMA_8B, "--draft-output", "d.json")
    done = command(*asked, "--gpus", gpus, "--json")
    assert done.code == 1
    options = [each["option"] for each in json.loads(done.out)["error"]["suggestions"]]
    assert len(options) == 2
    for option in options:
        again = command(*asked, *option.split())
        assert again.code == 0, (option, again.err)


def test_the_command(head: Path, tmp_path: Path) -> None:
    """Both plans are written, both verify, and the screen says what is left where."""
    output, beside = tmp_path / "plan.json", tmp_path / "draft.json"
    asked = ("plan", LLAMA_8B, "--gpus", "RTX4090,RTX3060", "--context", "4096", "--draft", head, "-o", output)
    whole = command(*asked)
    assert whole.code == 0
    left = tpplan.load(output).memory[0].draft_bytes
    assert f"note: room for head: {format_bytes(left)} on every device" in whole.err
    split = command(*asked, "--draft-output", beside)
    assert split.code == 0
    taken = [entry.used_bytes for entry in tpplan.load(beside).memory]
    assert [entry.draft_bytes for entry in tpplan.load(output).memory] == taken
    checked = command("check", output, "--model", LLAMA_8B, "--json")
    assert (checked.code, "the draft model head was not checked" in checked.err) == (0, True)
    assert [note[:40] for note in json.loads(checked.out)["notes"]] == ["the draft model head was not checked, on"]


@pytest.mark.parametrize("command_name", ["plan", "fit"])
def test_a_head_is_no_main_model(command_name: str, head: Path) -> None:
    """It is refused with the option that takes it; what else there is to see of it is shown."""
    done = command(command_name, head, "--gpus", "RTX3090")
    assert done.code == 2
    told = "head is an EAGLE-3 head, which cannot run without the model that it drafts for"
    assert done.err == f"error: {told}\nhint: name it with --draft beside its model\n"
    shown = command("inspect", head)
    assert (shown.code, f"note: {told}" in shown.err.replace("\n", " ")) == (0, True)
    assert "32 query heads" in shown.out
    assert any(told in note for note in json.loads(command("inspect", head, "--json").out)["notes"])


def test_a_head_without_attention_is_shown_without_it(tmp_path: Path) -> None:
    """It has no query heads, no cache, and no longest context."""
    config = {"model_type": "medusa", "hidden_size": 4096, "vocab_size": 128256, "medusa_num_heads": 4}
    head = write_checkpoint(tmp_path / "medusa", config | {"torch_dtype": "float16"}, {}) / "config.json"
    done = command("inspect", head)
    assert "medusa is a Medusa head" in done.err
    assert "No cache" in done.out
    assert not [word for word in ("query heads", "context", "longest", "0 bytes") if f" {word}" in done.out]


def test_a_plan_of_a_head_is_shown_checked_and_compared(inside: Path, head: Path) -> None:
    """As any other plan, with the model that the head drafts for named in it."""
    asked = ("plan", LLAMA_8B, "--gpus", "2x24GiB", "--context", "4096", "--draft", head, "--draft-output", "d.json")
    assert command(*asked).code == 0
    for words in (("show", "d.json"), ("check", "d.json", "--model", head), ("diff", "d.json", "d.json")):
        assert command(*words).code == 0, words
    assert tpplan.load(inside / "d.json").request.drafts_for == "Llama-3.1-8B"


def test_devices_without_a_part_of_a_draft_model(head: Path, tmp_path: Path) -> None:
    """They are noted as those without a part of a model are."""
    asked = ("plan", LLAMA_8B, "--gpus", "RTX4090,900MiB", "--context", "4096", "--draft", head)
    done = command(*asked, "--draft-output", tmp_path / "d.json")
    assert "note: no part of the draft model head is on device 1 (900MiB GPU)" in done.err.replace("\n", " ")
    # A larger one would get another part of the draft model.
    assert "hint: leave it out of --gpus, as in --gpus RTX4090\n" in done.err


def test_a_device_with_the_draft_model_alone_pays_its_overhead_for_it() -> None:
    """Once for each device, whichever of both models is there; budgets are kept to the byte."""
    model, draft = tpplan.read_model(LLAMA_8B), tpplan.read_model(LLAMA_8B)
    devices = tpplan.parse_devices("80GiB,17GiB")
    request = Options(context=512, strategy="balanced", max_rows=8).request(model)
    (room, _) = reserve_for_draft(request, draft, model, devices).draft.room_bytes  # type: ignore[union-attr]
    overhead = devices[1].overhead_bytes
    small = attrs.evolve(devices[1], budget_bytes=room + overhead)
    plan = plan_request(model, (devices[0], small), reserve_for_draft(request, draft, model, (devices[0], small)))
    alone, both = plan.memory[1], plan.memory[0]
    assert (alone.used_bytes, alone.draft_bytes, alone.free_bytes) == (0, room + overhead, 0)
    assert (both.overhead_bytes, both.draft_bytes) == (devices[0].overhead_bytes, room)
    assert both.used_bytes + both.draft_bytes + both.free_bytes == devices[0].budget_bytes
    less = attrs.evolve(small, budget_bytes=small.budget_bytes - 1)
    with pytest.raises(InfeasibleError, match=r"beside an overhead of 890\.00 MiB"):
        reserve_for_draft(request, draft, model, (devices[0], less))
    with pytest.raises(InfeasibleError):  # nor with the room that a plan says
        replan(model, attrs.evolve(plan, devices=(devices[0], less)))


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(LAYOUTS), st.data())
def test_every_device_leaves_the_room_of_its_part(seed: int, layout: str, data: st.DataObject) -> None:
    """Beside its reserve, whether or not the model is on it; planning again gives the same plan."""
    task = case(seed, layout, "balanced")
    count = len(task.devices)
    room = data.draw(st.tuples(*[st.integers(0, 2**30)] * count).filter(any))
    reserve = (Reserve(data.draw(st.integers(1, 2**30))),) * data.draw(st.booleans())
    left = [size + sum(each.bytes for each in reserve) for size in room]
    devices = tuple(
        attrs.evolve(device, budget_bytes=device.budget_bytes + size)
        for device, size in zip(task.devices, left, strict=True)
    )
    asked = attrs.evolve(task.request, reserve=reserve)
    try:
        plan = plan_request(task.model, devices, attrs.evolve(asked, draft=Draft("small", room, split=True)))
    except InfeasibleError:
        return
    for i, (device, entry) in enumerate(zip(devices, plan.memory, strict=True)):
        paid = room[i] + (0 if entry.used_bytes or not room[i] else device.overhead_bytes)
        assert (entry.draft_bytes, entry.reserved_bytes) == (paid, left[i] - room[i])
        assert entry.used_bytes + paid + entry.reserved_bytes + entry.free_bytes == device.budget_bytes
    assert plan.format_version == "1.4"
    assert not problems(plan)
    assert tpplan.loads(tpplan.dumps(plan)) == plan
    assert replan(task.model, plan) == plan
    assert differences(plan, task.model) == []


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((GIB,) * 12, "1.00 GiB on every device"),
        ((GIB,), "1.00 GiB on device 0"),
        ((GIB, GIB, 0), "1.00 GiB on devices 0 and 1"),
        ((GIB,) * 4 + (MIB,) + (GIB, 0, GIB), "1.00 GiB on devices 0-3, 5 and 7, 1.00 MiB on device 4"),
        ((GIB, GIB + 1, GIB), "1.00 GiB on every device"),
        ((0, 0), "nothing"),
    ],
)
def test_devices_with_equal_room_are_told_together(sizes: tuple[int, ...], told: str) -> None:
    """By ranges, and all of them as every device."""
    assert rooms_told(sizes) == (told,)


def test_devices_with_equal_reserves_are_told_together() -> None:
    """Those that are named, and the rest."""
    many = tuple(Reserve(GIB, i) for i in range(12))
    assert reserves_told(many) == ("1.00 GiB on devices 0-11",)
    assert reserves_told((*many[:2], Reserve(MIB))) == ("1.00 GiB on devices 0 and 1, 1.00 MiB on all others",)
    assert reserves_told((many[3], Reserve(GIB))) == ("1.00 GiB on device 3 and all others",)


def test_suggested_commands_keep_reserves_beside_a_draft_model(inside: Path, head: Path) -> None:
    """They ask for what was reserved, once if that is equal, and for the draft model as it was, and work."""
    assert head.exists()
    asked = ("plan", LLAMA_8B, "--gpus", "2x24GiB", "--context", 4096, "--reserve", "1GiB@0", "--reserve", "1GiB@1")
    for more, words in (((), ()), (("--draft-output", "d.json"), ("--draft-output", "p-draft.json"))):
        assert command(*asked, "--draft", "head", *more, "-o", "p.json").code == 0
        made = tpplan.load("p.json")
        stale = attrs.evolve(made, request=attrs.evolve(made.request, max_rows=2049))
        Path("p.json").write_text(tpplan.dumps(stale))
        _, hint, again = command("check", "p.json", "--model", LLAMA_8B).err.splitlines()
        assert hint.endswith("that changes (DRAFT stands for the path of the draft model)")
        assert shlex.split(again)[3:-2] == [
            *("--reserve", "1GiB", "--draft", "DRAFT", *words, "--gpus", "2x24GiB", "--context", "4096"),
            *("--max-rows", "2049"),
        ]
        assert command(*shlex.split(again.replace("DRAFT", "head"))[1:]).code == 0
        assert command("check", "p.json", "--model", LLAMA_8B).code == 0
        again_made = tpplan.load("p.json")
        assert again_made.request.reserve == (Reserve(GIB),)
        assert [entry.reserved_bytes for entry in again_made.memory] == [GIB, GIB]
        if words:
            assert tpplan.load("p-draft.json").request.drafts_for == "Llama-3.1-8B"
    assert inside == Path.cwd()


def test_a_draft_model_whose_plan_is_stale_is_planned_with_its_model(inside: Path, head: Path) -> None:
    """The command makes its plan with that of its model."""
    asked = ("plan", LLAMA_8B, "--gpus", "2x24GiB", "--context", 4096, "--reserve", "64MiB", "--draft", head)
    assert command(*asked, "--draft-output", "d.json", "-o", "p.json").code == 0
    assert command("check", "d.json", "--model", head).code == 0
    hint, again = command("check", "d.json", "--model", head, "--gpus", "24GiB,12GiB").err.splitlines()
    stand = (
        "(MODEL stands for the path of Llama-3.1-8B, for which it drafts, MODEL_PLAN for the file of that one's plan)"
    )
    assert stand in hint
    again = again.replace("MODEL_PLAN", "p.json").replace("MODEL", str(LLAMA_8B))
    assert command(*shlex.split(again)[1:]).code == 0
    assert command("check", "d.json", "--model", head, "--gpus", "24GiB,12GiB").code == 0
    taken = [entry.used_bytes for entry in tpplan.load(inside / "d.json").memory]
    assert [entry.draft_bytes for entry in tpplan.load(inside / "p.json").memory] == taken
    done = command("check", "d.json", "--model", head, "--gpus", "2x1GiB")
    assert "d.json: stale (devices, infeasible)" in said(done)
    hint, again = done.err.splitlines()
    assert "--reserve 64MiB --draft " in again
    assert "--context 4096" in again  # and not what fits of this one alone


@pytest.mark.parametrize("gpus", ["3x24GiB", "24GiB", "24GiB,20GiB"])
def test_a_plan_beside_a_draft_model_is_held_against_other_devices(inside: Path, head: Path, gpus: str) -> None:
    """What is whole has as much room on each of them; what is split has none on others, and is planned again."""
    asked = ("plan", LLAMA_8B, "--context", 4096, "--reserve", "64MiB", "--draft", head, "--gpus")
    assert command(*asked, "2x24GiB", "-o", "whole.json").code == 0
    assert command(*asked, "2x24GiB", "--draft-output", "d.json", "-o", "split.json").code == 0
    done = command("check", "whole.json", "split.json", "--model", LLAMA_8B, "--gpus", gpus)
    assert ("whole.json: stale (devices) " in said(done), done.code) == (True, 1)
    counts = "split.json: stale (devices, request) " in said(done)
    assert counts == (gpus != "24GiB,20GiB")
    assert ("the room of head is for 2 devices that it is split over" in said(done)) == counts
    assert not [line for line in done.out.splitlines() if "request differs" in line]
    for again in done.err.splitlines()[2:]:
        assert command(*shlex.split(again.replace("DRAFT", str(head)))[1:]).code == 0
    assert command("check", "whole.json", "split.json", "--model", LLAMA_8B, "--gpus", gpus).code == 0
    assert (inside / "whole.json").exists()


def test_what_fits_beside_the_room_that_a_plan_says(inside: Path, head: Path) -> None:
    """Where devices are too small for a plan today, commands keep its reserve and its draft model, and work.

    More devices, or larger ones, are not advised where it is split: that would be another split.
    """
    asked = ("plan", LLAMA_8B, "--context", 32768, "--reserve", "1GiB@1", "--draft", head, "--gpus")
    assert command(*asked, "2x16GiB", "-o", "whole.json").code == 0
    assert command(*asked, "2x16GiB", "--draft-output", "d.json", "-o", "split.json").code == 0
    for name in ("whole.json", "split.json"):
        done = command("check", name, "--model", LLAMA_8B, "--gpus", "2x11GiB")
        _, hint, *commands = done.err.splitlines()
        assert (": stale (devices, infeasible) " in said(done), "makes a plan (DRAFT" in hint) == (True, True)
        assert any("--gpus 3x11GiB" in each for each in commands) == (name == "whole.json")
        for again in commands:
            assert "--reserve 1GiB@1 --draft DRAFT" in again
            assert command(*shlex.split(again.replace("DRAFT", str(head)))[1:]).code == 0


def test_a_draft_model_with_a_longer_context_is_planned_again(inside: Path) -> None:
    """Its model may go beyond its own context, as it did."""
    config = json.loads((LLAMA_8B / "config.json").read_text()) | {"num_hidden_layers": 2}
    small = write_checkpoint(inside / "small", config | {"max_position_embeddings": 2**20}, {}) / "config.json"
    asked = ("--context", 140_000, "--beyond", "--draft", small, "--draft-output", "d.json", "-o", "p.json")
    assert command("plan", LLAMA_8B, "--gpus", "2x48GiB", *asked).code == 0
    again = command("check", "d.json", "--model", small, "--gpus", "2x47GiB").err.splitlines()[-1]
    assert command(*shlex.split(again.replace("MODEL_PLAN", "p.json").replace("MODEL", str(LLAMA_8B)))[1:]).code == 0


def test_another_vocabulary_is_noted(tmp_path: Path) -> None:
    """A small model drafts for one with the same tokens."""
    config = json.loads((LLAMA_8B / "config.json").read_text()) | {"num_hidden_layers": 2, "vocab_size": 32000}
    small = write_checkpoint(tmp_path / "small", config, {}) / "config.json"
    done = command("plan", LLAMA_8B, "--gpus", "48GiB", "--context", "4096", "--draft", small)
    assert "small has 32000 tokens, Llama-3.1-8B 128256: their tokens may differ" in done.err.replace("\n", " ")


def test_what_a_draft_model_was_made_for_is_noted(head: Path) -> None:
    """Its own longest context, where sequences are longer, and what is assumed of its weights."""
    asked = ("plan", LLAMA_8B, "--gpus", "48GiB", "--draft", head, "--context")
    noted = "note: head was made for 2048 tokens per sequence, the plan has 2049"
    assert [noted in command(*asked, context).err for context in (2048, 2049)] == [False, True]
    assert "assumed of head" not in command(*asked, 2048).err
    head.write_text(json.dumps({key: value for key, value in EAGLE3.items() if key != "torch_dtype"}))
    assert "note: assumed of head: dtype bfloat16: config.json names none" in command(*asked, 2048).err


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_manifest_names_a_draft_model(head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plans leave room, and are stale where they do not."""
    monkeypatch.chdir(tmp_path)
    entry = f'[[plan]]\nfile = "plan.json"\nmodel = "{LLAMA_8B / "config.json"}"\ngpus = "48GiB"\ncontext = 4096\n'
    (tmp_path / "tpplan.toml").write_text(entry)
    assert command("plan", "--all").code == 0
    assert command("check").code == 0
    (tmp_path / "tpplan.toml").write_text(entry + 'draft = "head/config.json"\n')
    stale = command("check")
    assert (stale.code, "(options) the manifest asks for draft head instead of none " in said(stale)) == (1, True)
    assert command("plan", "--all").code == 0
    assert command("check").code == 0
    model, draft = tpplan.read_model(LLAMA_8B), tpplan.read_model(head)
    asked = reserve_for_draft(Options(context=4096).request(model), draft, model, tpplan.parse_devices("48GiB"))
    made = tpplan.load("plan.json")
    assert (made.request.reserve, made.request.draft, made.format_version) == ((), asked.draft, "1.4")


def test_a_manifest_splits_a_draft_model(head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both plans are those of the command; each is made, checked and listed."""
    monkeypatch.chdir(tmp_path)
    gpus = "RTX4090,RTX3060"
    asked = ("plan", LLAMA_8B / "config.json", "--gpus", gpus, "--context", "4096", "--reserve", "64MiB@0")
    assert command(*asked, "--draft", head, "--draft-output", "d.json", "-o", "p.json").code == 0
    entry = f'file = "plans/p.json"\nmodel = "{LLAMA_8B / "config.json"}"\ngpus = "{gpus}"\ncontext = 4096\n'
    entry = f'[[plan]]\n{entry}reserve = "64MiB@0"\n'
    (tmp_path / "tpplan.toml").write_text(f'{entry}draft = "head/config.json"\ndraft-output = "plans/d.json"\n')
    assert "plans/d.json: new: not made yet" in command("check").out
    done = command("plan", "--all")
    assert done.code == 0, done.err
    for name in ("p.json", "d.json"):
        assert (tmp_path / "plans" / name).read_bytes() == (tmp_path / name).read_bytes()
    current = command("check")
    assert (current.code, "2 of 2 plans current" in current.out) == (0, True), current.out
    head.write_text(json.dumps(EAGLE3 | {"intermediate_size": 20000}))
    stale = command("check")
    assert (stale.code, "plans/d.json: stale (model)" in stale.out) == (1, True), stale.out
    for wrong, problem in (
        ('draft-output = "plans/d.json"', "has draft-output and no draft"),
        ('draft = "head/config.json"\ndraft-output = "plans/p.json"', "has the same file as"),
        ('draft = "head/config.json"\ndraft-output = "../d.json"', "expected a path within the folder"),
        ('draft = "head/config.json"\ndraft-output = 3', "names the file of the draft model's plan"),
    ):
        (tmp_path / "tpplan.toml").write_text(f"{entry}{wrong}\n")
        refused = command("check")
        assert (refused.code, problem in refused.err.replace("\n", " ")) == (2, True), refused.err
    (tmp_path / "tpplan.toml").write_text(f'[defaults]\ndraft-output = "d.json"\n{entry}')
    assert 'has the unknown key "draft-output"' in command("check").err


def test_a_manifest_writes_no_plan_of_a_draft_model_without_its_model(head: Path, inside: Path) -> None:
    """Where the model does not fit, the files of both stay as they were."""
    entry = f'[[plan]]\nfile = "p.json"\nmodel = "{LLAMA_8B / "config.json"}"\ncontext = 4096\n'
    entry += f'draft = "{head}"\ndraft-output = "d.json"\n'
    for gpus, code in (("24GiB,12GiB", 0), ("2x6GiB", 1)):
        (inside / "tpplan.toml").write_text(f'{entry}gpus = "{gpus}"\n')
        done = command("plan", "--all", "--json")
        assert done.code == code
    assert [len(tpplan.load(inside / name).devices) for name in ("p.json", "d.json")] == [2, 2]
    assert tpplan.load(inside / "d.json").devices == tpplan.parse_devices("24GiB,12GiB")
    plans = json.loads(done.out)["plans"]
    assert [plan["outcome"] for plan in plans] == ["infeasible", "infeasible"]
    assert plans[1]["message"] == "not made, as p.json was not, the plan of the model that it drafts for"


def test_room_is_told_in_one_way(head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are rounded as everywhere; to the byte only where two would look alike."""
    monkeypatch.chdir(tmp_path)
    asked = ("plan", LLAMA_8B, "--gpus", "2xRTX3060", "--context", "4096", "--cache", "q8")
    assert command(*asked, "-o", "a.json").code == 0
    assert command(*asked, "--draft", head, "--draft-output", "d.json", "--reserve", "1GiB@1", "-o", "b.json").code == 0
    found = json.loads(command("diff", "a.json", "b.json", "--json").out)["fields"]
    fields = {each["path"]: (each["before"], each["after"]) for each in found}
    size, again = (format_bytes(entry.draft_bytes) for entry in tpplan.load("b.json").memory)
    assert size == again
    assert fields == {
        "format_version": ("1.2", "1.4"),
        "request.reserve": ("nothing", "1.00 GiB on device 1"),
        "request.draft.name": ("", "head"),
        "request.draft.room_bytes": ("nothing", f"{size} on every device"),
        "request.draft.split": ("false", "true"),
        "request.draft.head": ("", "eagle3"),
    }
    screen = command("diff", "a.json", "b.json").out.splitlines()  # which cuts nothing out of these two
    assert "~  request.reserve: nothing → 1.00 GiB on device 1" in screen
    assert f"~  request.draft.room_bytes: nothing → {size} on every device" in screen
    entry = f'[[plan]]\nfile = "a.json"\nmodel = "{LLAMA_8B / "config.json"}"\ngpus = "2xRTX3060"\n'
    entry += 'cache = "q8"\nreserve = "1GiB@1"\n'
    (tmp_path / "tpplan.toml").write_text(
        f'{entry}context = 4096\ndraft = "head/config.json"\ndraft-output = "d.json"\n'
    )
    stale = said(command("check", "a.json"))
    assert "draft head instead of none; draft-output given instead of none; reserve 1.00 GiB on device 1 inst" in stale
    one, two = (Reserve(2**30 + more) for more in (0, 1))
    assert reserves_told((one,), (two,)) == ("1073741824 bytes on every device", "1073741825 bytes on every device")


def test_a_draft_model_too_large_for_all(tmp_path: Path) -> None:
    """Split, it does not fit as any model does not."""
    model = tpplan.read_model(LLAMA_8B)
    with pytest.raises(InfeasibleError):
        split_draft(Options(context=4096).request(model), model, model, tpplan.parse_devices("2x6GiB"))


def test_prediction_layers_of_deepseek_v3() -> None:
    """With them the files have as many numbers as the hub counts: 8-bit floats, 16-bit floats, and 32-bit biases.

    Published are 680,571,043,840 F8_E4M3, 3,918,786,560 BF16, and in F32 scales and a bias for each expert.
    """
    path = DEEPSEEK / "config.json"
    model, layers = tpplan.read_model(path), read_prediction_layers(path)
    copies = 2 * 129_280 * 7168  # of the embedding and the output matrix, which are the model's
    biases = (58 + 1) * 256
    assert model.parameter_count + layers.parameter_count + copies == 680_571_043_840 + 3_918_786_560 + biases
    sixteen = sum(p.elements for _, p, _ in (*model.tensors(), *layers.tensors()) if p.dtype == "BF16")
    assert sixteen + copies == 3_918_786_560
    attention = layers.blocks[0].attention
    assert attention
    assert attention.latent_dim == 512 + 64  # cached of every token, as by any layer


#: A tiny glm4_moe: two layers, one that predicts.
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    **shape(vocab=96, hidden=64, dense=128, expert=32, layers=2, q=4, kv=2, head_dim=16, top=1, context=128),
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}


def _predicting(start: str) -> Tensors:
    """Return the tensors of the layer that predicts, as they are in files."""
    expert = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    matrices = {
        "eh_proj": (64, 128),
        **{f"self_attn.{name}_proj": (64, 64) for name in "qo"},
        **{f"self_attn.{name}_proj": (32, 64) for name in "kv"},
        "mlp.gate": (2, 64),
        **{f"mlp.experts.{i}.{name}": shape for i in range(2) for name, shape in expert.items()},
        **{f"mlp.shared_experts.{name}": shape for name, shape in expert.items()},
        **dict.fromkeys(("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"), (64,)),
    }
    found: Tensors = {f"{start}{name}.weight": ("BF16", shape) for name, shape in matrices.items()}
    return found | {f"{start}mlp.gate.e_score_correction_bias": ("F32", (2,))}


def test_prediction_layers_of_files(tmp_path: Path) -> None:
    """Their bytes are those in the files, without the copies of embedding and output matrix."""
    start = "model.layers.2."
    own = _predicting(start)
    copies = {f"{start}{name}.weight": ("BF16", (96, 64)) for name in ("embed_tokens", "shared_head.head")}
    model = {"model.norm.weight": ("BF16", (64,)), "model.layers.1.input_layernorm.weight": ("BF16", (64,))}
    directory = write_checkpoint(tmp_path / "glm", GLM, model | own | copies)
    layers = read_prediction_layers(directory)
    assert layers.weight_bytes == tensor_bytes(own)
    assert {name for name, *_ in layers.tensors()} == {name.replace(start, "layers.0.") for name in own}
    assert read_prediction_layers(directory / "config.json").weight_bytes == tensor_bytes(own)
    del own[f"{start}eh_proj.weight"]
    write_checkpoint(directory, GLM, model | own)
    with pytest.raises(ModelError, match="eh_proj"):
        read_prediction_layers(directory)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_nextn_predict_layers": 0}, "has no prediction layers"),
        ({"model_type": "llama", "architectures": None}, "prediction layers of 'llama' are not known"),
        ({"model_type": "llama", "architectures": None, "num_nextn_predict_layers": None}, "has no prediction layers"),
        ({"num_nextn_predict_layers": "one"}, "num_nextn_predict_layers"),
        ({"num_nextn_predict_layers": 65}, "num_nextn_predict_layers"),
    ],
)
def test_models_without_prediction_layers(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """An error says that there are none, or that they are not known, and what to do instead."""
    with pytest.raises(ModelError, match=problem) as caught:
        read_prediction_layers(write_checkpoint(tmp_path, GLM | change, {}) / "config.json")
    assert caught.value.hint
    if "num_nextn_predict_layers" in change and not change["num_nextn_predict_layers"]:
        with pytest.raises(ModelError, match="prediction layers"):
            read_prediction_layers(write_checkpoint(tmp_path, GLM, {"model.norm.weight": ("BF16", (64,))}))


_DENSE_LAYER = {
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64),
    "mlp.gate_proj.weight": (96, 64),
    "mlp.up_proj.weight": (96, 64),
    "mlp.down_proj.weight": (64, 96),
}
_BIASES = {f"self_attn.{name}_proj.bias": (width,) for name, width in (("q", 64), ("k", 32), ("v", 32))}
_MIXTURE = {
    f"mlp.{part}.{name}_proj.weight": (64, 32) if name == "down" else (32, 64)
    for part in ("experts.0", "experts.1", "shared_mlp")
    for name in ("gate", "up", "down")
}
#: Names of prediction layers as vLLM reads them, with what a config has beside.
OTHERS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "mimo": (
        {},
        {
            f"model.mtp_layers.0.{name}": shape
            for name, shape in {
                **_DENSE_LAYER,
                **_BIASES,
                **{f"{of}_layernorm.weight": (64,) for of in ("token", "hidden", "final")},
                "input_proj.weight": (64, 128),
            }.items()
        },
    ),
    "ernie4_5_moe": (
        {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 32, "head_dim": 16},
        {
            **{f"model.mtp_block.0.{name}": shape for name, shape in _DENSE_LAYER.items()},
            "model.mtp_emb_norm.0.weight": (64,),
            "model.mtp_hidden_norm.0.weight": (64,),
            "model.mtp_linear_proj.0.weight": (64, 128),
        },
    ),
    "hy_v3": (
        {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "head_dim": 16},
        {
            f"model.layers.2.{name}": shape
            for name, shape in {
                **{name: shape for name, shape in _DENSE_LAYER.items() if not name.startswith("mlp.")},
                **_MIXTURE,
                "mlp.router.gate.weight": (2, 64),
                "mlp.expert_bias": (2,),
                **{f"self_attn.{of}_norm.weight": (16,) for of in ("q", "k")},
                **{f"{of}.weight": (64,) for of in ("enorm", "hnorm", "final_layernorm")},
                "eh_proj.weight": (64, 128),
            }.items()
        },
    ),
}


@pytest.mark.parametrize("model_type", OTHERS)
def test_prediction_layers_under_other_names(model_type: str, tmp_path: Path) -> None:
    """Those of MiMo, ERNIE and HY are read from files and from a config alone, with the same bytes."""
    keys, shapes = OTHERS[model_type]
    size = {key: GLM[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = {
        "model_type": model_type,
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 128,
        "num_nextn_predict_layers": 1,
        **size,
        **keys,
    }
    own: Tensors = {name: ("F32" if name.endswith("expert_bias") else "BF16", at) for name, at in shapes.items()}
    model: Tensors = {"model.norm.weight": ("BF16", (64,)), "model.layers.1.input_layernorm.weight": ("BF16", (64,))}
    directory = write_checkpoint(tmp_path / model_type, config, model | own)
    assert read_prediction_layers(directory).weight_bytes == tensor_bytes(own)
    assert read_prediction_layers(directory / "config.json").weight_bytes == tensor_bytes(own)


def test_prediction_layers_of_qwen() -> None:
    """They are layers with full attention beside a matrix that joins two vectors, and three norms."""
    layers = read_prediction_layers(QWEN / "config.json")
    hidden, heads, kv, size, width, experts = 2048, 16, 2, 256, 512, 512
    attention = hidden * (2 * heads + 2 * kv + heads) * size + 2 * size  # queries with gates, keys, values, output
    mixture = experts * hidden + (experts + 1) * 3 * hidden * width + hidden  # router, experts and the shared one, gate
    assert layers.parameter_count == attention + mixture + 2 * hidden + 2 * hidden * hidden + 3 * hidden


def test_room_for_prediction_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is split like the model, on the command line and in a manifest."""
    monkeypatch.chdir(tmp_path)
    path = DEEPSEEK / "config.json"
    done = command("plan", path, "--gpus", "8xH200", "--context", "4096", "--mtp", "-o", "plan.json")
    assert (done.code, "room for prediction layers of DeepSeek-V3: " in done.err) == (0, True)
    plan = tpplan.load("plan.json")
    together = sum(entry.draft_bytes for entry in plan.memory)
    assert not plan.request.reserve
    assert (plan.request.mtp, plan.format_version, plan.model.not_planned) == (True, "1.4", ())
    shown = command("show", "plan.json", "--html", "plan.html", "--format", "text")
    page = (tmp_path / "plan.html").read_text()
    for text in (done.err, shown.out, page):
        assert "ot planned" not in text
    assert "room for prediction layers" in " ".join(shown.out.split())
    assert "room for prediction layers" in page
    weights, cache = read_prediction_layers(path).weight_bytes, 8 * 4096 * 576 * 2
    assert weights + cache < together < weights + cache + 8 * GIB // 2
    entry = f'[[plan]]\nfile = "plan.json"\nmodel = "{path}"\ngpus = "8xH200"\ncontext = 4096\nmtp = true\n'
    (tmp_path / "tpplan.toml").write_text(entry)
    assert command("check").code == 0
    (tmp_path / "other.json").write_text(path.read_text())  # the same model by another name
    (tmp_path / "tpplan.toml").write_text(entry.replace(f"{path}", "other.json"))
    assert command("check").code == 0
    more = path.read_text().replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 2')
    (tmp_path / "config.json").write_text(more)
    (tmp_path / "tpplan.toml").write_text(entry.replace(f"{path}", "config.json"))
    assert "(draft) prediction layers of" in said(stale := command("check"))
    assert " changed: their room is " in said(stale)
    both = command("plan", path, "--gpus", "8xH200", "--mtp", "--draft", path)
    assert (both.code, "--mtp does not go with --draft" in both.err) == (2, True)
    (tmp_path / "tpplan.toml").write_text(entry + 'draft = "x"\n')
    both = command("check")
    assert (both.code, "has draft and mtp" in both.err) == (2, True)


def test_prediction_layers_are_split_by_memory_unless_latency_is_asked_for() -> None:
    """Nobody asks how fast they are: plan and fit leave the same room, also where ``auto`` cuts by latency."""
    model, layers = tpplan.read_model(QWEN), read_prediction_layers(QWEN)
    devices = tpplan.parse_devices("2xH100,2xRTX4090")
    asked = Options(context=4096, mtp=True).request(model)
    rooms = {
        strategy: split_draft(evolve(asked, strategy=strategy), layers, model, devices)[0].draft
        for strategy in ("auto", "balanced", "latency")
    }
    assert rooms["auto"] == rooms["balanced"] != rooms["latency"]


@pytest.mark.parametrize("beside", [(), ("--draft-output", "draft.json")])
def test_suggestions_are_right_when_followed(
    beside: tuple[str, ...], head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the draft model changes with what is suggested: its cache is shorter, or split over more devices."""
    monkeypatch.chdir(tmp_path)
    small = tmp_path / "small"
    small.mkdir()
    config = json.loads((LLAMA_8B / "config.json").read_text()) | {"num_hidden_layers": 8}
    (small / "config.json").write_text(json.dumps(config))
    gpus, wanted = ["16GiB", "16GiB"], {"context": 32768, "batch": 8, "cache": "fp16", "layout": "reduce", "kv": "idle"}

    def planned(gpus: list[str], *more: str, **changes: object) -> Done:
        options = [f"--{key}={value}" for key, value in (wanted | changes).items()]
        named = ("--draft", small / "config.json", *beside, "--gpus", ",".join(gpus))
        return command("plan", LLAMA_8B, *named, *options, *more)

    done = planned(gpus, "--json")
    assert done.code == 1
    error = json.loads(done.out)["error"]
    assert len(error["suggestions"]) >= 2
    for advice in error["suggestions"]:
        kind, value, more = advice["kind"], advice["value"], [*gpus]
        if kind == "devices":
            again = planned([*gpus, *[gpus[advice["device"]]] * int(value)])
        elif kind == "memory":
            more[advice["device"]] = f"{value}B"
            again = planned(more)
        else:
            again = planned(gpus, **{kind: value})
        assert again.code == 0, (advice, again.err)
        if kind == "context":
            assert planned(gpus, context=int(value) + 256).code == 1


def test_what_is_reserved_beside_a_draft_model_may_be_left_out(head: Path) -> None:
    """Of reserves, only that of the user is advised against."""
    done = command("plan", LLAMA_8B, "--gpus", "24GiB", "--context", "4096", "--draft", head, "--reserve", "8GiB")
    assert (done.code, "reserve nothing" in done.err) == (1, True)
    done = command("plan", LLAMA_8B, "--gpus", "16GiB", "--context", "4096", "--draft", head)
    assert (done.code, "reserve nothing" in done.err) == (1, False)


def test_standard_output_takes_one_document(head: Path) -> None:
    """The plan of the draft model goes to a file."""
    done = command("plan", LLAMA_8B, "--gpus", "24GiB", "--draft", head, "--draft-output", "-")
    assert (done.code, done.out, "--draft-output is standard output" in done.err) == (2, "", True)


def test_a_default_draft_model_can_be_left_out(head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty text is none; the room of others is told as for a single plan, and so is that it changed."""
    monkeypatch.chdir(tmp_path)
    entry = f'gpus = "48GiB"\nmodel = "{LLAMA_8B / "config.json"}"\ncontext = 4096\n'
    both = f'[[plan]]\nfile = "a.json"\n{entry}\n[[plan]]\nfile = "b.json"\ndraft = ""\n{entry}'
    (tmp_path / "tpplan.toml").write_text(f'[defaults]\ndraft = "head/config.json"\n{both}')
    done = command("plan", "--all")
    assert done.code == 0
    assert "a.json: room for head: " in done.err
    assert "b.json: room for" not in done.err
    assert not tpplan.load("b.json").request.reserve
    head.write_text(json.dumps(EAGLE3 | {"intermediate_size": 20000}))
    stale = command("check")
    assert (stale.code, "a.json: stale (draft) the draft model head changed: its" in said(stale)) == (1, True)


def said(done: Done) -> str:
    """Return what is on a screen in one line."""
    return " ".join(done.out.split())


DRAFTING = f"""
[[plan]]
file = "p.json"
model = "{LLAMA_8B / "config.json"}"
gpus = "48GiB,40GiB"
context = 4096
draft = "head/config.json"
"""
DRAFT_CHANGED, RESERVE = "the draft model head changed: its room is ", "256MiB"


def test_a_reserve_that_changed_is_told_beside_a_draft_model(inside: Path, head: Path) -> None:
    """All of the draft model is on every device, so what changed on one is the manifest's."""
    assert head.exists()
    for before, after, told in (
        ("64MiB@1", "", "nothing instead of 64.00 MiB on device 1"),
        ("64MiB@1", "16MiB@1", "16.00 MiB on device 1 instead of 64.00 MiB on device 1"),
        ("", "1GiB", "1.00 GiB on every device instead of nothing"),
    ):
        for size, words in ((before, ("plan", "--all")), (after, ("check",))):
            (inside / "tpplan.toml").write_text(DRAFTING + (f'reserve = "{size}"\n' if size else ""))
            done = command(*words)
        assert said(done).startswith(f"p.json: stale (options) the manifest asks for reserve {told} ")


@pytest.mark.parametrize(
    ("intermediate", "change", "told"),
    [
        (30000, ("", ""), f"(draft) {DRAFT_CHANGED}"),
        (12288, ("", ""), f"(draft) {DRAFT_CHANGED}"),
        (
            14336,
            (RESERVE, "128MiB"),
            "(options) the manifest asks for reserve 128.00 MiB on every device instead of",
        ),
        (14336, (RESERVE, "39GiB"), "(options, infeasible) the manifest asks for reserve 39.00 GiB on every device"),
        (30000, (RESERVE, "128MiB"), f"instead of 256.00 MiB on every device; {DRAFT_CHANGED}"),
        (14336, ("4096", "8192"), "(options) the manifest asks for context 8192 instead of 4096 "),
        (14336, ("4096", "8192\nbatch = 2"), "(options) the manifest asks for context 8192 instead of 4096; batch 2 "),
        (30000, ("4096", "8192"), f"instead of 4096; {DRAFT_CHANGED}"),
    ],
)
def test_room_that_changed_is_told_from_a_reserve(
    inside: Path, head: Path, intermediate: int, change: tuple[str, str], told: str
) -> None:
    """A plan has each by itself."""
    path, config = inside / "tpplan.toml", head.read_text()
    for split in ("", 'draft-output = "d.json"\n'):
        manifest = f'{DRAFTING}reserve = "{RESERVE}"\n{split}'
        path.write_text(manifest)
        head.write_text(config)
        assert command("plan", "--all").code == 0
        assert command("check").code == 0
        head.write_text(json.dumps(EAGLE3 | {"intermediate_size": intermediate}))
        path.write_text(manifest.replace(*change, 1))
        assert told in said(command("check", "p.json"))


def test_what_is_noted_of_prediction_layers_and_heads(head: Path) -> None:
    """Layers that --mtp knows are hinted at by it; a head for a model of another width is noted."""
    done = command("plan", DEEPSEEK / "config.json", "--gpus", "8xH200", "--context", "4096")
    assert "hint: --mtp keeps room for prediction layers" in done.err
    done = command(
        "plan", ROOT / "examples/models/Llama-3.1-70B", "--gpus", "4xH100", "--context", "4096", "--draft", head
    )
    assert "head reads hidden states of 4096 elements, Llama-3.1-70B has 8192" in done.err.replace("\n", " ")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "Eagle3DraftModel"])
def test_no_engine_serves_a_head_alone(
    engine: str, architecture: str, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan is refused, with a hint to the model's, which is not; no other engine or devices are suggested."""
    monkeypatch.chdir(tmp_path)
    head.write_text(json.dumps(EAGLE3 | {"architectures": [architecture]}))
    asked = ("--gpus", "2xRTX4090", "--context", 4096, "--draft", head.parent, "--draft-output", "head.json")
    assert command("plan", LLAMA_8B, *asked, "-o", "p.json").code == 0
    done = command("export", "head.json", "--for", engine)
    assert done.code == 1
    assert "has no embedding" in done.out
    assert done.err.startswith("hint: export the plan of the model that it drafts for")
    assert done.err.count("hint: ") == 1
    assert "has no embedding" not in command("export", "p.json", "--for", engine).out


@pytest.mark.parametrize("split", [False, True])
def test_a_plan_says_that_its_draft_model_is_a_head(split: bool, head: Path) -> None:
    """By its kind; of another model the key is left out, and not asked for."""
    model, devices = tpplan.read_model(LLAMA_8B), tpplan.parse_devices("2xH100")
    for path, kind in ((head, "eagle3"), (ROOT / "examples/models/Qwen2.5-7B", "")):
        draft, asked = tpplan.read_model(path), Options(context=2048).request(model)
        room = (
            split_draft(asked, draft, model, devices)[0] if split else reserve_for_draft(asked, draft, model, devices)
        )
        plan = plan_request(model, devices, room)
        text = tpplan.dumps(plan)
        assert json.loads(text)["request"]["draft"].get("head", "") == kind
        assert tpplan.loads(text) == plan
