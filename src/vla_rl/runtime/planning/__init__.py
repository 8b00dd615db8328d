"""What a plan will cost before a device is spent: latencies, a simulation of the runtime, and strategies compared."""
