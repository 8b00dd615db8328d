#!/usr/bin/env bash
# albumentations: all workers of a DataLoader crop alike, and each epoch crops as the first one did.
#
# An expert would guess: the mistake of many years, NumPy's global generator that every forked worker inherits, is
#   gone: torch seeds NumPy in each worker, and albumentations 2 has generators of its own. Crops differ by worker and
#   epoch.
# Versions: albumentations 2.0.8, torch 2.13.0 (CPU), opencv-python-headless 4.14.0.94, NumPy 2.4.6.
# Behaviour: the generator belongs to the Compose object, which is made once in the main process. Each worker gets a
#   copy of it in the state that it had there, draws its own copy on and is thrown away at the end of the epoch; the
#   main process never draws. torch's seeding does not know it. n workers thus draw each crop n times, and each epoch
#   is the same as the first. With persistent_workers epochs differ and workers do not. Without workers all is random.
#   The same holds for any np.random.Generator that a data set keeps; drawing from torch's or NumPy's global generator
#   is right.
# What it means: with 8 workers the policy sees one crop for 8 samples, and the same picture gets one of few
#   augmentations for the whole training: it over-fits as if augmentation were off. With num_workers=0, as in a
#   debugger, everything is right.
# Output seen (different crops among the 2 epochs of 32 samples, of 3,249 possible ones):
#   0 workers:                 63 different crops; second epoch as the first: False
#   2 workers:                 16 different crops; second epoch as the first: True
#   8 workers:                  4 different crops; second epoch as the first: True
#   8 workers, persistent:      8 different crops; second epoch as the first: False
#   8 workers, crops by torch: 64 different crops; second epoch as the first: False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
pip=("$work/venv/bin/pip" install -q --no-compile)
{ "${pip[@]}" torch==2.13.0 &&
  "${pip[@]}" albumentations==2.0.8 opencv-python-headless==4.14.0.94 numpy==2.4.6; } >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; } # torch's CPU build suffices
NO_ALBUMENTATIONS_UPDATE=1 "$work/venv/bin/python" - <<'PY'
import albumentations
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

IMAGE = np.arange(64 * 64, dtype=np.float32).reshape(64, 64, 1)  # a pixel says where it is


class Crops(Dataset):
    def __init__(self, by_torch):
        self.by_torch, self.crop = by_torch, albumentations.Compose([albumentations.RandomCrop(8, 8)])

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if self.by_torch:
            row, column = torch.randint(57, (2,)).tolist()
            return float(IMAGE[row, column, 0])
        return float(self.crop(image=IMAGE)["image"][0, 0, 0])


def epochs(workers, by_torch=False, **options):
    if workers:
        options["multiprocessing_context"] = "fork"  # Linux's default up to Python 3.13
    loader = DataLoader(Crops(by_torch), batch_size=1, num_workers=workers, **options)
    return [[crop.item() for crop in loader] for _ in range(2)]


torch.manual_seed(0)
for name, options, most in (
    ("0 workers", {"workers": 0}, 64),
    ("2 workers", {"workers": 2}, 16),
    ("8 workers", {"workers": 8}, 4),
    ("8 workers, persistent", {"workers": 8, "persistent_workers": True}, 8),
    ("8 workers, crops by torch", {"workers": 8, "by_torch": True}, 64),
):
    first, second = epochs(**options)
    different = len({*first, *second})
    print(f"{name + ':':26s} {different:2d} different crops; second epoch as the first: {first == second}")
    assert different <= most and (most < 64 or different > 55), "the behaviour changed"
    assert (first == second) == (most in (16, 4)), "the behaviour changed"
PY
