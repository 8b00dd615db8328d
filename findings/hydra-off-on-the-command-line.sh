#!/usr/bin/env bash
# Hydra: "off" in a file is False, and "off" on the command line is a text that counts as true.
#
# An expert would guess: an override is the line of the file, written on the command line; flag=off does what `flag:
#   off` does, and 1:30 or 012 are the same number in both.
# Versions: hydra-core 1.3.8, omegaconf 2.3.1, PyYAML 6.0.3.
# Behaviour: files are YAML 1.1, where off and no are False, 1:30 is 90 (to base 60) and 012 is 10 (octal). Overrides
#   have a grammar of their own that knows true and false only; the rest becomes text, also where the value in the
#   file was a bool, since nothing says its type. omegaconf's own from_dotlist, with which many training scripts read
#   their overrides, goes by YAML. A field that is typed by a dataclass turns "off" into False.
# What it means: `python train.py augment=off` trains with augmentation if the code asks `if cfg.augment`, and the
#   saved config says augment: 'off', which looks right. Sweeps over on, off compare on with on.
# Output seen:
#   file:         augment False, video False, limit 90, seed 10, rate 0.0001
#   command line: augment 'off', video 'no', limit '1:30', seed '012', rate 0.0001
#   from_dotlist: augment False, video False, limit 90, seed 10, rate 0.0001
#   augment=off on the command line: on; typed as a bool: False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile hydra-core==1.3.8 omegaconf==2.3.1 PyYAML==6.0.3 >"$work/pip.log" 2>&1 ||
  { cat "$work/pip.log"; exit 2; }
WORK=$work "$work/venv/bin/python" - <<'PY'
import os
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf


@dataclass
class Typed:
    augment: bool = True


lines = {"augment": "off", "video": "no", "limit": "1:30", "seed": "012", "rate": "1e-4"}
folder = Path(os.environ["WORK"])
(folder / "file.yaml").write_text("".join(f"{key}: {text}\n" for key, text in lines.items()))
(folder / "default.yaml").write_text("augment: true\nvideo: true\nlimit: 5\nseed: 5\nrate: 1.0\n")
overrides = [f"{key}={text}" for key, text in lines.items()]
ConfigStore.instance().store("typed", Typed)
with initialize_config_dir(str(folder), version_base=None):
    seen = {
        "file": dict(compose("file")),
        "command line": dict(compose("default", overrides=overrides)),
        "from_dotlist": dict(OmegaConf.from_dotlist(overrides)),
    }
    typed = compose("typed", overrides=["augment=off"]).augment
for name, values in seen.items():
    print(f"{name + ':':13s}", ", ".join(f"{key} {value!r}" for key, value in values.items()))
print(f"augment=off on the command line: {'on' if seen['command line']['augment'] else 'off'}; typed as a bool: {typed}")
assert seen["file"] == {"augment": False, "video": False, "limit": 90, "seed": 10, "rate": 1e-4}, "the behaviour changed"
assert seen["from_dotlist"] == seen["file"], "the behaviour changed"
assert seen["command line"] == lines | {"seed": seen["command line"]["seed"], "rate": 1e-4}, "the behaviour changed"
assert seen["command line"]["seed"] != 10 and typed is False, "the behaviour changed"
PY
