"""AFMoE, drawn and told: the parts of a block, the config's fields, and what has to be understood.

The values' layouts, words and availability are the table's (`afmoe`); here is what stands between them.
"""

from __future__ import annotations

from typing import Any

from nnterp_afmoe.families.afmoe_kinds import NO_DENSE, NO_ROUTER, is_dense, slides
from nnterp_afmoe.family import Case
from nnterp_afmoe.schematic import Note, Part, Schematic

__all__ = ["SCHEMATIC"]


def mixture_only(case: Case) -> str | None:
    """The router and the experts."""
    return NO_ROUTER if is_dense(case.config, case.layer) else None


def dense_only(case: Case) -> str | None:
    """A dense block's MLP."""
    return None if is_dense(case.config, case.layer) else NO_DENSE


def rotary(case: Case) -> str | None:
    """The rotary."""
    if slides(case.config, case.layer):
        return None
    return "a block with full attention has no rotary: its queries and keys leave the QK norm as they are"


def features(config: Any) -> list[str]:
    """What this config has."""
    dense, layers = config.num_dense_layers, config.num_hidden_layers
    full = sum(not slides(config, layer) for layer in range(layers))
    group = config.num_attention_heads // config.num_key_value_heads
    lines = [
        f"{layers} blocks, each with two branches between two RMSNorms: the sandwich, a norm before and a norm after",
        f"{layers - full} blocks see the last {config.sliding_window} tokens, their own counted, with the rotary; {full} see all, without it",
        f"{config.num_attention_heads} query heads over {config.num_key_value_heads} key/value heads, {group} to each, "
        f"queries and keys normed head by head",
        "a sigmoid gate on every channel of every head, before o_proj",
    ]
    if dense:
        lines.append(
            f"a dense MLP of {config.intermediate_size:,} neurons in the first {f'{dense} blocks' if dense > 1 else 'block'}"
        )
    if dense < layers:
        lines.append(
            f"a mixture in the other {layers - dense}: {config.num_experts} experts of {config.moe_intermediate_size:,} neurons, "
            f"{config.num_experts_per_tok} to a token, and a shared expert of "
            f"{config.moe_intermediate_size * config.num_shared_experts:,} beside them"
        )
    if config.mup_enabled:
        lines.append(f"embeddings scaled by the root of {config.hidden_size}, as muP has it")
    lines.append(
        "a head that is the embedding, transposed" if config.tie_word_embeddings else "a head with weights of its own"
    )
    return lines


STREAM = (
    Part("attention_mask", (0, 2)),
    Part("input_size", (0, 1)),
    Part("input_ids", (0, 0)),
    Part(
        "embed_tokens", (1, 0), ("input_ids",), "embed_tokens", "embed_tokens", "A row of the embedding for each token."
    ),
    Part("token_embeddings", (2, 0), ("embed_tokens",)),
    Part(
        "scale",
        (3, 0),
        ("token_embeddings",),
        "\u00d7 \u221ahidden_size",
        "",
        "Where mup_enabled is set; otherwise nothing.",
    ),
    Part(
        "blocks",
        (4, 0),
        ("scale",),
        "the blocks",
        "layers",
        "One after the other, each adding two contributions to the stream.",
    ),
    Part("norm", (5, 0), ("blocks",), "norm", "norm", "An RMSNorm."),
    Part("final_norm_output", (6, 0), ("norm",)),
    Part(
        "lm_head", (7, 0), ("final_norm_output",), "lm_head", "lm_head", "A matrix from the stream to the vocabulary."
    ),
    Part("lm_head_output", (8, 0), ("lm_head",)),
    Part("logits", (9, 0), ("lm_head_output",)),
    Part("next_token_probs", (10, 0), ("logits",)),
)

