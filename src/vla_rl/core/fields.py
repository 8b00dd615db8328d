"""The numbers that travel with every sample, in one table. A new number is one line here: what a simulator or a policy
reports under its name is put together for the rollout, cut and joined with it, and reaches the algorithm.

Dimensions are those of `types.py`: T chunk steps, N trajectories, C actions, M log-probs of an action, D features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from attrs import frozen

Source = Literal["env", "policy", "learner", "driver", "algorithm"]


@frozen(kw_only=True)
class Field:
    """One number of every chunk step ("T N ..."), or of every trajectory ("N ...")."""

    name: str
    """Attribute of `Rollout`, `Advantages` or `Batch`; where these have none of that name, key of their `extras`."""
    dims: str
    source: Source
    """Who makes it."""
    optional: bool = False
    """It may be missing: without a critic, or where the algorithm does not need it."""
    in_batch: bool = False
    """It goes with the samples to the learners, and is in `Batch`."""
    fill: float = 0.0
    """Value of chunk steps after a trajectory ended."""

    @property
    def by_time(self) -> bool:
        """Whether it has a time axis, which comes first."""
        return self.dims.startswith("T")


ROLLOUT = (
    Field(name="rewards", dims="T N C", source="env"),
    Field(name="terminated", dims="T N C", source="env"),
    Field(name="truncated", dims="T N C", source="env"),
    Field(name="valid", dims="T N C", source="env", in_batch=True),
    Field(name="log_probs", dims="T N C M", source="policy", in_batch=True),
    Field(name="values", dims="T N [C]", source="policy", optional=True, in_batch=True),
    Field(name="next_values", dims="T N", source="policy", optional=True),
    Field(name="versions", dims="T N", source="policy", in_batch=True),
    Field(name="proximal_log_probs", dims="T N C M", source="learner", optional=True, in_batch=True),
    Field(name="groups", dims="N", source="driver"),
    Field(name="success", dims="N", source="driver"),
    Field(name="features", dims="N D", source="policy", optional=True),
)
"""Of a rollout."""

ADVANTAGES = (
    Field(name="advantages", dims="T N [C]", source="algorithm", in_batch=True),
    Field(name="weights", dims="T N [C]", source="algorithm", in_batch=True),
    Field(name="counts", dims="T N [C]", source="algorithm", optional=True),
    Field(name="returns", dims="T N [C]", source="algorithm", optional=True, in_batch=True),
    Field(name="value_weights", dims="T N [C]", source="algorithm", optional=True, in_batch=True),
    Field(name="value_counts", dims="T N [C]", source="algorithm", optional=True),
)
"""Of what an algorithm makes of a rollout; `Algorithm.extras` adds to them."""


def read(holder: Any, field: Field) -> Any:
    """Return the field of a `Rollout`, `Advantages` or `Batch`; None where it is missing."""
    return getattr(holder, field.name, None) if hasattr(type(holder), field.name) else holder.extras.get(field.name)


def arranged(holder: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for these values (name -> tensor) of a class: its attributes, and "extras" with the
    others; None is left out of these."""
    attributes = {name: value for name, value in values.items() if hasattr(holder, name)}
    extras = {name: value for name, value in values.items() if name not in attributes and value is not None}
    return {**attributes, "extras": extras}


def fits(shape: Iterable[int], dims: str, known: dict[str, int]) -> bool:
    """Whether a tensor of this shape has these dimensions ("T N C M"; those in brackets may be missing), where the
    sizes of some are known."""
    shape = tuple(shape)
    for names in (dims.replace("[", "").replace("]", "").split(), [d for d in dims.split() if not d.startswith("[")]):
        if len(names) == len(shape) and all(known.get(n, size) == size for n, size in zip(names, shape, strict=True)):
            return True
    return False
