"""What FSDP1's words meant: the table of keys, and the translation of a configuration."""
