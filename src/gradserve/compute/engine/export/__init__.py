"""Checkpoints -> files that other programs load. ``run.export`` is the way in; a file per format, one for the check."""
