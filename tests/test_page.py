"""What notebooks show of a model, and the encyclopedia page: all of it the table's, of any config, within its size."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from conftest import CONFIGS
from helpers import contrast, trinity
from transformers import AfmoeConfig, PreTrainedConfig

import nnterp_afmoe
from nnterp_afmoe import StandardizedTransformer, families
from nnterp_afmoe.cli import main
from nnterp_afmoe.family import FAMILIES
from nnterp_afmoe.pages import page
from nnterp_afmoe.places import parse
from nnterp_afmoe.testing import tiny

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
FAMILY = families.AFMOE
BLOCK = {host.dotted(name): value for host in FAMILY.hosts for name, value in host.values().items()}
MODEL = StandardizedTransformer.values()


# -- the schematic -------------------------------------------------------------------------


def test_every_value_stands_in_the_drawing_once():
    drawn = [part.name for part in FAMILY.schematic.block if not part.label]
    assert sorted(drawn) == sorted(BLOCK)
    assert sorted(part.name for part in FAMILY.schematic.stream if not part.label) == sorted(MODEL)


def test_the_drawing_holds_together():
    for parts in (FAMILY.schematic.block, FAMILY.schematic.stream):
        names = [part.name for part in parts]
        assert len(set(names)) == len(names)
        assert len({part.at for part in parts}) == len(parts)
        for index, part in enumerate(parts):
            assert set(part.after) <= set(names[:index]), part.name
            assert bool(part.does) == bool(part.label), part.name


def test_the_drawing_flows_as_the_model_runs():
    """Along every path, a value stands after those that one trace has to ask for before it."""
    model = tiny(attn_implementation="eager")
    parts = {part.name: part for part in FAMILY.schematic.block}

    def before(name):
        return {source for direct in parts[name].after for source in {direct, *before(direct)}}

    for layer in range(model.num_layers):
        order = model.order(layer)
        for name in order:
            for source in before(name) & set(order):
                assert order.index(source) < order.index(name), (layer, source, name)


def test_every_part_names_a_module_that_is_there():
    model = tiny()
    for layer in range(model.num_layers):
        case = FAMILY.case(model.config, layer)
        for part in FAMILY.schematic.block:
            if part.module and not (part.missing and part.missing(case)):
                assert model.layers[layer].get(part.module) is not None


def test_every_field_of_the_config_has_words_and_no_other():
    shared = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = {field.name for field in dataclasses.fields(AfmoeConfig)} - shared
    words = set(FAMILY.schematic.fields)
    assert own <= words
    assert words <= own | shared | set(AfmoeConfig().to_dict())


# -- the page ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_the_page_of_any_config(build, name):
    model = build(name, "sdpa")
    html = page(model)
    assert html == page(model)
    assert len(html.encode()) <= 400_000
    assert not re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"", html)
    assert "://" not in html
    for layer in range(model.num_layers):
        assert f'data-layer="{layer}"' in html
    for kind, layers in model.family.kinds(model.config).items():
        assert f"{', '.join(kind)}" in html, layers


@pytest.mark.parametrize("name", ["nano", "large"])
def test_the_pages_of_the_docs_are_up_to_date(name, capsys):
    file = ROOT / "docs" / "pages" / "encyclopedia" / f"{name}.html"
    assert main(["page", str(DATA / f"trinity_{name}"), "-o", str(file), "--check"]) == 0, capsys.readouterr().err
    assert len(file.read_bytes()) <= 400_000


def test_the_words_are_the_tables():
    text = unescape(page(trinity("nano")))
    for value in {**BLOCK, **MODEL}.values():
        assert value.description in text
        assert str(value.place) in text
        assert str(value.layout or "").partition(" ")[0] in text
    for name, reason in trinity("nano").support(layer=0).items():
        assert reason is None or reason in text, name
    assert "there under attn_implementation='eager'" in text
    for layer in FAMILY.schematic.notes:
        assert layer.title in text


def test_the_state_of_every_kind_is_the_supports():
    model = trinity("nano")
    html = page(model)
    for name in BLOCK:
        (said,) = re.findall(rf'data-card="{re.escape(name)}" data-label="[^"]*" data-missing="([^"]*)"', html)
        reasons = json.loads(unescape(said))
        for index, layers in enumerate(model.family.kinds(model.config).values()):
            for layer in layers:
                assert (model.support(layer=layer)[name] or "") == reasons[index]


def test_a_place_is_written_as_it_is_parsed():
    for value in {**BLOCK, **MODEL}.values():
        assert parse(str(value.place)) == value.place


def test_the_command(tmp_path, capsys):
    out, folder = tmp_path / "page.html", str(DATA / "trinity_nano")
    assert main(["page", folder, "-o", str(out), "--check"]) == 1
    assert "is not there" in capsys.readouterr().err
    assert main(["page", folder, "-o", str(out)]) == 0
    assert out.read_text() == trinity("nano").page()
    assert main(["page", folder, "-o", str(out), "--check"]) == 0
    out.write_text(out.read_text().replace("router", "rooter"))
    assert main(["page", folder, "-o", str(out), "--check"]) == 1
    assert "is stale" in capsys.readouterr().err
    assert main(["page", folder, "-o", str(out), "--attn", "eager"]) == 0
    assert main(["page", folder, "-o", str(out), "--check"]) == 1


def test_a_family_without_a_page():
    model = tiny()
    object.__setattr__(model, "family", dataclasses.replace(FAMILIES["afmoe"], schematic=None))
    with pytest.raises(NotImplementedError, match="the AFMoE family declares no page"):
        model.page()


def test_the_code_on_every_card_runs(tmp_path):
    """Each value is read by its card's lines, and what was read is written back by them."""
    model = tiny(attn_implementation="eager")
    html = page(model)
    cards = re.findall(r'data-card="([^"]+)".*?(?=data-card=|</main>)', html, re.DOTALL)
    assert len(cards) == len(set(cards))
    lines = [
        "from nnterp_afmoe.testing import tiny",
        "model = tiny(attn_implementation='eager')",
        "prompt = 'some text'",
    ]
    for name, code in re.findall(
        r'data-card="([^"]+)"(?:(?!data-card).)*?<pre class="code"[^>]*><code>(.*?)</code>', html, re.DOTALL
    ):
        text = unescape(re.sub(r"<[^>]+>", "", code))
        read, _, write = text.partition("\n\n")
        lines += [read, "new = value.clone()", write] if write else [read]
        if name in BLOCK or name in MODEL:
            assert f".{name}" in read
            assert bool(write) == (name not in ("next_token_probs", "input_size")), name
        lines.append(f"print({name!r})")
    script = tmp_path / "cards.py"
    script.write_text("\n".join(lines))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    never = {name for name in BLOCK if all(model.support(layer=layer)[name] for layer in range(model.num_layers))}
    assert never == {"mlp.shared_experts.mlp_output"}
    assert (set(BLOCK) | set(MODEL)) - never <= set(done.stdout.split())


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_colour_reads_on_what_it_stands_on(scheme):
    """axe looks at HTML alone; the drawing's colours are these."""
    styles = (Path(nnterp_afmoe.__file__).parent / "templates" / "page.css").read_text()
    colours = dict(re.findall(r"--([\w]+): (#\w{6})", styles.split(":root")[scheme + 1]))

    for ink in ("ink", "soft", "edge", "k0", "k1", "k2", "k3"):
        for paper in ("paper", "fill") if ink != "soft" else ("paper", "fill", "pin"):
            assert contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)
    for paper in ("value", "pin"):
        assert contrast(colours["ink"], colours[paper]) >= 4.5, paper


