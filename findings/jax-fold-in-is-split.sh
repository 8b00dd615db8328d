#!/usr/bin/env bash
# JAX: fold_in(key, i) is the i-th key of split(key, n): a loop counter meets the keys that were split off.
#
# An expert would guess: split and fold_in are two ways of deriving keys that cannot meet, and the number of keys is
#   part of the hash, so split(key, 2) and split(key, 4) share nothing.
# Versions: jax 0.10.2, jaxlib 0.10.2 (CPU), NumPy 2.4.6.
# Behaviour: with jax_threefry_partitionable (on by default since 0.5) the i-th key of a split is the hash of the
#   parent and i, whatever n is, and fold_in(key, i) is the same hash. With the old scheme all of them differ. Numbers
#   are made from the same hashes: bits(key)[i] is the exclusive or of the two words of the i-th child.
# What it means: `init_key, noise_key = split(key)` followed by `fold_in(key, step)` in the training loop gives step 0
#   the key of the initial weights and step 1 the key of the noise; a code that split off 2 keys and now splits off 4
#   keeps the first two. It is correct only under the rule that a key is used for one purpose once, and nothing shows
#   that the rule was broken: before the change of the default these programs were right.
# Output seen:
#   partitionable (default): fold_in(key, 0..3) equal split(key, 4): 4 of 4; split(key, 2) in split(key, 4): 2 of 2
#   not partitionable:       fold_in(key, 0..3) equal split(key, 4): 0 of 4; split(key, 2) in split(key, 4): 0 of 2
#   noise of step 1 and noise of the second key: correlation 1.000
#   bits(key) from the words of the children: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; }
JAX_PLATFORMS=cpu "$work/venv/bin/python" - <<'PY'
import jax
import numpy as np


def words(key):
    return np.asarray(jax.random.key_data(key))


key = jax.random.key(0)
seen = {}
for partitionable in (True, False):
    with jax.threefry_partitionable(partitionable):
        two, four = words(jax.random.split(key, 2)), words(jax.random.split(key, 4))
        folded = np.stack([words(jax.random.fold_in(key, i)) for i in range(4)])
    seen[partitionable] = int((folded == four).all(1).sum()), sum(one in four.tolist() for one in two.tolist())
    name = "partitionable (default):" if partitionable else "not partitionable:"
    print(
        f"{name:24s} fold_in(key, 0..3) equal split(key, 4): {seen[partitionable][0]} of 4; "
        f"split(key, 2) in split(key, 4): {seen[partitionable][1]} of 2"
    )
assert seen == {True: (4, 2), False: (0, 0)}, "the behaviour changed"
noise_key = jax.random.split(key)[1]
noise = [np.asarray(jax.random.normal(k, (500,))) for k in (jax.random.fold_in(key, 1), noise_key)]
correlation = np.corrcoef(*noise)[0, 1]
print(f"noise of step 1 and noise of the second key: correlation {correlation:.3f}")
assert correlation > 0.9999, "the behaviour changed (the default)"
children = words(jax.random.split(key, 100))
same = bool((children[:, 0] ^ children[:, 1] == np.asarray(jax.random.bits(key, (100,)))).all())
print(f"bits(key) from the words of the children: {same}")
assert same, "the behaviour changed"
PY
