"""Writes chat_texts.json: what transformers renders for `chat_templates`.

Run it in an environment with transformers: python tests/data/make_chat_fixture.py
"""

import json
import pathlib

import transformers
from chat_templates import SPECIALS, TALKS, TEMPLATES
from transformers.utils.chat_template_utils import render_jinja_template

FILE = pathlib.Path(__file__).parent / "chat_texts.json"


def rendered(text):
    """Returns the text of each of TALKS, and of its first message with the prompt of an answer."""
    texts = [
        render_jinja_template([talk[:count]], chat_template=text, **kinds, **SPECIALS)[0]
        for talk in TALKS
        for count, kinds in ((len(talk), {}), (1, {"add_generation_prompt": True}))
    ]
    return [each[0] for each in texts]


if __name__ == "__main__":
    rows = {name: rendered(text) for name, text in TEMPLATES.items()}
    fields = {"transformers": transformers.__version__, "texts": rows}
    FILE.write_text(json.dumps(fields, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
