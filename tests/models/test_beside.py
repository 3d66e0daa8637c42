"""What lies beside what is planned: other parts of a model, other files, adapters, weights that are not read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import LLAMA, llama_layers, llama_outside, tensor_bytes, write_checkpoint
from tests.family_models import build, hub_config, meta_model, save_model
from tests.models.reader_cases import plain, small
from tests.published import shape
from tpplan.core.device import Device
from tpplan.core.model import NotPlanned
from tpplan.errors import ModelError
from tpplan.models.reader import read_model
from tpplan.planfile.codec import fingerprint
from tpplan.planner.plan import plan
from tpplan.reports.check import check

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

QWEN3_VL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen3_vl_text",
        **shape(vocab=151_936, hidden=4096, dense=12_288, layers=36, q=32, kv=8, head_dim=128, context=262_144),
    },
    "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096},
}


def lay(directory: Path, name: str, size: int) -> None:
    """Put a file with so many bytes beside a model; of safetensors, with tensors of that size."""
    header = b""
    if name.endswith(".safetensors"):
        text = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        header = len(text).to_bytes(8, "little") + text
    with (directory / name).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Return the directory of a small model in one file."""
    return write_checkpoint(tmp_path / "m", LLAMA, llama_outside() | llama_layers(plain))


def test_a_vision_tower_is_told_to_the_byte(tmp_path: Path) -> None:
    """Of Qwen3-VL-8B the files hold 17,534,247,392 bytes: 16,381,470,720 are planned, the rest is its vision tower."""
    names = meta_model(hub_config(QWEN3_VL)).named_parameters()
    tensors = {name: ("BF16", tuple(tensor.shape)) for name, tensor in names}
    assert tensor_bytes(tensors) == 17_534_247_392
    directory = write_checkpoint(tmp_path / "m", QWEN3_VL, tensors)
    spec = read_model(directory)
    assert spec.weight_bytes == 16_381_470_720
    assert spec.not_planned == (NotPlanned("vision tower", 1_152_776_672),)
    assert spec.not_planned[0].text == "vision tower, 1.07 GiB"
    alone = read_model(directory / "config.json")
    assert alone.not_planned == (NotPlanned("vision tower"),)
    assert alone.not_planned[0].text == "vision tower, of unknown size"
    assert fingerprint(alone) == fingerprint(spec)


