"""One runtime for every execution mode: roles (sim, policy, learner), lanes and a window, local and Ray backends."""
