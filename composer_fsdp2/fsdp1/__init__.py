"""FSDP1's configuration: the table of keys, and their translation to FSDP2."""
