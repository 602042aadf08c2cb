"""Parallelism besides sharding: tensor, context and expert parallelism, shared batches, idle experts and towers."""