@pytest.mark.parametrize("shard", ["5GB", "40KB"])
def test_all_bytes_of_a_saved_model_are_counted_or_told(tmp_path: Path, shard: str) -> None:
    """However transformers shards it."""
    text = QWEN3_VL["text_config"] | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    config = QWEN3_VL | {"text_config": text, "vision_config": vision | {"deepstack_visual_indexes": [0]}}
    model = build(hub_config(config))
    whole = sum(tensor.nbytes for tensor in model.parameters())
    save_model(model, tmp_path / "m", shard)
    spec = read_model(tmp_path / "m")
    assert spec.weight_bytes + sum(part.bytes for part in spec.not_planned) == whole
    seeing = sum(tensor.nbytes for name, tensor in model.named_parameters() if ".visual." in name)
    assert spec.not_planned == (NotPlanned("vision tower", seeing),)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"model_type": "llama"}, ()),
        ({"num_nextn_predict_layers": 1}, ("prediction layers",)),
        ({"num_nextn_predict_layers": 0, "vision_config": None}, ()),
        ({"mtp_num_hidden_layers": 2, "audio_config": {"depth": 2}}, ("audio tower", "prediction layers")),
        ({"vision_config": {"depth": 2}, "num_mtp_modules": 3}, ("vision tower", "prediction layers")),
    ],
)
def test_a_config_alone_tells_parts_without_their_size(
    tmp_path: Path, config: dict[str, Any], parts: Sequence[str]
) -> None:
    """What it says that the model has beside the decoder, as long as no file says how large that is, or that it is."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
    assert read_model(tmp_path / "config.json").not_planned == tuple(map(NotPlanned, parts))
    directory = write_checkpoint(tmp_path / "m", LLAMA | config, llama_outside() | llama_layers(plain))
    assert read_model(directory).not_planned == ()


@pytest.mark.parametrize(
    ("files", "parts", "note"),
    [
        ({"mtp.safetensors": 70}, {"mtp.safetensors": 70}, ""),
        ({"adapter_model.safetensors": 8, "adapter_config.json": 9}, {"adapter_model.safetensors": 8}, ""),
        (
            {"vision-00001-of-00002.safetensors": 3, "vision-00002-of-00002.safetensors": 4},
            {"vision-*.safetensors": 7},
            "",
        ),
        ({"mmproj-F16.gguf": 5, "mm_projector.bin": 6}, {"mm_projector.bin": 6, "mmproj-F16.gguf": 5}, ""),
        ({"consolidated.safetensors": 8}, {}, "consolidated.safetensors"),
        ({"consolidated.00.pth": 2**20}, {}, "consolidated.00.pth (1.00 MiB)"),
        ({"pytorch_model-00001-of-00002.bin": 1024, "pytorch_model-00002-of-00002.bin": 1024},
         {}, "pytorch_model-*.bin (2.00 KiB)"),
        ({"Llama-Q4_K_M.gguf": 9, "tf_model.h5": 9, "flax_model.msgpack": 9}, {},
         "Llama-Q4_K_M.gguf (9 B), flax_model.msgpack (9 B), tf_model.h5 (9 B)"),
        ({"tokenizer.bin": 5, "training_args.bin": 5, "optimizer.pt": 5, "rng_state_0.pth": 5, "x.model": 5}, {}, ""),
        ({f"part{i}.safetensors": i for i in range(1, 13)},
         {"part1.safetensors": 1, "part10.safetensors": 10, "part11.safetensors": 11, "part12.safetensors": 12,
          "part2.safetensors": 2, "part3.safetensors": 3, "part4.safetensors": 4, "5 further files": 35}, ""),
    ],
)  # fmt: skip
def test_files_that_are_not_read_are_told(llama: Path, files: dict[str, int], parts: dict[str, int], note: str) -> None:
    """Weights in other files are not planned, by name and size; further copies are a note; what trains counts not."""
    own = read_model(llama)
    for name, size in files.items():
        lay(llama, name, size)
    spec = read_model(llama)
    assert spec.not_planned == tuple(NotPlanned(name, size) for name, size in parts.items())
    assert (note in spec.notes[0]) if note else not spec.notes
    assert fingerprint(spec) == fingerprint(own)


def test_an_adapter_is_no_shard_of_a_model(tmp_path: Path) -> None:
    """Without an index all safetensors files are the model's, but not those of an adapter beside them."""
    directory = write_checkpoint(tmp_path / "m", LLAMA, llama_outside() | llama_layers(plain))
    (directory / "model.safetensors").rename(directory / "weights.safetensors")
    lay(directory, "adapter_model.safetensors", 40)
    assert read_model(directory).not_planned == (NotPlanned("adapter_model.safetensors", 40),)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 40, bytes(40)])
