"""What a training tells while it goes on: metrics by name, and where they are written."""
