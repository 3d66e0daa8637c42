"""Weights by a plan: the parts of small checkpoints, put together again, are what was saved."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from fnmatch import fnmatch
from itertools import pairwise
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tpplan
from tests.checkpoints import fill_random, save_random, saved_values
from tests.examples import examples
from tests.family_configs import VISION, configs
from tests.family_models import NOT_IN_TRANSFORMERS, renamed
from tests.format_cases import CASES, make
from tests.weight_plans import assert_loaded, even_plan, fine_units, loaded, plans_of
from tpplan.exec import compile as compile_plan
from tpplan.models import families
from tpplan.models.checkpoint import Tensor
from tpplan.weights import TensorSlice, load, load_weights, reads, staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["fine_units"]  # a fixture

#: Sizes of a read: a few rows, most tensors, and all.
CHUNKS = (64, 1000, reads.CHUNK_BYTES)


class Late(staging.Sender):
    """It sends as late as it may: when somebody waits for it."""

    def __init__(self, buffer: torch.Tensor, block: torch.Tensor) -> None:
        """Have sent nothing."""
        super().__init__(buffer, block)
        self.late: list[reads.Move] = []

    def send(self, move: reads.Move) -> None:
        """Copy later, whatever is in the buffer then."""
        self.late.append(move)

    def wait(self) -> None:
        """Copy now."""
        for move in self.late:
            super().send(move)
        self.late.clear()


def staged(late: bool) -> AbstractContextManager[object]:
    """Load as to CUDA devices, which take their parts in their own time, or at once."""
    return patch.object(staging, "Sender", Late if late else staging.Sender)


@pytest.mark.parametrize("model_type", sorted({*families.supported()} - NOT_IN_TRANSFORMERS))
@settings(max_examples=examples(4))
@given(data=st.data())
def test_parts_together_are_the_checkpoint(model_type: str, data: st.DataObject) -> None:
    """Every family, any plan, one file or several, read at once or in parts: all devices have their slices."""
    config = data.draw(configs(model_type))
    dtype = data.draw(st.sampled_from(("float32", "bfloat16", "float16")))
    with TemporaryDirectory() as folder:
        directory = save_random(Path(folder), config, dtype, data.draw(st.sampled_from((2**12, 2**30))))
        model = tpplan.read_model(directory)
        plan = data.draw(plans_of(model))
        with patch.object(reads, "CHUNK_BYTES", data.draw(st.sampled_from(CHUNKS))), staged(data.draw(st.booleans())):
            weights = loaded(plan, directory)
        saved = saved_values(directory)
    known = families.tolerated(model.model_type)  # of the model around it, if transformers has it in one only
    own = {n: t for n, t in saved.items() if not any(fnmatch(n, pattern) for pattern in known.ignored)}
    wanted = {renamed(name, known.renamed): tensor for name, tensor in own.items()}
    assert_loaded(plan, model, weights, wanted)


def test_nothing_is_on_its_way_after_an_error(tmp_path: Path) -> None:
    """Whoever gets the memory next must not find late bytes in it."""
    keys = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 16}
    directory = save_random(tmp_path, {"model_type": "llama", **keys, **heads}, "bfloat16")
    plan = even_plan(tpplan.read_model(directory), 2)
    made: list[Late] = []

    def sender(buffer: torch.Tensor, block: torch.Tensor) -> Late:
        made.append(Late(buffer, block))
        return made[-1]

    @contextmanager
    def shortened(what: str, total: int) -> Iterator[Callable[[int], None]]:
        os.truncate(directory / "model.safetensors", 10_000)
        yield lambda _: None

    chunk, late, cut = (
        patch.object(reads, "CHUNK_BYTES", 1000),
        patch.object(staging, "Sender", sender),
        patch.object(load, "progress", shortened),
    )
    with chunk, late, cut, pytest.raises(tpplan.ModelError, match="ends at byte 10000, "):
        loaded(plan, directory)
    assert made
    assert not any(each.late for each in made)


def test_no_call_is_needed_that_windows_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read where os has no calls for reading at a place."""
    keys = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 16}
    directory = save_random(tmp_path, {"model_type": "llama", **keys, **heads}, "bfloat16")
    model = tpplan.read_model(directory)
    plan = even_plan(model, 2)
    for name in ("pread", "preadv"):
        monkeypatch.delattr(os, name, raising=False)
    assert_loaded(plan, model, loaded(plan, directory), saved_values(directory))


