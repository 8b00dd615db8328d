"""envs/place_empty_cup.py: a task is a module with a class of its name."""

from robotwin.envs._base_task import Base_Task
from robotwin.envs.scene import expert_raises, goal, too_hard, unstable


class place_empty_cup(Base_Task):
    def setup_demo(self, **kwags):
        super()._init_task_env_(**kwags)

    def load_actors(self, seed):
        self.goal = goal(seed)
        self.unstable = unstable(seed)
        self.hard = "no plan" if too_hard(seed) else "raises" if expert_raises(seed) else ""
        self.things = {"{A}": f"021_cup/base{seed % 4}", "{B}": "019_coaster/base0"}
