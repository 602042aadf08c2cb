"""Frozen values: what a run is to be, independent of any framework's key names. They import no torch."""
