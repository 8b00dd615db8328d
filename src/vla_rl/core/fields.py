"""Tables of the numeric fields that travel with every sample. A new field is one line here: what a simulator or a
policy reports under its name is checked, assembled into the rollout, cut and joined with it, and passed to the
algorithm. A plugin adds fields by declaring their dimensions: `EnvInfo.extras`, `VLAModel.extras`, `Algorithm.extras`.

Dimensions are those of `types.py`: T chunk steps, N trajectories or envs, C actions, A numbers of an action, M
log-probs of an action, D features; or a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from attrs import frozen

from vla_rl.core.errors import PluginError

Source = Literal["env", "policy", "learner", "driver", "algorithm"]


@frozen(kw_only=True)
class Field:
    """A numeric field of every chunk step (dims "T N ...") or of every trajectory or env ("N ...")."""

    name: str
    """Attribute of `ChunkResult`, `Rollout`, `Advantages` or `Batch`; without such an attribute a key of `extras`."""
    dims: str
    source: Source
    """Component that produces the field."""
    optional: bool = False
    """The field may be missing: without a critic, or if the algorithm does not need it."""
    in_batch: bool = False
    """The field is sent to the learners with the samples, and is part of `Batch`."""
    fill: float = 0.0
    """Value at chunk steps after the end of a trajectory."""
    dtype: str = "float32"
    """Type of the numbers, where it is checked: in results of simulators and models."""
    given_with: str = ""
    """Attribute of `EnvInfo` that has to be set for a simulator to report the field; empty: every simulator does."""


RESULT = (
    Field(name="rewards", dims="N C", source="env"),
    Field(name="terminated", dims="N C", source="env", dtype="bool"),
    Field(name="truncated", dims="N C", source="env", dtype="bool"),
    Field(name="executed", dims="N C", source="env", dtype="bool"),
    Field(name="success", dims="N", source="env", dtype="bool"),
    Field(name="succeeded", dims="N C", source="env", dtype="bool", optional=True),
    Field(name="source", dims="N C", source="env", dtype="int8", given_with="takeovers"),
    Field(name="executed_actions", dims="N C A", source="env", given_with="takeovers"),
    Field(name="late", dims="N C", source="env", dtype="bool", given_with="control_hz"),
)
"""Fields of the result of a chunk step."""

ROLLOUT = (
    Field(name="rewards", dims="T N C", source="env"),
    Field(name="terminated", dims="T N C", source="env"),
    Field(name="truncated", dims="T N C", source="env"),
    Field(name="valid", dims="T N C", source="env", in_batch=True),
    Field(name="source", dims="T N C", source="env", optional=True, in_batch=True),
    Field(name="executed_actions", dims="T N C A", source="env", optional=True, in_batch=True),
    Field(name="expert_actions", dims="T N C A", source="env", optional=True, in_batch=True),
    Field(name="log_probs", dims="T N C M", source="policy", in_batch=True),
    Field(name="values", dims="T N [C]", source="policy", optional=True, in_batch=True),
    Field(name="next_values", dims="T N", source="policy", optional=True),
    Field(name="versions", dims="T N", source="policy", in_batch=True),
    Field(name="proximal_log_probs", dims="T N C M", source="learner", optional=True, in_batch=True),
    Field(name="groups", dims="N", source="driver"),
    Field(name="success", dims="N", source="driver"),
    Field(name="features", dims="N D", source="policy", optional=True),
)
"""Fields of a rollout."""

ADVANTAGES = (
    Field(name="advantages", dims="T N [C]", source="algorithm", in_batch=True),
    Field(name="weights", dims="T N [C]", source="algorithm", in_batch=True),
    Field(name="counts", dims="T N [C]", source="algorithm", optional=True),
    Field(name="returns", dims="T N [C]", source="algorithm", optional=True, in_batch=True),
    Field(name="value_weights", dims="T N [C]", source="algorithm", optional=True, in_batch=True),
    Field(name="value_counts", dims="T N [C]", source="algorithm", optional=True),
)
"""Fields of the advantages that an algorithm computes from a rollout; `Algorithm.extras` adds to them."""

SAMPLE_IDS = (
    Field(name="sample_ids", dims="T N", source="policy", dtype="int64", fill=-1),
    Field(name="ended", dims="T N", source="policy", dtype="bool", optional=True),
    Field(name="ranks", dims="T N", source="driver", dtype="int64", optional=True),
    Field(name="workers", dims="N", source="driver", dtype="int64"),
    Field(name="numbers", dims="N", source="driver", dtype="int64"),
)
"""Where the model inputs of a rollout's samples are: fields of the driver's `RolloutBatch`."""

BATCH = {"obs", "chunk", "lag", "reference_log_probs", "extras", "actions"}
"""Names that samples have besides, in `Batch` or on their way to it."""


def check_extras(extras: Mapping[str, str], dims: str) -> None:
    """Raise ValueError for a name that samples have already, and for dimensions but numbers and letters of `dims`."""
    taken = {field.name for field in (*RESULT, *ROLLOUT, *ADVANTAGES, *SAMPLE_IDS)} | BATCH
    for name, declared in extras.items():
        if not name.isidentifier() or name in taken:
            raise ValueError(f"extras: {name!r} cannot name a further number; taken are {', '.join(sorted(taken))}")
        parts = declared.split() if isinstance(declared, str) else ["?"]
        if not all(one.isdigit() or one in dims for one in parts) or "C" in parts[1:]:
            raise ValueError(
                f"extras: {name!r} has dimensions {declared!r}; give numbers and letters of {', '.join(dims)}, the "
                "chunk's actions C first: 'C' for one number an action, 'C 3' for three, '' for one a chunk"
            )


class Extras(dict[str, Any]):
    """Further numbers of samples, by name. Raises PluginError for a name that none of the run's plugins declares."""

    def __missing__(self, name: str) -> Any:
        raise PluginError(
            f"samples have no number {name!r}; they have: {', '.join(self) or 'none'}. A simulator declares its "
            "numbers in EnvInfo.extras, a model in VLAModel.extras, an algorithm in Algorithm.extras; a world model "
            "imagines none"
        )


