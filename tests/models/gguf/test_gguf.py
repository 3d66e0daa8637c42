"""Models in GGUF, beside the package that llama.cpp's authors write files with."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from tests.command import command
from tpplan.core.axes import Axis
from tpplan.core.device import Device
from tpplan.core.model import NotPlanned
from tpplan.core.plan import Cache
from tpplan.errors import ModelError
from tpplan.models.config import parse_config
from tpplan.models.families import spec_from_config
from tpplan.models.gguf.architectures import ARCHITECTURES
from tpplan.models.gguf.header import TYPES, read_gguf
from tpplan.models.reader import read_model, read_prediction_layers
from tpplan.planner.plan import plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tpplan.core.model import ModelSpec

Q = gguf.GGMLQuantizationType
GIB = 2**30

#: What all small models have in common, by the words of metadata.
COMMON: dict[str, int] = {
    "block_count": 2,
    "context_length": 4096,
    "embedding_length": 512,
    "feed_forward_length": 1024,
    "attention.head_count": 8,
    "attention.head_count_kv": 4,
    "attention.key_length": 64,
}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256}
SHARED = EXPERTS | {"expert_shared_count": 2, "leading_dense_block_count": 1}
MLA = SHARED | {"attention.kv_lora_rank": 256, "rope.dimension_count": 32}
#: As files have it since llama.cpp attends to the latents themselves, all heads together; and before.
NEW_MLA = MLA | {
    "attention.head_count_kv": 1,
    "attention.key_length": 256 + 32,
    "attention.value_length": 256,
    "attention.key_length_mla": 64 + 32,
    "attention.value_length_mla": 64,
}
OLD_MLA = MLA | {"attention.head_count_kv": 8, "attention.key_length": 64 + 32, "attention.value_length": 64}
MORE: dict[str, dict[str, Any]] = {
    "qwen2moe": EXPERTS | {"expert_shared_feed_forward_length": 512},
    "qwen3moe": EXPERTS,
    "mixtral": {"expert_count": 4, "expert_used_count": 2},
    "glm4moe": SHARED,
    "dots1": SHARED,
    "gemma2": {"attention.sliding_window": 1024},
    "gemma3": {"attention.sliding_window": 1024},
    "gpt-oss": EXPERTS | {"feed_forward_length": 256, "attention.sliding_window": 128},
    "deepseek2": NEW_MLA | {"attention.q_lora_rank": 256},
    "deepseek2-old": OLD_MLA | {"attention.q_lora_rank": 256},
    "deepseek2-lite": NEW_MLA,
    "olmo3": {"attention.sliding_window": 1024, "attention.sliding_window_pattern": [False, True]},
    "exaone4": {"attention.sliding_window": 1024, "attention.sliding_window_pattern": [True, False]},
    "cohere2": {"attention.sliding_window": 1024},
    "olmoe": EXPERTS | {"feed_forward_length": 256},
    "phimoe": EXPERTS | {"feed_forward_length": 256, "attention.sliding_window": 1024},
    "minimax-m2": EXPERTS | {"feed_forward_length": 256},
    "granitemoe": EXPERTS | {"feed_forward_length": 256, "expert_shared_feed_forward_length": 512},
    "granitemoe-alone": EXPERTS | {"feed_forward_length": 256},
    "llama4": EXPERTS | {"interleave_moe_layer_step": 2},
    "ernie4_5-moe": SHARED | {"interleave_moe_layer_step": 1},
    "hunyuan-moe": EXPERTS | {"feed_forward_length": 256, "expert_shared_feed_forward_length": 256},
}
#: Models whose files have another architecture than their name; and types of them.
ARCHES = {"mixtral": "llama", "deepseek2-old": "deepseek2", "deepseek2-lite": "deepseek2", "olmo3": "olmo2"}
ARCHES["granitemoe-alone"] = "granitemoe"
MODEL_TYPES = {"deepseek2-old": "deepseek_v2", "deepseek2-lite": "deepseek_v2", "olmo3": "olmo3"}
MODEL_TYPES["granitemoe-alone"] = "granitemoe"
NAMES = [*ARCHITECTURES, *MODEL_TYPES]
VOCAB = 640


def config_of(name: str) -> dict[str, Any]:
    """Return the config.json of a small model in transformers' words, written by hand."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    routed |= {"n_shared_experts": 2, "first_k_dense_replace": 1}
    latent: dict[str, Any] = routed | {
        "num_key_value_heads": 8,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
    }
    latent |= {"v_head_dim": 64, "q_lora_rank": 256, "head_dim": None}
    local = {"num_local_experts": 4, "num_experts_per_tok": 2}
    more: dict[str, dict[str, Any]] = {
        "qwen2moe": experts | {"shared_expert_intermediate_size": 512},
        "qwen3moe": experts,
        "mixtral": local,
        "glm4moe": routed,
        "dots1": routed,
        "gemma2": {"sliding_window": 1024},
        "gemma3": {"sliding_window": 1024},
        "gpt-oss": local | {"intermediate_size": 256, "sliding_window": 128},
        "deepseek2": latent,
        "deepseek2-old": latent,
        "deepseek2-lite": latent | {"q_lora_rank": None},
        "olmo3": {"sliding_window": 1024, "layer_types": ["full_attention", "sliding_attention"]},
        "exaone4": {"sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"]},
        "command-r": {"use_qk_norm": True},
        "cohere2": {"sliding_window": 1024},
        "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
        "olmoe": experts | {"intermediate_size": 256},
        "phimoe": local
        | {"intermediate_size": 256, "sliding_window": 1024, "attention_bias": True, "lm_head_bias": True},
        "minimax-m2": local | {"intermediate_size": 256},
        "granitemoe": local | {"intermediate_size": 256, "shared_intermediate_size": 512},
        "granitemoe-alone": local | {"intermediate_size": 256},
        "llama4": local | {"intermediate_size": 256, "intermediate_size_mlp": 1024, "interleave_moe_layer_step": 2},
        "ernie4_5-moe": {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 256,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
        "hunyuan-moe": {"num_experts": 4, "moe_topk": [2, 2], "intermediate_size": 256},
    }
    return {
        "model_type": MODEL_TYPES.get(name) or ARCHITECTURES[name].model_type,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": VOCAB,
        "torch_dtype": "float16" if name == "llama" else "bfloat16",
        "tie_word_embeddings": name in {"gemma", "gemma2", "gemma3", "command-r", "cohere2"},
        **more.get(name, {}),
    }


