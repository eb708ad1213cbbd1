"""AFMoE: Arcee's Trinity Nano, Mini and Large, as transformers' `AfmoeForCausalLM` runs them.

A block is ``h = x + N2(attention(N1(x)))`` and then ``h + N4(mlp(N3(h)))``, every ``N`` an RMSNorm.
What a branch adds to the stream is its post-norm's output, so that is what `attention_output`
and `mlp_output` are. The first ``num_dense_layers`` blocks have a dense MLP, the others a mixture:
a sigmoid router that picks by score plus bias and weighs by score, routed experts, a shared one.

The classes below are the family's table. A row is a value: its layout, where it is read, what
it is, and (``inside``) its shape in the model where that is another one, (``when``) what it needs.
Within a class the rows stand as they are printed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AfmoeConfig, AfmoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.afmoe.modeling_afmoe import (
    AfmoeAttention,
    AfmoeDecoderLayer,
    AfmoeExperts,
    AfmoeSparseMoeBlock,
    eager_attention_forward,
)

from nnterp_afmoe.families.afmoe_kinds import NO_DENSE, NO_ROUTER, is_dense, slides
from nnterp_afmoe.families.afmoe_page import SCHEMATIC
from nnterp_afmoe.family import Case, Family, check_layer_types, register
from nnterp_afmoe.hosts import Host, Layers
from nnterp_afmoe.layouts import (
    ExpertIndices,
    ExpertOutputs,
    ExpertWeights,
    HeadOutputs,
    Keys,
    Neurons,
    Pattern,
    Queries,
    Residual,
    RouterLogits,
    Values,
)
from nnterp_afmoe.places import parse
from nnterp_afmoe.reference import Pass
from nnterp_afmoe.values import Value
from nnterp_afmoe.views import Recomputed

__all__ = ["AFMOE", "Attention", "Block", "Dense", "Mixture", "SharedExpert"]


# -- when a value exists ---------------------------------------------------------------


def eager_attention(case: Case) -> str | None:
    """The pattern is a tensor only where attention is written out."""
    if case.attn_implementation == "eager":
        return None
    return (
        f"{case.attn_implementation} attention keeps the pattern inside its kernel; load with "
        f"attn_implementation='eager' or call model.set_attn_implementation('eager')"
    )


def slotted_experts(case: Case) -> str | None:
    """A slot's output is a tensor where the experts run slot by slot, and follows from the weights under eager."""
    if case.experts_implementation in ("eager", "batched_mm", "grouped_mm"):
        return None
    return (
        f"{case.experts_implementation} experts sum the slots inside their kernel; load with "
        f"experts_implementation='grouped_mm' or call model.set_experts_implementation('grouped_mm')"
    )


def never(reason: str) -> Any:
    """A condition that no block meets."""
    return lambda case: reason


# -- expert_outputs under the eager experts --------------------------------------------