@pytest.mark.parametrize("case", CASES)
def test_quantised_tensors_arrive_as_they_are_stored(tmp_path: Path, case: str) -> None:
    """Packed words, scales and permutations are cut between stored elements, and not touched otherwise."""
    directory, _ = make(tmp_path, case)
    fill_random(directory)
    model, saved = tpplan.read_model(directory), saved_values(directory)

    @settings(max_examples=examples(4))
    @given(plan=plans_of(model))
    def check(plan: tpplan.SplitPlan) -> None:
        assert_loaded(plan, model, loaded(plan, directory), saved)

    check()


def test_a_prefix_that_the_checkpoint_leaves_out(tmp_path: Path) -> None:
    """GPT-2's own files have no ``transformer.`` before their names; the weights have the family's names."""
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 12, "n_positions": 4}
    directory = save_random(tmp_path, config, "float32")
    saved = saved_values(directory)
    from safetensors.torch import save_file  # noqa: PLC0415 (no stubs)

    save_file(
        {name.removeprefix("transformer."): tensor for name, tensor in saved.items()}, tmp_path / "model.safetensors"
    )
    plan = tpplan.plan(tpplan.read_model(directory), tpplan.parse_devices("1GiB"), max_rows=1)
    weights = loaded(plan, directory)
    assert weights[0].keys() == saved.keys()
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in saved.items())


