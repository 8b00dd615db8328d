"""envs/beat_block_hammer.py: a task is a module with a class of its name."""

from robotwin.envs._base_task import Base_Task
from robotwin.envs.scene import expert_raises, goal, too_hard, unstable


class beat_block_hammer(Base_Task):
    def setup_demo(self, **kwags):
        super()._init_task_env_(**kwags)

    def load_actors(self, seed):
        self.goal = goal(seed)
        self.unstable = unstable(seed)
        self.hard = "no plan" if too_hard(seed) else "raises" if expert_raises(seed) else ""
        self.things = {"{A}": f"020_hammer/base{seed % 4}", "{a}": "left" if self.goal[0] < 0 else "right"}
