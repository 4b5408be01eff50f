"""GRPO by TRL, with the settings that make it the same: which modules are adapted, the loss, Adam's, no schedule."""

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def train(model, rows, reward, *, seed, steps, learning_rate, max_tokens, callback=None):
    """``reward``: a function of a completion and its row's answer."""

    def rewards(completions, answer, **columns):
        return [reward(each[0]["content"], right) for each, right in zip(completions, answer, strict=True)]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=GRPOConfig(
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=max_tokens,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            loss_type="grpo",
            max_steps=steps,
            seed=seed,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=Dataset.from_list(
            [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
        ),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=ALL_MODULES),
        callbacks=[callback] if callback else [],
    )
    trainer.train()
    return trainer.model
