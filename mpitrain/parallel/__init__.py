"""How a model meets a mesh: buckets and their reduction, the update, the pipeline of micro-batches, replicas."""
