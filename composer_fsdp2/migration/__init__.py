"""Configuration files from one system's words to another's: ``migrate_text`` for a text, ``files`` for the disk."""
