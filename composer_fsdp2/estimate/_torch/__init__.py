"""Trace a step without a GPU: fake tensors, live storages, FLOPs and collectives."""
