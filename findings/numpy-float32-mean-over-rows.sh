#!/usr/bin/env bash
# NumPy: mean(axis=0) of float32 rows is off by two percent where the mean of each column alone is exact.
#
# An expert would guess: NumPy adds in pairs, so a float32 mean of millions of numbers is right to six digits, and
#   rows.mean(axis=0)[i] is rows[:, i].mean().
# Versions: NumPy 2.4.6.
# Behaviour: pairs are added along the axis that lies together in memory. Over the rows of an (N, D) array the sums go
#   on one by one in float32: once a sum is large, each number is rounded to the sum's last digit before it counts.
#   The positions of a servo at 2,100 ticks lose 1 % in 10^6 rows, and std, which squares the distance from that mean,
#   turns from 0 to 21. The same array transposed in memory (order="F") is right; so are a column alone,
#   dtype=float64, and torch's mean. Numbers around 0 are not concerned.
# What it means: statistics for normalisation depend on how many rows there are and how an array lies in memory: a
#   servo that stands still is handed to the policy as -1 ... 1 standard deviations off, and a check on the first
#   10,000 rows is right.
# Output seen (servo 0 stands still at 2,100 ticks, servo 1 moves by 50 about it):
#      10,000 rows: mean 2100.0 and 2100.0, std 0.0 and 29.3; in float64 2100.0 and 2100.0, 0.0 and 29.3
#     100,000 rows: mean 2097.3 and 2099.9, std 2.7 and 29.1; in float64 2100.0 and 2100.0, 0.0 and 29.1
#   1,000,000 rows: mean 2078.7 and 2097.6, std 21.2 and 29.2; in float64 2100.0 and 2100.0, 0.0 and 29.2
#   4,000,000 rows: mean 2055.7 and 2060.7, std 44.9 and 48.9; in float64 2100.0 and 2100.0, 0.0 and 29.2
#   each column alone: 2100.0 and 2100.0; order F: 2100.0 and 2100.0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile numpy==2.4.6 >"$work/pip.log" 2>&1 || { cat "$work/pip.log"; exit 2; }
"$work/venv/bin/python" - <<'PY'
import numpy as np

moving = np.random.default_rng(0).integers(-50, 51, 4_000_000)
rows = np.stack([np.full(len(moving), 2100), 2100 + moving], axis=1).astype(np.float32)
seen = {}
for n in (10_000, 100_000, 1_000_000, 4_000_000):
    part = rows[:n]
    mean, std = part.mean(axis=0), part.std(axis=0)
    true_mean, true_std = part.mean(axis=0, dtype=np.float64), part.std(axis=0, dtype=np.float64)
    seen[n] = mean, std, true_mean, true_std
    print(
        f"{n:9,d} rows: mean {mean[0]:.1f} and {mean[1]:.1f}, std {std[0]:.1f} and {std[1]:.1f}; "
        f"in float64 {true_mean[0]:.1f} and {true_mean[1]:.1f}, {true_std[0]:.1f} and {true_std[1]:.1f}"
    )
columns = [float(rows[:, i].mean()) for i in (0, 1)]
turned = np.asfortranarray(rows).mean(axis=0)
print(f"each column alone: {columns[0]:.1f} and {columns[1]:.1f}; order F: {turned[0]:.1f} and {turned[1]:.1f}")
mean, std, true_mean, true_std = seen[4_000_000]
assert abs(seen[10_000][0] - seen[10_000][2]).max() < 1, "the behaviour changed"
assert (true_mean - mean > 30).all() and std[0] > 30 and true_std[0] == 0, "the behaviour changed"
assert abs(np.array(columns) - true_mean).max() < 0.1 and abs(turned - true_mean).max() < 0.1, "the behaviour changed"
PY
