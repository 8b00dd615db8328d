"""Parts of trainers: models that are trained, optimisers, gradient accumulation, micro-batches."""
