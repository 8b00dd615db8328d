#!/usr/bin/env bash
# JAX: sampling tokens from bfloat16 logits prefers tokens with low numbers, by a factor of four.
#
# An expert would guess: bfloat16 logits cost some precision of the probabilities (up to half a percent), so
#   jax.random.categorical draws from the rounded distribution; equal logits are drawn equally often.
# Versions: jax 0.10.2, jaxlib 0.10.2 (CPU), NumPy 2.4.6.
# Behaviour: the Gumbel noise is drawn in the type of the logits, from uniform numbers with 7 random bits: it has
#   about 128 values. Among 256 equal logits two have the largest value on average, and argmax takes the first of
#   them. With float32 logits the draw is uniform. The noise is also short of its upper tail: a token of probability
#   0.001 is drawn half as often as it should be. The same bits make random.normal in bfloat16 a set of 128 numbers
#   that ends at 2.5, so a flow policy's start lacks its tails.
# What it means: action tokens are bins in order, so the policy acts with a bias towards the low end of each dimension
#   (-0.3 on a range of -1 to 1 where all bins are equally likely), explores less than its entropy says, and
#   log-probabilities computed from the same logits are those of another distribution: importance ratios are wrong by
#   up to a factor of three. A cast of the logits to float32 before sampling cures it.
# Output seen:
#   bfloat16: quarters of 256 equal bins are drawn 1.83, 1.10, 0.67, 0.41 times as often as they should be; mean bin -0.315
#   float32:  quarters of 256 equal bins are drawn 1.00, 1.00, 1.00, 1.00 times as often as they should be; mean bin -0.001
#   a token with probability 0.001, 200,000 draws: bfloat16 109, float32 200
#   a token with probability 0.0001, 200,000 draws: bfloat16 9, float32 21
#   normal, 200,000 draws: bfloat16 128 values up to 2.516, float32 beyond 4.0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; }
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

DRAWS, BINS = 200_000, 256


def draw_share(kind):
    logits = jnp.zeros((DRAWS, BINS), kind)
    counts = np.bincount(np.asarray(jax.random.categorical(jax.random.key(0), logits)), minlength=BINS)
    quarters = counts.reshape(4, -1).sum(1) / DRAWS * 4
    return quarters, counts @ np.linspace(-1, 1, BINS) / DRAWS


for name, kind in (("bfloat16", jnp.bfloat16), ("float32", jnp.float32)):
    quarters, mean = draw_share(kind)
    parts = ", ".join(f"{q:.2f}" for q in quarters)
    print(f"{name + ':':9s} quarters of 256 equal bins are drawn {parts} times as often as they should be; mean bin {mean:.3f}")
    if kind == jnp.bfloat16:
        assert quarters[0] > 1.6 and quarters[-1] < 0.6 and mean < -0.2, "the behaviour changed"
    else:
        assert np.abs(quarters - 1).max() < 0.02, "the behaviour changed"
for chance, low, high in ((0.001, 0.35, 0.75), (0.0001, 0.0, 0.75)):
    rare = {}
    for kind in (jnp.bfloat16, jnp.float32):
        logits = jnp.broadcast_to(jnp.log(jnp.array([1 - chance, chance])).astype(kind), (DRAWS, 2))
        rare[kind] = int(jax.random.categorical(jax.random.key(1), logits).sum())
    print(f"a token with probability {chance}, 200,000 draws: bfloat16 {rare[jnp.bfloat16]}, float32 {rare[jnp.float32]}")
    due = DRAWS * chance
    assert low * due <= rare[jnp.bfloat16] <= high * due, "the behaviour changed"
    assert abs(rare[jnp.float32] - due) < 4 * due**0.5, "the behaviour changed"
narrow, wide = (np.asarray(jax.random.normal(jax.random.key(2), (DRAWS,), k).astype(jnp.float32)) for k in (jnp.bfloat16, jnp.float32))
print(f"normal, 200,000 draws: bfloat16 {len(np.unique(narrow))} values up to {narrow.max():.3f}, float32 beyond {np.floor(wide.max()):.1f}")
assert len(np.unique(narrow)) < 300 and narrow.max() < 3 and wide.max() > 4, "the behaviour changed"
PY
