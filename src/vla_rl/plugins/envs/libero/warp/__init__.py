"""LIBERO on MuJoCo Warp: a batch of worlds for each task. See docs/simulators/libero_warp.md."""
