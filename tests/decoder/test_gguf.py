"""Computing with a GGUF file: its bytes on the devices, the numbers that they stand for, and the tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.command import command
from tests.models.gguf.test_gguf import COMMON, VOCAB, kind_of, shapes_of, spec_of
from tests.weight_plans import loaded
from tpplan.core.device import Device
from tpplan.core.plan import Cache, SplitPlan
from tpplan.decoder.weights.gguf import dequantised
from tpplan.models.gguf.reader import read_gguf_model
from tpplan.models.reader import read_model
from tpplan.planner.plan import plan
from tpplan.weights import iter_slices

if TYPE_CHECKING:
    from pathlib import Path

Q = gguf.GGMLQuantizationType
MIB = 2**20
HEAD_DIM = COMMON["attention.key_length"]


def written(path: Path, name: str) -> None:
    """Write a small model of random numbers, in the types of mixed files."""
    writer = gguf.GGUFWriter(path, name)
    for key, value in COMMON.items():
        writer.add_uint32(f"{name}.{key}", value)
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{name}.rope.freq_base", 10000.0)
    writer.add_uint32(f"{name}.vocab_size", VOCAB)
    writer.add_uint32(f"{name}.rope.dimension_count", HEAD_DIM)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    random = np.random.default_rng(7)
    for tensor, shape in shapes_of(spec_of(name), name).items():
        kind = kind_of(tensor, shape, [Q.Q4_1, Q.Q8_0, Q.Q5_0])
        values: Any = random.standard_normal(shape, np.float32)
        values = values / 2 if len(shape) > 1 and "embd" in tensor else values / np.sqrt(np.float32(shape[-1]))
        if kind is Q.F32:
            writer.add_tensor(tensor, values + 1 if tensor.endswith("norm.weight") else values)
        else:
            writer.add_tensor(tensor, gguf.quants.quantize(values, kind), raw_dtype=kind)
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


def theirs(path: Path) -> Any:
    """Return the model as transformers reads it from the file."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.head_dim = HEAD_DIM  # which transformers does not take from the metadata of qwen3
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_parts_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    """Bytes are the file's; what they stand for is, to the bit, that part of what transformers reads from it."""
    path = tmp_path / "small.gguf"
    written(path, name)
    made, model = uneven(path), read_gguf_model(path)
    weights = loaded(made, path)
    stored = {tensor.data_offset: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    whole = {key: value.bfloat16() for key, value in theirs(path).state_dict().items()}
    numbers = {d: dequantised(weights[d], model, torch.bfloat16, HEAD_DIM) for d in weights.tensors}
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_tokens_are_likeliest_for_transformers(name: str, tmp_path: Path) -> None:
    """Each token through an uneven plan is transformers' likeliest, but for the rounding of 16 bits."""
    path = tmp_path / "small.gguf"
    written(path, name)
    uneven(path).save(tmp_path / "p.json")
    prompt = [5, 17, 99, 3, 250]
    arguments = ("--token-ids", ",".join(map(str, prompt)), "--max-new-tokens", 6, "--backend", "cpu", "--json")
    done = command("generate", tmp_path / "p.json", "--model", path, *arguments)
    assert done.code == 0, done.err
    new = json.loads(done.out)["new_tokens"]
    with torch.inference_mode():
        logits = theirs(path)(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1]
    behind = logits.max(-1).values - logits.gather(1, torch.tensor(new)[:, None])[:, 0]
    assert bool((behind < 0.2 * logits.std(-1)).all())
    assert bool((logits.max(-1).values > 2 * logits.std(-1)).all())


def test_scaled_rope_is_refused(tmp_path: Path) -> None:
    """Metadata does not say how Llama 3.1 scales it; the factors are a tensor."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in COMMON.items():
        writer.add_uint32(f"llama.{key}", value)
    for tensor, shape in shapes_of(spec_of("llama"), "llama").items():
        writer.add_tensor(tensor, np.zeros(shape, np.float32))
    writer.add_tensor("rope_freqs.weight", np.ones(HEAD_DIM // 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = plan(read_model(path), [Device(name="x", budget_bytes=64 * MIB, overhead_bytes=0)], cache=Cache(tokens=64))
    made.save(tmp_path / "p.json")
    done = command("generate", tmp_path / "p.json", "--model", path, "--token-ids", "1,2")
    assert done.code == 2
    assert "small.gguf: the decoder does not compute a scaled RoPE from GGUF" in done.err
