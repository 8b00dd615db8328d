import importlib


def make_device_from_device_class(config):
    """Instantiate the class whose name is the config's without `Config`, from the config's package."""
    name = type(config).__name__.removesuffix("Config")
    package = type(config).__module__.rpartition(".")[0]
    return getattr(importlib.import_module(package), name)(config)


def register_third_party_plugins() -> None:
    """There are none."""
