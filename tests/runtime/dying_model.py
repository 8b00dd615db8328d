"""A model whose process is killed once, in the midst of a weight transfer or while it is saved."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Literal

from attrs import field, frozen

from vla_rl.core.contexts import ModelContext
from vla_rl.core.declarations import ModelPlugin
from vla_rl.testing.linear import LinearModel


@frozen(kw_only=True)
class DyingConfig:
    end: Literal["sender", "receiver", "saver"] = "sender"
    """End of the transfer that dies, or who saves."""
    version: int = 2
    """Number of the transfer, or of the checkpoint, in which it dies."""
    killed: str = field()
    """File that says that it has died."""


class DyingModel(LinearModel):
    def __init__(self, config: DyingConfig, context: ModelContext) -> None:
        super().__init__(context.env, context.chunk, seed=context.seed)
        self.dying = config
        self.sent = -2  # the learner's first calls are for types and layout
        self.received = 0
        self.saved = 0

    def weights(self):
        self.sent += 1
        for pair in super().weights():
            yield pair
            self.die("sender", self.sent)

    def load_weights(self, pairs):
        self.received += 1
        for pair in pairs:
            super().load_weights([pair])
            self.die("receiver", self.received)

    def save(self, folder):
        super().save(folder)
        self.saved += 1
        self.die("saver", self.saved)

    def die(self, end: str, number: int) -> None:
        file = Path(self.dying.killed)
        if end == self.dying.end and number == self.dying.version and not file.exists():
            file.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)


vla_rl_plugins = {
    "model": {"dying": ModelPlugin(config=DyingConfig, build=DyingModel, summary="test double: dies once")}
}
