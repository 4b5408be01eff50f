"""GRPO as a visible loop, over the public SDK: a language model learns to answer in digits.

python examples/grpo.py [MODEL] [STEPS]
"""

import sys

import numpy as np
from tinker import types

import gradserve

GROUP, PROMPTS, MAX_TOKENS = 8, ["What is 3 + 4?", "How many legs has a spider?", "Pick a number."], 6


def reward(answer: str) -> float:
    """The share of the answer's characters that are digits."""
    return sum(c.isdigit() for c in answer) / max(len(answer), 1)


def datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Inputs are all tokens but the last, targets all but the first; the prompt has no advantage."""
    tokens, silent = prompt + list(sequence.tokens), [0.0] * (len(prompt) - 1)
    inputs = {"logprobs": silent + list(sequence.logprobs), "advantages": silent + [advantage] * len(sequence.tokens)}
    arrays = {name: types.TensorData.from_numpy(np.array(values, np.float32)) for name, values in inputs.items()}
    arrays["target_tokens"] = types.TensorData.from_numpy(np.array(tokens[1:]))
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays)


def main(model: str = "smollm2-135m-instruct", steps: int = 10) -> float:
    """Train, and return the mean reward of the last step."""
    service = gradserve.connect()
    run = service.create_lora_training_client(base_model=model, rank=16, seed=0).result()
    tokenizer = run.get_tokenizer()
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    for step in range(steps):
        sampler = run.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=step)
        asked = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]
        data, rewards = [], []
        for prompt, future in zip(prompts, asked, strict=True):
            group = future.result().sequences
            earned = np.array([reward(tokenizer.decode(each.tokens, skip_special_tokens=True)) for each in group])
            advantages = (earned - earned.mean()) / (GROUP * len(PROMPTS) * MAX_TOKENS)
            data += [datum(prompt, each, a) for each, a in zip(group, advantages, strict=True)]
            rewards.append(earned.mean())
        gradient = run.forward_backward(data, "importance_sampling")
        stepped = run.optim_step(types.AdamParams(learning_rate=1e-3))
        gradient.result(), stepped.result()
        print(f"step {step + 1}: reward {np.mean(rewards):.2f}")
    return float(np.mean(rewards))


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
