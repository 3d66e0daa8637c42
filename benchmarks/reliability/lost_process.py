"""Processes of which one is lost while they generate, each in a network namespace of its own: how all of them end.

Run it as ``python -m benchmarks.soak lost``, on Linux, where unprivileged users may have network namespaces.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import asdict, define, field, frozen

import tpplan
from benchmarks.common.random_checkpoint import write
from benchmarks.common.rows import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

EXAMPLE = ROOT / "examples/generate_together.py"
RANKS, PROMPT, NEW_TOKENS = 3, "5,17,99", 50
#: Tokens after which something happens.
_BEFORE = 5
#: Seconds beyond the time-out in which all have to end, and more until those that did not are ended from outside.
GRACE_S, _MORE_S = 5.0, 30.0
_POLL_S = 0.01
_APART = ["unshare", "-Urn"]
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@frozen
class Case:
    """Something that happens to one of the processes.

    Attributes:
        fault: ``none``, ``kill`` (-9), ``stop`` (SIGSTOP), ``cut`` (its network, for ``seconds``), ``gone`` (the same
            for good), ``late`` (by ``seconds``) or ``never`` (it is not started).
        rank: rank of the process.
        seconds: that it lasts.
    """

    fault: str
    rank: int = 1
    seconds: float = 0

    @property
    def name(self) -> str:
        """What happens, in a word or two."""
        lasts = f" {self.seconds:g} s" if self.seconds else ""
        return self.fault if self.fault == "none" else f"{self.fault} {self.rank}{lasts}"

    @property
    def is_fatal(self) -> bool:
        """Whether the others cannot go on."""
        return self.fault not in {"none", "cut", "late"}


def cases(late_s: float, cut_s: float) -> list[Case]:
    """Return what may happen to a process that has the store, and to one that has not."""
    both = [Case(fault, rank) for fault in ("kill", "stop", "gone", "never") for rank in (1, 0)]
    return [
        Case("none"),
        *both,
        *(Case("cut", rank, cut_s) for rank in (1, 0)),
        Case("late", 1, late_s),
        Case("late", 0, late_s),
    ]


@define
class End:
    """How a process ended.

    Attributes:
        rank: rank of the process.
        code: its exit code, negative for a signal; None if it had to be ended from outside, or was not started.
        seconds: since the fault.
        tokens: that it generated.
        error: what it wrote to standard error.
    """

    rank: int
    code: int | None = None
    seconds: float = 0
    tokens: list[int] = field(factory=list)
    error: str = ""

    @property
    def cause(self) -> str:
        """The first line of its error."""
        return self.error.strip().partition("\n")[0]


@frozen
class Outcome:
    """How the processes of a case ended.

    Attributes:
        case: what happened.
        ends: how each process ended.
    """

    case: Case
    ends: list[End]

    def problems(self, expected: Sequence[int], most_s: float) -> list[str]:
        """Return what is not as it should be, in words.

        Args:
            expected: the tokens that one process alone generates.
            most_s: seconds in which all have to end after something that they cannot survive.
        """
        alive = [
            end for end in self.ends if end.rank != self.case.rank or self.case.fault not in {"kill", "stop", "never"}
        ]
        found = [f"process {end.rank} did not end" for end in alive if end.code is None]
        found += [
            f"process {e.rank} ended after {e.seconds:.1f} s"
            for e in alive
            if e.seconds > most_s and self.case.is_fatal
        ]
        for end in self.ends:
            if "Traceback" in end.error:
                found.append(f"process {end.rank} ended with a traceback")
            if end.tokens != list(expected[: len(end.tokens)]):
                found.append(f"process {end.rank} has other tokens")
        if self.case.is_fatal:
            found += [f"process {end.rank} ended with {end.code}" for end in alive if end.code != 1]
            named = re.compile(rf"process {self.case.rank}( of {RANKS})? (is lost|did not come)")
            found += [
                f"process {end.rank} does not name process {self.case.rank}"
                for end in alive
                if end.rank != self.case.rank and not named.search(end.cause)  # who is cut off cannot know that it is
            ]
        else:
            found += [f"process {e.rank} ended with {e.code}: {e.cause}" for e in alive if e.code != 0]
            found += [f"process {e.rank} has {len(e.tokens)} tokens" for e in alive if len(e.tokens) < len(expected)]
        return found


def why_not() -> str:
    """Return why this machine cannot have such network namespaces; empty if it can."""
    missing = [name for name in ("unshare", "nsenter", "ip") if not shutil.which(name)]
    if missing:
        return f"there is no {' and no '.join(missing)}"
    script = "ip link add b0 type bridge && ip link add v0 type veth peer name w0 && ip link set v0 master b0 up"
    done = subprocess.run([*_APART, "sh", "-c", script], capture_output=True, text=True, check=False)
    return f"no network namespaces: {done.stderr.strip() or done.returncode}" if done.returncode else ""


def run(which: Sequence[Case], timeout_s: float, folder: Path) -> tuple[list[Outcome], list[int]]:
    """Let cases happen side by side, and return how they ended and what one process alone generates.

    Args:
        which: the cases.
        timeout_s: of the processes.
        folder: an empty one.

    Raises:
        RuntimeError: it could not be tried.
    """
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in which]))
    words = [
        *_APART,
        "--kill-child",
        sys.executable,
        "-m",
        "benchmarks.soak",
        "lost",
        "--inside",
        str(folder),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    limit = 120 + timeout_s + GRACE_S + max(case.seconds for case in which)
    done = subprocess.run(
        [*words, "--timeout", str(timeout_s)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    if done.returncode or not (folder / "outcomes.json").exists():
        raise RuntimeError(f"ended with {done.returncode}\n{done.stderr[-4000:]}")
    said = json.loads((folder / "outcomes.json").read_text())
    outcomes = [Outcome(case, [End(**end) for end in ends]) for case, ends in zip(which, said["ends"], strict=True)]
    return outcomes, said["expected"]


class _Rank:
    """A process, which is started in a network namespace of its own, and waits until it is told to go."""

    def __init__(self, case: int, rank: int, folder: Path, timeout_s: float) -> None:
        self.link = f"v{case}r{rank}"
        self._files = {name: folder / f"{case}-{rank}.{name}" for name in ("tokens", "error")}
        for file in self._files.values():
            file.touch()
        ready, is_ready = os.pipe()
        start, self._start = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            words = [*_arguments(folder), "--new", str(NEW_TOKENS), "--timeout", str(timeout_s)]
            self._act(case, rank, words, (is_ready, start))
        os.close(is_ready)
        os.close(start)
        os.read(ready, 1)
        os.close(ready)
        self.rank = rank
        self._code: int | None = None
        self.ended = 0.0
        _ip(f"link add {self.link} type veth peer name eth0 netns {self.pid}")
        _ip(f"link set {self.link} master b{case} up")
        for setting in ("link set lo up", f"addr add {_address(case, rank)}/24 dev eth0", "link set eth0 up"):
            _ip(setting, self.pid)

    def go(self) -> None:
        """Let it begin."""
        os.write(self._start, b"!")  # not closed: processes started later have it too

    def code(self) -> int | None:
        """Return its exit code, if it has ended."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code, self.ended = os.waitstatus_to_exitcode(status), time.monotonic()
        return self._code

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.code() is None:
            os.kill(self.pid, number)

    def end(self, since: float) -> End:
        """End it if it still runs, and return how it ended."""
        code = self.code()
        if code is None:
            self.signal(signal.SIGABRT)  # it says where it was
            time.sleep(1)
            self.signal(signal.SIGKILL)
            os.waitpid(self.pid, 0) if self.code() is None else None
        return End(self.rank, code, max(0.0, self.ended - since), self.tokens(), self._files["error"].read_text())

    def tokens(self) -> list[int]:
        """Return the tokens that it has generated."""
        return [int(line) for line in self._files["tokens"].read_text().split("\n")[:-1]]

    def _act(self, case: int, rank: int, words: Sequence[str], pipes: tuple[int, int]) -> NoReturn:
        """Be the process."""
        os.environ |= _environment(rank, _address(case, 0))
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "unshare")
        error = os.open(self._files["error"], os.O_WRONLY | os.O_APPEND)
        os.dup2(error, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        faulthandler.enable()
        os.close(pipes[0])
        os.read(pipes[1], 1)
        scope = runpy.run_path(str(EXAMPLE))
        generated = scope["generated"]

        def noting(*arguments: Any, **options: Any) -> Any:
            with self._files["tokens"].open("a") as file:
                for token in generated(*arguments, **options):
                    print(token, file=file, flush=True)
                    yield token

        scope["main"].__globals__["generated"] = noting
        sys.argv = [str(EXAMPLE), *words]
        scope["main"]()
        sys.exit()


def _arguments(folder: Path) -> list[str]:
    return [str(folder / "plan.json"), str(folder / "model"), PROMPT, "cpu"]


def _environment(rank: int, address: str) -> Mapping[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": address, "MASTER_PORT": "29500"}


def _address(case: int, rank: int) -> str:
    return f"10.9.{case}.{rank + 1}"


def _ip(words: str, process: int | None = None) -> None:
    inside = ["nsenter", "-t", str(process), "-n"] if process else []
    subprocess.run([*inside, "ip", *words.split()], check=True)


def _happen(case: Case, ranks: Sequence[_Rank], timeout_s: float) -> list[End]:
    """Let something happen to one of the processes, wait for all, and return how they ended."""
    it, others = ranks[case.rank], [each for each in ranks if each.rank != case.rank]
    for each in others:
        each.go()
    since = time.monotonic()
    if case.fault == "late":
        time.sleep(case.seconds)
    if case.fault != "never":
        it.go()
    if case.fault in {"kill", "stop", "gone", "cut"}:
        _wait(lambda: all(len(each.tokens()) >= _BEFORE or each.code() is not None for each in ranks), 4 * timeout_s)
        since = time.monotonic()
        _strike(case, it)
    patience = timeout_s + GRACE_S + _MORE_S if case.is_fatal else 2 * timeout_s + 30
    waiting = others if case.fault in {"never", "stop"} else ranks
    _wait(lambda: all(each.code() is not None for each in waiting), patience)
    if case.fault == "stop":  # once it goes on, it has to end too
        it.signal(signal.SIGCONT)
        _wait(lambda: it.code() is not None, timeout_s + GRACE_S)
    if case.fault == "never":
        it.signal(signal.SIGKILL)
    return [each.end(since) for each in ranks]


def _strike(case: Case, it: _Rank) -> None:
    """Let something happen to a process that runs."""
    if case.fault in {"kill", "stop"}:
        it.signal(signal.SIGKILL if case.fault == "kill" else signal.SIGSTOP)
        return
    _ip(f"link set {it.link} down")
    if case.fault == "cut":
        time.sleep(case.seconds)
        _ip(f"link set {it.link} up")


def _wait(done: Callable[[], bool], seconds: float) -> None:
    """Wait until something is so, for some seconds at most."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _inside(folder: Path, timeout_s: float) -> None:
    """Let the cases of a folder happen, as root of a network namespace."""
    import torch  # noqa: PLC0415 (only here: once for all processes, which are forks of this one)

    from tpplan import exec as tpx  # noqa: PLC0415
    from tpplan.decoder import Decoder, generate  # noqa: PLC0415
    from tpplan.exec.group import process_group  # noqa: F401, PLC0415
    from tpplan.exec.processes import compiler  # noqa: F401, PLC0415
    from tpplan.weights import load_weights  # noqa: PLC0415

    torch.set_num_threads(1)
    which = [Case(**each) for each in json.loads((folder / "cases.json").read_text())]
    model = folder / "model"
    model.mkdir()
    write(model, _CONFIG)
    devices = tpplan.parse_devices(f"{RANKS}x3GiB")
    plan = tpplan.plan(tpplan.read_model(model), devices, cache=tpplan.Cache("fp16", 512), max_rows=8)
    plan.save(folder / "plan.json")
    with tpx.compile(plan, backend="cpu", model=model, scratch=False) as context:
        decoder = Decoder(context, model, load_weights(plan, model, context))
        prompt = [int(token) for token in PROMPT.split(",")]
        expected = [token for (token,) in generate(decoder, [prompt], NEW_TOKENS)]
    _ip("link set lo up")
    for i in range(len(which)):
        _ip(f"link add b{i} type bridge")
        _ip(f"link set b{i} up")
    gc.collect()
    gc.freeze()  # what processes do not touch they need not copy
    worlds = [[_Rank(i, rank, folder, timeout_s) for rank in range(RANKS)] for i in range(len(which))]
    with ThreadPoolExecutor(len(which)) as pool:
        ends = list(pool.map(partial(_happen, timeout_s=timeout_s), which, worlds))
    said = {"expected": expected, "ends": [[asdict(end) for end in each] for each in ends]}
    (folder / "outcomes.json").write_text(json.dumps(said))


def main(arguments: Sequence[str]) -> None:
    """Let everything happen, and print a line for each case."""
    parser = argparse.ArgumentParser(prog="soak lost", description="Lose one of three processes while they generate.")
    parser.add_argument("--timeout", type=float, default=60, help="of the processes, in seconds (default: 60)")
    parser.add_argument("--late", type=float, default=20, help="seconds by which a process is late (default: 20)")
    parser.add_argument("--cut", type=float, default=4, help="seconds without a network (default: 4)")
    parser.add_argument("--repeat", type=int, default=1, help="times that everything happens (default: 1)")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.inside:
        _inside(given.inside, given.timeout)
        return
    if reason := why_not():
        sys.exit(f"error: {reason}")
    wrong: Counter[str] = Counter()
    for _ in range(given.repeat):
        with TemporaryDirectory() as folder:
            outcomes, expected = run(cases(given.late, given.cut), given.timeout, Path(folder))
        for outcome in outcomes:
            problems = outcome.problems(expected, given.timeout + GRACE_S)
            wrong.update(problems)
            ends = ", ".join(f"{end.code} after {end.seconds:.1f} s" for end in outcome.ends)
            print(f"{outcome.case.name:12} {'; '.join(problems) or 'as it should be'} ({ends})")
            for cause in dict.fromkeys(end.cause for end in outcome.ends if end.error):
                print(f"{'':12} {cause}")
    if wrong:
        sys.exit(1)
