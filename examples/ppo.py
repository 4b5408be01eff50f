"""PPO with a value head (arXiv:1707.06347) on a language model as a visible loop; the loss is plain PyTorch.

python examples/ppo.py [MODEL] [STEPS]
"""

import sys

import numpy as np
import torch
from tinker import types

import gradserve

PROMPTS, SAMPLES, MAX_TOKENS = ["What is 3 + 4?", "How many legs has a spider?", "Pick a number."], 8, 6


def reward(answer: str) -> float:
    """The share of the answer's characters that are digits."""
    return sum(c.isdigit() for c in answer) / max(len(answer), 1)


def ppo(logprobs, old_logprobs, values, returns, sampled, clip=0.2, value_weight=0.5):
    """With discount and lambda 1 an advantage is the return less the value; ``sampled`` is 1 at the policy's tokens."""
    count = sampled.sum()
    centred = (returns - values).detach() - ((returns - values).detach() * sampled).sum() / count
    advantages = centred / ((centred * sampled).square().sum() / count + 1e-6).sqrt()
    ratio = (logprobs - old_logprobs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    missed = ((values - returns).square() * sampled).sum() / count
    return value_weight * missed - (gain * sampled).sum() / count, {"value_error": missed}


def main(model: str = "smollm2-135m-instruct", steps: int = 10) -> float:
    """Train, and return the mean reward of the last step."""
    run = gradserve.create_lora_training_client(gradserve.connect(), model, rank=16, seed=0, value_head=True).result()
    tokenizer, loss = run.get_tokenizer(), gradserve.loss(ppo)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    for step in range(steps):
        sampler = run.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=step)
        asked = [sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params) for prompt in prompts]
        data, rewards = [], []
        for prompt, future in zip(prompts, asked, strict=True):
            for answer in future.result().sequences:
                rewards.append(reward(tokenizer.decode(answer.tokens, skip_special_tokens=True)))
                tokens, silent, count = [*prompt, *answer.tokens], [0.0] * (len(prompt) - 1), len(answer.tokens)
                given = {"logprobs": answer.logprobs, "returns": [rewards[-1]] * count, "sampled": [1.0] * count}
                inputs = {name: np.array([*silent, *values], np.float32) for name, values in given.items()}
                arrays = {name: types.TensorData.from_numpy(values) for name, values in inputs.items()}
                arrays["target_tokens"] = types.TensorData.from_numpy(np.array(tokens[1:]))
                data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays))
        run.forward_backward(data, loss), run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        print(f"step {step + 1}: reward {np.mean(rewards):.2f}")
    return float(np.mean(rewards))


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
