"""Run in TransformerLens' environment: its cache of every block's output against the bare forward, as JSON."""

from __future__ import annotations

import json
import sys

import torch
from timing import seconds
from transformer_lens.model_bridge import TransformerBridge
from transformers import AfmoeForCausalLM, AutoTokenizer

folder, tokens = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.set_grad_enabled(False)
bare = AfmoeForCausalLM.from_pretrained(folder)
bridge = TransformerBridge.boot_transformers(
    folder, hf_model=AfmoeForCausalLM.from_pretrained(folder), tokenizer=AutoTokenizer.from_pretrained(folder)
)
ids = torch.randint(3, 261, (1, tokens), generator=torch.Generator().manual_seed(0))


def read():
    _, cache = bridge.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_out") and name.count(".") == 2)
    assert sum(name.startswith("blocks.") for name in cache) == 5, list(cache)


plain, cached = seconds(lambda: bare(ids), read, repeats=61)
print(json.dumps({"plain": plain, "read": cached}))
