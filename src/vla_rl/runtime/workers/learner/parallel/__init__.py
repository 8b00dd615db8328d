"""How the model of several learners is held: replicated, or in shards."""