#: Starts of names in a wrapper of either kind, and how newer tools write them.
NEWER = {
    "mistral3": {
        "language_model.lm_head.": "lm_head.",
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
    "qwen2_5_vl": {"model.": "model.language_model.", "visual.": "model.visual."},
}


@pytest.mark.parametrize("model_type", NEWER)
def test_names_of_a_wrapper_as_newer_tools_write_them(model_type: str, tmp_path: Path) -> None:
    """Newer tools write ``model.language_model.`` for what the hub has; what reads images is passed over."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4}
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "vocab_size": 12, "pad_token_id": 0}
    config = {"model_type": model_type, "text_config": {**sizes, **heads}, "vision_config": VISION[model_type]}
    is_tied = model_type != "mistral3"  # with an output matrix of its own, whose name is the same in the other kind
    directory = save_random(tmp_path, {**config, "tie_word_embeddings": is_tied}, "float32")
    saved = saved_values(directory)
    model = tpplan.read_model(directory)
    plan = tpplan.plan(model, tpplan.parse_devices("1GiB"), max_rows=1)
    from safetensors.torch import save_file  # noqa: PLC0415 (no stubs)

    newer = {renamed(name, NEWER[model_type]): tensor for name, tensor in saved.items()}
    assert newer.keys().isdisjoint(saved)
    save_file(newer, tmp_path / "model.safetensors")
    assert tpplan.read_model(directory) == model
    weights = loaded(plan, directory)
    assert weights[0].keys() == {name for name in saved if not name.startswith(("vis", "multi"))}
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights[0].items())
    norm = next(name for name in saved if name.endswith("model.norm.weight"))
    save_file({**newer, norm: saved[norm].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(tpplan.ModelError, match=f"has '{re.escape(norm)}' twice"):
        tpplan.read_model(directory)


def test_matrices_of_a_device_follow_each_other(tmp_path: Path) -> None:
    """Projections of the same input lie side by side, with no bias between them, on every device."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
    keys = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64, **heads}
    directory = save_random(tmp_path, {"model_type": "qwen2", **keys}, "float32")
    weights = loaded(even_plan(tpplan.read_model(directory), 2), directory)
    for own in weights.tensors.values():
        q, k, v = (own[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
        assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert (k.data_ptr(), v.data_ptr()) == (q.data_ptr() + q.nbytes, k.data_ptr() + k.nbytes)
        assert all(tensor.data_ptr() % 64 == q.untyped_storage().data_ptr() % 64 for tensor in own.values())


def test_the_python_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both examples run, and show the parts of a model for two devices."""
    text = (Path(__file__).parents[2] / "docs/run-a-model.md").read_text(encoding="utf-8")
    loading, slices, *_ = re.findall(r"```python\n(.*?)```", text.partition("## Loading")[2], re.DOTALL)
    keys = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 64}
    directory = save_random(tmp_path / "models" / "llama", {"model_type": "llama", **keys, **heads}, "float32")
    (tmp_path / "plans").mkdir()
    even_plan(tpplan.read_model(directory), 2).save(tmp_path / "plans" / "llama.json")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec(loading, names)  # noqa: S102 (our own)
    assert capsys.readouterr().out == "0 [32, 24]\n1 [32, 24]\n"
    exec(slices, names)  # noqa: S102 (our own)
    assert "model.layers.0.mlp.down_proj.weight 1 1 ((24, 48),) (32, 24) 3072\n" in capsys.readouterr().out


@pytest.mark.parametrize("dim", [None, 0, 1, 2])
@pytest.mark.parametrize("shape", [(128, 2880, 5760), (3, 11_000_000, 5), (128_256, 8192, 1)])
def test_reads_are_small_and_cover_a_tensor_once(shape: tuple[int, int, int], dim: int | None) -> None:
    """However large a tensor, it is read from its first byte to its last, never more at a time than a buffer holds."""
    header = Tensor("BF16", shape, 2 * prod(shape), "model.safetensors", 1000)
    cut = [(0, 1), (1, shape[dim])] if dim is not None and shape[dim] > 1 else [(0, shape[dim or 0])]
    parts = [TensorSlice("x", i, "BF16", shape, dim, () if dim is None else (ends,)) for i, ends in enumerate(cut)]
    at, moved = 1000, 0
    for read in reads.reads_of(header, [(part, 0) for part in parts]):
        assert read.start == at
        assert 0 < read.nbytes <= reads.CHUNK_BYTES
        at += read.nbytes
        moved += sum(move.rows * move.width for move in read.moves)
    assert (at, moved) == (1000 + header.nbytes, sum(part.nbytes for part in parts))


@pytest.mark.parametrize(("shape", "dim"), [((4, 0), 1), ((0, 4), 1), ((0, 4), 0), ((4, 0), None)])
def test_a_tensor_of_no_bytes_is_not_read(shape: tuple[int, int], dim: int | None) -> None:
    """Wherever it is cut, there is nothing to read of it."""
    part = TensorSlice("x", 0, "BF16", shape, dim, () if dim is None else ((0, shape[dim]),))
    assert not list(reads.reads_of(Tensor("BF16", shape, 0, "model.safetensors", 1000), [(part, 0)]))


@given(
    sizes=st.lists(st.integers(1, 100), max_size=20),
    gaps=st.lists(st.sampled_from((0, 0, 1)), min_size=20, max_size=20),
    files=st.lists(st.sampled_from(("a", "a", "a", "b")), min_size=20, max_size=20),
)
def test_neighbours_are_read_together(sizes: list[int], gaps: list[int], files: list[str]) -> None:
    """As many as a read may take, and no others: each byte goes where it went, and two joined reads were too large."""
    single, at = [], 0
    for i, (size, gap, file) in enumerate(zip(sizes, gaps, files, strict=False)):
        at += gap
        single.append(reads.Read(file, at, size, [reads.Move(i % 2, 1000 * i, 0, 0, 0, size, 1)]))
        at += size

    def places(found: Iterable[reads.Read]) -> list[tuple[object, ...]]:
        return [(r.file, r.start + m.source, m.device, m.target, m.width) for r in found for m in r.moves]

    wanted = places(single)
    with patch.object(reads, "CHUNK_BYTES", 100):
        found = list(reads.joined(single))
    assert places(found) == wanted
    assert all(read.nbytes == sum(move.width for move in read.moves) <= 100 for read in found)
    for one, other in pairwise(found):
        neighbours = one.file == other.file and one.start + one.nbytes == other.start
        assert not neighbours or one.nbytes + other.moves[0].width > 100


@pytest.mark.gpu
def test_parts_on_a_gpu_are_those_of_a_virtual_device(tmp_path: Path) -> None:
    """Through pinned memory, in many small parts, the same bits arrive where the plan wants them."""
    keys = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 200, "pad_token_id": 0}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64}
    directory = save_random(tmp_path, {"model_type": "phi3", **keys, **heads}, "bfloat16")
    gpus = [f"cuda:{i}" for i in range(min(2, torch.cuda.device_count()))]
    plan = even_plan(tpplan.read_model(directory), len(gpus))
    virtual = loaded(plan, directory)
    for chunk in CHUNKS:
        with patch.object(reads, "CHUNK_BYTES", chunk), compile_plan(plan, backend="cuda") as ctx:
            weights = load_weights(plan, directory, ctx)
        assert weights.tensors.keys() == virtual.tensors.keys()
        for device, own in virtual.tensors.items():
            assert all(tensor.device == torch.device(gpus[device]) for tensor in weights[device].values())
            assert weights[device].keys() == own.keys()
            assert all(torch.equal(weights[device][name].cpu(), tensor) for name, tensor in own.items())
