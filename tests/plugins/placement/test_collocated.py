from __future__ import annotations

import pytest

from vla_rl.core.plan import Cluster, DoesNotFit, Job
from vla_rl.plugins.placement.fixed import collocated as plugin
from vla_rl.plugins.placement.fixed.config import CollocatedConfig
from vla_rl.plugins.placement.fixed.impl import Collocated
from vla_rl.testing import check_placement

JOB = Job(num_envs=8, group_size=2, env="sim", env_memory=2**30)


def plan(workers=None, *, cpu_workers=1, cpus=8.0, gpus=0, memory=2**36, job=JOB):
    config = CollocatedConfig(workers=workers, cpu_workers=cpu_workers)
    return Collocated(config).plan(Cluster(cpus=cpus, gpus=gpus, memory=memory), job)


def test_one_worker_on_a_machine_without_gpus():
    (slot,) = plan().slots
    assert (set(slot.roles), slot.device, slot.cpus, slot.gpus) == ({"sim", "policy", "learner"}, "cpu", 8.0, 0.0)


def test_one_worker_a_gpu():
    slots = plan(gpus=4).slots
    assert [(s.device, s.cpus, s.gpus) for s in slots] == [("cuda", 2.0, 1.0)] * 4


def test_workers_on_a_machine_without_gpus():
    assert [(s.device, s.cpus) for s in plan(cpu_workers=2).slots] == [("cpu", 4.0)] * 2
    assert [(s.device, s.cpus) for s in plan(cpu_workers=2, cpus=1.0).slots] == [("cpu", 1.0)]
    assert [s.device for s in plan(cpu_workers=2, gpus=1).slots] == ["cuda"]
    assert len(plan(workers=1, cpu_workers=2).slots) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 3}, "8 envs cannot be shared evenly by 3 workers"),
        ({"workers": 4, "cpus": 2.0}, "4 workers need a CPU core each, and there are 2"),
        ({"workers": 8, "gpus": 2}, "8 workers need a GPU each"),
        ({"memory": 5 * 2**30}, r"need about 8.0 GiB .* there are 5.0 GiB; at most 5 envs fit"),
    ],
)
def test_what_does_not_fit_says_the_numbers(options, message):
    with pytest.raises(DoesNotFit, match=message):
        plan(**options)


def test_it_keeps_the_contract():
    check_placement(plugin, CollocatedConfig())