def expert_slots(experts: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Each slot's weighted output, ``[tokens, top_k, hidden_size]``, from the arguments the experts are called with.

    The eager experts add a slot to the sum as they compute it. Here every expert's slots are
    computed as there and kept: ``w * W_down(silu(W_gate x) * (W_up x))``.
    """
    names = ("hidden_states", "top_k_index", "top_k_weights")
    hidden, index, weights = (kwargs[name] if name in kwargs else args[i] for i, name in enumerate(names))
    places, outputs = [], []
    for expert in range(experts.num_experts):
        token, slot = torch.where(index == expert)
        gate, up = torch.nn.functional.linear(hidden[token], experts.gate_up_proj[expert]).chunk(2, dim=-1)
        out = torch.nn.functional.linear(experts.act_fn(gate) * up, experts.down_proj[expert])
        places.append((token, slot))
        outputs.append(out * weights[token, slot, None])
    found = torch.cat(outputs)
    # A slot whose index is no expert's, as transformers marks one that is left out, stays zero.
    slots = found.new_zeros(*index.shape, found.shape[-1])
    token, slot = (torch.cat(axis) for axis in zip(*places, strict=True))
    return slots.index_put((token, slot), found)


def sum_slots(slots: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The routed sum that these slots give, in the dtype of the experts' own."""
    return slots.sum(1).to(output.dtype)


EAGER_SLOTS = Recomputed(
    when=lambda case: case.experts_implementation == "eager",
    source=parse("mlp.experts.input"),
    sink=parse("mlp.experts.output"),
    compute=expert_slots,
    fold=sum_slots,
    note="the eager experts keep no slot; it is recomputed from their arguments, and a write replaces their sum",
)


# -- the table -------------------------------------------------------------------------

ATTEND = "self_attn.source{attention_interface()}"


class Attention(Host):
    """A block's self-attention: QK norm, the rotary on sliding blocks only, GQA, a sigmoid gate on every head.

    Query head ``h`` reads key/value head ``h // (num_heads / num_kv_heads)``. The gate multiplies
    each channel of each head between `attention_head_outputs` and `attention_premix`.
    """

    at = "self_attn"

    attention_output = Value(
        Residual, "post_attention_layernorm.output", "what the attention adds to the stream, after its post-norm"
    )
    attention_queries = Value(
        Queries, f"{ATTEND}.input[query]", "after the QK norm and, on a sliding block, the rotary"
    )
    attention_keys = Value(
        Keys,
        f"{ATTEND}.input[key]",
        "likewise, one set a KV head; with a cache, of the tokens it holds",
        shared=True,
    )
    attention_values = Value(
        Values, f"{ATTEND}.input[value]", "one set a KV head; with a cache, of the tokens it holds", shared=True
    )
    attention_scores = Value(
        Pattern,
        f"{ATTEND}.source{{nn.functional.softmax()}}.input[0]",
        "query-key products, scaled and masked, entering the softmax",
        when=eager_attention,
    )
    attention_premix = Value(
        HeadOutputs,
        "self_attn.o_proj.input[0]",
        "each head's output AFTER its gate, what o_proj mixes",
        inside="batch seq (num_heads head_dim)",
    )
    attention_probabilities = Value(
        Pattern,
        f"{ATTEND}.source{{nn.functional.dropout()}}.output",
        "the pattern that mixes the values",
        when=eager_attention,
    )
    attention_head_outputs = Value(HeadOutputs, f"{ATTEND}.output[0]", "each head's mix of values, BEFORE its gate")


class Dense(Host):
    """A dense block's MLP: ``down_proj(silu(gate_proj(x)) * up_proj(x))``."""

    at = "mlp"

    mlp_output = Value(Residual, "post_mlp_layernorm.output", "what the MLP adds to the stream, after its post-norm")
    mlp_activation = Value(Neurons, "mlp.act_fn.output", "the gate's activation, silu(gate_proj(x))")
    mlp_neurons = Value(Neurons, "mlp.down_proj.input[0]", "the neurons, activation times up_proj(x)")

    @staticmethod
    def absent(case: Case) -> str:
        return NO_DENSE


class SharedExpert(Host):
    """A mixture's shared expert: an MLP that every token goes through, beside the routed ones.

    Its width is ``moe_intermediate_size * num_shared_experts``.
    """

    at = "mlp.shared_experts"

    mlp_output = Value(
        Residual,
        "mlp.shared_experts.output",
        "not a contribution of its own",
        when=never(
            "the block adds the whole mixture, post-normed, as mlp.mlp_output; "
            "the shared expert's own output is mlp.shared_expert_output"
        ),
    )
    mlp_activation = Value(
        Neurons,
        "mlp.shared_experts.act_fn.output",
        "the gate's activation, silu(gate_proj(x))",
        inside="(batch seq) intermediate_size",
    )
    mlp_neurons = Value(
        Neurons,
        "mlp.shared_experts.down_proj.input[0]",
        "the neurons, activation times up_proj(x)",
        inside="(batch seq) intermediate_size",
    )

    @staticmethod
    def absent(case: Case) -> str:
        return "a dense block has no shared expert"

    def _axis(self, name: str) -> int:
        config = self._root.config
        if name == "intermediate_size":
            return config.moe_intermediate_size * config.num_shared_experts
        return super()._axis(name)


ROUTED_NEURONS = never(
    "a mixture has no single set of neurons: the shared expert's are on mlp.shared_experts, "
    "and the routed experts' outputs are mlp.expert_outputs"
)


class Mixture(Host):
    """A mixture's MLP: a sigmoid router, its chosen experts, and a shared expert.

    ``s = sigmoid(float32(router_logits))``; the chosen are the top `top_k` of ``s + expert_bias``;
    their weights are ``s / sum(s) * route_scale`` over the chosen. The bias chooses and does not weigh.
    """

    at = "mlp"

    shared_experts: SharedExpert

    router_logits = Value(
        RouterLogits,
        "mlp.router.gate.output",
        "every expert's logit, in the model's dtype, before the sigmoid and the bias",
        inside="(batch seq) num_experts",
    )
    mlp_activation = Value(Neurons, "mlp.shared_experts.act_fn.output", "dense blocks only", when=ROUTED_NEURONS)
    mlp_neurons = Value(Neurons, "mlp.shared_experts.down_proj.input[0]", "dense blocks only", when=ROUTED_NEURONS)
    expert_weights = Value(
        ExpertWeights,
        "mlp.experts.input[top_k_weights]",
        "the chosen experts' weights, float32, summing to route_scale",
        inside="(batch seq) top_k",
    )
    expert_indices = Value(
        ExpertIndices,
        "mlp.experts.input[top_k_index]",
        "the chosen experts, int64",
        inside="(batch seq) top_k",
        note="a choice has no gradient; it reaches the router through mlp.expert_weights",
        below="num_experts",
    )
    expert_outputs = Value(
        ExpertOutputs,
        "mlp.experts.source{experts_forward()}.source{weighted_out.view()}.output",
        "each chosen expert's WEIGHTED output, before the sum",
        inside="(batch seq) top_k hidden_size",
        when=slotted_experts,
        recomputed=EAGER_SLOTS,
    )
    routed_output = Value(
        Residual, "mlp.experts.output", "the sum over the chosen experts", inside="(batch seq) hidden_size"
    )
    shared_expert_output = Value(
        Residual, "mlp.shared_experts.output", "the shared expert's output", inside="(batch seq) hidden_size"
    )
    mlp_output = Value(
        Residual, "post_mlp_layernorm.output", "what the mixture adds to the stream, after its post-norm"
    )

    @staticmethod
    def absent(case: Case) -> str:
        mixtures = [i for i in range(case.config.num_hidden_layers) if not is_dense(case.config, i)]
        where = f"blocks {mixtures[0]} to {mixtures[-1]} are mixtures" if mixtures else "no block here is a mixture"
        return f"{NO_ROUTER} ({where})"

    @property
    def num_experts(self) -> int:
        """How many routed experts there are."""
        return self._axis("num_experts")

    @property
    def top_k(self) -> int:
        """How many of them a token goes through."""
        return self._axis("top_k")


class Block(Host):
    """A decoder block: attention and an MLP, each between two RMSNorms, each added to the stream.

    ``layer_input + attention_output == layer_mid`` and ``layer_mid + mlp_output == layer_output``.
    `mlp` is a `Mixture`, or on the first ``num_dense_layers`` blocks a `Dense`, which has three of
    a mixture's values and says of the others why it lacks them.
    """

    self_attn: Attention
    mlp: Mixture

    layer_mid = Value(
        Residual,
        "source{hidden_states = residual + hidden_states}.output",
        "the stream after the attention's add; a write reaches the MLP and the residual",
    )
    mlp_norm_output = Value(Residual, "pre_mlp_layernorm.output", "the normed stream that the MLP reads")
    layer_input = Value(Residual, "input[0]", "the stream entering the block (scaled embeddings on block 0)")
    attention_norm_output = Value(Residual, "input_layernorm.output", "the normed stream that the attention reads")
    mlp_input = Value(Residual, "mlp.input[0]", "what the MLP is called with")
    layer_output = Value(Residual, "output", "the stream leaving the block")

    @staticmethod
    def absent(case: Case) -> str:
        return "the model has no such block"


# -- the family ------------------------------------------------------------------------


def present(config: Any, layer: int, at: str) -> type[Host] | None:
    """The host at ``at`` in block ``layer``."""
    dense = is_dense(config, layer)
    return {
        "": Block,
        "self_attn": Attention,
        "mlp": Dense if dense else Mixture,
        "mlp.shared_experts": None if dense else SharedExpert,
    }[at]


def traits(config: Any, layer: int) -> tuple[str, ...]:
    """``("dense" or "mixture", "sliding" or "full")``."""
    return "dense" if is_dense(config, layer) else "mixture", "sliding" if slides(config, layer) else "full"


def check(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` on ``layer_types`` of the wrong length or of an unknown type."""
    check_layer_types(config, ("full_attention", "sliding_attention"))


def attention_function(case: Case) -> Any:
    """What `AfmoeAttention` calls under this case's implementation."""
    return ALL_ATTENTION_FUNCTIONS.get_interface(case.attn_implementation, eager_attention_forward)


def experts_function(case: Case) -> Any:
    """What `AfmoeExperts` calls under this case's implementation."""
    return ALL_EXPERTS_FUNCTIONS.get_interface(case.experts_implementation, inspect.unwrap(AfmoeExperts.forward))


def attn_implementations() -> list[str]:
    """The attention implementations that transformers calls as one Python function."""
    return ["eager", *(name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if not name.startswith("paged|"))]


def experts_implementations() -> list[str]:
    """The experts implementations that transformers has."""
    return ["eager", *ALL_EXPERTS_FUNCTIONS.valid_keys()]


def tiny(**fields: Any) -> AfmoeConfig:
    """A small config with every feature: both MLPs, both attentions in an irregular order, GQA, muP.

    ``num_heads * head_dim != hidden_size``, and no two axes are of one length.
    """
    defaults: dict[str, Any] = dict(
        vocab_size=261,
        hidden_size=40,
        intermediate_size=56,
        moe_intermediate_size=24,
        num_hidden_layers=5,
        num_dense_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        num_experts=7,
        num_experts_per_tok=3,
        num_shared_experts=1,
        route_scale=2.826,
        sliding_window=8,
        mup_enabled=True,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    layers = fields.get("num_hidden_layers", defaults["num_hidden_layers"])
    pattern = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    defaults["layer_types"] = [pattern[layer % len(pattern)] for layer in range(layers)]
    return AfmoeConfig(**{**defaults, **fields})


AFMOE = register(
    Family(
        name="AFMoE",
        model_type="afmoe",
        architecture=AfmoeForCausalLM,
        config=AfmoeConfig,
        hosts=(Block, Attention, Dense, Mixture, SharedExpert),
        present=present,
        envoys={
            AfmoeDecoderLayer: Block,
            AfmoeAttention: Attention,
            AfmoeSparseMoeBlock: Mixture,
            "mlp.shared_experts": SharedExpert,
            "layers.*.mlp": Dense,
            "model.layers": Layers,
        },
        rename={"model.embed_tokens": "embed_tokens", "model.layers": "layers", "model.norm": "norm"},
        block_call="model.source{decoder_layer()}.input",
        axes={
            "hidden_size": lambda config: config.hidden_size,
            "vocab_size": lambda config: config.vocab_size,
            "num_heads": lambda config: config.num_attention_heads,
            "num_kv_heads": lambda config: config.num_key_value_heads,
            "head_dim": lambda config: config.head_dim,
            "qk_head_dim": lambda config: config.head_dim,
            "intermediate_size": lambda config: config.intermediate_size,
            "num_experts": lambda config: config.num_experts,
            "top_k": lambda config: config.num_experts_per_tok,
        },
        traits=traits,
        every_kind=(("dense", "sliding"), ("dense", "full"), ("mixture", "sliding"), ("mixture", "full")),
        callees={"attention_interface": attention_function, "experts_forward": experts_function},
        attn_implementations=attn_implementations,
        experts_implementations=experts_implementations,
        scan_experts="batched_mm",
        float32=("expert_bias",),
        check=check,
        equations=Pass,
        tiny=tiny,
        schematic=SCHEMATIC,
    )
)
