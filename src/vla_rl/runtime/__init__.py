"""The runtime of all execution modes: roles (sim, policy, learner), lanes, dynamic batching, local and Ray backends."""
