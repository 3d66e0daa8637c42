"""Computing with a GGUF file: its bytes on the devices, the numbers that they stand for, and the tokens."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from attrs import evolve
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from tests.command import command
from tests.models.gguf.test_gguf import COMMON, MORE, VOCAB, config_of, kind_of, shapes_of, spec_of, write
from tests.weight_plans import loaded
from tpplan.core.device import Device
from tpplan.core.plan import Cache, SplitPlan
from tpplan.core.sizes import format_bytes
from tpplan.decoder.decoder import Decoder
from tpplan.decoder.fast.launches.chosen import readable
from tpplan.decoder.fast.launches.dense import KINDS
from tpplan.decoder.model.settings import settings_of
from tpplan.decoder.weights.fuse import fuse_weights
from tpplan.decoder.weights.gguf import check_room, dequantised, in_pairs
from tpplan.errors import ExecutionError, ModelError
from tpplan.exec import compile as compile_plan
from tpplan.models.gguf.architectures import ARCHITECTURES
from tpplan.models.gguf.reader import read_gguf_model
from tpplan.models.reader import read_model
from tpplan.planner.plan import plan
from tpplan.weights import iter_slices

if TYPE_CHECKING:
    from pathlib import Path

Q = gguf.GGMLQuantizationType
MIB = 2**20
HEAD_DIM = COMMON["attention.key_length"]
CAPS = 5.0, 3.0
THETA = {"rope_theta": 10000.0}
PLAIN = {"rope_type": "default", **THETA}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 16.0, "beta_slow": 2.0, **THETA}
YARN |= {"original_max_position_embeddings": 128}
#: Numbers of the metadata by architecture; Granite's are as small as its models'.
FACTORS = {
    "gemma2": {"attn_logit_softcapping": CAPS[0], "final_logit_softcapping": CAPS[1]},
    "granite": {"attention.scale": 0.1, "embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 4.0},
}
#: The same in words of a config.json, where they differ from what it says of the small models.
MORE_WORDS: dict[str, dict[str, Any]] = {
    "granite": {
        "attention_multiplier": 0.1,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    },
    "gpt-oss": {"sliding_window": 4},
    "exaone4": {"sliding_window": 4},
    "gemma3": {"sliding_window": 4, "query_pre_attn_scalar": HEAD_DIM},
}
#: Kinds of RoPE: in words of a config.json.
ROPES: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "gpt-oss": {**YARN, "truncate": False},
    "mistral3": {
        **YARN,
        "original_max_position_embeddings": 4,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "llama_4_scaling_beta": 0.25,
    },
    "linear": {"rope_type": "linear", "factor": 8.0, **THETA},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        **THETA,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 64 for i in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + i / 4 for i in range(HEAD_DIM // 2)],
        "factor": 128.0,
        "original_max_position_embeddings": 32,
        **THETA,
    },
    "partial": {**PLAIN, "partial_rotary_factor": 0.5},
}
#: The kind that small models have, where it is not the default.
OWN_ROPES = {"gpt-oss": "gpt-oss", "glm4": "partial", "mistral3": "mistral3"}


def divisors(rope: dict[str, Any]) -> np.ndarray:
    """Return what Llama 3.1's RoPE divides each frequency by, from the length of its wave, as llama.cpp has it."""
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((context / waves - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / rope["factor"] + smooth), np.float32)


def write_rope(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    """Write a RoPE as llama.cpp's converter does."""
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(HEAD_DIM * rope.get("partial_rotary_factor", 1)))
    kind = rope["rope_type"]
    if kind in {"yarn", "linear"}:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", divisors(rope))
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(rope["factor"]) / np.log(original))))
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


