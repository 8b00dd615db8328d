"""Parallel strategies: how several learners hold one model, as replicas or in shards."""
