"""Where torch lives: one worker process that computes Tasks.

    worker     the process: a reader thread, and a loop that shares time between training and sampling
    engine     one training Task -> Outcome
    sampler    continuous batching of SampleTasks; kv, choose, rng, stops and prompts are its parts
    base       a frozen model, its attention (attention) and the adapters laid over it (lora)
    train      packed rows -> log-probs, loss (losses), gradient;  optim: AdamW
    arrays     objects as tensors;  convert: GGUF -> a Hugging Face directory

Shapes: N packed tokens, H heads, Hkv key/value heads, G = H / Hkv, D head size, L cached length, S slots,
R rank, V vocabulary, K targets per position. Invariant: everything here but objects on disk is a cache.
"""
