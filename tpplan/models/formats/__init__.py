"""Weight formats: the tensors that a checkpoint stores for the unquantised model that its config describes."""

from __future__ import annotations

from tpplan.models.formats.formula import stored_by_formula
from tpplan.models.formats.matching import stored_by_headers
from tpplan.models.formats.scheme import Scheme
from tpplan.models.formats.tools import read_scheme

__all__ = ["Scheme", "read_scheme", "stored_by_formula", "stored_by_headers"]
