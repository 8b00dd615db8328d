"""What authors of plugins build with, one package for each kind of plugin."""
