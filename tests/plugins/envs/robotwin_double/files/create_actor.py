"""envs/utils/create_actor.py, alike in all sources: only the error of it."""


class UnStableError(Exception):
    def __init__(self, msg):
        super().__init__(msg)
