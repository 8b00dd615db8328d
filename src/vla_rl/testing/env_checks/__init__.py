"""Subjects of `check_env`, each a question; `testing/envs.py` sets their order.

`values`: is a single answer right? `scenes`: is a state id a scene? `actions`: what do actions lead to, and is it told
and shown? `ranges`: does every part of an action count? `repeats`: do the same state, seed and actions give the same
episode, whatever came before and whatever neighbours do? `ends`: does an env stop at an end? `first_action`: do resets
show what steps show? `experts`: does the demonstrator solve the tasks? `surroundings`: is the process left as it was?
`player` plays scripts and records what it saw; `traces`: episodes and how they differ.
"""
