#!/usr/bin/env bash
# datasets: Dataset.from_generator returns yesterday's recording after the file was recorded again.
#
# An expert would guess: from_generator runs the generator, as the name says. Caches of datasets go by content: a file
#   that changed is read again, as load_dataset does.
# Versions: datasets 5.2.0.
# Behaviour: the result is written to a cache on the disk, under a hash of the generator's code and of gen_kwargs. A
#   path is a text: what the file holds is not part of it. The same call returns the old rows in the same process and
#   in later ones, although the file is newer, longer or gone. load_dataset looks at the time of the file and reads
#   the new one. A changed line of the generator's code, or another argument, runs it again.
# What it means: an episode that was recorded anew under its name, or a data set that grew, is trained on as it was
#   when it was first converted. The number of rows is plausible, nothing is printed, and on another machine the same
#   script is right. Pass the time of the file in gen_kwargs.
# Output seen:
#   recorded 1 2:   from_generator [1, 2], load_dataset [1, 2], from_generator with the time [1, 2]
#   recorded 5 6 7: from_generator [1, 2], load_dataset [5, 6, 7], from_generator with the time [5, 6, 7]
#   a new process:  from_generator [1, 2], load_dataset [5, 6, 7], from_generator with the time [5, 6, 7]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile datasets==5.2.0 >"$work/pip.log" 2>&1 || { cat "$work/pip.log"; exit 2; }
cat >"$work/finding.py" <<'PY'
import json
import os
import sys
from pathlib import Path

import datasets

datasets.disable_progress_bars()
path = Path(os.environ["WORK"]) / "episode.jsonl"


def read(path):
    with open(path) as file:
        for line in file:
            yield json.loads(line)


def rows():
    by_generator = datasets.Dataset.from_generator(read, gen_kwargs={"path": str(path)})["state"][:]
    time = {"path": str(path), "time": path.stat().st_mtime_ns}
    by_time = datasets.Dataset.from_generator(lambda path, time: read(path), gen_kwargs=time)["state"][:]
    by_file = datasets.load_dataset("json", data_files=str(path), split="train")["state"][:]
    return by_generator, by_file, by_time


if sys.argv[1] == "record":
    states, expected = [1, 2], ([1, 2], [1, 2], [1, 2])
    path.write_text("".join(json.dumps({"state": state}) + "\n" for state in states))
    print("recorded 1 2:   from_generator {}, load_dataset {}, from_generator with the time {}".format(*(seen := rows())))
    assert seen == expected, "the behaviour changed"
    states = [5, 6, 7]
    path.write_text("".join(json.dumps({"state": state}) + "\n" for state in states))
name = "recorded 5 6 7: " if sys.argv[1] == "record" else "a new process:  "
print(name + "from_generator {}, load_dataset {}, from_generator with the time {}".format(*(seen := rows())))
assert seen == ([1, 2], [5, 6, 7], [5, 6, 7]), "the behaviour changed"
PY
export WORK=$work HF_HOME=$work/cache HF_HUB_OFFLINE=1
"$work/venv/bin/python" "$work/finding.py" record
"$work/venv/bin/python" "$work/finding.py" again