# -- what a notebook shows -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["nano", "large"])
def test_a_notebook_shows_cards(name):
    model = trinity(name)
    html = model._repr_html_()
    assert len(html.encode()) <= 40_000
    assert "<script" not in html
    assert "://" not in html
    assert "url(" not in html
    text = unescape(html)
    assert html.count("<details>") == len(model.family.kinds(model.config)) + 1
    for value, reason in model.support(layer=0).items():
        assert f"<code>{value}</code>" in text
        assert reason is None or reason in text
    assert f"hidden_size={model.hidden_size}" in text
    assert "none yet: no weights are loaded" in text
    assert f"{sum(parameter.numel() for parameter in model._module.parameters()):,}" in text


def test_the_cards_follow_the_question():
    model = tiny()
    assert "attn_implementation='eager'" in unescape(model._repr_html_())
    assert model.support()._repr_html_() == model._repr_html_()
    eager = unescape(model.support(attn_implementation="eager")._repr_html_())
    assert "not here: sdpa attention" not in eager
    assert "<b>attention</b> eager" in eager
    assert "<b>devices</b> cpu" in eager
    assert "<b>dtype</b> float32" in eager


def test_the_shared_expert_has_its_own_width():
    html = tiny(num_shared_experts=2)._repr_html_()
    assert "intermediate_size=48" in html
    assert "intermediate_size=56" in html
