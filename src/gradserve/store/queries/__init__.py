"""What the store does, a file per noun: plain functions of an open connection, run by the commit thread."""
