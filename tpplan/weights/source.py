"""The checkpoint that weights are loaded from, and the check that it matches a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import frozen

from tpplan.core.model import ModelSpec
from tpplan.errors import ModelError
from tpplan.models.checkpoint import Headers
from tpplan.models.config import read_config
from tpplan.models.families import spec_from_config, tolerated
from tpplan.models.gguf.reader import SUFFIX, GgufModel
from tpplan.models.reader import are_stacked, gguf_model_at, read_checkpoint
from tpplan.planfile.codec import fingerprint
from tpplan.planner.recount import check_ledger

if TYPE_CHECKING:
    from tpplan.core.plan import SplitPlan
    from tpplan.models.checkpoint import Tensor

_SHOWN: Final = 3
_HINT: Final = "plan again from this checkpoint, or fetch the one that the plan was made for"


@frozen
class Source:
    """A checkpoint whose headers were read and checked against its config.

    Attributes:
        directory: directory of the checkpoint's files.
        model: the model that config and headers describe.
        headers: headers of its files, with the names that tensors have in the model.
        gguf: the GGUF file that it is; None if it is none.
    """

    directory: Path
    model: ModelSpec
    headers: Headers
    gguf: GgufModel | None = None

    @classmethod
    def read(cls, directory: Path) -> Source:
        """Read the config and the headers of a checkpoint.

        Raises:
            ModelError: tensors are missing, unexpected, or of other shapes than in the config, or there are none.
        """
        gguf = gguf_model_at(directory)
        model, headers = (gguf.spec, gguf.headers) if gguf else read_checkpoint(directory)
        if headers is None:
            hint = "name the directory that has the model's .safetensors files beside config.json"
            raise ModelError(f"{directory} has no weights in safetensors files", hint)
        return cls(directory if directory.is_dir() else directory.parent, model, headers, gguf)

    def find(self, name: str) -> Tensor:
        """Return the header of a tensor of the model, with or without the prefix that checkpoints may omit."""
        tensors = self.headers.tensors
        return tensors.get(name) or tensors[name.removeprefix(tolerated(self.model.model_type).prefix)]

    def check(self, plan: SplitPlan) -> None:
        """Check that a plan was made for this checkpoint, and that its ledger is right.

        Args:
            plan: a plan that breaks no rule.

        Raises:
            ModelError: it was made for another one. The error names the tensors whose dtypes differ if that is the only
                difference, and otherwise what differs.
            PlanError: a value of the plan is not what the model or the plan's own cuts decide.
        """
        given = fingerprint(self.model)
        if given == plan.model.fingerprint:
            check_ledger(plan, self.model, self.directory)
            return
        if planned := self._unquantised(plan):
            raise self._stored_otherwise(planned)
        facts = (
            ("architecture", plan.model.architecture, self.model.architecture),
            ("layers", plan.model.layers, self.model.layer_count),
            ("dtype", plan.model.dtype, self.model.dtype),
            ("fingerprint", plan.model.fingerprint, given),
        )
        listed = ", ".join(f"{what} {here} and not {there}" for what, there, here in facts if here != there)
        here = f"{self.directory}, whose weights are {self.model.weight_format},"
        raise ModelError(f"{here} is not the model that the plan for {plan.model.name} was made for: {listed}", _HINT)

    def _stored_otherwise(self, planned: ModelSpec) -> ModelError:
        """Return the error for a checkpoint of the planned, unquantised model that is quantised or has other dtypes."""
        plan = f"the plan for {planned.name}"
        wanted, found = ({name: each.dtype for name, each, _ in model.tensors()} for model in (planned, self.model))
        if wanted.keys() != found.keys():
            what = f"the weights in {self.directory} are {self.model.weight_format}, those of {plan} are not quantised"
            return ModelError(what, _HINT)
        odd = [(name, found[name], dtype) for name, dtype in wanted.items() if found[name] != dtype]
        more = f", and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        listed = ", ".join(
            f"{name} in {self.find(name).file} is {here} and not {there}" for name, here, there in odd[:_SHOWN]
        )
        return ModelError(f"the checkpoint has tensors of other dtypes than {plan}: {listed}{more}", _HINT)

    def _unquantised(self, plan: SplitPlan) -> ModelSpec | None:
        """Return the model with unquantised weights of one dtype, if the plan was made for it."""
        if self.gguf:
            return None  # the file is all that describes it
        config = read_config(self.directory).having("tie_word_embeddings", self.model.tied_embeddings)
        for key in ("torch_dtype", "dtype"):
            config = config.having(key, plan.model.dtype)
        planned = spec_from_config(config, plan.model.name, stacked=are_stacked(self.headers))
        return planned if fingerprint(planned) == plan.model.fingerprint else None


def gguf_of(where: str | Path | Source) -> GgufModel | None:
    """Return the GGUF file of a checkpoint, which is read if only its path is given; None if it is none.

    Raises:
        ModelError: the file cannot be read.
    """
    return where.gguf if isinstance(where, Source) else gguf_model_at(Path(where))


def directory_of(where: str | Path | Source) -> Path:
    """Return the directory of a checkpoint's files, of a GGUF file the one that it is in."""
    if isinstance(where, Source):
        return where.directory
    path = Path(where)
    return path.parent if path.suffix == SUFFIX and path.is_file() else path
