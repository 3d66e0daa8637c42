"""What all tests share: Hypothesis profiles, a model, and skipping what this machine has no GPUs for."""

from __future__ import annotations

import gc
import os
from hashlib import sha256
from pathlib import Path
from subprocess import DEVNULL, CalledProcessError, check_output

import pytest
from hypothesis import HealthCheck, settings

_HERE = Path(__file__).parent
_SLOW_IS_FINE = (HealthCheck.too_slow,)  # one slow core must not turn a green run red

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads on top of pytest's workers only get in each other's way

settings.register_profile("dev", deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile("ci", deadline=None, suppress_health_check=_SLOW_IS_FINE, derandomize=True, max_examples=50)
settings.register_profile("quick", deadline=None, suppress_health_check=_SLOW_IS_FINE, max_examples=10)
_USUAL_PROFILE = "ci" if os.environ.get("CI") else "dev"
settings.load_profile(_USUAL_PROFILE)


def pytest_xdist_auto_num_workers() -> int:
    """Start a worker more than there are cores, as many tests wait: for other processes, or for a time to run out."""
    return (os.cpu_count() or 1) + 1


#: Folders, files and functions of tests that take most of the time: they compare with transformers or an exact solver,
#: compile kernels, run their sources lane by lane, start processes, or leave out each step of a program in turn.
SLOW = {
    *(
        "bench",
        "benchmarks",
        "decoder",
        "exllamav2",
        "fuzz",
        "kernels",
        "machine",
        "processes",
        "project",
        "selftest",
        "transformers",
    ),
    *("test_beside", "test_families", "test_family_cuts", "test_family_defaults", "test_family_facts"),
    *("test_family_parts", "test_linear_attention", "test_mamba", "test_states", "test_number_of_experts_is_compared"),
    *("test_fill", "test_load", "test_python", "test_reader", "test_styles", "test_tables"),
    *("test_infeasible", "test_optimum"),
    *("test_bounds", "test_handles", "test_interrupts", "test_ordering_mutations", "test_streams"),
    *("test_heads_are_cut_as_told", "test_what_transformers_cuts"),
    "test_every_pair_of_programs_is_safe_on_one_context",
    "test_every_program_is_right_under_random_schedules",
    "test_scheduler_and_checker_agree_on_every_step_that_is_left_out",
}


#: Of the cases of a test, ``--sample`` takes one in so many, and not fewer than so many; the same of one that is slow.
_USUAL, _OF_SLOW = (5, 4), (16, 2)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option by which tests of many cases are run in part."""
    what = (
        "run a fifth of the cases of every test, of slow ones a sixteenth: others for each seed, by default the "
        "commit; and half of the random examples"
    )
    parser.addoption("--sample", metavar="SEED", help=what)


def pytest_configure(config: pytest.Config) -> None:
    """Choose a seed where none is given, once for all workers: xdist hands them this process's options.

    The same commit always has the same cases, so that running its tests again does not hide a failure, and over many
    commits all cases are run.
    """
    if config.option.sample == "":
        config.option.sample = _commit()
    if config.option.sample and not config.getoption("hypothesis_profile", None):
        usual = settings.get_profile(_USUAL_PROFILE)
        settings.register_profile("sample", usual, max_examples=usual.max_examples // 2)
        settings.load_profile("sample")


def _commit() -> str:
    try:
        return check_output(["git", "rev-parse", "--short=12", "HEAD"], cwd=_HERE, text=True, stderr=DEVNULL).strip()  # noqa: S607
    except (OSError, CalledProcessError):  # sources without their history
        return "none"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how to run the same cases again, whatever the commit is then."""
    if seed := config.option.sample:
        profile = "CI=1 " if os.environ.get("CI") else ""
        terminalreporter.write_line(f"a part of the cases; the same ones: {profile}just test --sample={seed}")


def sampled(items: list[pytest.Item], seed: str) -> set[pytest.Item]:
    """Return what is left of the cases of every test, which do not depend on each other: those of the least hashes."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    return {
        item for each in cases.values() for item in sorted(each, key=lambda item: _hash(item, seed))[: _count(each)]
    }


def _count(cases: list[pytest.Item]) -> int:
    one_in, fewest = _OF_SLOW if _is_slow(cases[0]) else _USUAL
    return max(fewest, -(-len(cases) // one_in))


def _is_slow(item: pytest.Item) -> bool:
    return bool(SLOW & {*item.path.parts[len(_HERE.parts) :], item.path.stem, getattr(item, "originalname", item.name)})


def _hash(item: pytest.Item, seed: str) -> bytes:
    return sha256(f"{seed} {item.nodeid}".encode()).digest()


def _gpu_count() -> int:
    import torch  # noqa: PLC0415 - three seconds that only GPU tests pay

    return torch.cuda.device_count()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take a sample of cases, mark tests as slow, and skip those of more GPUs than there are."""
    if seed := config.option.sample:
        kept = sampled(items, seed)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    for item in items:
        if _is_slow(item):
            item.add_marker("slow")
    needs = {item: 2 if item.get_closest_marker("multi_gpu") else 1 for item in items if _wants_gpu(item)}
    have = _gpu_count() if needs else 0
    for item, count in needs.items():
        if have < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} GPUs, found {have}"))


def pytest_sessionstart() -> None:
    """Have the garbage collector wait until all is imported, of which nothing is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone what was imported, and come less often: compilers make many objects."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 10, 10)


def _wants_gpu(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("gpu", "multi_gpu"))
