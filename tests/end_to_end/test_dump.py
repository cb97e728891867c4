"""FASA_DUMP: the graphs of each stage, as files; and inner compilers that take no mode."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
import torch
from models import cache_for, decode, llama_profile, tiny_llama

from fasa_compile import explain, fasa_backend

IDS = torch.randint(0, 512, (1, 20), generator=torch.Generator().manual_seed(3))


def run(backend, **how):
    torch._dynamo.reset()
    model = tiny_llama(layers=1)
    decode(model, torch.compile(model, backend=backend, **how), IDS, cache_for(model, "static"), 2)


def made(**how):
    return fasa_backend(llama_profile(1, n_fac=8), check_weights=False, **({"inner": "eager"} | how))


def test_every_stage_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("FASA_DUMP", str(tmp_path))
    run(made())
    run(made())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph-000", "graph-001"]
    files = {p.name: p.read_text() for p in (tmp_path / "graph-001").iterdir()}
    assert sorted(files) == ["0-dynamo.txt", "1-shadow.txt", "2-sites.txt", "3-plan.txt", "4-rewritten.txt"]
    assert "scaled_dot_product_attention" in files["0-dynamo.txt"]
    assert "index_copy" in files["1-shadow.txt"]
    assert "rope: half-split, 32 dims" in files["2-sites.txt"]
    assert "sparse" in files["3-plan.txt"]
    assert "sparse_decode" in files["4-rewritten.txt"]
    assert "scaled_dot_product_attention" not in files["4-rewritten.txt"]


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FASA_DUMP", str(tmp_path / "file"))
    run(made())
    assert "could not be written" in caplog.text


def test_an_inner_compiler_that_takes_no_mode_is_called_without():
    seen = []

    def inner(gm, example_inputs):
        seen.append(gm)
        return gm.forward

    run(made(inner=inner), mode="reduce-overhead")
    assert seen


def test_an_inner_compiler_that_takes_a_mode_gets_it():
    seen = []

    def inner(gm, example_inputs, mode=None):
        seen.append(mode)
        return gm.forward

    run(made(inner=inner), mode="reduce-overhead")
    assert seen == ["reduce-overhead"]


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("rect",):
            assert self.open.pop() == tag


@pytest.fixture
def report():
    backend = made()
    run(backend)
    return backend.explain()


def test_html_is_one_well_formed_file(report):
    text = report.html()
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    # The picture in the site's own row; the maps of all layers have wider cells.
    cells = [attrs["fill"] for tag, attrs in tags.seen if tag == "rect" and attrs["width"] == "4"]
    assert len(cells) == 2 * 16  # KV heads x frequency chunks
    assert cells.count("#0a6b2d") == 2 * 8  # n_tip of them dominant
    assert not any("src" in attrs or "href" in attrs for _, attrs in tags.seen), "it must need no other file"
    assert "model.layers.0.self_attn" in text and "half-split 32/32" in text


def test_json_says_its_schema_and_the_frequencies(report):
    document = json.loads(report.json())
    assert document["schema"] == 1
    (row,) = document["rows"]
    assert (row["n_fc"], [len(head) for head in row["dominant"]]) == (16, [8, 8])


def test_several_backends_have_graphs_of_their_own_numbers():
    first, second = made(), made()
    run(first)
    run(second)
    merged = explain()
    assert len({g.index for g in merged.graphs}) == len(merged.graphs) >= 2
    mine = [row for row in merged.rows if row.layer == "model.layers.0.self_attn"]
    assert len({row.graph for row in mine}) == len(mine) >= 2
