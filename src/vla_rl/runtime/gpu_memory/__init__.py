"""Memory of GPUs, predicted by running a model of the workers on the meta device, and checked."""
