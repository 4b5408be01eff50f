"""What can't be used, said with what to do about it. All are ValueError.

TemplateUnusable      a chat template (or a tokenizer without one), or what it makes of a conversation
RowUnusable           a row of the data
EnvironmentUnusable   an environment's class, settings or tools
"""

from __future__ import annotations


class TemplateUnusable(ValueError):
    """Training or sampling with this template would be wrong; the message names the turn and shows the texts."""


class RowUnusable(ValueError):
    """The row is of no form that can be trained on or played; the message names its columns and the accepted ones."""


class EnvironmentUnusable(ValueError):
    """It can't be loaded, lacks a method, or a setting is unknown."""
