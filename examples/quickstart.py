"""A first look: what the model is, what it offers, and one intervention.

python examples/quickstart.py                                      # a small random model, made here
python examples/quickstart.py --model arcee-ai/Trinity-Nano-Base   # a real one
"""

from __future__ import annotations

import argparse

import torch

from nnterp_afmoe import StandardizedTransformer
from nnterp_afmoe.testing import tiny

PROMPT = "The Eiffel Tower stands in the city of"


def main() -> None:
    """Print, trace, check a sum, read a routing, ablate an expert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a hub name or a folder; by default a small random model")
    parser.add_argument("--prompt", default=PROMPT)
    arguments = parser.parse_args()
    model = StandardizedTransformer(arguments.model) if arguments.model else tiny()
    assert model.tokenizer is not None
    torch.set_grad_enabled(False)

    print(model)
    print(model.support())

    layer = next(layer for layer in range(model.num_layers) if model.support(layer=layer)["mlp.expert_indices"] is None)
    block = model.layers[layer]
    with model.trace(arguments.prompt):
        entering = block.layer_input.save()
        attention = block.self_attn.attention_output.save()
        weights = block.mlp.expert_weights.save()
        experts = block.mlp.expert_indices.save()
        mlp = block.mlp.mlp_output.save()
        leaving = block.layer_output.save()
        before = model.next_token_probs.save()

    print(f"\nBlock {layer} of {arguments.prompt!r}")
    off = (entering + attention + mlp - leaving).abs().max() / leaving.abs().max()
    print(f"layer_input + attention_output + mlp_output equals layer_output to {off:.1e} of its largest entry")
    print(f"the last token goes through experts {experts[0, -1].tolist()}")
    print(f"  with weights {[round(weight, 3) for weight in weights[0, -1].tolist()]}, which sum to the route scale")

    expert = experts[0, -1, 0].item()
    with model.trace(arguments.prompt):
        chosen = block.mlp.expert_indices == expert
        block.mlp.expert_outputs[chosen] = 0
        after = model.next_token_probs.save()

    print(f"\nThe most likely next tokens, before and after expert {expert} of block {layer} is ablated:")
    for token in before[0].topk(5).indices.tolist():
        text = model.tokenizer.convert_ids_to_tokens(token)
        print(f"  {text:>12}  {before[0, token]:.4f} -> {after[0, token]:.4f}")


if __name__ == "__main__":
    main()
