"""Tools to test plugins with: `check_*` for components, and test doubles.

    from vla_rl.testing import check_env
    check_env(plugin, MyConfig(size=3))        # or a component that is already built

Each check returns nothing, or raises one `CheckFailed` that lists everything it found. The doubles are `scripted`
(an environment), `linear` (a model), `synthetic` (rollouts, observations) and `events` (what hooks hear); `train_on`
is one update of a model by an algorithm. The same
checks come as pytest fixtures of their names. Importing this package imports no torch: names load on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
