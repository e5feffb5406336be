"""A small GPT-2 learns to write like Python's own manual, letter by letter."""

import os
import sys
from pydoc_data.topics import topics  # a text that Python carries

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed
from offbeat.integrations.transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

folder = sys.argv[1] if len(sys.argv) > 1 else "hugging-face-output"
os.makedirs(folder, exist_ok=True)  # to look for a checkpoint in
text = "".join(topics[name] for name in sorted(topics))[:16_000].encode("ascii", "replace")
rows = torch.tensor(list(text)).view(-1, 64)  # a letter is a token
data = [{"input_ids": row, "labels": row} for row in rows]

set_seed(0)
tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
config = GPT2Config(vocab_size=128, n_positions=96, n_embd=48, n_layer=6, n_head=4, **tokens)
model = GPT2LMHeadModel(config)
if "adapters" in sys.argv:
    model = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))

args = TrainingArguments(
    folder, num_train_epochs=1, per_device_train_batch_size=8, learning_rate=3e-3, warmup_steps=5,
    logging_steps=4, save_steps=12, report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model, args, train_dataset=data, offbeat={"method": "pipedream", "stages": 3})
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
trainer.save_model(folder)
written = model.generate(input_ids=rows[:1, :32], max_new_tokens=32, do_sample=False)
print(bytes(written[0].tolist()).decode())
