"""The same training as a user writes it with gradserve and with TRL, one file each.

These are what is measured, and whose lines are counted (without imports, comments, docstrings and blank lines).
"""
