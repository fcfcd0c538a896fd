"""Text that a model samples from itself: what it was trained on, as far as it has learned it."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

AT_ONCE = 256


def write_own_text(model: Path, path: Path, tokens: int, length: int = 256) -> None:
    """Write documents of `length` tokens sampled at temperature 1, as JSON lines, if the file is not there."""
    if path.exists():
        return
    torch.manual_seed(0)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    begin = torch.full((AT_ONCE, 1), loaded.config.bos_token_id)
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        for _ in range(-(-tokens // (AT_ONCE * length))):
            found = loaded.generate(begin, do_sample=True, top_k=0, max_new_tokens=length, pad_token_id=0)
            texts = tokenizer.batch_decode(found, skip_special_tokens=True)
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    part.rename(path)
