"""`rlds`: reads demonstrations in RLDS, as TensorFlow Datasets writes them (TFRecord files), without TensorFlow."""

from __future__ import annotations

from vla_rl.core.declarations import DataPlugin

plugin = DataPlugin(
    config="vla_rl.plugins.data.rlds.config:RLDSConfig",
    build="vla_rl.plugins.data.rlds.dataset:RLDSData",
    summary="a data set in RLDS (TFRecord files)",
    check="vla_rl.plugins.data.rlds.dataset:check_folder",
    inspect="vla_rl.plugins.data.rlds.dataset:open_recordings",
    files=("**/*.tfrecord-*",),
)
