"""Wrong use, and the words each error says."""

from __future__ import annotations

import re

import pytest
import torch

from nnterp_afmoe import (
    ConfigError,
    LoadError,
    NoSuchName,
    OutOfOrder,
    OutsideTrace,
    ReadOnly,
    StandardizedTransformer,
    Unavailable,
    UnsupportedModel,
    WriteError,
)
from nnterp_afmoe.testing import byte_tokenizer, tiny, tiny_module


def says(*words: str) -> str:
    return ".*".join(re.escape(word) for word in words)


def test_unavailable_comes_before_the_model_runs(build, ids):
    model = build("irregular", "sdpa")
    ran = []
    hook = model._module.model.embed_tokens.register_forward_hook(lambda *_: ran.append(1))
    with (
        pytest.raises(
            Unavailable,
            match=says(
                "layers[3].self_attn.attention_scores is unavailable: sdpa", "attn_implementation='eager'", "model.set"
            ),
        ),
        model.trace(ids),
    ):
        model.layers[3].self_attn.attention_scores.save()
    hook.remove()
    assert not ran


def test_unavailable_on_another_kind_of_block(build, ids):
    model = build()
    for read, words in [
        (
            lambda: model.layers[0].mlp.router_logits,
            "layers[0].mlp.router_logits is unavailable: a dense block has no router",
        ),
        (
            lambda: model.layers[2].mlp.mlp_neurons,
            "layers[2].mlp.mlp_neurons is unavailable: a mixture has no single set",
        ),
        (
            lambda: model.layers[2].mlp.shared_experts.mlp_output,
            "the shared expert's own output is mlp.shared_expert_output",
        ),
    ]:
        with pytest.raises(Unavailable, match=says(words)):
            read()
        with pytest.raises(Unavailable, match=says(words)), model.trace(ids):
            read()
    assert not issubclass(Unavailable, AttributeError)
    with pytest.raises(
        Unavailable, match=says("layers[0].mlp.shared_experts is unavailable: a dense block has no shared expert")
    ):
        model.layers[0].mlp.shared_experts.mlp_neurons
    assert not hasattr(model.layers[0].mlp, "experts")


def test_unavailable_is_raised_by_an_assignment_too(build, ids):
    model = build("irregular", "sdpa")
    with pytest.raises(Unavailable, match="attention_scores"), model.trace(ids):
        model.layers[0].self_attn.attention_scores = torch.zeros(1)


def test_outside_a_trace(build):
    model = build()
    with pytest.raises(
        OutsideTrace,
        match=says("layers[1].layer_output can be read only while the model runs", "with model.trace", "support()"),
    ):
        model.layers[1].layer_output
    with pytest.raises(OutsideTrace, match=says("layers[1].layer_output can be assigned only")):
        model.layers[1].layer_output = torch.zeros(1)
    with pytest.raises(OutsideTrace, match="support"):
        hasattr(model.layers[1], "layer_output")


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (
            torch.zeros(2, 13, 41),
            WriteError,
            "layers[2].layer_output is Residual [batch seq hidden_size] = [2, 13, 40] here; the tensor assigned has shape [2, 13, 41]",
        ),
        (torch.zeros(40), WriteError, "has shape [40]"),
        (
            torch.zeros(2, 13, 40, dtype=torch.int64),
            WriteError,
            "of torch.float32; the tensor assigned is torch.int64, of another kind",
        ),
        (
            torch.zeros(2, 13, 40, device="meta"),
            WriteError,
            "on cpu; the tensor assigned is on meta: move it with .to(",
        ),
        (0.0, WriteError, "it takes a torch.Tensor, not float. To fill it, write in place: `layer_output[:] = ...`"),
        (torch.zeros(2, 13, 40).numpy(), WriteError, "not ndarray"),
        (None, WriteError, "not NoneType"),
    ],
)
def test_a_write_that_does_not_fit(build, ids, value, error, words):
    model = build()
    with pytest.raises(error, match=says(words)), torch.no_grad(), model.trace(ids):
        model.layers[2].layer_output = value
    # Nothing is left behind: the next run is as if it had not been.
    with torch.no_grad(), model.trace(ids):
        model.logits.save()


def test_a_write_to_a_reshaped_value_that_does_not_fit(build, ids):
    model = build()
    with (
        pytest.raises(
            WriteError,
            match=says("layers[3].mlp.expert_weights is ExpertWeights [batch seq top_k] = [2, 13, 3] here", "[26, 3]"),
        ),
        model.trace(ids),
    ):
        model.layers[3].mlp.expert_weights = torch.zeros(26, 3)
    with (
        pytest.raises(WriteError, match=says("expert_indices", "torch.int64; the tensor assigned is torch.float32")),
        model.trace(ids),
    ):
        model.layers[3].mlp.expert_indices = torch.zeros(2, 13, 3)


