"""Settings of `behaviour_cloning`."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class BehaviourCloningConfig:
    """Spec keys of the trainer `behaviour_cloning`: none, `train` has them."""
