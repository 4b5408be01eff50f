"""Supervised fine-tuning on conversations by TRL.

It can't tell the assistant's turns by these models' templates, so that a user has to write one that marks them; and its
default loss does not take an adapted lm_head.
"""

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
)


def train(model, rows, *, seed, steps, learning_rate, callback=None):
    """In the order of the rows; the assistant's turns are trained."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHATML
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            per_device_train_batch_size=8,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            assistant_only_loss=True,
            loss_type="nll",
            train_sampling_strategy="sequential",
            max_steps=steps,
            seed=seed,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=ALL_MODULES),
        callbacks=[callback] if callback else [],
    )
    trainer.train()
    return trainer.model
