"""Loading that is refused or fails, with the names of what is wrong, and what a person sees of it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, Thread
from time import sleep
from typing import IO, TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file

import tpplan
from tests.checkpoints import save_random, saved_values
from tests.published import sizes
from tests.weight_plans import even_plan, fine_units, loaded
from tpplan.core.workspace import workspace_bytes
from tpplan.errors import ExecutionError, ModelError, PlanError, RequestError
from tpplan.exec import compile as compile_plan
from tpplan.weights import load, load_weights, reads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tpplan.core.plan import SplitPlan

__all__ = ["fine_units"]  # a fixture

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    **sizes(vocab=40, hidden=32, dense=48, layers=2, q=4, kv=2, context=16),
}
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Return the directory of a small checkpoint in one file."""
    return save_random(tmp_path / "llama", LLAMA, "bfloat16")


@pytest.fixture
def plan(model_dir: Path) -> SplitPlan:
    """Return a plan for it, for two devices."""
    return even_plan(tpplan.read_model(model_dir), 2)


def change(directory: Path, how: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Save the checkpoint again with other tensors."""
    tensors = saved_values(directory)
    how(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda t: t.pop(DOWN), f"lacks 1 tensors that config.json asks for: '{DOWN}'"),
        (lambda t: t.update({"model.extra": torch.zeros(3)}), "does not ask for: 'model.extra'"),
        (lambda t: t.update({DOWN: torch.zeros(32, 40, dtype=torch.bfloat16)}), f"{DOWN} of BF16 [32, 40]"),
        (lambda t: t.update({DOWN: t[DOWN].float()}), f"{DOWN} in model.safetensors is F32 and not BF16"),
        (lambda t: t.update({name: x.half() for name, x in t.items()}), "is F16 and not BF16, "),
    ],
    ids=["missing", "extra", "shape", "dtype", "dtype of all"],
)
def test_a_checkpoint_with_other_tensors(
    model_dir: Path, plan: SplitPlan, how: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    """The error names the tensor."""
    change(model_dir, how)
    with pytest.raises(ModelError) as caught:
        loaded(plan, model_dir)
    assert message in caught.value.message.replace(f"{model_dir}/", "")
    assert caught.value.hint


def test_another_model(tmp_path: Path, plan: SplitPlan) -> None:
    """The error says what differs, and nothing was allocated or read."""
    other = save_random(tmp_path / "other", LLAMA | {"num_hidden_layers": 3}, "float16")
    with pytest.raises(ModelError, match="layers 3 and not 2, dtype float16 and not bfloat16, fingerprint sha256:"):
        loaded(plan, other)
    with pytest.raises(ModelError, match="is not the model that the plan for llama was made for: fingerprint"):
        loaded(plan, save_random(tmp_path / "wider", LLAMA | {"vocab_size": 41}, "bfloat16"))


def test_a_directory_without_weights(model_dir: Path, plan: SplitPlan) -> None:
    """A config alone makes a plan, but has nothing to load."""
    (model_dir / "model.safetensors").unlink()
    for path in (model_dir, model_dir / "config.json"):
        with pytest.raises(ModelError, match="has no weights in safetensors files"):
            loaded(plan, path)


def test_experts_that_are_stored_in_several_ways(tmp_path: Path) -> None:
    """What tpplan can plan but not tell apart by name is refused, and says where, and what the ways are."""
    keys = {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 1}
    directory = save_random(tmp_path, LLAMA | keys, "bfloat16")
    name = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
    change(directory, lambda t: t.update({name: t[name].float()}))
    ways = r"experts\.\{expert\}\.w2: weight BF16 \[\d+, \d+\] of 2, weight F32 \[\d+, \d+\] of 1"
    with pytest.raises(ModelError, match=f"experts of layer 1 are stored in several ways .*{ways}"):
        loaded(even_plan(tpplan.read_model(directory), 2), directory)


def test_a_ledger_that_counts_other_bytes(model_dir: Path, plan: SplitPlan) -> None:
    """A cut that was moved by hand breaks the promise of the ledger; so does a bucket that was edited."""
    splits = tuple(evolve(s, bounds=(0, 8, 40)) if s.axis == "vocab" else s for s in plan.splits)
    needed = workspace_bytes(splits, plan.model.dtype, plan.request)
    rows = [(m, m.workspace_bytes - size) for m, size in zip(plan.memory, needed, strict=True)]
    moved = tuple(evolve(m, workspace_bytes=m.workspace_bytes - b, free_bytes=m.free_bytes + b) for m, b in rows)
    emptied = tuple(evolve(m, cache_bytes=0, free_bytes=m.free_bytes + m.cache_bytes) for m in plan.memory)
    for edited, bucket in (
        (evolve(plan, splits=splits, memory=moved), "weights_bytes"),
        (evolve(plan, memory=emptied), "cache_bytes"),
    ):
        with pytest.raises(PlanError, match=rf"memory\[0\].{bucket} is \d+, expected \d+"):
            loaded(edited, model_dir)


def test_the_context_is_another_one(model_dir: Path, plan: SplitPlan) -> None:
    """Weights go where the plan was compiled, and not into a closed context."""
    other = even_plan(tpplan.read_model(model_dir), 3)
    with compile_plan(plan, backend="cpu") as ctx, pytest.raises(RequestError, match="another plan"):
        load_weights(other, model_dir, ctx)
    with pytest.raises(ExecutionError, match="closed"):
        load_weights(plan, model_dir, ctx)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "model.safetensors ends at byte"),
        (lambda path: path.unlink(), "model.safetensors cannot be read: No such file"),
    ],
    ids=["shorter", "gone"],
)
def test_a_file_that_changes_while_it_is_read(
    model_dir: Path,
    plan: SplitPlan,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], object],
    message: str,
) -> None:
    """One thread's failure ends them all, with its reason."""

    @contextmanager
    def spoiled(what: str, total: int) -> Iterator[Callable[[int], None]]:
        spoil(model_dir / "model.safetensors")
        yield lambda _: None

    monkeypatch.setattr(load, "progress", spoiled)
    with pytest.raises(ModelError, match=message):
        loaded(plan, model_dir)


def test_interrupted_loading_stops(model_dir: Path, plan: SplitPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """When one thread fails, the others do not read on to the end."""
    calls: list[None] = []

    @contextmanager
    def failing(what: str, total: int) -> Iterator[Callable[[int], None]]:
        def done(_: int) -> None:
            calls.append(None)
            raise KeyboardInterrupt

        yield done

    monkeypatch.setattr(load, "progress", failing)
    monkeypatch.setattr(reads, "CHUNK_BYTES", 64)
    with pytest.raises(KeyboardInterrupt):
        loaded(plan, model_dir)
    assert len(calls) <= load.THREADS


def test_loading_stops_where_a_thread_cannot_start(
    model_dir: Path, plan: SplitPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run already do not read all of the checkpoint before the error is told."""
    done: list[int] = []
    started: list[Thread] = []
    start = Thread.start

    def start_one(thread: Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    @contextmanager
    def slow(what: str, total: int) -> Iterator[Callable[[int], None]]:
        def count(nbytes: int) -> None:
            done.append(nbytes)
            sleep(0.01)  # all of the reads take seconds

        monkeypatch.setattr(Thread, "start", start_one)
        yield count

    monkeypatch.setattr(load, "progress", slow)
    monkeypatch.setattr(reads, "CHUNK_BYTES", 64)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        loaded(plan, model_dir)
    assert started
    assert sum(done) < sum(tensor.nbytes for tensor in saved_values(model_dir).values()) / 2


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many a checkpoint has: one for each thread."""
    directory = save_random(tmp_path, LLAMA, "bfloat16", shard_bytes=2**10)
    opened: list[IO[Any]] = []
    at_once: list[int] = []
    open_file, alone = Path.open, Lock()

    def opening(self: Path, *args: Any, **kwargs: Any) -> Any:
        with alone:  # so that no file counted as open is closed, and another one opened, before the count ends
            opened.append(open_file(self, *args, **kwargs))
            at_once.append(sum(not each.closed for each in opened))
            return opened[-1]

    plan = even_plan(tpplan.read_model(directory), 2)
    monkeypatch.setattr(Path, "open", opening)
    loaded(plan, directory)
    assert len(list(directory.glob("*.safetensors"))) > 2 * load.THREADS
    assert 0 < max(at_once) <= load.THREADS


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_on_a_terminal(
    model_dir: Path,
    plan: SplitPlan,
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A bar on standard error; in a pipe not a word, and never one on standard output."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    loaded(plan, model_dir)
    shown = capsys.readouterr()
    total = sum(tensor.nbytes for tensor in saved_values(model_dir).values())
    assert shown.out == ""
    assert ("loading llama" in shown.err) is terminal
    assert (f"{total / 2**10:.1f}/{total / 2**10:.1f} KiB" in shown.err) is terminal
