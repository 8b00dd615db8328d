"""Mixed precision: a model's calls compute with the weights that it has at each of them."""

from __future__ import annotations

import torch

from vla_rl.core.types import Scores
from vla_rl.runtime.workers.models import Autocast


def score_by(autocast: Autocast, layer: torch.nn.Linear) -> torch.Tensor:
    """Return the log-probs that a model with this layer gives through the wrapper."""
    call = autocast.chunk_log_probs()
    next(call)
    outputs = layer(torch.ones(1, 4))
    assert outputs.dtype == torch.bfloat16
    scores = Scores(log_probs=outputs, entropy=outputs.detach(), values=None)
    try:
        call.send(scores)
    except StopIteration as end:
        scores = end.value
    assert scores.log_probs.dtype == torch.float32
    return scores.log_probs


def test_every_pass_computes_with_the_present_weights() -> None:
    """torch keeps the bfloat16 copies of weights until the outermost autocast block ends, so that a block around several
    steps would compute each loss with the first weights."""
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    autocast = Autocast("cpu")
    first = score_by(autocast, layer)
    first.sum().backward()
    optimizer.step()
    assert not torch.equal(score_by(autocast, layer), first)
    with torch.autocast("cpu", torch.bfloat16):
        stale = layer(torch.ones(1, 4))
        stale.sum().backward()
        optimizer.step()
        assert torch.equal(layer(torch.ones(1, 4)), stale), "torch drops the copies now: change the page of surprises"
