"""Conversion of configuration files between systems: ``migrate_text`` for a text, ``files`` for files on disk."""
