"""From a model's files to its ModelSpec: what checkpoint and config decide."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoints import LLAMA, Tensors, llama_layers, llama_outside, tensor_bytes, write_checkpoint
from tests.examples import examples
from tests.family_configs import configs
from tests.family_models import NOT_IN_TRANSFORMERS, SAME
from tests.models.reader_cases import plain, save, small
from tpplan.errors import ModelError
from tpplan.models import families
from tpplan.models.checkpoint import read_headers
from tpplan.models.reader import read_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("model_type", sorted({*families.supported()} - SAME.keys() - NOT_IN_TRANSFORMERS))
@settings(
    max_examples=examples(3),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(data=st.data())
def test_saved_model_is_the_model_of_its_config(tmp_path: Path, model_type: str, data: st.DataObject) -> None:
    """For every family, a checkpoint and its config give the same model, and all bytes of the files are told."""
    directory = tmp_path / str(len(list(tmp_path.iterdir())))
    dtype = data.draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32)))
    if model_type in {"deepseek_v4", "hy_v4"}:  # some tensors are F32 whatever others are: most bytes of a small one
        dtype = torch.float32
    save(directory, data.draw(configs(model_type)), dtype, data.draw(st.sampled_from(("4KB", "5GB"))))
    headers = read_headers(directory)
    assert headers is not None
    spec = read_model(directory)
    alone = read_model(directory / "config.json")
    assert evolve(spec, not_planned=()) == evolve(alone, not_planned=())
    assert {part.what for part in alone.not_planned} <= {
        "vision tower",
        "audio tower",
        "prediction layers",
        "n-gram embeddings",
    }
    beside = sum(part.bytes for part in spec.not_planned)
    assert spec.weight_bytes + beside == sum(tensor.nbytes for tensor in headers.tensors.values())
    ignored = families.tolerated(spec.model_type).ignored  # of the model around it, if transformers has it in one only
    own = [t for n, t in headers.tensors.items() if not any(fnmatch(n, pattern) for pattern in ignored)]
    assert spec.weight_bytes == sum(tensor.nbytes for tensor in own)
    assert spec.dtype == str(dtype).removeprefix("torch.")


def test_checkpoint_beats_the_dtype_of_the_config(tmp_path: Path) -> None:
    """A config that says bfloat16 over a float32 checkpoint does not halve its bytes."""
    tensors = llama_outside(dtype="F32") | llama_layers(lambda i, o, _: {".weight": ("F32", (o, i))}, "F32")
    spec = read_model(write_checkpoint(tmp_path / "m", small(torch_dtype="bfloat16"), tensors))
    assert (spec.dtype, spec.weight_format) == ("float32", "F32")
    assert spec.weight_bytes == tensor_bytes(tensors)


def test_single_tensors_may_have_another_dtype(tmp_path: Path) -> None:
    """The format is that of most bytes; every tensor keeps its own dtype."""
    tensors = llama_outside() | llama_layers(plain)
    tensors["model.norm.weight"] = ("F32", (256,))
    spec = read_model(write_checkpoint(tmp_path / "m", LLAMA, tensors))
    assert (spec.dtype, spec.weight_format) == ("float16", "F16")
    assert spec.weight_bytes == tensor_bytes(tensors)


def test_file_means_config_only(tmp_path: Path) -> None:
    """Shards beside a config.json do not count if the path is the file: not even broken ones."""
    path = write_checkpoint(tmp_path / "m", LLAMA, {"x": ("F16", (1,))})
    assert read_model(path / "config.json").weight_format == "F16"
    with pytest.raises(ModelError, match="has no lm_head"):
        read_model(path)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Llama-9B/config.json", "Llama-9B"),
        ("Llama-9B", "Llama-9B"),
        ("Llama-9B/other.json", "other"),
        ("models--org--Llama-9B/snapshots/0123abc", "Llama-9B"),
        ("models--org--Llama-9B/snapshots/0123abc/config.json", "Llama-9B"),
        ("odd\x1b[2J \u202e/config.json", "odd[2J"),
        ("n" * 210, "n" * 200),
    ],
)
def test_name_is_one_part_of_the_path(tmp_path: Path, path: str, name: str) -> None:
    """Models are called like their directory, their repository in a hub cache, or their loose file."""
    file = tmp_path / path if path.endswith(".json") else tmp_path / path / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(LLAMA))
    assert read_model(tmp_path / path).name == name


def test_name_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path gives the same name as an absolute one."""
    write_checkpoint(tmp_path / "here", LLAMA, llama_outside() | llama_layers(plain))
    monkeypatch.chdir(tmp_path / "here")
    assert read_model(".") == read_model("config.json") == read_model(tmp_path / "here")