def read_field(holder: Any, field: Field) -> Any:
    """Return the field of a `Rollout`, `Advantages` or `Batch`; None where it is missing."""
    return getattr(holder, field.name, None) if hasattr(type(holder), field.name) else holder.extras.get(field.name)


def arrange_fields(holder: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of a class: `values` that are its attributes, all others as "extras"; without None."""
    attributes = {name: value for name, value in values.items() if hasattr(holder, name)}
    extras = {name: value for name, value in values.items() if name not in attributes and value is not None}
    return {**attributes, "extras": Extras(extras)}


def list_arrays(holder: Any, table: Iterable[Field]) -> dict[str, Any]:
    """Return the fields of the table, and the extras, that a holder has: name -> tensor or array."""
    arrays = {field.name: read_field(holder, field) for field in table} | dict(getattr(holder, "extras", ()))
    return {name: array for name, array in arrays.items() if array is not None}


def shape_of(dims: Iterable[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of these dimensions: numbers as they are, letters as `sizes` says."""
    return tuple(int(name) if name.isdigit() else sizes[name] for name in dims)


def shape_matches(shape: Iterable[int], dims: str, sizes: Mapping[str, int]) -> bool:
    """Return whether a tensor of this shape matches `dims` ("T N C M"; bracketed dimensions may be missing, a number
    stands for itself). `sizes` maps the dimensions that are known to their sizes."""
    shape = tuple(shape)
    for names in (dims.replace("[", "").replace("]", "").split(), [d for d in dims.split() if not d.startswith("[")]):
        wanted = [int(name) if name.isdigit() else sizes.get(name) for name in names]
        if len(names) == len(shape) and all(one in (None, size) for one, size in zip(wanted, shape, strict=True)):
            return True
    return False
