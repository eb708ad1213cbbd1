"""The pictures' numbers, against the bare transformers model; their words, their cuts, their files."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch
from einops import einsum, rearrange, repeat
from helpers import contrast

from nnterp_afmoe import StandardizedTransformer, Unavailable, pictures
from nnterp_afmoe.drawing import Grid, Label, Picture, Scale
from nnterp_afmoe.testing import pinned, tiny, tiny_module

PROMPT = "<bos> keep muki suki . keep tari nade . keep kizo lozo . say vepo pode nalo kimu ; vepo pode nalo kimu . fetch muki"


@pytest.fixture(scope="module")
def model():
    return pinned(attn_implementation="eager")


@pytest.fixture(scope="module")
def bare(model):
    """What the bare model did with the prompt, by torch's own hooks."""
    seen = {"router": {}, "gate": {}, "value": {}}
    handles = []
    for i, layer in enumerate(model._module.model.layers):
        if layer.moe_enabled:
            handles.append(
                layer.mlp.router.register_forward_hook(lambda _, __, out, i=i: seen["router"].update({i: out}))
            )
        for name, module in (("gate", layer.self_attn.gate_proj), ("value", layer.self_attn.v_proj)):
            handles.append(
                module.register_forward_hook(lambda _, __, out, i=i, name=name: seen[name].update({i: out[0]}))
            )
    ids = torch.tensor([model.tokenizer(PROMPT)["input_ids"]])
    with torch.no_grad():
        out = model._module(ids, output_attentions=True, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    return seen | {"ids": ids[0], "attentions": out.attentions, "streams": out.hidden_states, "logits": out.logits}


def test_routing(model, bare):
    table = pictures.routing(model, PROMPT).table
    assert len(table) == 5 * len(bare["ids"])
    for record in table:
        _, weights, indices = bare["router"][record["layer"]]
        token = record["token"]
        order = weights[token].argsort(descending=True)
        assert record["weight of the first expert"] == pytest.approx(weights[token].max().item(), rel=1e-5)
        assert record["experts"] == indices[token][order].tolist()
        assert sum(record["weights"]) == pytest.approx(model.config.route_scale, abs=2e-3)


def test_expert_load_counts_no_padding(model):
    prompts = [PROMPT, "<bos> say vepo pode ; vepo"]
    counts = {layer: torch.zeros(8) for layer in range(1, 6)}
    for prompt in prompts:
        for layer, indices in model.collect(prompt, "mlp.expert_indices")["mlp.expert_indices"].items():
            counts[layer] += torch.bincount(indices.flatten(), minlength=8)
    for record in pictures.expert_load(model, prompts).table:
        load = counts[record["layer"]]
        expected = load[record["expert"]] / load.mean() - 1
        assert record["load over even, less 1"] == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("token", [3, -1])
def test_expert_choice(model, bare, token):
    picture = pictures.expert_choice(model, PROMPT, 2, token)
    logits, weights, indices = bare["router"][2]
    scores = logits.sigmoid()
    bias = model._module.model.layers[2].mlp.expert_bias
    position = token % len(scores)
    bars = [record for record in picture.table if "score" in record]
    assert sorted(record["expert"] for record in bars) == list(range(8))
    for record in bars:
        expert = record["expert"]
        assert record["score"] == pytest.approx(scores[position, expert].item(), rel=1e-5)
        assert record["score + bias"] - record["score"] == pytest.approx(bias[expert].item(), abs=1e-6)
        assert record["chosen"] == (expert in indices[position])
        weight = weights[position][indices[position] == expert].sum().item()
        assert record["weight"] == pytest.approx(weight, rel=1e-5)
        assert (record["score + bias"] > picture.panels[0].cut) == record["chosen"]
    changed = [
        set(now.tolist()) != set(score.topk(2).indices.tolist()) for now, score in zip(indices, scores, strict=True)
    ]
    assert {record["token"] for record in picture.table if "change" in record} == {
        i for i, yes in enumerate(changed) if yes
    }
    assert f"The bias changed the choice of {sum(changed)} of {len(scores)} tokens." in picture.notes
    for record in (record for record in picture.table if "change" in record):
        token = record["token"]
        now, without = set(indices[token].tolist()), set(scores[token].topk(2).indices.tolist())
        assert record["experts"] == sorted(now - without if record["change"] == "in by the bias" else without - now)


@pytest.mark.parametrize("layer", [1, 2])
def test_attention(model, bare, layer):
    picture = pictures.attention(model, PROMPT, layer)
    pattern = bare["attentions"][layer][0]
    gate = rearrange(bare["gate"][layer].sigmoid(), "seq (head d) -> head seq d", head=6)
    values = repeat(bare["value"][layer], "key (kv d) -> (kv group) key d", kv=2, group=3)
    mixed = einsum(pattern, values, "head query key, head key d -> head query d")
    through = (mixed * gate).norm(dim=-1) / mixed.norm(dim=-1)
    seen = torch.zeros_like(pattern)
    for record in picture.table:
        head, query, key = record["head"], record["query"], record["key"]
        seen[head, query, key] = record["attention"]
        assert record["kv_head"] == head // 3
        assert record["gate"] == pytest.approx(through[head, query].item(), rel=1e-4)
    torch.testing.assert_close(seen, pattern, atol=1e-6, rtol=1e-5)
    reach = {record["query"] - record["key"] for record in picture.table}
    assert reach == set(range(12)) if layer == 1 else reach == set(range(len(pattern[0])))
    assert picture.across == 3


def test_an_edited_gate_is_seen(model):
    with model.edit() as (_, edited):
        edited.layers[1].self_attn.gate_proj.output[:] = -30
    table = pictures.attention(edited, PROMPT, 1).table
    assert max(record["gate"] for record in table) < 1e-6


def test_edited_experts_are_not_laid_to_the_bias(model):
    with model.edit() as (_, edited):
        edited.layers[3].mlp.expert_indices[:] = torch.tensor([0, 1])
    picture, plain = (pictures.expert_choice(each, PROMPT, 3) for each in (edited, model))
    assert picture.notes[0] == plain.notes[0]
    assert "this run was edited" in picture.notes[1]
    assert len(plain.notes) == 1
    assert {record["expert"] for record in picture.table if record.get("chosen")} == {0, 1}


def test_attention_of_some_heads(model):
    assert {record["head"] for record in pictures.attention(model, PROMPT, 1, heads=3).table} == {3}
    assert {record["head"] for record in pictures.attention(model, PROMPT, 1, heads=slice(0, 2)).table} == {0, 1}
    assert {record["head"] for record in pictures.attention(model, PROMPT, -1, heads=[-1, 2]).table} == {5, 2}


def test_the_logit_lens(model, bare):
    table = pictures.logit_lens(model, PROMPT).table
    body = model._module
    for record in table:
        layer, token = record["layer"], record["token"]
        if layer < 5:
            likely = body.lm_head(body.model.norm(bare["streams"][layer + 1][0, token])).softmax(-1)
        else:
            likely = bare["logits"][0, token].softmax(-1)
        assert record["probability"] == pytest.approx(likely.max().item(), rel=1e-4)
        assert record["likeliest"] == model.tokenizer.decode([likely.argmax().item()]).strip()
    (suki,) = model.tokenizer(" suki")["input_ids"]
    for record in pictures.logit_lens(model, PROMPT, layers=-1, token=" suki").table:
        expected = bare["logits"][0, record["token"]].softmax(-1)[suki]
        assert record["probability"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-7)


def test_a_difference(model):
    with model.edit() as (_, edited):
        edited.layers[4].layer_output[:, 3] = 0
    before, after = (pictures.logit_lens(each, PROMPT, token=" suki") for each in (model, edited))
    change = pictures.difference(before, after)
    scale = change.panels[0].scale
    assert scale.centred
    assert scale.colour(0) == "#f7f7f7"
    assert scale.colour(scale.high) != scale.colour(scale.low)
    for old, new, record in zip(before.table, after.table, change.table, strict=True):
        assert record["change of probability"] == pytest.approx(new["probability"] - old["probability"], abs=1e-9)
        if record["layer"] < 4 or record["token"] < 3:
            assert record["change of probability"] == 0
    assert any(record["change of probability"] for record in change.table)
    assert set(pictures.difference(before, before).panels[0].values[0]) == {0.0}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model: pictures.routing(model, ["a", "b"]), "a picture is of one prompt, and this is 2"),
        (lambda model: pictures.logit_lens(model, "a", token=" suki suki"), "' suki suki' is 2 tokens"),
        (lambda model: pictures.routing(model, "a").save("x.png"), "'x.png' ends in neither .html nor .svg"),
        (
            lambda model: pictures.difference(pictures.logit_lens(model, "a"), pictures.logit_lens(model, "a")),
            "the likeliest token of one run may be another in the other; name a token",
        ),
        (
            lambda model: pictures.difference(pictures.expert_load(model, "a"), pictures.attention(model, "a", 1)),
            "two pictures of the same grids",
        ),
        (
            lambda model: pictures.difference(pictures.attention(model, "a", 1), pictures.attention(model, "a b", 1)),
            "two pictures of the same grids",
        ),
        (
            lambda model: pictures.difference(*[pictures.expert_choice(model, "a b", 1)] * 2),
            "two pictures of the same grids",
        ),
        (lambda model: pictures.logit_lens(model, "a", token="suki"), "' suki', with its blank, is one"),
        (lambda model: pictures.logit_lens(model, "a", token=434), "the vocabulary has 434 tokens, 0 to 433"),
        (lambda model: pictures.logit_lens(model, "a", token=True), "token=True: give a string of one token, or an id"),
        (lambda model: pictures.logit_lens(model, "a", token=2.0), "token=2.0: give a string of one token, or an id"),
        (lambda model: pictures.routing(model, "a", layers=[]), r"layers=\[\] names no layer to draw"),
        (lambda model: pictures.expert_load(model, "a", layers=[]), r"layers=\[\] names no layer to draw"),
        (lambda model: pictures.attention(model, "a", [1, 2]), r"layer=\[1, 2\]: this picture is of one layer"),
        (lambda model: pictures.attention(model, "a", 1, heads=6), "heads=6: the model has 6 heads, 0 to 5"),
        (lambda model: pictures.attention(model, "a", 1, heads=[]), r"heads=\[\]: the model has 6 heads"),
        (lambda model: pictures.attention(model, "a", 1, heads="a"), "heads='a': give an index"),
        (lambda model: pictures.expert_choice(model, "a b", 1, token=9), "token=9: the prompt has . tokens"),
        (lambda model: pictures.expert_choice(model, "a", 1, token="a"), "token='a': give an index"),
        (lambda model: pictures.routing(model, ""), "collect needs a prompt"),
        (
            lambda model: pictures.routing(model, {"input_ids": [[0, 5]], "attention_mask": [[0, 1]]}),
            "a picture is of a prompt without padding",
        ),
        (lambda model: pictures.difference(1, 2), "a difference is of two pictures, not of int and int"),
    ],
)
def test_what_it_refuses(model, make, words):
    with pytest.raises((ValueError, TypeError, IndexError), match=words):
        make(model)