ATTENTION = (
    Part("layer_input", (0, 0)),
    Part(
        "input_layernorm",
        (2.5, 0),
        ("layer_input",),
        "input_layernorm",
        "input_layernorm",
        "An RMSNorm before the attention.",
    ),
    Part("attention_norm_output", (2.5, 1), ("input_layernorm",)),
    Part("q_proj", (1, 2), ("attention_norm_output",), "q_proj", "self_attn.q_proj", "The query of each head."),
    Part("k_proj", (2, 2), ("attention_norm_output",), "k_proj", "self_attn.k_proj", "The key of each KV head."),
    Part("v_proj", (3, 2), ("attention_norm_output",), "v_proj", "self_attn.v_proj", "The value of each KV head."),
    Part(
        "gate_proj",
        (4, 2),
        ("attention_norm_output",),
        "gate_proj",
        "self_attn.gate_proj",
        "One number a channel of each head.",
    ),
    Part(
        "q_norm",
        (1, 3),
        ("q_proj",),
        "q_norm",
        "self_attn.q_norm",
        "An RMSNorm over each query's head_dim, its weights shared by the heads.",
    ),
    Part(
        "k_norm",
        (2, 3),
        ("k_proj",),
        "k_norm",
        "self_attn.k_norm",
        "An RMSNorm over each key's head_dim, its weights shared by the heads.",
    ),
    Part(
        "q_rotary",
        (1, 4),
        ("q_norm",),
        "rotary",
        "",
        "Turns each query by its position, on sliding blocks only.",
        rotary,
        bypassed=True,
    ),
    Part(
        "k_rotary",
        (2, 4),
        ("k_norm",),
        "rotary",
        "",
        "Turns each key by its position, on sliding blocks only.",
        rotary,
        bypassed=True,
    ),
    Part("self_attn.attention_queries", (1, 5), ("q_rotary",)),
    Part("self_attn.attention_keys", (2, 5), ("k_rotary",)),
    Part("self_attn.attention_values", (3, 5), ("v_proj",)),
    Part(
        "products",
        (1.5, 6),
        ("self_attn.attention_queries", "self_attn.attention_keys"),
        "q \u00b7 k / \u221ad + mask",
        "",
        "Each query with the keys of its group's KV head, scaled; what is ahead, or out of a sliding block's window, is masked.",
    ),
    Part("self_attn.attention_scores", (1.5, 7), ("products",)),
    Part("softmax", (1.5, 8), ("self_attn.attention_scores",), "softmax", "", "Over the keys, in float32."),
    Part("self_attn.attention_probabilities", (1.5, 9), ("softmax",)),
    Part(
        "mix",
        (2.5, 10),
        ("self_attn.attention_probabilities", "self_attn.attention_values"),
        "mix the values",
        "",
        "Each query head mixes the values of its group's KV head by its pattern.",
    ),
    Part("self_attn.attention_head_outputs", (2.5, 11), ("mix",)),
    Part("sigmoid", (4, 11), ("gate_proj",), "sigmoid", "", "How far each channel is let through, from 0 to 1."),
    Part(
        "gate",
        (2.5, 12),
        ("self_attn.attention_head_outputs", "sigmoid"),
        "\u00d7 gate",
        "",
        "Each channel of each head times its gate.",
    ),
    Part("self_attn.attention_premix", (2.5, 13), ("gate",)),
    Part(
        "o_proj",
        (2.5, 14),
        ("self_attn.attention_premix",),
        "o_proj",
        "self_attn.o_proj",
        "Mixes the heads into the stream's width.",
    ),
    Part(
        "post_attention_layernorm",
        (2.5, 15),
        ("o_proj",),
        "post_attention_layernorm",
        "post_attention_layernorm",
        "An RMSNorm after the attention: what it gives is what is added.",
    ),
    Part("self_attn.attention_output", (2.5, 16), ("post_attention_layernorm",)),
    Part(
        "add_attention",
        (0, 17),
        ("layer_input", "self_attn.attention_output"),
        "+",
        "",
        "The stream and what the attention adds.",
    ),
)

