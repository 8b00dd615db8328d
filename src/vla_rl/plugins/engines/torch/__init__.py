"""`torch`: the model itself acts, in the process of its policy worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from vla_rl.core.types import Context, Plugin

if TYPE_CHECKING:
    from vla_rl.plugins.engines.torch.engine import TorchEngine


@frozen(kw_only=True)
class TorchEngineConfig:
    """Keys of `rollout.engine` with `type: torch`: none."""


def build(config: TorchEngineConfig, context: Context) -> TorchEngine:
    """Build the run's model, if its learner has not built it in this process, and return the engine around it."""
    from vla_rl.plugins.engines.torch.engine import TorchEngine
    from vla_rl.toolkit.models.adapters import merge_mode

    assert context.make_model is not None
    return TorchEngine(context.make_model(), merge=merge_mode(context.model_config), learns=context.role == "both")


plugin = Plugin(config=TorchEngineConfig, build=build, summary="the model itself (default)")
