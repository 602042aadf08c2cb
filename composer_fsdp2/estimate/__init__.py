"""Estimate a step's memory, communication and minimum time, without a GPU and for any world size."""
