"""Where torch lives: one worker process that computes Tasks.

    worker     the process: a reader thread, and a loop that shares time between training and sampling
    engine     training Tasks -> Outcomes, small ones together (merge)
    train      packed rows (packing) -> log-probs, losses and gradients;  optim: AdamW;  fused: derivatives by hand
    memory_plan  what a training pass will take, and what to compute twice so that it fits
    sampler    SampleTasks -> Outcomes: a lane of continuous batching per base (and per version of a fully trained run)
    lane       one pass: places (kv), attention (decode), drawing (choose, rng), ends (stops), prompts' scores (prompts)
    full       Tasks on all parameters of a base, which are exchanged for a pass (parameters)
    vllm_sampler  the same through vLLM (vllm_engine), its adapters (vllm_adapters) checked by measurement (fingerprint)
    base       a frozen model, its attention (attention) and the adapters laid over it (lora)
    kernels    the arithmetic that decides bits: fast, invariant (equal to the bit in any batch) or cuda
    graphs     users' losses and policies, as data: checked, measured by a dry run, interpreted
    arrays     objects as tensors (tensorfile: their bytes; origin: of which weights), and in the making (drafts)
    memory     how much is used, what means "too much"
    convert    GGUF -> a Hugging Face directory

Shapes: N packed tokens, H heads, Hkv key/value heads, G = H / Hkv, D head size, L cached length, S slots,
R rank, V vocabulary, K targets per position. Invariant: everything here but objects on disk is a cache.
"""
