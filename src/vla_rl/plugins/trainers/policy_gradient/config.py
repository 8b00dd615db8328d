"""Settings of `policy_gradient`."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class PolicyGradientConfig:
    """Spec keys of the trainer `policy_gradient`: none, `train` has them."""
