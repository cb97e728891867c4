"""Files that are no models, and what a skeleton is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from fasa_compile import ModelError, fasa_backend, loading

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 96, "tie_word_embeddings": True,
}  # fmt: skip


def config(tmp_path: Path, **changes: object) -> loading.Source:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    return loading.source(tmp_path / "config.json")


def test_a_folder_with_a_gguf_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"holds some\.gguf: name that file"):
        loading.source(tmp_path)
    found = loading.source(tmp_path / "some.gguf")
    assert (found.kind, found.name, found.has_weights) == ("gguf", "some.gguf", True)
    with pytest.raises(ModelError, match="transformers cannot read the configuration"):
        loading.configuration(found)
    with pytest.raises(ModelError, match="the model cannot be loaded"):
        loading.load(found)


def test_shapes_that_ship_and_a_file_of_that_name_that_comes_first(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "config.json").write_text(json.dumps(LLAMA))
    found = loading.source("llama-3.1-8b")
    assert not found.has_weights
    shapes = loading.configuration(found)
    assert (shapes.num_hidden_layers, shapes.head_dim, shapes.rope_parameters["rope_type"]) == (32, 128, "llama3")
    with torch.device("meta"):
        model = loading.random_model(shapes, "meta")
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248  # what its card says
    assert loading.configuration(loading.source("smollm2-135m")).num_hidden_layers == 3
    with pytest.raises(ModelError, match=r"shapes that ship: llama-3\.1-8b, smollm2-135m$") as refused:
        loading.source("llama-3.1-7b")
    pytest.importorskip("typer")
    from fasa_compile.cli.app import MODEL

    (option,) = MODEL.__metadata__  # written out there: help takes no torch
    assert option.help.endswith(str(refused.value).rpartition(", or ")[2] + ".")


def test_an_architecture_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read the configuration: .*nonesuch"):
        loading.configuration(config(tmp_path, model_type="nonesuch"))


def test_a_configuration_that_makes_no_causal_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    found = loading.configuration(loading.source(tmp_path / "config.json"))
    with pytest.raises(ModelError, match="no causal LM can be made of this ViTConfig"):
        loading.skeleton(found)


def test_fewer_layers(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    cut = loading.configuration(config(tmp_path, model_type="qwen3", layer_types=kinds, head_dim=16), layers=2)
    assert (cut.num_hidden_layers, cut.layer_types) == (2, kinds[:2])


def test_a_skeleton_keeps_what_is_tied_and_leaves_torch_as_it_was(tmp_path: Path) -> None:
    register, dtype = torch.nn.Module.register_parameter, torch.get_default_dtype()
    model = loading.skeleton(loading.configuration(config(tmp_path)))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not any(p.is_meta for p in model.parameters())
    assert model.model.rotary_emb.inv_freq.isfinite().all() and model.model.rotary_emb.inv_freq[0] == 1
    assert torch.nn.Module.register_parameter is register and torch.get_default_dtype() == dtype


def test_random_weights_are_the_same_each_time(tmp_path: Path) -> None:
    found = config(tmp_path)
    (one, tokenizer), (two, _) = loading.load(found), loading.load(found, dtype=torch.bfloat16)
    assert tokenizer is None and torch.get_default_dtype() == torch.float32
    a, b = one.model.embed_tokens.weight, two.model.embed_tokens.weight
    assert (a.dtype, b.dtype) == (torch.float32, torch.bfloat16) and not a.requires_grad
    again, _ = loading.load(found)
    assert torch.equal(again.model.embed_tokens.weight, a)


def test_a_model_that_cannot_be_traced_is_an_error(tmp_path: Path) -> None:
    model = loading.skeleton(loading.configuration(config(tmp_path), layers=1), torch.float32)

    def forward(*args: object, **how: object) -> None:
        raise ValueError("planted")

    model.model.forward = forward
    with pytest.raises(ModelError, match="a decode step of LlamaForCausalLM cannot be traced here"):
        loading.survey(model, fasa_backend("all", inner="eager"), length=32)