def test_another_precision_of_the_same_kind_is_cast(build, ids):
    model = build()
    with torch.no_grad(), model.trace(ids):
        model.layers[2].layer_output = torch.ones(2, 13, 40, dtype=torch.float64)
        after = model.layers[3].layer_input.save()
    assert after.dtype is torch.float32
    assert (after == 1).all()


def test_read_only(build, ids):
    model = build()
    for name in ("next_token_probs", "input_size"):
        with pytest.raises(ReadOnly, match=f"{name} is read-only"), model.trace(ids):
            setattr(model, name, torch.zeros(2, 261))


def test_a_typo_offers_near_names(build, ids):
    model = build()
    with pytest.raises(
        NoSuchName, match=says("model.model.layers.0 (Block) has no 'layer_ouptut'; near names: layer_output")
    ):
        model.layers[0].layer_ouptut
    with pytest.raises(NoSuchName, match=says("'expert_weigths'; near names: expert_weights")), model.trace(ids):
        model.layers[3].mlp.expert_weigths
    with (
        pytest.raises(NoSuchName, match=says("has nothing to assign at 'layer_ouptut'; near names: layer_output")),
        model.trace(ids),
    ):
        model.layers[0].layer_ouptut = torch.zeros(2, 13, 40)
    with pytest.raises(NoSuchName, match=says("'logit'; near names: logits")), model.trace(ids):
        model.logit = torch.zeros(1)
    assert not hasattr(model.layers[0], "nothing_like_it")


def test_a_layer_out_of_range(build):
    model = build()
    assert model.layers[-1] is model.layers[4]
    for index in (5, -6):
        with pytest.raises(IndexError, match=says(f"layers[{index}]: the model has 5 layers, 0 to 4")):
            model.layers[index]


def test_out_of_order_in_a_plain_trace(build, ids):
    model = build()
    words = says(
        "layers[1].layer_output was asked for after layers[3].mlp.expert_weights, but the forward pass comes to it before",
        "model.order()",
        "model.rank(name, layer)",
    )
    with pytest.raises(OutOfOrder, match=words), model.trace(ids):
        model.layers[3].mlp.expert_weights.save()
        model.layers[1].layer_output.save()
    with pytest.raises(OutOfOrder, match="attention_scores was asked for after"), model.trace(ids):
        model.layers[1].layer_output.save()
        model.layers[1].self_attn.attention_scores.save()


def test_another_model_type(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)
    with pytest.raises(
        UnsupportedModel, match=says("GPT2LMHeadModel is of model type 'gpt2'; supported: afmoe (AfmoeForCausalLM)")
    ):
        StandardizedTransformer(GPT2LMHeadModel(config))
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=says("is of model type 'gpt2'; supported: afmoe")):
        StandardizedTransformer(str(tmp_path))
    with pytest.raises(UnsupportedModel, match="Linear is of no model type"):
        StandardizedTransformer(torch.nn.Linear(1, 1))
    with pytest.raises(UnsupportedModel, match="AfmoeModel is of model type 'afmoe'"):
        StandardizedTransformer(tiny_module().model)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(LoadError, match=says(str(tmp_path), "has no config.json")):
        StandardizedTransformer(str(tmp_path))
    with pytest.raises(LoadError, match=says("there is no folder", "nowhere")):
        StandardizedTransformer(str(tmp_path / "nowhere"))
    with pytest.raises(LoadError, match="not a int"):
        StandardizedTransformer(3)  # pyright: ignore


def test_a_config_that_contradicts_itself(tmp_path):
    import json

    tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for types, words in [
        (
            ["full_attention"],
            "lists 1 layer_types for num_hidden_layers=5; give one of full_attention, sliding_attention",
        ),
        (
            ["full_attention"] * 4 + ["chunked_attention"],
            "layer_types has chunked_attention; this family knows full_attention",
        ),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": types}))
        with pytest.raises(ConfigError, match=says(words)):
            StandardizedTransformer(str(tmp_path))


def test_an_unknown_keyword(tmp_path):
    tiny(tmp_path)
    with pytest.raises(
        LoadError, match=says("unknown keyword 'atn_implementation'", "near names: attn_implementation")
    ):
        StandardizedTransformer(str(tmp_path), atn_implementation="eager")
    with pytest.raises(
        LoadError,
        match=says("attn_implementation= can't apply to a model that is loaded already", "set_attn_implementation"),
    ):
        StandardizedTransformer(tiny_module(), attn_implementation="eager")


def test_a_string_without_a_tokenizer(ids):
    model = StandardizedTransformer(tiny_module())
    with torch.no_grad(), model.trace(ids):
        model.logits.save()
    with pytest.raises(LoadError, match=says("has no tokenizer", "tokenizer=")), model.trace("a prompt"):
        model.logits.save()


def test_a_folder_without_a_tokenizer(tmp_path):
    tiny_module().save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=says("no tokenizer found for", "pass one as tokenizer=")):
        StandardizedTransformer(str(tmp_path))
    assert StandardizedTransformer(str(tmp_path), tokenizer=byte_tokenizer()).tokenizer is not None
