"""robotwin/config.py of the wheel 0.1.3."""

from importlib.resources import files

import yaml


def load_task_config(name):
    """A packaged settings file by its stem; ValueError for a name that is none, or that is not there."""
    value = name.removesuffix(".yaml").removesuffix(".yml")
    if not value or "/" in value or "\\" in value or value in {".", ".."}:
        raise ValueError(f"invalid RoboTwin task config name: {name!r}")
    resource = files("robotwin.configs.task").joinpath(f"{value}.yml")
    if not resource.is_file():
        raise ValueError(f"RoboTwin task config is not packaged: {name!r}")
    return yaml.safe_load(resource.read_text())
