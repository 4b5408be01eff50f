"""Lowers Ops to Programs of Tasks, decides where and when they run, and settles what came out. No torch here."""
