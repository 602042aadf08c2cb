"""Convert configuration files to FSDP2 and between systems: ``migrate_text`` for a text, ``files`` for files on
disk."""
