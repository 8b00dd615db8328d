#!/usr/bin/env bash
# NumPy: default_rng([seed, 0]) is default_rng(seed): a key that ends in zeros is the key without them.
#
# An expert would guess: a list of numbers is hashed as a whole, so [seed], [seed, episode] and [seed, worker,
#   episode] are different streams for all values; that is why one passes a list instead of a sum.
# Versions: NumPy 2.4.6.
# Behaviour: SeedSequence writes the numbers as 32-bit words, one after the other, and fills up to four words with
#   zeros. [7], [7, 0] and [7, 0, 0, 0] are therefore one key, and so are [7, 1] and 7 + 2**32 or [7 + 2**32]; a list
#   that has a number beyond 32 bits runs into its neighbour: [2**32, 1] is [0, 1, 1]. spawn_key is put behind the
#   filled words and is not concerned.
# What it means: the run's generator default_rng(seed) and that of its first episode default_rng([seed, 0]) draw the
#   same numbers, so the shuffle of the data and the noise of episode 0 are correlated; worker 3 of run 7 and episode
#   0 of worker 3 are one. Put the counters first ([episode, seed] with a seed that is not 0), or use spawn_key.
# Output seen:
#   same streams: [7] [7, 0] [7, 0, 0] [7, 0, 0, 0]
#   same streams: [7, 1] [4294967303]
#   same streams: [7, 3] [7, 3, 0]
#   same streams: [4294967296, 1] [0, 1, 1]
#   seed 7, 300 draws: run and its episode 0 correlate by 1.00, run and its episode 1 by 0.10
#   by spawn_key: run and its episode 0 correlate by -0.06
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile numpy==2.4.6 >"$work/pip.log" 2>&1 || { cat "$work/pip.log"; exit 2; }
"$work/venv/bin/python" - <<'PY'
import numpy as np

keys = [[7], [7, 0], [7, 0, 0], [7, 0, 0, 0], [7, 1], [7 + 2**32], [7, 3], [7, 3, 0], [2**32, 1], [0, 1, 1]]
streams = {}
for key in keys:
    streams.setdefault(np.random.default_rng(key).random(8).tobytes(), []).append(key)
for same in streams.values():
    print("same streams:", *same)
groups = [keys[:4], keys[4:6], keys[6:8], keys[8:]]
assert list(streams.values()) == groups, "the behaviour changed"


def correlation(one, other):
    return np.corrcoef(*(np.random.default_rng(key).normal(size=300) for key in (one, other)))[0, 1]


first, second = correlation(7, [7, 0]), correlation(7, [7, 1])
print(f"seed 7, 300 draws: run and its episode 0 correlate by {first:.2f}, run and its episode 1 by {second:.2f}")
child = correlation(7, np.random.SeedSequence(7, spawn_key=(0,)))
print(f"by spawn_key: run and its episode 0 correlate by {child:.2f}")
assert first > 0.999 and abs(second) < 0.2 and abs(child) < 0.2, "the behaviour changed"
PY
