"""A sharded model gives what transformers gives on one device."""

from __future__ import annotations

import json
from copy import deepcopy
from shutil import copytree
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve

from tests.command import command
from tests.family_models import NOT_IN_TRANSFORMERS, SAME
from tests.transformers.cases import KINDS, Model, cut, default_config, model_of, prompt, sharded
from tests.weight_plans import fine_units  # noqa: F401 (for every test here)
from tpplan.core.axes import Axis
from tpplan.core.plan import Cache, Request
from tpplan.errors import ExecutionError, RequestError
from tpplan.exec.context import TPContext
from tpplan.models import families
from tpplan.transformers.cache import PerDeviceLayer
from tpplan.transformers.classes import runnable
from tpplan.transformers.sharding import config_of
from tpplan.transformers.trial import check_small_model
from tpplan.weights.source import Source

if TYPE_CHECKING:
    from pathlib import Path

    from tpplan.core.plan import SplitPlan

#: Families that transformers does not run on several devices, or of which no small model can be made.
REFUSED = {
    *("granite_docling_text", "longcat_flash", "minimax_m3_vl_text", "mllama_text_model"),
    *("qwen2_5_omni_text", "qwen3_omni_moe_text", "voxtral_realtime_text"),
    *("minimax", "deepseek_ocr2_text", "aria_text", "ernie4_5_vl_moe_text", "granite4_vision_text"),
    *("hunyuan_vl_text", "molmo2_text", "muse_spark_text"),
}


def assert_same(model: Model, plan: SplitPlan, new: int = 14) -> None:
    """Compare logits of a prompt that takes several passes, and what is generated greedily."""
    tokens = prompt()
    with sharded(model, plan) as parts, torch.no_grad():
        torch.testing.assert_close(parts(tokens).logits, model.whole(tokens).logits, atol=1e-4, rtol=1e-4)
        wanted, found = (each.generate(tokens, max_new_tokens=new, do_sample=False) for each in (model.whole, parts))
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("model_type", KINDS)
def test_any_cut(model_type: str, devices: int) -> None:
    """One to four uneven devices, some without heads, columns or rows, give transformers' logits and tokens."""
    assert_same(model_of(model_type), cut(model_of(model_type), devices, seed=devices))


@pytest.mark.parametrize("model_type", ["llama", "phi3", "qwen3_next", "gpt2", "olmo2"])
def test_gathered(model_type: str) -> None:
    """Layout gather cuts matrices by their outputs, which devices join."""
    if model_type == "qwen3_next":
        with pytest.raises(RequestError, match="experts, whose matrices transformers multiplies together"):
            assert_same(model_of(model_type), cut(model_of(model_type), 3, seed=2, layout="gather"))
    else:
        assert_same(model_of(model_type), cut(model_of(model_type), 3, seed=2, layout="gather"))


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("seed", [3, 4])
def test_replicated_heads(model_type: str, seed: int) -> None:
    """A KV head may be on several devices, whose query heads need not be as many for each KV head."""
    assert_same(model_of(model_type), cut(model_of(model_type), 3, seed, kv="replicate"))


@pytest.mark.parametrize("model_type", KINDS)
def test_weights_are_those_of_the_ledger(model_type: str) -> None:
    """A device's parameters are the bytes that the plan counts, each once; what it lacks takes none."""
    model = model_of(model_type)
    plan = cut(model, 3, seed=1)
    with sharded(model, plan) as parts:
        for device, own in parts.device_models.items():
            stored = {**dict(own.named_parameters()), **{name: own.get_buffer(name) for name in _buffers(own)}}
            real = [t for t in stored.values() if t.untyped_storage().nbytes() >= t.nbytes and _has_values(t)]
            assert sum(tensor.nbytes for tensor in real) == plan.memory[device].weights_bytes
            stores = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in real}
            # They are aligned, and biases that count on another device are zeros here.
            assert sum(stores.values()) <= 1.02 * plan.memory[device].weights_bytes + 64 * len(real)