def test_a_damaged_file_beside_the_model_is_refused(llama: Path, content: bytes) -> None:
    """What is in it cannot be told, and a size of next to nothing would be a lie."""
    (llama / "mtp.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"^mtp\.safetensors, which no index names, is damaged") as error:
        read_model(llama)
    assert "move it elsewhere" in error.value.hint
    (llama / "mtp.safetensors").unlink()
    read_model(llama)


@pytest.mark.parametrize("named", ["a", "a/adapter_config.json"])
@pytest.mark.parametrize("beside", [(), ("config.json",), ("adapter_model.bin", "training_args.bin")])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "LORA", "base_model_name_or_path": "org/Base-8B"}, "(LORA) for org/Base-8B, not a model"),
        ({"peft_type": 3, "base_model_name_or_path": None}, " is an adapter, not a model"),
        ([], " is an adapter, not a model"),
    ],
)
def test_an_adapter_in_place_of_a_model(
    tmp_path: Path, named: str, beside: Sequence[str], config: object, words: str
) -> None:
    """The error names the model that it was made for, whether or not a config of that lies beside it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/adapter_config.json").write_text(json.dumps(config))
    for name in beside:
        (tmp_path / "a" / name).write_text(json.dumps(small()))
    with pytest.raises(ModelError) as error:
        read_model(tmp_path / named)
    assert words in error.value.message
    assert "--reserve" in error.value.hint


def test_a_dtype_that_no_file_names_is_assumed(tmp_path: Path) -> None:
    """It is said, and with headers there is nothing to assume."""
    (tmp_path / "config.json").write_text(json.dumps(small(torch_dtype=None)))
    spec = read_model(tmp_path / "config.json")
    assert (spec.weight_format, spec.assumed) == ("BF16", "dtype bfloat16: config.json names none")
    assert read_model(write_checkpoint(tmp_path / "b", small(), llama_outside() | llama_layers(plain))).assumed == ""
    tensors = llama_outside() | llama_layers(plain)
    assert read_model(write_checkpoint(tmp_path / "m", small(torch_dtype=None), tensors)).assumed == ""


def test_weights_that_are_not_read_are_assumed(tmp_path: Path) -> None:
    """Without safetensors files the config says how large weights are, and no file proves it."""
    (tmp_path / "config.json").write_text(json.dumps(small()))
    lay(tmp_path, "pytorch_model.bin", 9)
    assert read_model(tmp_path).assumed == "weights in F16: pytorch_model.bin is not read"
    assert read_model(tmp_path / "config.json").assumed == ""


@pytest.mark.parametrize("made_of", ["config.json", "directory"])
def test_a_plan_is_current_whether_or_not_files_are_there(tmp_path: Path, made_of: str) -> None:
    """What lies beside the same weights changes no plan: neither files that come, nor files that are gone."""
    config = LLAMA | {"num_nextn_predict_layers": 1}
    directory = write_checkpoint(tmp_path / "m", config, llama_outside() | llama_layers(plain))
    lay(directory, "mtp.safetensors", 70)
    both = [read_model(directory / "config.json"), read_model(directory)]
    assert both[0].not_planned != both[1].not_planned
    model, other = both if made_of == "config.json" else both[::-1]
    made = plan(model, (Device(name="GPU", budget_bytes=2**30),))
    assert made.model.not_planned == model.not_planned
    assert made.format_version == "1.1"
    for read in (model, other):
        assert check({"a.json": made}, read).current


def test_a_description_beside_a_config_that_is_named_alone(tmp_path: Path) -> None:
    """It is read with the directory; where only config.json is named, the weights are assumed, and the way is told."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert read_model(tmp_path).weight_format == "FP8 per tensor"
    alone = read_model(tmp_path / "config.json")
    assert alone.weight_format == "F16"
    assert alone.assumed == "weights in F16: hf_quant_config.json is read if you name the directory"


@pytest.mark.parametrize("description", [{}, {"quantization": {}}, {"quantization": {"exclude_modules": []}}])
def test_a_description_that_says_nothing_is_refused(tmp_path: Path, description: dict[str, Any]) -> None:
    """Without an algorithm nobody knows what the weights are; null says that they stay as they are."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(description))
    with pytest.raises(ModelError, match="quant_algo is missing"):
        read_model(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None}}))
    assert read_model(tmp_path).weight_format == "F16"


def test_modelopt_is_known_by_its_algorithm(tmp_path: Path) -> None:
    """A section without a method that names an algorithm and groups, as ModelOpt 0.31 wrote it, is ModelOpt's."""
    groups = {"group_0": {"weights": {"num_bits": 8, "type": "float", "dynamic": False}}}
    section = {"config_groups": groups, "ignore": ["lm_head"], "quant_algo": "FP8", "kv_cache_scheme": "FP8"}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": section}))
    assert read_model(tmp_path).weight_format == "FP8 per tensor"
