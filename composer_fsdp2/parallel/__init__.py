"""Parallelism besides sharding: tensor, context and expert parallelism, shared batches, and idle experts and towers."""