def _has_values(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is more than the one zero that takes the place of what a device lacks."""
    return tensor.numel() > 1 or bool(tensor.any())


def _buffers(model: Any) -> set[str]:
    """Return the names of buffers that a checkpoint has."""
    return {*model.state_dict()} - {name for name, _ in model.named_parameters(remove_duplicate=False)}


def layers_of(cache: Any, device: int) -> dict[int, Any]:
    """Return the layers of a device's cache, those that have one."""
    return {i: layer._layers[device] for i, layer in enumerate(cache.layers) if type(layer) is PerDeviceLayer}


@pytest.mark.parametrize(
    "model_type", ["llama", "gemma4 that shares keys", "granitemoehybrid without experts", "falcon_h1 with a norm"]
)
def test_caches_are_of_own_heads(model_type: str) -> None:
    """A device caches keys of the KV heads that the plan gives it, and states of its linear heads."""
    model = model_of(model_type)
    plan, blocks = cut(model, 3, seed=2), Source.read(model.directory).model.by_layer
    with sharded(model, plan) as parts, torch.no_grad():
        cache = parts(prompt(), use_cache=True).past_key_values
    for layer, block in blocks.items():
        for device in range(3):
            own = layers_of(cache, device).get(layer)
            if own is None:
                assert block.attention is not None
                assert block.attention.shared
                continue
            for axis, _ in block.sizes():
                start, end = plan.split(axis, layer).bounds[device : device + 2]
                if axis is Axis.KV_HEADS and end > start:
                    assert own.keys.shape[1] == end - start
                elif axis is Axis.KV_HEADS:
                    assert own.keys.numel() <= prompt().numel()
                elif axis is Axis.LINEAR_HEADS:
                    assert own.recurrent_states[0].shape[1] == max(1, end - start)


def test_sixteen_bits() -> None:
    """In bfloat16, a sharded model loses no more than a whole one does."""
    exact, model = model_of("llama"), model_of("llama", torch.bfloat16)
    model.whole.load_state_dict(exact.whole.state_dict())
    model.whole.save_pretrained(model.directory)
    tokens = prompt()
    with sharded(model, cut(model, 3, seed=3)) as parts, torch.no_grad():
        right, lost, found = (each(tokens).logits.float() for each in (exact.whole, model.whole, parts))
    assert 0 < (found - right).norm() < 2 * (lost - right).norm()


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next", "gemma3_text", "gemma4 that shares keys"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"do_sample": True, "top_k": 5, "temperature": 0.7},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
        {"use_cache": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_generate_does(model_type: str, options: dict[str, Any]) -> None:
    """Beams, drawing, looking up, static caches and none: transformers' generate does as on one device."""
    if model_type == "qwen3_next" and "prompt_lookup_num_tokens" in options:
        pytest.skip("transformers itself does not do this with states")
    model, tokens = model_of(model_type), prompt()
    with sharded(model, cut(model, 3, seed=5)) as parts:
        wanted, found = (_seeded(each, tokens, {"do_sample": False} | options) for each in (model.whole, parts))
    assert found == wanted


def _seeded(model: Any, tokens: torch.Tensor, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return model.generate(tokens, max_new_tokens=12, **options).tolist()


def test_several_texts() -> None:
    """Texts of different length are padded, and continued as one by one."""
    model, tokens = model_of("llama"), prompt(9, 2)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    with sharded(model, cut(model, 3, seed=6)) as parts:
        both = parts.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False)[:, 9:]
        alone = [each.tolist() for row in (tokens[:1], tokens[1:, 4:]) for each in _new(model.whole, row)]
    assert both.tolist() == alone


def _new(model: Any, row: torch.Tensor, count: int = 8) -> torch.Tensor:
    found: torch.Tensor = model.generate(row, max_new_tokens=count, do_sample=False)[:, row.shape[1] :]
    return found


def test_a_cache_of_others() -> None:
    """A cache that something else has filled is refused."""
    model, tokens = model_of("llama"), prompt()
    filled = model.whole(tokens, use_cache=True).past_key_values
    with (
        sharded(model, cut(model, 2, seed=1)) as parts,
        pytest.raises(ExecutionError, match="already has keys and values"),
    ):
        parts(tokens[:, :1], past_key_values=filled)


def test_a_copy_of_a_cache() -> None:
    """A cache that was filled by a prefix may be copied, and each copy goes on by itself."""
    model, tokens = model_of("llama"), prompt()
    with sharded(model, cut(model, 3, seed=1)) as parts, torch.no_grad():
        first = parts(tokens, use_cache=True).past_key_values
        copies = [deepcopy(first) for _ in range(2)]
        wanted = model.whole(torch.cat([tokens, tokens[:, :2]], 1)).logits[:, -2:]
        for cache in copies:
            found = [parts(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(2)]
            torch.testing.assert_close(torch.cat(found, 1), wanted, atol=1e-4, rtol=1e-4)
        with sharded(model, cut(model, 2, seed=2)) as others, pytest.raises(ExecutionError, match="another sharded"):
            others(tokens[:, :1], past_key_values=copies[0])


def test_tokens_of_the_config(tmp_path: Path) -> None:
    """A pad token may be in any device's rows, and generation_config.json counts as for transformers."""
    model = model_of("llama")
    copytree(model.directory, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"pad_token_id": 200}), encoding="utf-8")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [7]}', encoding="utf-8")
    moved = Model(tmp_path / "model", model.whole)
    with sharded(moved, cut(moved, 3, seed=1)) as parts, torch.no_grad():
        torch.testing.assert_close(parts(prompt()).logits, model.whole(prompt()).logits, atol=1e-4, rtol=1e-4)
        assert parts.generation_config.eos_token_id == [7]
        assert parts(prompt(), use_cache=None).past_key_values.get_seq_length() == prompt().shape[1]


