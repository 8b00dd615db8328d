"""The interface of lerobot 0.6.2, for tests: its module paths, base classes and signatures, and a drawn robot."""
