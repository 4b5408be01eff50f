"""Alembic's environment and versions. ``store.schema.migrate`` is the only caller."""
