"""A plan's cost before a device is used: latencies, a simulation of the runtime, and the comparison of plans."""
