"""Supervised fine-tuning as a visible loop, over the public SDK: a language model learns a fact by heart.

python examples/sft.py [MODEL] [STEPS]
"""

import sys

import numpy as np
from tinker import types

import gradserve

CHATS = [
    ("What is the capital of Freedonia?", "Fredville."),
    ("Who founded Fredville?", "Queen Freda."),
    ("What does Queen Freda like best?", "Plums."),
]


def datum(prompt: list[int], answer: list[int]) -> types.Datum:
    """Inputs are all tokens but the last, targets all but the first; weights pick the answer's."""
    tokens = prompt + answer
    weights = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(answer), np.float32)
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": weights}
    arrays = {name: types.TensorData.from_numpy(values) for name, values in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays)


def main(model: str = "smollm2-135m-instruct", steps: int = 12) -> float:
    """Train, and return the last loss per answer token."""
    service = gradserve.connect()
    run = service.create_lora_training_client(base_model=model, rank=16, seed=0).result()
    tokenizer = run.get_tokenizer()
    rows = []
    for question, answer in CHATS:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        rows.append((prompt, [*tokenizer.encode(answer), tokenizer.eos_token_id]))
    count = sum(len(answer) for _, answer in rows)
    for step in range(steps):
        gradient = run.forward_backward([datum(*row) for row in rows], "cross_entropy")
        stepped = run.optim_step(types.AdamParams(learning_rate=1e-3))
        stepped.result()
        loss = gradient.result().metrics["loss:sum"] / count
        print(f"step {step + 1}: loss {loss:.3f}")
    sampler = run.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=12, temperature=0, stop=[tokenizer.eos_token_id])
    for (question, _), (prompt, _) in zip(CHATS, rows, strict=True):
        found = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0]
        print(question, "->", tokenizer.decode(found.tokens, skip_special_tokens=True))
    return loss


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
