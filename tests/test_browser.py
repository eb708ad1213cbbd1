"""The pages and pictures in a real browser: Debian's chromium, from disk, with the network blocked.

It needs the ``browser`` extra, chromium, and axe-core's axe.min.js named by ``AXE``; without them it
is skipped, unless ``REQUIRE_BROWSER`` says that it has to run. Screenshots are left in ``SCREENSHOTS`` where that is set.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from helpers import trinity

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
AXE = Path(os.environ.get("AXE", "/nowhere"))

if not os.environ.get("REQUIRE_BROWSER"):
    pytest.importorskip("playwright", reason="the browser extra is not installed")
    if not os.path.exists(CHROMIUM) or not AXE.exists():
        pytest.skip("there is no chromium, or AXE does not name axe.min.js", allow_module_level=True)

from playwright.sync_api import expect, sync_playwright  # noqa: E402  after the skip

PAGES = {name: ROOT / "docs" / "pages" / "encyclopedia" / f"{name}.html" for name in ("nano", "large")}
LAYERS = {"nano": 56, "large": 60}
QUIET = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
]
QUIET += ["--disable-sync", "--no-sandbox"]


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield launched
        launched.close()


@pytest.fixture
def screenshots(tmp_path):
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def visit(browser):
    """Open a file; afterwards nothing was asked of the network and nothing was complained of."""
    opened = []

    def go(path, fragment="", **options):
        context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, "offline": True, **options})
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = context.new_page()
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url) if not request.url.startswith("file:") else None)
        page.goto(f"{Path(path).as_uri()}{fragment}")
        opened.append((context, said, asked))
        return page

    yield go
    for context, said, asked in opened:
        context.close()
        assert not said
        assert not asked


def names(page, selector):
    return set(page.eval_on_selector_all(f"{selector}[data-value]", "found => found.map(one => one.dataset.value)"))


def table():
    from nnterp_afmoe import StandardizedTransformer, families

    block = {host.dotted(name) for host in families.AFMOE.hosts for name in host.values()}
    return block, set(StandardizedTransformer.values())


@pytest.mark.parametrize("name", PAGES)
def test_every_value_is_drawn_listed_and_printed_and_nothing_else(visit, name):
    page = visit(PAGES[name])
    block, root = table()
    assert names(page, "#drawing ") == block
    assert names(page, ".stream ") == root
    assert names(page, ".printout ") == block | root
    listed = page.eval_on_selector_all("details.row[id]", "rows => rows.map(row => row.dataset.row)")
    assert len(listed) == len(set(listed))
    assert set(listed) == block | root


@pytest.mark.parametrize("name", PAGES)
def test_slide_through_every_block(visit, name):
    model = trinity(name)
    page = visit(PAGES[name])
    slider = page.locator("#layer")
    slider.focus()
    slider.press("Home")
    for layer in range(LAYERS[name]):
        assert page.locator("#which").inner_text() == str(layer)
        assert page.locator("#kind").inner_text().split(maxsplit=1)[1] == ", ".join(
            model.family.traits(model.config, layer)
        )
        missing = {value for value, reason in model.support(layer=layer).items() if reason}
        assert names(page, "#drawing .missing") == missing
        rotary = page.locator('g[data-name="q_rotary"]')
        slides = model.config.layer_types[layer] == "sliding_attention"
        assert ("missing" in rotary.get_attribute("class").split()) != slides
        slider.press("ArrowRight")
    assert page.locator("#which").inner_text() == str(LAYERS[name] - 1)


def test_pins_by_mouse_and_by_keyboard(visit):
    page = visit(PAGES["nano"], "#block=2")
    page.locator('g[data-name="mlp.router_logits"]').click()
    page.locator('g[data-name="layer_mid"]').click()
    pins = page.locator(".pin")
    expect(pins).to_have_count(2)
    expect(pins.nth(0)).to_contain_text("model.layers[2].mlp.router_logits")
    first, second = (pins.nth(i).bounding_box() for i in (0, 1))
    assert first["y"] != second["y"] or first["x"] != second["x"]
    page.keyboard.press("Escape")
    expect(pins).to_have_count(0)
    start = page.locator('g[data-name="layer_input"]')
    start.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.name") == "input_layernorm"
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.name") == "attention_norm_output"
    assert "hidden_size=1024" in page.locator("#status").inner_text()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    expect(pins).to_have_count(2)
    assert page.locator('g[data-name="attention_norm_output"]').get_attribute("aria-pressed") == "true"
    page.keyboard.press("Enter")
    expect(pins).to_have_count(1)


def test_the_drawing_is_reached_by_tab_alone_and_walked_through(visit):
    page = visit(PAGES["nano"], "#block=2")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('#drawing') !== null"):
            break
    seen = [page.evaluate("document.activeElement.dataset.name")]
    for _ in range(60):
        page.keyboard.press("ArrowDown")
        name = page.evaluate("document.activeElement.dataset.name")
        if name == seen[-1]:
            break
        seen.append(name)
    assert seen[0] == "layer_input"
    assert seen[-1] == "layer_output"


def test_copy(visit):
    page = visit(PAGES["nano"], "#block=5&pins=mlp.expert_weights")
    page.locator(".pin button", has_text="copy").click()
    text = page.evaluate("navigator.clipboard.readText()")
    assert "value = model.layers[5].mlp.expert_weights.save()" in text
    assert "model.layers[5].mlp.expert_weights = new" in text
    compile(text, "copied", "exec")


def test_the_state_is_in_the_address(visit):
    page = visit(PAGES["large"], "#block=7&pins=q_rotary,mlp.routed_output&filter=expert")
    assert page.locator("#which").inner_text() == "7"
    expect(page.locator(".pin")).to_have_count(2)
    assert page.locator("#filter").input_value() == "expert"
    page.locator("#filter").fill("router")
    page.locator(".pin button", has_text="unpin").first.click()
    again = visit(PAGES["large"], page.evaluate("location.hash"))
    assert again.locator("#filter").input_value() == "router"
    expect(again.locator(".pin")).to_have_count(1)


def test_an_address_of_nonsense(visit):
    page = visit(PAGES["large"], "#block=999&pins=nothing,layer_mid&filter=%3Cb%3E")
    expect(page.locator(".pin")).to_have_count(1)
    assert page.locator("#found").inner_text() == "0 values"


def test_filter(visit):
    page = visit(PAGES["nano"])
    page.locator("#filter").fill("router_logits")
    shown = page.locator("details.row[id]:visible")
    assert page.locator("#found").inner_text() == f"{shown.count()} values"
    assert 0 < shown.count() < 10
    expect(page.locator('details[data-row="mlp.router_logits"]')).to_be_visible()
    expect(page.locator('details[data-row="layer_mid"]')).to_be_hidden()
    page.locator("#filter").fill("")
    expect(page.locator('details[data-row="layer_mid"]')).to_be_visible()


def test_the_printout_and_the_drawing_lead_to_each_other(visit):
    page = visit(PAGES["nano"], "#block=2")
    page.locator('[data-line="mlp.router_logits"]').first.click()
    assert page.evaluate("document.activeElement.dataset.name") == "mlp.router_logits"
    expect(page.locator(".pin")).to_have_count(1)
    page.locator('g[data-name="layer_mid"]').hover()
    assert page.locator('[data-line="layer_mid"].lit').count() > 0


def test_what_the_load_decides_is_marked(visit):
    page = visit(PAGES["nano"])
    marked = page.eval_on_selector_all(
        "details.row[id]",
        "rows => rows.filter(row => row.querySelector('summary').textContent.includes('\u2699')).map(row => row.dataset.row)",
    )
    assert set(marked) == {
        "self_attn.attention_scores",
        "self_attn.attention_probabilities",
        "mlp.expert_outputs",
    }


def test_without_javascript(visit, screenshots):
    page = visit(PAGES["nano"], java_script_enabled=False)
    expect(page.locator("#layer")).to_be_visible()
    expect(page.locator("#filter")).to_be_hidden()
    page.locator('details[data-row="mlp.expert_weights"] summary').click()
    expect(page.locator('details[data-row="mlp.expert_weights"]')).to_contain_text("summing to route_scale")
    expect(page.locator("#drawing")).to_contain_text("attention_queries")
    page.screenshot(path=screenshots / "no_javascript.png", full_page=True)


LOOKS = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "narrow": {"viewport": {"width": 360, "height": 780}},
    "still": {"reduced_motion": "reduce"},
}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("look", LOOKS)
def test_it_looks_well_and_axe_finds_nothing_serious(visit, screenshots, name, look):
    page = visit(PAGES[name], "#block=3&pins=self_attn.attention_queries,mlp.router_logits,q_rotary", **LOOKS[look])
    page.screenshot(path=screenshots / f"{name}_{look}.png", full_page=True)
    wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide[0] <= wide[1]
    assert serious(page) == []
    if look == "still":
        assert page.eval_on_selector("#drawing rect", "rect => getComputedStyle(rect).transitionDuration") == "0s"


def test_print(visit, screenshots):
    page = visit(PAGES["nano"], "#block=3&pins=mlp.router_logits")
    page.emulate_media(media="print")
    expect(page.locator("#filter")).to_be_hidden()
    expect(page.locator("#layer")).to_be_hidden()
    card = page.locator('details[data-row="mlp.expert_weights"] .card')
    assert card.bounding_box()["height"] > 50  # what is folded is printed all the same
    page.screenshot(path=screenshots / "print.png", full_page=True)
    page.pdf(path=screenshots / "print.pdf")


def serious(page) -> list[str]:
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'best-practice']})")
    return [
        f"{violation['id']}: {node['html'][:200]} {json.dumps(node['any'][0]['data'] if node['any'] else '')}"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"][:3]
    ]


# -- what a notebook shows -----------------------------------------------------------------


def shown(tmp_path, name, content):
    path = tmp_path / f"{name}.html"
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f"<title>{name}</title><body><main><h1>{name}</h1>{content}</main></body></html>"
    )
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_cards_of_a_notebook(visit, screenshots, tmp_path, scheme):
    model = trinity("nano")
    page = visit(shown(tmp_path, "cards", model._repr_html_()), color_scheme=scheme)
    for summary in page.locator("summary").all():
        summary.click()
    page.screenshot(path=screenshots / f"cards_{scheme}.png", full_page=True)
    expect(page.get_by_text("a dense block has no router").first).to_be_visible()
    assert serious(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pictures(visit, screenshots, tmp_path, scheme):
    from nnterp_afmoe import pictures
    from nnterp_afmoe.testing import pinned

    model = pinned(attn_implementation="eager")
    prompt = "<bos> keep muki suki . keep tari nade . ( [ ] ) . say vepo pode nalo ; vepo pode nalo . fetch muki"
    with model.edit() as (_, edited):
        edited.layers[2].self_attn.attention_output[:] = 0
    made = {
        "routing": pictures.routing(model, prompt),
        "load": pictures.expert_load(model, prompt),
        "choice": pictures.expert_choice(model, prompt, 3),
        "attention": pictures.attention(model, prompt, 1),
        "lens": pictures.logit_lens(model, prompt),
        "difference": pictures.difference(
            pictures.logit_lens(model, prompt, token=" suki"), pictures.logit_lens(edited, prompt, token=" suki")
        ),
    }
    for name, picture in made.items():
        page = visit(
            picture.save(tmp_path / f"{name}.html"), color_scheme=scheme, viewport={"width": 1300, "height": 700}
        )
        page.screenshot(path=screenshots / f"picture_{name}_{scheme}.png", full_page=True)
        assert serious(page) == []
        visit(picture.save(tmp_path / f"{name}.svg")).close()
