"""The reference policy of a KL term: asked for once before training, so that a run without one ends at once."""

from __future__ import annotations

import torch

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.rollouts.heavy import blank


def check_reference(model: VLAModel, spec: Spec, info: EnvInfo) -> None:
    """Let the model score one chunk for a black picture. Raises UserError where it has no reference policy."""
    obs, chunk = blank(model, info)
    try:
        with torch.no_grad():
            model.reference_log_probs(obs, chunk)
    except TypeError as exc:
        raise UserError(
            f"algorithm {spec.algorithm.type!r} compares the policy with a reference (kl_coef above 0), and model "
            f"{spec.model.type!r} gives none: {exc}; set algorithm.kl_coef: 0, or give the model `lora` if it takes it"
        ) from exc
