"""Headers of safetensors files: names, dtypes, shapes, bytes and places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from tests.models.header_cases import entry, write, write_index
from tpplan.errors import ModelError
from tpplan.models.checkpoint import Tensor, read_headers

if TYPE_CHECKING:
    from pathlib import Path


def test_directory_without_safetensors_has_no_headers(tmp_path: Path) -> None:
    """Other files, an index among them, do not make a checkpoint."""
    (tmp_path / "config.json").write_text("{}")
    write_index(tmp_path, {"a": "model-1.safetensors"})
    assert read_headers(tmp_path) is None


def test_single_file_as_the_library_writes_it(tmp_path: Path) -> None:
    """Names, dtypes, shapes, bytes and places are those of the tensors that were saved."""
    tensors = {
        "a.weight": torch.zeros(3, 4, dtype=torch.bfloat16),
        "a.scale": torch.zeros((), dtype=torch.float32),
        "b": torch.zeros(0, 7, dtype=torch.int32),
        "c": torch.zeros(5, dtype=torch.float8_e4m3fn),
    }
    file = tmp_path / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    headers = read_headers(tmp_path)
    assert headers is not None
    data = 8 + int.from_bytes(file.read_bytes()[:8], "little")  # the library puts wide dtypes first
    assert headers.tensors == {
        "a.weight": Tensor("BF16", (3, 4), 24, file.name, data + 4),
        "a.scale": Tensor("F32", (), 4, file.name, data),
        "b": Tensor("I32", (0, 7), 0, file.name, data + 4),
        "c": Tensor("F8_E4M3", (5,), 5, file.name, data + 28),
    }
    assert headers.file_bytes == file.stat().st_size


def test_shards_with_index(tmp_path: Path) -> None:
    """All files of the index are read, and files that it does not name are left alone."""
    save_file({"a": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    save_file({"other": torch.zeros(4)}, tmp_path / "consolidated.safetensors")
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    headers = read_headers(tmp_path)
    assert headers is not None
    assert {name: tensor.file for name, tensor in headers.tensors.items()} == {
        "a": "model-1.safetensors",
        "b": "model-2.safetensors",
    }
    assert headers.file_bytes == sum((tmp_path / f"model-{i}.safetensors").stat().st_size for i in (1, 2))


def test_shards_without_index(tmp_path: Path) -> None:
    """Without an index every file counts, but not the second copy that Mistral ships."""
    save_file({"a": torch.zeros(2)}, tmp_path / "output-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "output-00002-of-00002.safetensors")
    save_file({"tok_embeddings": torch.zeros(4)}, tmp_path / "consolidated.safetensors")
    headers = read_headers(tmp_path)
    assert headers is not None
    assert set(headers.tensors) == {"a", "b"}


def test_only_consolidated_files(tmp_path: Path) -> None:
    """Where nothing else is there, the consolidated file is the checkpoint."""
    save_file({"a": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    headers = read_headers(tmp_path)
    assert headers is not None
    assert set(headers.tensors) == {"a"}


def test_index_left_over_from_another_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """EXL2 conversions copy the original's index, of whose files none is there."""
    save_file({"a": torch.zeros(2)}, tmp_path / "output.safetensors")
    write_index(tmp_path, {"z": "model-1.safetensors", "y": "model-2.safetensors"})
    headers = read_headers(tmp_path)
    assert headers is not None
    assert set(headers.tensors) == {"a"}


def test_links_to_blobs_are_followed(tmp_path: Path) -> None:
    """A hub cache's snapshot is a directory of links that lead out of it."""
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    save_file({"a": torch.zeros(2)}, tmp_path / "blobs" / "0f1e")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0f1e")
    headers = read_headers(snapshot)
    assert headers is not None
    assert headers.tensors["a"].nbytes == 8


def test_elements_smaller_than_a_byte(tmp_path: Path) -> None:
    """Elements of 4 and 6 bits are counted in bits; a tensor of them that ends within a byte is refused."""
    header = {"a": entry("F4", [3, 2], [0, 3]), "b": entry("F6_E3M2", [4], [3, 6]), "c": entry("F6_E2M3", [8], [6, 12])}
    write(tmp_path / "model.safetensors", header, bytes(12))
    headers = read_headers(tmp_path)
    assert headers is not None
    assert [tensor.nbytes for tensor in headers.tensors.values()] == [3, 3, 6]
    for dtype in ("F4", "F6_E2M3"):
        write(tmp_path / "model.safetensors", {"a": entry(dtype, [3], [0, 2])}, bytes(2))
        with pytest.raises(ModelError, match=r"of shape \[3\], but its data_offsets span 2 bytes"):
            read_headers(tmp_path)


@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"])
def test_rare_dtypes_as_the_library_writes_them(tmp_path: Path, dtype: str) -> None:
    """Dtypes that torch and the library know have the names that the library writes."""
    if not hasattr(torch, dtype):
        pytest.skip(f"torch {torch.__version__} has no {dtype}")
    tensor = torch.zeros(6, dtype=torch.uint8).view(getattr(torch, dtype))
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    headers = read_headers(tmp_path)
    assert headers is not None
    assert headers.tensors["a"].nbytes == 6


def test_many_tensors_are_read(tmp_path: Path) -> None:
    """A checkpoint of DeepSeek-V3's size (163 files, 90,000 tensors) is read whole."""
    for shard in range(163):
        header = {f"t.{shard}.{i}": entry("F32", [1], [4 * i, 4 * i + 4]) for i in range(553)}
        write(tmp_path / f"model-{shard:05}.safetensors", header, bytes(4 * 553))
    headers = read_headers(tmp_path)
    assert headers is not None
    assert len(headers.tensors) == 163 * 553
