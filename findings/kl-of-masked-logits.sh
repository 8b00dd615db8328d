#!/usr/bin/env bash
# torch.distributions: the KL divergence of two masked categoricals is right, and its gradient is NaN.
#
# An expert would guess: logits of -inf are the usual way to forbid tokens. torch.distributions supports it: log_prob,
#   entropy and kl_divergence come out finite, so the gradient of each is finite too (zero where masked).
# Versions: torch 2.13.0 (CPU), NumPy 2.4.6.
# Behaviour: kl_divergence computes p (log p - log q) everywhere, which is 0 * (-inf + inf) = NaN at a forbidden
#   token, and then overwrites these entries with 0. The sum is right. Backward, the gradient of the overwritten
#   entries is 0, but 0 times the infinite factors within is NaN, and log_softmax spreads it over all logits of the
#   row. entropy and log_prob are right in both directions. A mask of the lowest float instead of -inf gives the same
#   KL and a finite gradient.
# What it means: a KL penalty against a reference policy on masked action tokens (256 bins of a 32,000-token
#   vocabulary) logs a sensible divergence while the first optimizer step turns every weight to NaN; watching the loss
#   shows nothing, and the entropy bonus on the same distribution works.
# Output seen:
#   -inf:         KL 0.0263, gradient [nan, nan, nan]
#   lowest float: KL 0.0263, gradient [-0.0983, 0.0983, 0.0]
#   -inf:         entropy 0.5822, gradient [0.1966, -0.1966, 0.0]
#   -inf:         log_prob -1.3133, gradient [0.7311, -0.7311, 0.0]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 && "${pip[@]}" numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
"$work/venv/bin/python" - <<'PY'
import math

import torch
from torch.distributions import Categorical, kl_divergence


def show(name, mask, quantity):
    logits = torch.tensor([1.0, 2.0, mask], requires_grad=True)
    reference = Categorical(logits=torch.tensor([0.5, 1.0, mask]))
    policy = Categorical(logits=logits)
    value = {
        "KL": lambda: kl_divergence(policy, reference),
        "entropy": policy.entropy,
        "log_prob": lambda: policy.log_prob(torch.tensor(0)),
    }[quantity]()
    value.backward()
    gradient = [round(g, 4) + 0.0 for g in logits.grad.tolist()]
    print(f"{name + ':':13s} {quantity} {value.item():.4f}, gradient {gradient}")
    return value.item(), gradient


lowest = torch.finfo(torch.float32).min
masked, gradient = show("-inf", -math.inf, "KL")
assert math.isfinite(masked) and all(map(math.isnan, gradient)), "the behaviour changed"
finite, gradient = show("lowest float", lowest, "KL")
assert abs(masked - finite) < 1e-6 and all(map(math.isfinite, gradient)), "the behaviour changed"
for quantity in ("entropy", "log_prob"):
    assert all(map(math.isfinite, show("-inf", -math.inf, quantity)[1])), "the behaviour changed"
PY
