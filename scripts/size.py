"""Tells how many lines of code each package has, without comments, docstrings and blank lines, as a Markdown table."""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def lines_of_code(source: bytes) -> int:
    """Return how many lines hold code; those of a string that is no docstring all do."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)), *_]:
                    docstrings |= {*range(first, last + 1)}
    lines: set[int] = set()
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if token.type not in _NO_CODE and not is_docstring:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines)


def here(folder: str) -> list[tuple[str, bytes]]:
    """Return the path and content of every Python file in a folder."""
    return [(path.as_posix(), path.read_bytes()) for path in Path(folder).rglob("*.py")]


def at(ref: str, folder: str) -> list[tuple[str, bytes]]:
    """Return the same for a commit."""
    archive = subprocess.run(["git", "archive", "--format=tar", ref], stdout=subprocess.PIPE, check=True)  # noqa: S607
    files = []
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        for member in tar:
            path, content = PurePosixPath(member.name), tar.extractfile(member)
            if content and path.suffix == ".py" and path.is_relative_to(folder):
                files.append((member.name, content.read()))
    return files


def count(files: Iterable[tuple[str, bytes]]) -> tuple[Counter[str], Counter[str]]:
    """Return how many files, and lines of code in them, each package has."""
    number, lines = Counter[str](), Counter[str]()
    for path, source in files:
        package = PurePosixPath(path).parent.as_posix().replace("/", ".")
        number[package] += 1
        lines[package] += lines_of_code(source)
    return number, lines


def table(before: tuple[Counter[str], Counter[str]] | None, after: tuple[Counter[str], Counter[str]]) -> str:
    """Return the table of what there is, beside what there was if that is given."""
    head = ["package", "files", "lines"]
    if before:
        head[1:] = [f"{name} {when}" for name in head[1:] for when in ("before", "after", "±")]
    packages = sorted({*after[0], *(before or after)[0]})
    rows = [[package] for package in [*packages, "total"]]
    for was, now in zip(before or after, after, strict=True):
        for row, *sizes in zip(rows, _with_total(was, packages), _with_total(now, packages), strict=True):
            row += [f"{size:,}" for size in sizes[not before :]]
            if before:
                row.append(f"{sizes[1] - sizes[0]:+,}")
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (head, rule, *rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in aligned)


def _with_total(sizes: Counter[str], packages: Sequence[str]) -> list[int]:
    return [*(sizes[package] for package in packages), sizes.total()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="tpplan", help="tpplan by default")
    parser.add_argument("--against", metavar="REF", help="a commit to compare with")
    options = parser.parse_args(arguments)
    before = count(at(options.against, options.folder)) if options.against else None
    print(table(before, count(here(options.folder))), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