def written(path: Path, name: str, kind: str = "") -> None:
    """Write a small model of random numbers, in the types of mixed files; ``kind`` is that of its RoPE."""
    arch = "llama" if name == "mixtral" else name
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**COMMON, **MORE.get(name, {})}.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{arch}.{key}", 4 if key.endswith("sliding_window") else value)
    for key, factor in {**FACTORS.get(name, {}), "attention.layer_norm_rms_epsilon": 1e-5}.items():
        writer.add_float32(f"{arch}.{key}", factor)
    write_rope(writer, ROPES.get(kind or OWN_ROPES.get(name, ""), PLAIN))
    if name == "gemma3" and kind:
        writer.add_rope_freq_base_swa(THETA["rope_theta"])
        writer.add_sliding_window_pattern([True, False])
    writer.add_uint32(f"{arch}.vocab_size", VOCAB)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    random = np.random.default_rng(7)
    for tensor, shape in shapes_of(spec_of(name), name).items():
        stored = kind_of(tensor, shape, [Q.Q4_1, Q.Q8_0, Q.Q5_0])
        if name in {"gpt-oss", "qwen3moe"} and "exps.weight" in tensor:
            stored = Q.MXFP4
        values: Any = random.standard_normal(shape, np.float32)
        scale = (1 / 400 if "gemma" in name else 1 / 2) if "embd" in tensor else 1 / np.sqrt(np.float32(shape[-1]))
        values = values * np.float32(scale)
        if stored is Q.F32 or len(shape) == 1 or "bias" in tensor:
            writer.add_tensor(tensor, values + 1 if tensor.endswith("norm.weight") else values)
        else:
            writer.add_tensor(tensor, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def uneven(path: Path) -> SplitPlan:
    """Return a plan over two devices, of which the first has most of the model."""
    sizes = 18 * MIB, 14 * MIB
    devices = [Device(name="x", budget_bytes=size, overhead_bytes=0) for size in sizes]
    made = plan(read_model(path), devices, cache=Cache(tokens=128), max_rows=32)
    assert all(entry.weights_bytes for entry in made.memory)
    assert len({entry.weights_bytes for entry in made.memory}) == 2
    return made


def theirs(path: Path, name: str) -> Any:
    """Return the model as transformers reads it from the file, or as far as it cannot, as it would."""
    if name not in {"llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3"}:
        return by_hand(path, name)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.head_dim = config.query_pre_attn_scalar = HEAD_DIM  # which transformers does not take from the metadata
    config.moe_intermediate_size, config.sliding_window = 256, 4 if "gemma" in name else None
    config.attn_logit_softcapping, config.final_logit_softcapping = CAPS if name == "gemma2" else (None, None)
    config.pad_token_id = None
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype=torch.float32)


