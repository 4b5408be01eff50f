"""On-policy distillation as a visible loop: the student samples, the teacher's log-probs say which tokens it likes.

The reverse KL of student to teacher, token by token, is the reward (Agarwal et al. 2024, arXiv:2306.13649).
python examples/distill.py [STUDENT] [TEACHER] [STEPS]
"""

import sys

import numpy as np
from tinker import types

import gradserve

GROUP, MAX_TOKENS = 8, 12
PROMPTS = ["The sky is", "My favourite food is", "In the morning I"]


def datum(prompt: list[int], tokens: list[int], logprobs: list[float], teacher: list[float]) -> types.Datum:
    """The advantage of a token is how much likelier the teacher finds it."""
    silent = [0.0] * (len(prompt) - 1)
    advantages = (np.array(teacher) - np.array(logprobs)) / (GROUP * len(PROMPTS) * MAX_TOKENS)
    inputs = {"logprobs": silent + logprobs, "advantages": silent + advantages.tolist()}
    arrays = {name: types.TensorData.from_numpy(np.array(values, np.float32)) for name, values in inputs.items()}
    arrays["target_tokens"] = types.TensorData.from_numpy(np.array([*prompt, *tokens][1:]))
    return types.Datum(model_input=types.ModelInput.from_ints([*prompt, *tokens][:-1]), loss_fn_inputs=arrays)


def main(student: str = "smollm2-135m-instruct", teacher: str = "smollm2-135m-instruct", steps: int = 15) -> float:
    """Train, and return the last mean log(student/teacher) per token, an estimate of the reverse KL."""
    service = gradserve.connect()
    run = service.create_lora_training_client(base_model=student, rank=16, seed=0).result()
    likes = service.create_sampling_client(base_model=teacher).result()
    tokenizer = run.get_tokenizer()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    for step in range(steps):
        sampler = run.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=step)
        asked = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]
        pairs = [(p, s) for p, future in zip(prompts, asked, strict=True) for s in future.result().sequences]
        rated = [likes.compute_logprobs(types.ModelInput.from_ints(p + list(s.tokens))) for p, s in pairs]
        teachers = [future.result()[len(p) :] for future, (p, _) in zip(rated, pairs, strict=True)]
        data = [datum(p, list(s.tokens), list(s.logprobs), t) for (p, s), t in zip(pairs, teachers, strict=True)]
        gradient = run.forward_backward(data, "importance_sampling")
        stepped = run.optim_step(types.AdamParams(learning_rate=1e-3))
        gradient.result(), stepped.result()
        apart = [a - b for (_, s), t in zip(pairs, teachers, strict=True) for a, b in zip(s.logprobs, t, strict=True)]
        print(f"step {step + 1}: reverse KL {np.mean(apart):.3f} per token")
    return float(np.mean(apart))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:4]))
