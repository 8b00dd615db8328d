"""Table of the numeric fields that travel with every sample. A new field is one line here: what a simulator or a policy
reports under its name is assembled into the rollout, cut and joined with it, and passed to the algorithm.

Dimensions are those of `types.py`: T chunk steps, N trajectories, C actions, M log-probs of an action, D features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from attrs import frozen

Source = Literal["env", "policy", "learner", "driver", "algorithm"]


@frozen(kw_only=True)
class Field:
    """A numeric field of every chunk step (dims "T N ...") or of every trajectory ("N ...")."""

    name: str
    """Attribute of `Rollout`, `Advantages` or `Batch`; a key of their `extras` if they have no such attribute."""
    dims: str
    source: Source
    """Component that produces the field."""
    optional: bool = False
    """The field may be missing: without a critic, or if the algorithm does not need it."""
    in_batch: bool = False
    """The field is sent to the learners with the samples, and is part of `Batch`."""
    fill: float = 0.0
    """Value at chunk steps after the end of a trajectory."""

    @property
    def by_time(self) -> bool:
        """Whether the field has a time axis, which comes first."""
        return self.dims.startswith("T")


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


def read_field(holder: Any, field: Field) -> Any:
    """Return the field of a `Rollout`, `Advantages` or `Batch`; None where it is missing."""
    return getattr(holder, field.name, None) if hasattr(type(holder), field.name) else holder.extras.get(field.name)


def arrange_fields(holder: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a class for these values (name -> tensor): its attributes by name, and all others
    under "extras", without those that are None."""
    attributes = {name: value for name, value in values.items() if hasattr(holder, name)}
    extras = {name: value for name, value in values.items() if name not in attributes and value is not None}
    return {**attributes, "extras": extras}


def shape_matches(shape: Iterable[int], dims: str, sizes: dict[str, int]) -> bool:
    """Return whether a tensor of this shape matches `dims` ("T N C M"; bracketed dimensions may be missing). `sizes`
    maps the dimensions that are known to their sizes."""
    shape = tuple(shape)
    for names in (dims.replace("[", "").replace("]", "").split(), [d for d in dims.split() if not d.startswith("[")]):
        if len(names) == len(shape) and all(sizes.get(n, size) == size for n, size in zip(names, shape, strict=True)):
            return True
    return False
