"""What other installed packages add to tpplan's tables: a model's family, or GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpplan.errors import TpplanError

_Kind = TypeVar("_Kind")


def added(group: str, kind: type[_Kind], error: type[TpplanError], name: str = "") -> Iterator[_Kind]:
    """Yield the objects that entry points of a group name.

    Args:
        group: of entry points, such as ``tpplan.families``.
        kind: class of the objects.
        error: raised where one cannot be loaded, or is of another class.
        name: of the only entry points to load; all by default.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 (only what no table has asks for it)

    points = entry_points(group=group)
    for point in points.select(name=name) if name else points:
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "an installed package"
        what, hint = f"the entry point {point.name!r} of {package} in {group}", "repair or uninstall that package"
        try:
            found = point.load()
        except Exception as cause:
            raise error(f"{what} cannot be loaded: {type(cause).__name__}: {cause}", hint) from cause
        if not isinstance(found, kind):
            raise error(f"{what} is of the class {type(found).__name__}, expected {kind.__name__}", hint)
        yield found
