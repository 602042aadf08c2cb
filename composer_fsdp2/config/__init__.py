"""Frozen values that describe a run, independent of any framework's keys. They do not import torch."""