MLP = (
    Part("layer_mid", (0, 18), ("add_attention",)),
    Part(
        "pre_mlp_layernorm",
        (2.5, 18),
        ("layer_mid",),
        "pre_mlp_layernorm",
        "pre_mlp_layernorm",
        "An RMSNorm before the MLP.",
    ),
    Part("mlp_norm_output", (2.5, 19), ("pre_mlp_layernorm",)),
    Part("mlp_input", (2.5, 20), ("mlp_norm_output",)),
    Part("dense_gate", (1, 21), ("mlp_input",), "silu(gate_proj)", "mlp.act_fn", "The gate's activation.", dense_only),
    Part("mlp.mlp_activation", (1, 22), ("dense_gate",)),
    Part(
        "dense_up",
        (1, 23),
        ("mlp.mlp_activation",),
        "\u00d7 up_proj",
        "mlp.up_proj",
        "The activation times what up_proj gives.",
        dense_only,
    ),
    Part("mlp.mlp_neurons", (1, 24), ("dense_up",)),
    Part(
        "dense_down",
        (1, 25),
        ("mlp.mlp_neurons",),
        "down_proj",
        "mlp.down_proj",
        "From the neurons to the stream's width.",
        dense_only,
    ),
    Part(
        "router", (2.5, 21), ("mlp_input",), "router.gate", "mlp.router.gate", "A logit for each expert.", mixture_only
    ),
    Part("mlp.router_logits", (2.5, 22), ("router",)),
    Part(
        "scores",
        (2.5, 23),
        ("mlp.router_logits",),
        "sigmoid: scores",
        "",
        "Each expert's score by itself, in float32: they do not sum to one.",
        mixture_only,
    ),
    Part(
        "choose",
        (2, 24),
        ("scores",),
        "+ bias, top k",
        "mlp.router",
        "The mixture's expert_bias is added, and the experts of largest score plus bias are chosen.",
        mixture_only,
    ),
    Part(
        "weigh",
        (3, 24),
        ("scores", "choose"),
        "scores / sum \u00d7 scale",
        "mlp.router",
        "The chosen experts' scores without the bias, normed to route_scale.",
        mixture_only,
    ),
    Part("mlp.expert_indices", (2, 25), ("choose",)),
    Part("mlp.expert_weights", (3, 25), ("weigh",)),
    Part(
        "experts",
        (2.5, 26),
        ("mlp.expert_indices", "mlp.expert_weights"),
        "experts",
        "mlp.experts",
        "Each chosen expert on mlp_input, times its weight.",
        mixture_only,
        around=(("mlp_input", 1.955),),
    ),
    Part("mlp.expert_outputs", (2.5, 27), ("experts",)),
    Part("sum_slots", (2.5, 28), ("mlp.expert_outputs",), "sum", "", "Over the chosen experts.", mixture_only),
    Part("mlp.routed_output", (2.5, 29), ("sum_slots",)),
    Part(
        "shared_gate",
        (4, 21),
        ("mlp_input",),
        "silu(gate_proj)",
        "mlp.shared_experts.act_fn",
        "The shared expert's gate, activated.",
        mixture_only,
    ),
    Part("mlp.shared_experts.mlp_activation", (4, 22), ("shared_gate",)),
    Part(
        "shared_up",
        (4, 23),
        ("mlp.shared_experts.mlp_activation",),
        "\u00d7 up_proj",
        "mlp.shared_experts.up_proj",
        "The activation times what up_proj gives.",
        mixture_only,
    ),
    Part("mlp.shared_experts.mlp_neurons", (4, 24), ("shared_up",)),
    Part(
        "shared_down",
        (4, 25),
        ("mlp.shared_experts.mlp_neurons",),
        "down_proj",
        "mlp.shared_experts.down_proj",
        "From the neurons to the stream's width.",
        mixture_only,
    ),
    Part("mlp.shared_expert_output", (4, 26), ("shared_down",)),
    Part("mlp.shared_experts.mlp_output", (4, 31)),
    Part(
        "add_shared",
        (2.5, 30),
        ("mlp.routed_output", "mlp.shared_expert_output"),
        "+",
        "mlp",
        "The routed sum and the shared expert's output.",
        mixture_only,
    ),
    Part(
        "post_mlp_layernorm",
        (2.5, 31),
        ("add_shared", "dense_down"),
        "post_mlp_layernorm",
        "post_mlp_layernorm",
        "An RMSNorm after the MLP: what it gives is what is added.",
    ),
    Part("mlp.mlp_output", (2.5, 32), ("post_mlp_layernorm",)),
    Part("add_mlp", (0, 33), ("layer_mid", "mlp.mlp_output"), "+", "", "The stream and what the MLP adds."),
    Part("layer_output", (0, 34), ("add_mlp",)),
)

