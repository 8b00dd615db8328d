"""Subjects of `check_env`; `testing/envs.py` sets their order.

`values`: single answers. `player`: calls a simulator and looks at every answer. `traces`: episodes and how they
differ. `scenes`: initial states. `wandering`: what random, extreme and held actions bring about. `arrangements`: the
same episode run in other ways. `ends`: what happens at and after an end. `experts`: demonstrators. `ranges`: parts
of actions that do nothing. `first_action`: what resets show, against steps. `surroundings`: the process around.
"""
