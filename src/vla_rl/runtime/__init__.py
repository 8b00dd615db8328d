"""One runtime for every execution mode: roles (sim, policy, learner), lanes and dynamic batching, local and Ray
backends."""
