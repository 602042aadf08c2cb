"""Frozen values that describe a run in terms of FSDP2, not of a framework's keys.

This package does not import torch.
"""