def test_what_is_not_there_says_so(model):
    with pytest.raises(Unavailable, match="a dense block has no router"):
        pictures.expert_choice(model, PROMPT, 0)
    with pytest.raises(Unavailable, match="eager"):
        pictures.attention(pinned(), PROMPT, 1)
    with pytest.raises(IndexError, match="the model has 6 layers"):
        pictures.attention(model, PROMPT, 6)


def test_what_is_too_large_is_cut_and_says_so():
    model = tiny(attn_implementation="eager", num_experts=70, num_attention_heads=18, num_key_value_heads=2)
    text = "x" * 100
    assert "Cut: the first 48 of 100 tokens are drawn and in the table." in pictures.routing(model, text).notes
    assert "Cut: the first 64 of 70 experts are drawn and in the table." in pictures.expert_load(model, text).notes
    assert "Cut: the first 32 of 70 experts by score + bias" in pictures.expert_choice(model, text, 2).notes[0]
    assert "Cut: the first 16 of 18 heads" in pictures.attention(model, text, 2).notes[1]
    assert {record["token"] for record in pictures.logit_lens(model, text).table} == set(range(48))
    assert len(pictures.attention(model, text, 2).svg()) < 2_000_000


def test_odd_shapes_and_no_tokenizer():
    model = StandardizedTransformer(
        tiny_module(num_experts_per_tok=1, num_shared_experts=2, attn_implementation="eager")
    )
    ids = torch.randint(3, 200, (1, 11))
    for picture in (
        pictures.routing(model, ids),
        pictures.expert_load(model, ids),
        pictures.expert_choice(model, ids, 2),
        pictures.attention(model, ids, 0),
        pictures.logit_lens(model, ids, token=7),
    ):
        ElementTree.fromstring(picture.svg())
    assert pictures.routing(model, ids).panels[0].columns[4].text == str(ids[0, 4].item())
    with pytest.raises(ValueError, match="no tokenizer to read it with; give an id"):
        pictures.logit_lens(model, ids, token="a")


