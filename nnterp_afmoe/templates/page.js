"use strict";
document.documentElement.classList.add("scripted");
const get = (id) => document.getElementById(id);
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const slider = get("layer"), filter = get("filter"), pins = get("pins"), status = get("status"), drawing = get("drawing");
const parts = new Map(all("g.part", drawing).map((part) => [part.dataset.name, part]));
const cards = new Map(all("[data-card]").map((card) => [card.dataset.card, card]));
const state = { layer: Number(slider.value), pinned: [], filter: "" };

const kind = () => LAYERS[state.layer];
const label = (name) => cards.get(name).dataset.label;
const reason = (name) => JSON.parse(cards.get(name).dataset.missing)[kind()];

function show() {
  get("which").textContent = state.layer;
  get("kind").innerHTML = `<span class="mark k${SIGNS[kind()]}">${MARKS[kind()]}</span> ${KINDS[kind()]}`;
  slider.value = state.layer;
  slider.setAttribute("aria-valuetext", `block ${state.layer}, ${KINDS[kind()]}`);
  all(".ticks .mark").forEach((tick, layer) => tick.classList.toggle("now", layer === state.layer));
  const lacking = new Set([...parts.keys()].filter(reason));
  for (const [name, part] of parts) {
    part.classList.toggle("missing", lacking.has(name));
    part.setAttribute("aria-pressed", String(state.pinned.includes(name)));
    part.setAttribute("aria-label", label(name) + (lacking.has(name) ? `, missing here: ${reason(name)}` : ""));
  }
  for (const wire of all(".wire", drawing)) wire.classList.toggle("missing", wire.dataset.cuts.split(" ").some((name) => lacking.has(name)));
  pins.replaceChildren(...state.pinned.map(pin));
  for (const line of all("[data-line]")) line.classList.toggle("lit", state.pinned.includes(line.dataset.line));
  const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (const row of all("[data-row]")) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    found += Number(!row.hidden && row.id !== "");
  }
  get("found").textContent = words.length ? `${found} values` : "";
  filter.value = state.filter;
  remember();
}

function pin(name) {
  const box = document.createElement("article");
  box.className = "pin";
  box.dataset.pin = name;
  const head = document.createElement("h3"), close = document.createElement("button");
  head.append(label(name), close);
  close.textContent = "unpin";
  close.addEventListener("click", () => toggle(name));
  const body = cards.get(name).cloneNode(true);
  body.removeAttribute("data-card");
  const why = reason(name);
  for (const path of all(".path", body)) path.textContent = path.dataset.path.replace("{layer}", state.layer);
  if (why) for (const code of all("pre.code", body)) {
    const said = document.createElement("p");
    said.className = "lacking";
    said.textContent = `Not on block ${state.layer}: ${why}.`;
    code.replaceWith(said);
  }
  for (const line of all(".having li", body)) line.classList.toggle("here", Number(line.dataset.kind) === kind());
  for (const code of all("pre.code", body)) {
    const copy = document.createElement("button");
    copy.textContent = "copy";
    copy.addEventListener("click", async () => {
      const text = code.textContent.trim();
      try { await navigator.clipboard.writeText(text); } catch { select(code); document.execCommand("copy"); }
      copy.textContent = "copied";
      setTimeout(() => { copy.textContent = "copy"; }, 1500);
    });
    code.after(copy);
  }
  box.append(head, body);
  return box;
}

function select(element) {
  const range = document.createRange();
  range.selectNodeContents(element);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}

function toggle(name) {
  const at = state.pinned.indexOf(name);
  if (at < 0) state.pinned.push(name); else state.pinned.splice(at, 1);
  show();
}

function tell(name) {
  const card = cards.get(name), why = reason(name);
  const layout = all("dd", card)[0].textContent;
  status.textContent = `${label(name)}: ${why ? `missing here: ${why}` : parts.get(name)?.dataset.value ? layout : all(".does", card)[0].textContent}`;
  for (const [other, part] of parts) part.classList.toggle("lit", other === name);
  for (const line of all("[data-line]")) line.classList.toggle("lit", line.dataset.line === name || state.pinned.includes(line.dataset.line));
}

function step(name, key) {
  const place = (other) => { const box = parts.get(other).transform.baseVal.consolidate().matrix; return [box.e, box.f]; };
  const [x, y] = place(name);
  const joined = (from, to) => all(`.wire[data-${from}="${name}"]`, drawing).map((wire) => wire.dataset[to]);
  if (key === "ArrowDown") return joined("from", "to")[0];
  if (key === "ArrowUp") return joined("to", "from")[0];
  const side = key === "ArrowRight" ? 1 : -1;
  return [...parts.keys()].filter((other) => (place(other)[0] - x) * side > 0)
    .sort((a, b) => Math.hypot(place(a)[0] - x, 9 * (place(a)[1] - y)) - Math.hypot(place(b)[0] - x, 9 * (place(b)[1] - y)))[0];
}

function focus(name) {
  for (const part of parts.values()) part.setAttribute("tabindex", "-1");
  parts.get(name).setAttribute("tabindex", "0");
  parts.get(name).focus();
}

for (const [name, part] of parts) {
  part.addEventListener("click", () => toggle(name));
  part.addEventListener("mouseenter", () => tell(name));
  part.addEventListener("focus", () => tell(name));
  part.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(name); }
    if (event.key.startsWith("Arrow")) { event.preventDefault(); const next = step(name, event.key); if (next) focus(next); }
  });
}
for (const link of all("[data-line], .stream a[data-value]")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    const name = link.dataset.name;
    if (!state.pinned.includes(name)) toggle(name);
    if (parts.has(name)) { focus(name); parts.get(name).scrollIntoView({ block: "center" }); } else { pins.scrollIntoView({ block: "center" }); }
  });
  link.addEventListener("mouseenter", () => tell(link.dataset.name));
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { state.pinned = []; show(); }
});
slider.addEventListener("input", () => { state.layer = Number(slider.value); show(); });
for (const tick of all(".ticks .mark")) tick.addEventListener("click", () => { state.layer = Number(tick.dataset.layer); show(); });
filter.addEventListener("input", () => { state.filter = filter.value; show(); });

function remember() {
  const query = new URLSearchParams();
  query.set("block", state.layer);
  if (state.pinned.length) query.set("pins", state.pinned.join(","));
  if (state.filter) query.set("filter", state.filter);
  history.replaceState(null, "", `#${query}`);
}

function recall() {
  if (!location.hash.includes("=")) return;
  const query = new URLSearchParams(location.hash.slice(1));
  const layer = Number(query.get("block"));
  if (Number.isInteger(layer) && layer >= 0 && layer < LAYERS.length) state.layer = layer;
  state.pinned = (query.get("pins") || "").split(",").filter((name) => cards.has(name));
  state.filter = query.get("filter") || "";
}

addEventListener("hashchange", () => { if (location.hash.includes("=")) { recall(); show(); } });
const anchor = location.hash.includes("=") ? "" : location.hash;
recall();
show();
if (anchor) get(anchor.slice(1))?.scrollIntoView();
