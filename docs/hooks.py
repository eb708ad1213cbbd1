"""What the site draws of itself when it is built: the pictures of the guide, by the pinned model."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

PROMPT = (
    "<bos> keep muki suki . keep tari nade . 3 + 4 = 7 . ( [ ] ) . say vepo pode nalo ; vepo pode nalo . fetch muki"
)


def on_files(files: Files, *, config: Any) -> Files:
    """Add ``guide/made/*.svg``."""
    from nnterp_afmoe import pictures
    from nnterp_afmoe.testing import pinned

    model = pinned(attn_implementation="eager")
    with model.edit() as (_, edited):
        edited.layers[5].self_attn.attention_output[:] = 0
    before, after = (pictures.logit_lens(each, PROMPT, token=" suki") for each in (model, edited))
    made = {
        "routing": pictures.routing(model, PROMPT),
        "expert_load": pictures.expert_load(model, PROMPT),
        "expert_choice": pictures.expert_choice(model, PROMPT, layer=3),
        "attention": pictures.attention(model, PROMPT, layer=5, heads=[0, 1, 2]),
        "logit_lens": pictures.logit_lens(model, PROMPT),
        "difference": pictures.difference(before, after),
    }
    for name, picture in made.items():
        files.append(File.generated(config, f"guide/made/{name}.svg", content=picture.standalone()))
    return files
