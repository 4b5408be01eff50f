"""Conversations and environments as tokens, and back: what a language model's policy lives through.

episode      Turn, Episode: tokens, log-probs and versions, exactly as they were sampled
"""