def test_hub_cache_of_links_is_read(tmp_path: Path) -> None:
    """A snapshot's config and shards may all be links to blobs."""
    real = write_checkpoint(tmp_path / "blobs", LLAMA, llama_outside() | llama_layers(plain))
    snapshot = tmp_path / "models--org--small" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in real.iterdir():
        (snapshot / file.name).symlink_to(file)
    spec = read_model(snapshot)
    assert spec.name == "small"
    assert spec.weight_bytes == tensor_bytes(llama_outside() | llama_layers(plain))


TIES: dict[str, tuple[bool | None, bool, bool]] = {
    "untied": (False, True, False),
    "tied": (True, False, True),
    "not said, with a head": (None, True, False),
    "not said, without": (None, False, True),
    "said to be tied, with a head": (True, True, False),
}


@pytest.mark.parametrize("case", TIES)
def test_the_checkpoint_says_whether_embeddings_are_tied(tmp_path: Path, case: str) -> None:
    """An output matrix that is stored is counted, whatever the config says or leaves out."""
    said, head, tied = TIES[case]
    tensors = llama_outside(head=head) | llama_layers(plain)
    spec = read_model(write_checkpoint(tmp_path / "m", small(tie_word_embeddings=said), tensors))
    assert spec.tied_embeddings is tied
    assert ("lm_head.weight" in {p.name for p in spec.parameters}) is head
    assert spec.weight_bytes == tensor_bytes(tensors)


def test_prefix_may_be_left_out(tmp_path: Path) -> None:
    """A checkpoint without the family's prefix is the same model as one with it."""
    tensors = llama_outside() | llama_layers(plain)
    full = read_model(write_checkpoint(tmp_path / "a" / "m", LLAMA, tensors))
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert read_model(write_checkpoint(tmp_path / "b" / "m", LLAMA, bare)) == full


def test_ignored_buffers_do_not_count(tmp_path: Path) -> None:
    """Rotary frequencies that old checkpoints hold are neither an error nor bytes of the model."""
    tensors = llama_outside() | llama_layers(plain)
    buffers: Tensors = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": ("F32", (32,)) for i in range(3)}
    spec = read_model(write_checkpoint(tmp_path / "m", LLAMA, tensors | buffers))
    assert spec.weight_bytes == tensor_bytes(tensors)


def test_layers_for_prediction_of_more_tokens_do_not_count(tmp_path: Path) -> None:
    """DeepSeek-V3 ships layers beyond the config's; a family that does not is contradicted by them."""
    extra: Tensors = {"model.layers.2.eh_proj.weight": ("BF16", (4, 8)), "model.layers.2.mlp.x": ("BF16", (4,))}
    data = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(data))
    spec = read_model(tmp_path / "config.json")
    tensors: Tensors = {p.name: (p.dtype, p.shape) for p in spec.parameters}
    for block in spec.blocks:
        for p in block.parameters:
            for expert in range(p.copies):
                name = p.name.replace("{layer}", str(block.layers[0])).replace("{expert}", str(expert))
                tensors[name] = (p.dtype, p.shape)
    path = write_checkpoint(tmp_path / "m", data, tensors | extra)
    assert read_model(path).weight_bytes == tensor_bytes(tensors)
    fourth: Tensors = {"model.layers.3.mlp.x": ("F16", (4,))}
    path = write_checkpoint(tmp_path / "n", LLAMA, llama_outside() | llama_layers(plain) | fourth)
    with pytest.raises(ModelError, match=r"has 4 layers, but .* asks for 3 \(num_hidden_layers\)"):
        read_model(path)


def test_reading_needs_nothing_but_read_access(tmp_path: Path) -> None:
    """Reading a model changes no file and writes none."""
    path = write_checkpoint(tmp_path / "m", LLAMA, llama_outside() | llama_layers(plain))
    path.chmod(0o500)
    before = {file.name: (file.stat().st_mtime_ns, file.stat().st_size) for file in path.iterdir()}
    read_model(path)
    assert {file.name: (file.stat().st_mtime_ns, file.stat().st_size) for file in path.iterdir()} == before
    path.chmod(0o700)