def by_hand(path: Path, name: str, kind: str = "") -> Any:
    """Return transformers' model with the file's numbers, by the names of the package gguf, and a kind of RoPE."""
    rope = ROPES.get(kind or OWN_ROPES.get(name, ""), PLAIN)
    more = {"rms_norm_eps": 1e-5, "pad_token_id": None, "rope_parameters": rope, **MORE_WORDS.get(name, {})}
    if name == "phi3":
        more["original_max_position_embeddings"] = rope.get("original_max_position_embeddings", 4096)
    if name == "gemma3":
        more["layer_types"] = ["sliding_attention", "full_attention"]
        more["rope_parameters"] = {"sliding_attention": PLAIN, "full_attention": rope}
    config = AutoConfig.for_model(**{**config_of(name), **more})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    arch = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}["llama" if name == "mixtral" else name]
    names, back = gguf.get_tensor_name_map(arch, 2), LlamaTensorProcessor(config.to_dict())
    stored = {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(path).tensors}

    def number(key: str) -> torch.Tensor:
        parts = [number(key.replace("gate_up", part)) for part in ("gate", "up")] if "experts.gate_up" in key else []
        if parts and name == "gpt-oss":
            return torch.stack(parts, -1).flatten(-2)
        if parts:
            return torch.cat(parts, 1)
        stem, _, end = key.rpartition(".")
        if end not in {"weight", "bias"}:  # experts and sinks
            stem, end = key.removesuffix("_bias"), "bias" if key.endswith("_bias") else "weight"
        own = f"{names.get_name(stem)}.{end}"
        values = stored[own]
        if name in {"llama", "granite", "smollm3", "mixtral", "mistral3"}:
            values = back.process(values, own).weights
        if name == "gpt-oss" and values.ndim == 3:
            values = values.swapaxes(1, 2)
        return torch.tensor(values - 1 if name in {"gemma", "gemma3"} and key.endswith("norm.weight") else values)

    model.load_state_dict({key: number(key) for key in model.state_dict() if key != "lm_head.weight"}, strict=False)
    if config.tie_word_embeddings:
        model.tie_weights()
    else:
        model.lm_head.weight = torch.nn.Parameter(torch.tensor(stored["output.weight"]))
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_parts_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    """Bytes are the file's; what they stand for is, to the bit, that part of what transformers reads from it."""
    path = tmp_path / "small.gguf"
    written(path, name)
    made, model = uneven(path), read_gguf_model(path)
    weights = loaded(made, path)
    stored = {tensor.data_offset: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    whole = {key: value.bfloat16() for key, value in theirs(path, name).state_dict().items()}
    numbers = {d: dequantised(weights[d], model, torch.bfloat16)[0] for d in weights.tensors}
    cut = set()
    for part in iter_slices(made, model.spec):
        own = weights[part.device][part.name]
        places = [i for start, end in part.ranges for i in range(start, end)]
        raw = stored[model.headers.tensors[part.name].start]
        assert np.array_equal(own.numpy(), raw if part.dim is None else raw.take(places, part.dim))
        expected = whole[part.name]
        if part.dim is not None:
            ratio = expected.shape[part.dim] / part.whole[part.dim]
            ranges = [(round(start * ratio), round(end * ratio)) for start, end in part.ranges]
            chosen = torch.cat([torch.arange(start, end) for start, end in ranges])
            expected = expected.index_select(part.dim, chosen)
            cut.add(part.dim)
        assert torch.equal(numbers[part.device][part.name], expected), part
    assert cut == {0, 1}


def generated(path: Path, name: str, prompt: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return tokens through an uneven plan; in 32 bits, which the file does not say."""
    own = ARCHITECTURES[name]
    monkeypatch.setitem(ARCHITECTURES, name, evolve(own, fixed={**own.fixed, "torch_dtype": "float32"}))
    uneven(path).save(tmp_path / "p.json")
    arguments = ("--token-ids", ",".join(map(str, prompt)), "--max-new-tokens", 6, "--backend", "cpu", "--json")
    done = command("generate", tmp_path / "p.json", "--model", path, *arguments)
    assert done.code == 0, done.err
    new: list[int] = json.loads(done.out)["new_tokens"]
    return new


def likeliest(model: Any, prompt: list[int], new: list[int]) -> list[int]:
    """Return transformers' likeliest token in the place of each new one."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1]
    assert bool((logits.max(-1).values > 2 * logits.std(-1)).all())
    found: list[int] = logits.argmax(-1).tolist()
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3"),
        *(
            "granite",
            "smollm3",
            "mixtral",
            "glm4",
            "seed_oss",
            "ernie4_5",
            "hunyuan-dense",
            "gpt-oss",
            "exaone4",
            "mistral3",
        ),
    ],
)
def test_tokens_are_likeliest_for_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token through an uneven plan is transformers' likeliest."""
    path, prompt = tmp_path / "small.gguf", [5, 17, 99, 3, 250]
    written(path, name)
    new = generated(path, name, prompt, tmp_path, monkeypatch)
    assert new == likeliest(theirs(path, name), prompt, new)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", "llama3"), ("qwen3", "yarn"), ("qwen2", "linear"), ("gemma3", "linear"), ("phi3", "longrope")),
        *(("phi3", "partial"), ("llama", "linear"), ("ernie4_5", "llama3")),
    ],
)
def test_scaled_and_partial_rope(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are transformers' likeliest with the scaling of the file, and others without it."""
    path, prompt = tmp_path / "small.gguf", [7 * i % 631 for i in range(1, 45)]
    written(path, name, kind)
    new = generated(path, name, prompt, tmp_path, monkeypatch)
    assert new == likeliest(by_hand(path, name, kind), prompt, new)
    assert new != likeliest(by_hand(path, name, "none"), prompt, new)


def leaving(made: SplitPlan, *free: int) -> SplitPlan:
    """Return a plan for devices of which each has so many bytes more than it needs."""
    pairs = list(zip(made.devices, made.memory, free, strict=True))
    devices = [evolve(each, budget_bytes=each.budget_bytes + size - m.free_bytes) for each, m, size in pairs]
    return evolve(made, devices=tuple(devices), memory=tuple(evolve(m, free_bytes=size) for _, m, size in pairs))


def test_room_for_numbers(tmp_path: Path) -> None:
    """What blocks become takes two bytes an element on each device that has it; the plan's rest must be enough."""
    path = tmp_path / "small.gguf"
    written(path, "llama")
    made, model = uneven(path), read_gguf_model(path)
    weights = loaded(made, path)
    sizes = {
        device: sum(each.nbytes for each in dequantised(weights[device], model, torch.float16)[0].values())
        for device in weights.tensors
    }
    note = check_room(leaving(made, sizes[0], sizes[1]), model, 2)
    assert note.endswith(", ".join(f"{format_bytes(size)} on device {device}" for device, size in sizes.items()))
    tight = leaving(made, sizes[0], sizes[1] - 1)
    words = re.escape(f"device 1 (x) needs {format_bytes(sizes[1])} for the numbers")
    with pytest.raises(ExecutionError, match=words) as error:
        check_room(tight, model, 2)
    assert "--backend cpu" in error.value.hint


def test_a_decoder_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders of one's own, whose weights are loaded already, are refused as those of generate are."""
    path = tmp_path / "small.gguf"
    written(path, "llama")
    made = leaving(uneven(path), 0, 0)
    weights = loaded(made, path)
    monkeypatch.setattr("tpplan.decoder.weights.gguf._on_gpus", lambda _context: True)
    with (
        compile_plan(made, backend="cpu") as context,
        pytest.raises(ExecutionError, match=r"device 0 \(x\) needs .* which leaves 0"),
    ):
        Decoder(context, path, weights)


def test_experts_in_mxfp4_stay_codes(tmp_path: Path) -> None:
    """Whatever their bytes are, they are the numbers of the package; and what they take is what the plan counts."""
    random = np.random.default_rng(3)
    raw = random.integers(0, 256, (6, 4 * 17), np.uint8)
    raw[:, ::17] = random.integers(100, 150, (6, 4))  # exponents of numbers that bfloat16 has
    matrix = in_pairs(torch.from_numpy(raw))
    assert in_pairs(torch.empty(0, 34, dtype=torch.uint8)).shape == (0, 64)
    assert torch.equal(matrix.dense(0, 6, torch.float32), torch.from_numpy(gguf.quants.dequantize(raw, Q.MXFP4)))
    path = tmp_path / "small.gguf"
    written(path, "gpt-oss")
    made, model = uneven(path), read_gguf_model(path)
    weights = loaded(made, path)
    for device, tensors in weights.tensors.items():
        numbers, codes = dequantised(weights[device], model, torch.bfloat16)
        experts = {name for name in tensors if ".experts." in name and name.endswith("weight")}
        assert codes.keys() == experts
        assert not numbers.keys() & experts
        layers = [block for block in model.spec.blocks for _ in block.layers]
        own = fuse_weights(numbers, codes, layers, settings_of(path, model.spec), torch.bfloat16)
        experts_0 = "model.layers.0.mlp.experts.{expert}."
        gate, up = (readable(own.stacked[f"{experts_0}{part}_proj"], KINDS) for part in ("gate", "up"))
        assert gate is not None
        assert gate == up  # kernels take both
        sizes = {name: matrix.codes.nbytes + matrix.scales.nbytes for name, matrix in codes.items()}
        assert sizes == {name: tensors[name].nbytes for name in experts}


@pytest.mark.parametrize(
    ("name", "family", "helps"), [("deepseek2", "deepseek_v3", True), ("starcoder2", "starcoder2", False)]
)
def test_families_that_are_not_computed(name: str, family: str, helps: bool, tmp_path: Path) -> None:
    """They are refused by name before anything is loaded; safetensors files are proposed where they would help."""
    path = tmp_path / "small.gguf"
    write(path, name)
    with pytest.raises(ModelError, match=f"does not compute models of type {family} from GGUF, but llama, ") as error:
        settings_of(path, read_model(path))
    export = "tpplan export PLAN --for llama.cpp says how llama.cpp runs it"
    assert error.value.hint == (f"compute from the model's safetensors files; {export}" if helps else export)


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        (np.ones(5, np.float32), "rope_freqs.weight is F32 of shape [5], expected F32 of shape [32]"),
        (np.ones(32, np.float16), "rope_freqs.weight is F16 of shape [32], expected F32 of shape [32]"),
        (np.zeros(32, np.float32), "rope_freqs.weight has 0, expected numbers from 1e-06 to 1e+06"),
    ],
)
def test_factors_that_are_wrong(factors: np.ndarray, words: str, tmp_path: Path) -> None:
    """The error names the tensor or the list that it stands for."""
    path = tmp_path / "small.gguf"
    write(path, "llama", tensors={"rope_freqs.weight": factors})
    with pytest.raises(ModelError, match=re.escape(words)):
        settings_of(path, read_model(path))


def test_sections_of_images(tmp_path: Path) -> None:
    """Vision models of GLM-4 have rows in another order, which the name of the architecture does not tell."""
    path = tmp_path / "small.gguf"
    sections: dict[str, Any] = {"rope.dimension_sections": [8, 12, 12, 0]}
    write(path, "glm4", **sections)
    with pytest.raises(ModelError, match="has a section for each direction in images"):
        settings_of(path, read_model(path))