def test_every_expert_chosen():
    model = tiny(num_experts=3, num_experts_per_tok=3)
    picture = pictures.expert_choice(model, "abc", 2)
    assert picture.notes == ("The bias changed the choice of 0 of 3 tokens.",)
    assert all(record["chosen"] for record in picture.table)


def test_the_files(model, tmp_path):
    picture = pictures.logit_lens(model, PROMPT)
    page = picture.save(tmp_path / "x.html").read_text()
    assert picture.save(tmp_path / "y.html").read_text() == page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in page
    assert "&lt;bos&gt;" in page
    drawn = picture.save(tmp_path / "x.svg").read_text()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert picture._repr_html_().startswith("<div")
    assert "Picture: The logit lens" in repr(picture)
    assert "probability" in page


def test_colour_is_never_alone(model):
    """Every cell and bar says its number."""
    for picture in (pictures.routing(model, PROMPT), pictures.expert_choice(model, PROMPT, 2)):
        root = ElementTree.fromstring(picture.svg())
        space = "{http://www.w3.org/2000/svg}"
        titled = [one for one in root.iter(f"{space}rect") if one.find(f"{space}title") is not None]
        assert len(titled) == len(picture.table)


@pytest.mark.parametrize("number", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("low", [0.0, -1.0])
def test_what_is_printed_on_a_colour_reads(low, number):
    scale = Scale(low, 1.0, "x")

    for value in (number, -number if low else number):
        assert contrast(scale.colour(value), scale.ink(value)) >= 4.5


def test_a_number_that_is_none_has_no_colour():
    grid = Grid(
        [[0.5, float("nan")]], [Label("row")], [Label(0), Label(1)], ("row", "column"), Scale(0, 1, "x"), sparse=0.1
    )
    drawn = Picture("NaN", (grid,)).svg()
    assert drawn.count("\u2715") == 1
    assert "column 1: nan" in drawn
    change = pictures.difference(Picture("a", (grid,)), Picture("b", (grid,)))
    assert change.panels[0].scale.high == 1
    assert "\u2715" in change.svg()


def test_a_model_with_nan_is_pictured_as_it_is():
    model = tiny(attn_implementation="eager")
    with torch.no_grad():
        model.layers[3].mlp._module.experts.down_proj[:] = torch.nan
    for picture in (pictures.logit_lens(model, "abc", token=7), pictures.attention(model, "abc", 4)):
        assert "\u2715" in picture.svg()


def test_a_token_that_does_not_print():
    picture = pictures.logit_lens(tiny(), "a\x00b\x07 \n\u2028", token=7)
    ElementTree.fromstring(picture.svg())
    assert [label.text for label in picture.panels[0].columns][1] == r"\x00"
    grid = Grid([[0.5]], [Label("\x06")], [Label(0, "\ud800")], ("row", "column"), Scale(0, 1, "x"))
    ElementTree.fromstring(Picture("\x01", (grid,)).svg().encode())


def test_embeddings_have_positions_for_tokens(model):
    embeddings = torch.randn(1, 5, model.hidden_size)
    picture = pictures.routing(model, {"inputs_embeds": embeddings})
    assert [label.text for label in picture.panels[0].columns] == list("01234")


def test_a_token_that_looks_like_markup():
    grid = Grid([[0.5]], [Label("<b>&")], [Label(0, "<script>")], ("row", "column"), Scale(0, 1, "x"))
    picture = Picture("a & b <i>", (grid,))
    assert "<script>" not in picture.svg()
    ElementTree.fromstring(picture.svg())
    assert "<i>" not in picture._page()
