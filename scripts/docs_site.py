"""What the site has beside docs/: pages of the repository's root, the commands' help, and the public names.

mkdocs runs this as a hook, and griffe, which reads docstrings, as an extension.
"""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout, suppress
from itertools import takewhile
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import TYPE_CHECKING, Any

import griffe
from mkdocs.structure.files import File, Files

from tpplan.cli.commands import app
from tpplan.cli.main import main

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGES = ("tpplan", "tpplan.exec", "tpplan.weights", "tpplan.decoder", "tpplan.exllamav2")
#: Pages of the repository's root, and what they are called on the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

_LINK = re.compile(r"(\[[^\]]*\])\(([^)\s#]+)(#[^)\s]*)?\)")
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([\w.]+)`")

_log = griffe.get_logger("docs_site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that docs/ has not."""
    pages = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in PAGES.items()}
    pages |= {f"reference/{package}.md": f"::: {package}\n" for package in PACKAGES}
    for page, text in (pages | {"commands.md": _commands()}).items():
        files.append(File.generated(config, page, content=text))
    return files


def _commands() -> str:
    """Return a page of what each command answers to ``--help``."""
    names = sorted((name for name in app if not name.startswith("-")), key=lambda name: app[name].sort_key)
    sections = [f"# Commands\n\n{_help()}", *(f"## tpplan {name}\n\n{_help(name)}" for name in names)]
    return "\n".join(sections)


def _help(*command: str) -> str:
    with redirect_stdout(io.StringIO()) as to:
        main([*command, "--help"])
    return f"```text\n{to.getvalue().strip()}\n```\n"


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Point links at pages of the site; of those to other files of the repository only the text stays."""
    here = next((name for name, at in PAGES.items() if at == page.file.src_uri), f"docs/{page.file.src_uri}")

    def moved(link: re.Match[str]) -> str:
        text, target, anchor = link.groups(default="")
        path = normpath(PurePosixPath(here).parent / target)
        at = PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(at):
            return f"{text}({relpath(at, PurePosixPath(page.file.src_uri).parent)}{anchor})"
        return text[1:-1] if (ROOT / path).exists() else link[0]

    return _LINK.sub(moved, markdown)


class Docstrings(griffe.Extension):  # type: ignore[misc]
    """Makes links of roles such as ``:func:`tpplan.load```, and takes ``#:`` comments for docstrings.

    Roles that lead nowhere are warned of, and public names with neither, which the site would leave out.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Go through a package when all of it is read."""
        self._visit(pkg)
        for package in PACKAGES:
            module = pkg.modules_collection[package]
            for name in module.exports or ():
                with suppress(griffe.AliasResolutionError):  # a name of the standard library
                    member = module.members[name]
                    if not (member.final_target if member.is_alias else member).docstring:
                        _log.warning("%s.%s is public and has no docstring", package, name)

    def _visit(self, item: griffe.Object) -> None:
        if item.is_attribute and not item.docstring and item.lineno:
            above = item.lines_collection[item.filepath][: item.lineno - 1]
            comment = [*takewhile(lambda line: line.startswith("#:"), reversed(above))]
            if comment:
                item.docstring = griffe.Docstring(" ".join(line[2:].strip() for line in reversed(comment)), parent=item)
        if item.docstring:
            item.docstring.value = _ROLE.sub(lambda role: _link(item, role[1]), item.docstring.value)
        for member in item.members.values():
            if isinstance(member, griffe.Object):
                self._visit(member)


def _link(item: griffe.Object, name: str) -> str:
    """Return a link to what a docstring names, or the name alone if the site does not have it."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return f"`{name}`"
    try:
        path = _found(item, name).canonical_path
    except (griffe.GriffeError, KeyError):
        _log.warning("%s: no %s, which its docstring names", item.path, name)
        return f"`{name}`"
    return f'<autoref optional identifier="{path}"><code>{name}</code></autoref>'


def _found(item: griffe.Object, name: str) -> griffe.Object | griffe.Alias:
    """Return what a name means at some place: a class's own and inherited members, then those of the module."""
    if name.startswith("tpplan."):
        return item.modules_collection[name]
    first, *rest = name.split(".")
    scope = item if item.is_class or item.is_module else item.parent
    found = scope.all_members.get(first) or item.modules_collection[item.resolve(first)]
    for each in rest:
        found = found.all_members[each]
    return found
