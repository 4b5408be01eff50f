"""Direct preference optimisation (arXiv:2305.18290) as a visible loop: the loss is ten lines of plain PyTorch.

python examples/dpo.py [MODEL] [STEPS]
"""

import sys

import numpy as np
import torch
from tinker import types

import gradserve

PAIRS = [
    ("Say hello.", "Hello!", "Go away."),
    ("Thank me.", "Thank you very much.", "No."),
    ("How are you?", "Fine, thanks!", "Not your business."),
]


def dpo(logprobs, weights, reference, beta=0.1):
    """Rows alternate: chosen, rejected. ``reference`` [B] is a row's log-prob under the base model."""
    margins = (logprobs * weights).sum(1) - reference
    difference = margins[0::2] - margins[1::2]
    right = (difference > 0).float().mean()
    return -torch.nn.functional.logsigmoid(beta * difference).mean(), {"accuracy": right}


def main(model: str = "smollm2-135m-instruct", steps: int = 10) -> float:
    """Train, and return the share of pairs whose chosen answer has become likelier than the rejected one."""
    service = gradserve.connect()
    run = service.create_lora_training_client(base_model=model, rank=16, seed=0).result()
    base = service.create_sampling_client(base_model=model).result()
    tokenizer = run.get_tokenizer()
    data = []
    for question, *answers in PAIRS:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for answer in answers:
            tokens = [*prompt, *tokenizer.encode(answer), tokenizer.eos_token_id]
            known = base.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
            inputs = {
                "target_tokens": np.array(tokens[1:]),
                "weights": np.array([i >= len(prompt) for i in range(1, len(tokens))], np.float32),
                "reference": np.array([sum(known[len(prompt) :])], np.float32),
            }
            arrays = {name: types.TensorData.from_numpy(values) for name, values in inputs.items()}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays))
    loss = gradserve.loss(dpo, inputs={"reference": "float32[row]"})
    for step in range(steps):
        gradient = run.forward_backward(data, loss)
        run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        metrics = gradient.result().metrics
        print(f"step {step + 1}:", {name.split(":")[0]: round(value, 3) for name, value in metrics.items()})
    return next(value for name, value in metrics.items() if name.startswith("accuracy"))


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