def test_after_an_error() -> None:
    """An error in a device's forward pass is that error, and the model works after it."""
    model, tokens = model_of("llama"), prompt()
    with sharded(model, cut(model, 2, seed=1)) as parts, torch.no_grad():
        with pytest.raises(RequestError, match="token 1000000 is outside the vocabulary of 256"):
            parts(torch.tensor([[10**6]]))
        with pytest.raises(RuntimeError):
            parts(tokens, position_ids=torch.tensor([[[0]]]))
        torch.testing.assert_close(parts(tokens).logits, model.whole(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "deepseek_v3", "gemma4 of experts"])
def test_one_device_routes_for_all(model_type: str) -> None:
    """What another device would choose at a near tie does not matter: here its router says something else."""
    model, tokens = model_of(model_type), prompt()
    plan = cut(model, 3, seed=5)
    with sharded(model, plan) as parts, torch.no_grad():
        holders = [each.device for each in plan.slices(Axis.EXPERT_INTERMEDIATE)]
        assert len(holders) > 1
        for device in holders[1:]:
            for name, tensor in parts.device_models[device].named_parameters():
                if tensor.dim() > 1 and ("router" in name or name.endswith("gate.weight")):
                    tensor.normal_()
        torch.testing.assert_close(parts(tokens).logits, model.whole(tokens).logits, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_captured_runs_as_usual(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where torch cannot capture a step, the model says so once and goes on without graphs."""
    model, tokens = model_of("llama"), prompt()
    monkeypatch.setattr(TPContext, "can_capture", True)
    with sharded(model, cut(model, 3, seed=1)) as parts:
        assert parts.captures_steps
        options = {"cache_implementation": "static", "max_new_tokens": 8, "do_sample": False}
        wanted = model.whole.generate(tokens, **options).tolist()
        assert parts.generate(tokens, **options).tolist() == wanted  # virtual devices refuse to be captured
        assert parts.generate(tokens, **options).tolist() == wanted
        assert not parts.captures_steps
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "decoding steps run without a CUDA graph, which could not be captured"
    ]


def test_a_part_alone() -> None:
    """A part of a sharded model cannot be called by itself, and says so."""
    model = model_of("llama")
    with sharded(model, cut(model, 2, seed=1)) as parts, pytest.raises(ExecutionError, match="outside of the model"):
        parts.model(prompt())


@pytest.mark.parametrize("model_type", sorted({*families.LANGUAGE_MODELS} - {*SAME, *NOT_IN_TRANSFORMERS}))
def test_every_family_is_tried(model_type: str) -> None:
    """Every planned family runs on three devices, if need be within one that reads images, or is refused by name."""
    config = runnable(default_config(model_type))
    if model_type not in REFUSED:
        check_small_model(config, "reduce", "idle")
        return
    with pytest.raises(RequestError, match="does not run on several devices: "):
        check_small_model(config, "reduce", "idle")


def test_text_of_a_model_for_images() -> None:
    """A model that reads images is sharded without that part: text goes through its class, images are refused."""
    model, tokens = model_of("qwen2_5_vl"), prompt()
    with sharded(model, cut(model, 3, seed=1)) as parts:
        assert type(parts) is type(model.whole)
        assert not any("visual" in name for name, _ in parts.named_parameters())
        refusal = "was sharded for text, without what reads "
        with pytest.raises(RequestError, match=f"{refusal}pixel_values"):
            parts(tokens, pixel_values=torch.zeros(4, 8))
        with pytest.raises(RequestError, match=refusal):
            parts.generate(tokens, pixel_values=torch.zeros(4, 8), max_new_tokens=2)


def test_what_cannot_be_kept_is_refused() -> None:
    """A plan of a quantised cache, and a model that transformers does not know alone, are refused before loading."""
    model = model_of("llama")
    plan = evolve(cut(model, 2, seed=1), request=Request("reduce", "balanced", Cache("q8", 128), 2, 8, "idle"))
    source = Source.read(model.directory)
    with pytest.raises(RequestError, match="plan caches keys and values as q8, transformers as numbers of 16 bits"):
        config_of(source, plan)
    coded = evolve(source, model=evolve(source.model, weight_format="GPTQ 4-bit g128"))
    with pytest.raises(RequestError, match="GPTQ 4-bit g128, which are not computed by transformers"):
        config_of(coded, plan)


def test_the_command_takes_what_knows_the_model(tmp_path: Path) -> None:
    """``generate`` is by transformers where the decoder does not know the family, and says so."""
    model, path, tokens = model_of("stablelm"), tmp_path / "plan.json", prompt()
    cut(model, 3, seed=2).save(path)
    arguments = ["generate", path, "--model", model.directory, "--token-ids", ",".join(map(str, tokens[0].tolist()))]
    done = command(*arguments, "--max-new-tokens", 6)
    assert done.code == 0, done.err
    assert [*map(int, done.out.split(","))] == _new(model.whole, tokens)[0, :6].tolist()
    assert "computed by transformers, as" in done.err
    refused = command(*arguments, "--engine", "tpplan")
    assert (refused.code, "the decoder does not compute models of type" in refused.err) == (2, True)
    directory = copytree(model.directory, tmp_path / "other")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | {"hidden_act": "sillu"}), encoding="utf-8")
    neither = command(*(directory if each is model.directory else each for each in arguments))
    assert neither.err.endswith("(KeyError: 'sillu')\nhint: docs/run-a-model.md lists what runs\n"), neither.err


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_the_command_may_take_either(model_type: str, tmp_path: Path) -> None:
    """Both engines say the same of a model that the decoder knows."""
    model, path = model_of(model_type), tmp_path / "plan.json"
    cut(model, 2, seed=2).save(path)
    arguments = ["generate", path, "--model", model.directory, "--token-ids", "5,17,99", "--max-new-tokens", 6]
    outs = {command(*arguments, "--engine", engine).out for engine in ("tpplan", "transformers", "auto")}
    assert len(outs) == 1 and outs != {""}  # noqa: PT018 (one fact)