def spec_of(name: str) -> ModelSpec:
    """Return the unquantised model of a config.json."""
    return spec_from_config(parse_config(json.dumps(config_of(name)).encode(), "config.json"), name)


def converted(  # noqa: PLR0911 (one for each thing that the converter does)
    tensor: str, shape: tuple[int, ...], name: str
) -> dict[str, tuple[int, ...]]:
    """Return a checkpoint's tensor as llama.cpp's converter stores it, by names that the gguf package's map knows."""
    tensor = tensor.replace("correction_bias", "correction.bias")
    if tensor.endswith("sinks"):
        return {f"{tensor}.weight": shape}
    if tensor.endswith("kv_b_proj.weight") and name != "deepseek2-old":
        start, heads, nope = tensor.removesuffix("kv_b_proj.weight"), 8, 64
        value = shape[0] // heads - nope
        return {f"{start}k_b_proj.weight": (heads, shape[1], nope), f"{start}v_b_proj.weight": (heads, value, shape[1])}
    if ".norms." in tensor:
        start, number, _ = tensor.rsplit(".", 2)
        heads = 8 if "q_layernorm" in tensor else 4
        return {f"{start.removesuffix('.norms')}.weight": (heads, *shape)} if number == "0" else {}
    if name.startswith("granitemoe") and "input_linear" in tensor:
        *first, width, inputs = shape
        own = "mlp.experts" if "block_sparse" in tensor else "mlp.shared_mlp"
        start = tensor[: tensor.index("block_sparse" if "block_sparse" in tensor else "shared_mlp")]
        return {f"{start}{own}.{part}_proj.weight": (*first, width // 2, inputs) for part in ("gate", "up")}
    if name.startswith("granitemoe") and "shared_mlp.output_linear" in tensor:
        return {tensor.replace("shared_mlp.output_linear", "mlp.shared_mlp.down_proj"): shape}
    if name in {"gpt-oss", "llama4"} and tensor.endswith(("gate_up_proj", "down_proj", "_bias")):
        stem, _, kind = tensor.removesuffix("_bias").rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        *first, last = shape
        if tensor.endswith("_bias"):
            return {f"{stem}.{part}.bias": (*first, last // len(parts)) for part in parts}
        experts, inputs = first
        return {f"{stem}.{part}.weight": (experts, last // len(parts), inputs) for part in parts}
    return {tensor: shape}


def shapes_of(model: ModelSpec, name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a GGUF file's tensors by name, by the map of the gguf package."""
    arch = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[ARCHES.get(name, name)]
    names = gguf.get_tensor_name_map(arch, 2)
    found: dict[str, tuple[int, ...]] = {}
    placed = [(each, layer) for block in model.blocks for each in block.parameters for layer in block.layers]
    for parameter, layer in [*placed, *((each, 0) for each in model.parameters)]:
        shape = (*((parameter.copies,) if parameter.copies > 1 else ()), *parameter.shape)
        named = parameter.name.replace("{layer}", str(layer)).replace(".experts.{expert}.", ".experts.")
        for stored, own in converted(named, shape, name).items():
            stem, _, kind = stored.rpartition(".")
            assert names.get_name(stem), stem
            found[f"{names.get_name(stem)}.{kind}"] = own
    return found


def kind_of(name: str, shape: Sequence[int], kinds: Sequence[Any]) -> Any:
    """Return a type for a tensor: norms and biases in 32 bits, matrices by turns in those that their columns allow."""
    if len(shape) == 1 or name.endswith("bias"):
        return Q.F32
    fitting = [kind for kind in kinds if not shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]]
    return fitting[len(name) % len(fitting)]


def write(
    path: Path,
    name: str,
    kinds: Sequence[Any] = (Q.Q4_K, Q.Q6_K, Q.Q8_0),
    *,
    tensors: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> dict[str, int]:
    """Write a small model with the gguf package, and further tensors; return the bytes of its own by name."""
    arch = ARCHES.get(name, name)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**COMMON, **MORE.get(name, {}), **changes}.items():
        if value is not None:
            (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"{arch}.{key}", value)
    for tensor, data in tensors.items():
        writer.add_tensor(tensor, data)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(5000)])
    sizes = {}
    for tensor, shape in shapes_of(spec_of(name), name).items():
        kind = kind_of(tensor, shape, kinds)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = np.zeros((*shape[:-1], shape[-1] // block * size), np.uint8)
        if kind is Q.F32:
            writer.add_tensor(tensor, np.zeros(shape, np.float32))
        else:
            writer.add_tensor(tensor, data, raw_dtype=kind)
        sizes[tensor] = data.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sizes


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_every_architecture(name: str, tmp_path: Path) -> None:
    """It is the one of the same config.json, but for how weights are stored, which is as in the file, to the byte."""
    sizes = write(tmp_path / "small.gguf", name)
    found, logical = read_model(tmp_path / "small.gguf"), spec_of(name)
    assert found.weight_bytes == sum(sizes.values())
    assert found.not_planned == ()
    assert found.parameter_count == logical.parameter_count
    ours, theirs = ({evolve(b, layers=(), parameters=()) for b in spec.blocks} for spec in (found, logical))
    assert ours == theirs
    assert sorted(layer for block in found.blocks for layer in block.layers) == [0, 1]
    assert (found.architecture, found.max_context, found.dtype) == (
        logical.architecture,
        logical.max_context,
        logical.dtype,
    )


def test_layers_that_predict_are_none(tmp_path: Path) -> None:
    """Metadata counts them among the layers; what would be left without any is told."""
    write(tmp_path / "small.gguf", "glm4moe", block_count=3, nextn_predict_layers=1)
    assert read_model(tmp_path / "small.gguf").layer_count == 2
    write(tmp_path / "small.gguf", "glm4moe", nextn_predict_layers=2)
    with pytest.raises(ModelError, match="nextn_predict_layers is 2 of 2 layers"):
        read_model(tmp_path / "small.gguf")


def test_prediction_layers(tmp_path: Path) -> None:
    """They are blocks behind the model's, with tensors that the package has names for, and copies that do not count."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, 3)
    shapes = {
        "enorm": (512,),
        "hnorm": (512,),
        "eh_proj": (512, 1024),
        "shared_head.norm": (512,),
        "input_layernorm": (512,),
        "post_attention_layernorm": (512,),
        "self_attn.q_proj": (512, 512),
        "self_attn.k_proj": (256, 512),
        "self_attn.v_proj": (256, 512),
        "self_attn.o_proj": (512, 512),
        "mlp.gate": (4, 512),
        **{f"mlp.experts.{part}_proj": (4, 256, 512) for part in ("gate", "up")},
        "mlp.experts.down_proj": (4, 512, 256),
        **{f"mlp.shared_experts.{part}_proj": (512, 512) for part in ("gate", "up", "down")},
    }
    named = {f"{names.get_name(f'model.layers.2.{module}')}.weight": shape for module, shape in shapes.items()}
    named["blk.2.exp_probs_b.bias"] = (4,)
    own = {name: np.zeros(shape, np.float32) for name, shape in named.items()}
    for part in "qkv":  # of every layer, as the model of this test has them
        own[f"blk.2.attn_{part}.bias"] = np.zeros(named[f"blk.2.attn_{part}.weight"][0], np.float32)
    for part in "qk":
        own[f"blk.2.attn_{part}_norm.weight"] = np.zeros(64, np.float32)
    copies = {f"blk.2.nextn.{name}.weight": np.zeros((8, 512)) for name in ("embed_tokens", "shared_head_head")}
    path = tmp_path / "small.gguf"
    sizes = write(path, "glm4moe", block_count=3, nextn_predict_layers=1, tensors=own | copies)
    has = [name for name in own if name.replace("blk.2.", "blk.1.") in sizes or "nextn" in name]
    layers = read_prediction_layers(path)
    assert layers.weight_bytes == sum(own[name].nbytes for name in has)
    assert (layers.layer_count, layers.weight_format, layers.name) == (1, "GGUF F32", "prediction layers of small")
    del own["blk.2.nextn.eh_proj.weight"]
    write(path, "glm4moe", block_count=3, nextn_predict_layers=1, tensors=own)
    with pytest.raises(ModelError, match=r"small\.gguf has no tensor blk\.2\.nextn\.eh_proj\.weight"):
        read_prediction_layers(path)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("glm4moe", {}, "small.gguf has no prediction layers"),
        ("minimax-m2", {"block_count": 3, "nextn_predict_layers": 1}, "of minimax_m2 in GGUF are not known"),
        ("ernie4_5-moe", {"block_count": 3, "nextn_predict_layers": 1}, "of ernie4_5_moe in GGUF are not known"),
    ],
)
def test_files_without_prediction_layers(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Neither is planned: what a file does not have, and what llama.cpp's converter has no names for."""
    write(tmp_path / "small.gguf", name, **changes)
    with pytest.raises(ModelError, match=words):
        read_prediction_layers(tmp_path)


def test_types_are_those_of_the_package() -> None:
    """Numbers, names, elements and bytes of blocks."""
    for number, (text, *sizes) in TYPES.items():
        assert Q(number).name == text
        assert gguf.GGML_QUANT_SIZES[Q(number)] == tuple(sizes)
    assert {kind.name for kind in Q} - {text for text, *_ in TYPES.values()} <= {"Q8_1", "Q8_K", "Q1_0"}


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q5_1, Q.Q8_0, Q.IQ4_NL, Q.Q2_K, Q.Q3_K, Q.Q5_K, Q.IQ4_XS, Q.F16, Q.BF16])
def test_headers_are_those_of_the_package(kind: Any, tmp_path: Path) -> None:
    """Types, shapes, places and metadata, as the package's reader has them."""
    write(tmp_path / "small.gguf", "qwen3", [kind])
    ours, theirs = read_gguf(tmp_path / "small.gguf"), gguf.GGUFReader(tmp_path / "small.gguf")
    assert {name: (t.kind, t.shape, t.nbytes, t.start) for name, t in ours.tensors.items()} == {
        t.name: (t.tensor_type.name, tuple(map(int, reversed(t.shape))), t.n_bytes, t.data_offset)
        for t in theirs.tensors
    }
    for key, value in ours.metadata.items():
        assert theirs.fields[key].contents() == value
    assert ours.lengths["tokenizer.ggml.tokens"] == 5000
    assert "tokenizer.ggml.tokens" not in ours.metadata


def test_cuts_are_between_blocks(tmp_path: Path) -> None:
    """Rows of 256 columns in Q4_K and Q6_K: heads of 64 go by fours, and the MLP by 256."""
    write(tmp_path / "small.gguf", "llama", [Q.Q4_K, Q.Q6_K])
    devices = [Device(name="x", budget_bytes=4 * GIB, overhead_bytes=0)] * 2
    made = plan(read_model(tmp_path / "small.gguf"), devices, cache=Cache(tokens=256), max_rows=64)
    for axis, width in ((Axis.Q_HEADS, 64), (Axis.INTERMEDIATE, 1)):
        split = made.split(axis)
        assert split.unit * width % 256 == 0
        assert all((end - start) * width % 256 == 0 for start, end in pairwise(split.bounds))
    assert sum(entry.weights_bytes for entry in made.memory) >= read_model(tmp_path / "small.gguf").weight_bytes


@pytest.mark.parametrize("name", ["llama", "qwen2moe", "gemma3", "phi3", "gpt-oss", "deepseek2", "deepseek2-old"])
def test_a_plan_is_that_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """In 16 bits, every axis is cut where it is in a plan for the config.json, and the cache takes the same bytes."""
    write(tmp_path / "small.gguf", name, [Q.BF16])
    file, checkpoint = read_model(tmp_path / "small.gguf"), evolve(spec_of(name), dtype="bfloat16")
    assert file.parameter_count == checkpoint.parameter_count
    size = checkpoint.weight_bytes  # and 16 MiB for cache and workspace
    devices = [Device(name="x", budget_bytes=size * part // 100 + 16 * 2**20, overhead_bytes=0) for part in (80, 40)]
    plans = [plan(each, devices, cache=Cache(tokens=256), max_rows=64) for each in (file, checkpoint)]
    ours, theirs = ({split.axis: split.bounds for split in made.splits} for made in plans)
    assert ours == theirs
    assert [m.cache_bytes for m in plans[0].memory] == [m.cache_bytes for m in plans[1].memory]
    cut = [bounds for bounds in ours.values() if len(bounds) > 2]
    assert len(cut) == len(ours)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    """Written by the package in parts; any of the files stands for all, and a missing one is told."""
    arch = "llama"
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", arch, split_max_tensors=5)
    for key, value in COMMON.items():
        writer.add_uint32(f"{arch}.{key}", value)
    total = 0
    for name, shape in shapes_of(spec_of("llama"), "llama").items():
        data = np.zeros(shape, np.float32 if len(shape) == 1 else np.float16)
        writer.add_tensor(name, data)
        total += data.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 2
    assert files[0].name.startswith("small-00001-of-")
    for path in (files[0], files[-1], tmp_path):
        assert read_model(path).weight_bytes == total
    files[1].unlink()
    with pytest.raises(ModelError, match=rf"1 of {len(files)} files are not there, such as small-00002-of-"):
        read_model(files[0])


def test_other_names_with_numbers(tmp_path: Path) -> None:
    """Only names as those of parts are parts: a model may be called best-of-breed, and two of those are two models."""
    write(tmp_path / "best-of-breed.gguf", "llama")
    assert read_model(tmp_path).weight_bytes == read_model(tmp_path / "best-of-breed.gguf").weight_bytes
    write(tmp_path / "1-of-2.gguf", "llama")
    with pytest.raises(ModelError, match=r"has 2 models in GGUF: 1-of-2\.gguf, best-of-breed\.gguf"):
        read_model(tmp_path)


def header_of(tensors: int, values: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return a header of keys and their values, which begin with their type."""
    start = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(values))
    return start + b"".join(struct.pack("<Q", len(key)) + key + value for key, value in values)


def test_limits_hold_for_all_files_together(tmp_path: Path) -> None:
    """Of files that are below each limit one by one."""
    texts = struct.pack("<IIQ", 9, 8, 2_100_000) + bytes(8 * 2_100_000)
    large = struct.pack("<IQ", 8, 2**25) + bytes(2**25)
    for value, words in ((texts, "elements, the most is 4000000"), (large, f"larger than {2**26} bytes")):
        for number in (1, 2):
            (tmp_path / f"x-0000{number}-of-00002.gguf").write_bytes(header_of(0, [(b"a", value)]))
        with pytest.raises(ModelError, match=words + " in all files together"):
            read_gguf(tmp_path / "x-00001-of-00002.gguf")


def test_what_is_beside(tmp_path: Path) -> None:
    """Factors of RoPE, prediction layers and unknown tensors are told in bytes; safetensors files win."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in COMMON.items():
        writer.add_uint32(f"llama.{key}", value)
    for name, shape in shapes_of(spec_of("llama"), "llama").items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    for name, count in (("rope_freqs.weight", 32), ("blk.2.nextn.eh_proj.weight", 64), ("extra.weight", 8)):
        writer.add_tensor(name, np.zeros(count, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = (NotPlanned("buffers", 128), NotPlanned("other tensors", 32), NotPlanned("prediction layers", 256))
    assert read_model(path).not_planned == parts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_count": 3}, "has no tensor blk.2."),
        ({"embedding_length": 256}, "has the shape [512], by the metadata it is [256]"),
        ({"attention.head_count": 0}, "num_attention_heads"),
        ({"feed_forward_length": [1024, 512]}, "llama.feed_forward_length differs between layers"),
        ({"block_count": None}, "num_hidden_layers"),
    ],
)
def test_metadata_that_is_wrong(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """The error names the file and the tensor or the key."""
    write(tmp_path / "small.gguf", "llama", **changes)
    done = command("inspect", tmp_path / "small.gguf")
    assert done.code == 2
    assert words in " ".join(done.err.split())
    assert "small.gguf" in done.err


@pytest.mark.parametrize("arch", ["rwkv7", "clip", "mamba"])
def test_other_architectures(arch: str, tmp_path: Path) -> None:
    """They are refused by name."""
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", arch)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="mmproj" if arch == "clip" else arch):
        read_model(tmp_path / "small.gguf")


def test_no_bytes_raise_anything_but_model_errors(tmp_path: Path) -> None:
    """Files that end anywhere in the header, and with any bytes replaced."""
    write(tmp_path / "whole.gguf", "qwen3", [Q.Q8_0], block_count=2)
    whole = (tmp_path / "whole.gguf").read_bytes()
    size, path = len(whole), tmp_path / "cut.gguf"
    for end in (*range(0, 400, 7), *range(400, 80_000, 1999), size - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError):
            read_model(path)

    @given(st.lists(st.tuples(st.integers(4, 3000), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4))
    def changed(edits: list[tuple[int, bytes]]) -> None:
        data = bytearray(whole)
        for at, new in edits:
            data[at : at + len(new)] = new
        path.write_bytes(data)
        try:
            read_model(path)
        except ModelError as error:
            assert len(str(error)) < 1000  # noqa: PT017 (any of them)

    changed()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GGUF\x00\x00\x00\x03" + bytes(16), "big endian"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "version 1, expected 2 or 3"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 8 + bytes(8), "tensors, the most is"),
        (b"GGUF\x03\x00\x00\x00" + bytes(8) + b"\xff" * 8, "keys, the most is"),
        (b"GGML" + bytes(20), "does not begin with GGUF"),
        (b"GGUF\x03\x00\x00\x00" + bytes(8) + b"\x01" + bytes(7) + b"\xff" * 7 + b"\x00", "has a text of"),
    ],
)
def test_headers_that_lie(data: bytes, words: str, tmp_path: Path) -> None:
    """Numbers beyond the file are refused before anything is read by them."""
    (tmp_path / "small.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=words):
        read_model(tmp_path / "small.gguf")


def test_computing_is_refused_with_what_can_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an architecture whose metadata does not say all, a plan is made, and generating says which engine runs it."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "small.gguf", "olmo2")
    assert command("plan", "small.gguf", "--gpus", "4GiB", "--context", 256, "--max-rows", 64, "-o", "p.json").code == 0
    done = command("generate", "p.json", "--model", "small.gguf", "--token-ids", "1,2")
    assert done.code == 2
    assert "the decoder does not compute models of type olmo2 from GGUF, but llama, qwen2, qwen3" in done.err
    assert "tpplan export PLAN --for llama.cpp" in done.err
    assert command("check", "p.json", "--model", "small.gguf").code == 0
