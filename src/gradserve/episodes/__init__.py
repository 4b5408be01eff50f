"""Conversations and environments as tokens, and back: what a language model's policy lives through.

episode      Turn, Episode: tokens, log-probs and versions, exactly as they were sampled
tokens       Rendered; texts as ids, so that ids that are there already stay
chat         ChatTemplate: a model's template between messages and ids, its prefix property asserted
plain        PlainText: the same for models that have no template
replies      the text of a reply as a message with tool calls
rows         a row of training data as tokens and weights
tools        Python functions as tools of the model
environment  the contract of an environment, and how one is configured
calls        a user's code under a time limit
play         an episode from start to end, against any sampler
show         rows as they are trained on, for people
"""
