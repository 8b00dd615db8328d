"""The examples of docs/reference/placement.md and of the strategies' own pages are right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vla_rl.core.plan import Cluster
from vla_rl.core.spec.spec import load_spec
from vla_rl.runtime.planning.plan import plan_for
from vla_rl.runtime.planning.profile import Cost, Profile

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "docs" / "reference" / "placement.md",
    ROOT / "docs" / "how-to" / "place-a-run.md",
    *(ROOT / "src" / "vla_rl" / "plugins" / "placement").glob("*/README.md"),
]
PROFILE = Profile(chunk_steps=20, sim=Cost(seconds=0.1, num_envs=8), policy=Cost(seconds=0.1, num_envs=8))
GPUS8 = Cluster(cpus=96, gpus=8, memory=2**40)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_examples_plan_on_eight_gpus(page):
    examples = re.findall(r"^placement: (\{.*\})", page.read_text(), flags=re.MULTILINE)
    assert examples
    for example in examples:
        spec = load_spec(ROOT / "examples" / "tabletop_grpo.yaml", [f"placement={example}"])
        assert plan_for(spec, GPUS8, lambda spec, cluster: PROFILE).hosting("learner")


@pytest.mark.parametrize("cluster", [Cluster(cpus=1, gpus=0, memory=2**37), Cluster(cpus=8, gpus=1, memory=2**37)])
@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_example_has_a_place_on_one_core_and_on_one_gpu(file, cluster):
    assert plan_for(load_spec(file), cluster, lambda spec, cluster: PROFILE).hosting("learner")
