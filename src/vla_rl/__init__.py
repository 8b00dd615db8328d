"""vla-rl: train vision-language-action models by reinforcement learning.

Every public name, loaded on first use: contracts and the data that crosses them for authors of plugins; specs, runs and
all that the command line does for users. `vla_rl.toolkit` holds what plugins are built with, `vla_rl.testing` what they
are checked with.
"""

import lazy_loader

from vla_rl.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
