"""Building blocks for plugin authors, one package per kind of plugin."""