FIELDS = {
    "vocab_size": "How many tokens there are: rows of the embedding and of the head.",
    "hidden_size": "The width of the residual stream.",
    "intermediate_size": "Neurons of a dense block's MLP.",
    "moe_intermediate_size": "Neurons of one routed expert; the shared expert has this times num_shared_experts.",
    "num_hidden_layers": "How many blocks there are.",
    "num_dense_layers": "How many blocks at the beginning have a dense MLP; the others are mixtures.",
    "num_attention_heads": "Query heads a block.",
    "num_key_value_heads": "Key/value heads a block; each serves an equal group of query heads.",
    "head_dim": "The width of a head; the heads together need not be as wide as the stream.",
    "hidden_act": "The MLPs' activation.",
    "max_position_embeddings": "The longest sequence that the model was made for.",
    "initializer_range": "The spread of fresh weights; a loaded checkpoint does not use it.",
    "rms_norm_eps": "What every RMSNorm adds under its root.",
    "use_cache": "Whether generation keeps keys and values.",
    "tie_word_embeddings": "Whether the head is the embedding, transposed.",
    "rope_parameters": "The rotary's base and scaling; sliding blocks alone use it.",
    "num_experts": "Routed experts of a mixture.",
    "num_experts_per_tok": "How many of them a token goes through: the top_k of the layouts.",
    "num_shared_experts": "How many experts' width the shared expert has; it is one MLP.",
    "route_scale": "What a token's expert weights sum to.",
    "output_router_logits": "Whether transformers returns the router's logits; the named values need it not.",
    "global_attn_every_n_layers": "Used only to fill in layer_types where a config does not list them.",
    "sliding_window": "How many tokens a sliding block sees, the present one counted.",
    "layer_types": "Which block slides and which attends to everything: this list decides, and it may be irregular.",
    "attention_dropout": "The pattern's dropout in training.",
    "mup_enabled": "Whether the embeddings are scaled by the root of hidden_size.",
    "attention_bias": "Whether q_proj, k_proj, v_proj and o_proj have biases; gate_proj never has one.",
    "bos_token_id": "The token that begins a text.",
    "eos_token_id": "The token that ends one.",
    "pad_token_id": "The token that fills a shorter row.",
}

NOTES = (
    Note(
        "The block, in order",
        "The stream enters as layer_input. A norm, the attention, another norm; what leaves that norm is attention_output, and it is added: "
        "layer_mid. Again a norm, the MLP, another norm; what leaves it is mlp_output, and it is added: layer_output. One trace has to ask in this "
        "order, and model.order(layer) lists it.",
    ),
    Note(
        "Why the contributions are the post-norms' outputs",
        "A branch's last step before the addition is an RMSNorm, and an RMSNorm does not see how large its input is. So scaling what enters it, o_proj's "
        "output or the MLP's, changes nothing: the norm undoes it. What the stream receives is the norm's output, and that is what attention_output and "
        "mlp_output are. Sums, logit attributions and scalings belong there.\n\n"
        "To give a head or an expert its share, freeze the post-norm's scale at what it was and send the part through it.",
    ),
    Note(
        "The gate",
        "Between a head's mix of values (attention_head_outputs) and o_proj's input (attention_premix) every channel is multiplied by the sigmoid of "
        "gate_proj, taken from the same normed stream as the queries. A head may look hard at a token and let nothing of it through; a pattern alone does "
        "not say what a head does.",
    ),
    Note(
        "Where the rotary runs",
        "On sliding blocks queries and keys are turned by their positions after the QK norm; on blocks with full attention they are not, so those find a token "
        "by what it holds and not by how far off it is. config.layer_types says which is which.",
    ),
    Note(
        "The router's arithmetic",
        "Each expert has a score of its own, the sigmoid of its logit in float32. To choose, a bias is added that training moved until the load was even; the "
        "top_k of score plus bias are taken. To weigh, the bias is left out: the chosen scores are divided by their sum and multiplied by route_scale. A "
        "token's weights always sum to route_scale, and a chosen expert is never weighed more for its bias.",
    ),
    Note(
        "The order of the shared expert",
        "The router's logits come first, then the shared expert runs, then the weights and indices reach the routed experts. In one trace the shared expert's "
        "values are asked for between router_logits and expert_weights. The routed sum and the shared output are added, and the post-norm sees them as one.",
    ),
    Note(
        "Ablating an expert",
        "Zero its slots in expert_outputs on the tokens that chose it: its part is gone, and the others' weights stay what they were. To ask what the router "
        "would have done without it, lower its expert_bias among the router's arguments (mlp.router.inputs) instead: another expert is chosen, and the weights are normed again. The two "
        "answer different questions; say which was asked.",
    ),
)

SCHEMATIC = Schematic(features, STREAM, "blocks", (*ATTENTION, *MLP), FIELDS, NOTES)
