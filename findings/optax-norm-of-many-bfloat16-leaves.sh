#!/usr/bin/env bash
# optax: the global norm of bfloat16 gradients stops growing after some hundred leaves, so clipping clips too little.
#
# An expert would guess: clip_by_global_norm(1.0) leaves a norm of at most 1. In bfloat16 the norm is off by the
#   rounding of the last digit (half a percent), as the sum within each leaf is made in float32.
# Versions: optax 0.2.8, jax 0.10.2, jaxlib 0.10.2 (CPU), NumPy 2.4.6.
# Behaviour: global_norm adds the leaves' sums of squares one after the other in their own type. In bfloat16 a sum
#   that is 256 times as large as a leaf does not change any more when the leaf is added. The norm of 1,000 like
#   leaves is 5.66 instead of 8.94, the clipped gradient has a norm of 1.58, and the more leaves, the less is clipped.
#   One leaf with all numbers (layers that are stacked, as under scan) is right. A float32 leaf anywhere makes the sum
#   float32 from there on, so the order of names counts: first it cures, last it does not.
# What it means: full fine-tuning in bfloat16 with a list of layers (some 300 to 1,000 tensors) clips to another norm
#   than the same network with stacked layers, and the logged norm is too small. Cast gradients to float32 first.
# Output seen (leaves of 8 numbers of 0.1; norm in float64, in optax, and after clip_by_global_norm(1)):
#       10 leaves: true 0.895, optax 0.895; clipped to 0.895
#      100 leaves: true 2.831, optax 2.891; clipped to 0.981
#      300 leaves: true 4.904, optax 5.062; clipped to 0.969
#     1000 leaves: true 8.953, optax 5.656; clipped to 1.583
#     4000 leaves: true 17.906, optax 5.656; clipped to 3.166
#    stacked 1000: true 8.953, optax 8.938; clipped to 0.999
#      1000 leaves, one in float32: first 8.949, last 5.664
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
"${pip[@]}" optax==0.2.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; }
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax.numpy as jnp
import numpy as np
import optax


def true_norm(leaves):
    return float(np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in leaves)))


def clipped(leaves):
    clip = optax.clip_by_global_norm(1.0)
    return true_norm(clip.update(leaves, clip.init(leaves))[0])


leaf = jnp.full((8,), 0.1, jnp.bfloat16)
cases = {f"{n:6d} leaves": [leaf] * n for n in (10, 100, 300, 1000, 4000)} | {"stacked 1000": [jnp.stack([leaf] * 1000)]}
seen = {}
for name, leaves in cases.items():
    seen[name] = true_norm(leaves), float(optax.global_norm(leaves)), clipped(leaves)
    print("{:>13s}: true {:.3f}, optax {:.3f}; clipped to {:.3f}".format(name, *seen[name]))
single = jnp.full((8,), 0.1, jnp.float32)
first, last = (float(optax.global_norm(x)) for x in ([single] + [leaf] * 999, [leaf] * 999 + [single]))
print(f"   1000 leaves, one in float32: first {first:.3f}, last {last:.3f}")
assert abs(seen["    10 leaves"][1] / seen["    10 leaves"][0] - 1) < 0.01, "the behaviour changed"
assert abs(seen["stacked 1000"][1] / seen["stacked 1000"][0] - 1) < 0.01, "the behaviour changed"
for name in ("  1000 leaves", "  4000 leaves"):
    assert abs(seen[name][1] - 5.656) < 0.01, "the behaviour changed"
assert seen["  1000 leaves"][2] > 1.5 and seen["  4000 leaves"][2] > 3, "the behaviour changed"
assert abs(first - 8.95) < 0.02 and abs(last - 5.66) < 0.02, "the behaviour changed"
PY
