"""The diagrams of the documentation are those of tools/draw_diagrams.py, and readable at 480 pixels."""

from __future__ import annotations

import re

import pytest
from PIL import ImageFont

import draw_diagrams


@pytest.mark.parametrize("name", draw_diagrams.DRAWINGS)
def test_the_file_is_that_of_the_script(name):
    text = (draw_diagrams.FOLDER / f"{name}.svg").read_text()
    assert text == draw_diagrams.DRAWINGS[name]().svg(), "run: python tools/draw_diagrams.py"


@pytest.mark.parametrize("name", draw_diagrams.DRAWINGS)
def test_texts_are_large_and_within_the_drawing(name):
    text = draw_diagrams.DRAWINGS[name]().svg()
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" font-size="(\d+)" text-anchor="(\w+)"[^>]*>([^<]+)<', text)
    assert len(texts) > 5
    for x, _, size, anchor, words in texts:
        assert int(size) >= 12
        width = ImageFont.load_default(int(size)).getlength(words)
        left = float(x) - {"start": 0, "middle": width / 2, "end": width}[anchor]
        assert left >= 0 and left + width <= draw_diagrams.WIDTH, words
