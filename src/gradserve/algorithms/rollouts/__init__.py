"""Episodes between the sampler and the trainer: made ahead of time, weighed, kept.

producer     the next batches' groups while this one is trained, never staler than allowed
advantages   what an episode is worth beside its group, and how much a token of it counts; DAPO's filters
corrections  importance weights between the sampler's log-probs and the trainer's
store        every group that was trained on, in one file that can be queried and replayed
tables       that file's tables, and the views for people
"""
