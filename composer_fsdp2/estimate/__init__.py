"""Estimate a step's memory, traffic and minimum time, without a GPU and for any world size."""
