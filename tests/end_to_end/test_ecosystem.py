"""Ways in which transformers generates, through ``fasa_compile.generate`` and the pipeline: sparse where docs/transformers.md says so.

With a budget that covers the context the tokens are those of the model alone; with a smaller one steps must have been sparse and the
logits must differ, or nothing was tested.
"""

from __future__ import annotations

import copy
import gc
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from models import cache_for, llama_profile, tiny_gemma3, tiny_llama

import fasa_compile
from fasa_compile import generate

transformers = pytest.importorskip("transformers")

IDS = torch.randint(1, 512, (3, 60), generator=torch.Generator().manual_seed(5))
# generate makes a static cache of 60 + 7 tokens. A budget of one token less is not "within-budget", and drops a token in the last step
# alone: the one that scores least.
COVERING, SMALL = 66, 24
HOW: dict[str, Any] = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)


def ours(model: Any, inputs: Any, n_fac: int = COVERING, profile: Any = None, **how: Any) -> Any:
    options = {"n_fac": n_fac, "check_weights": False, "strict": True}
    given = llama_profile(2) if profile is None else profile
    return generate(model, inputs, profile=given, inner="eager", backend=options, **(HOW | how))


def test_one_call_is_generate_and_the_model_is_as_it_was():
    model = tiny_llama(layers=2)
    profile = llama_profile(2)
    expected = model.generate(IDS[:1], **HOW)
    for _ in range(2):
        assert torch.equal(ours(model, IDS[:1], profile=profile), expected)
        assert "forward" not in model.__dict__
    stats = fasa_compile.stats()
    assert stats["sparse_steps"] == 14
    assert stats["decode_graphs"] == 1, "a second call with the same settings compiles nothing anew"
    less = ours(model, {"input_ids": IDS[:1], "attention_mask": torch.ones_like(IDS[:1])}, SMALL, profile)
    assert fasa_compile.stats()["sparse_steps"] == 21 and not torch.equal(less, expected)
    gone = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None, "what generate keeps must not keep the model"


def test_a_left_padded_batch():
    model = tiny_llama(layers=2)
    mask = torch.ones_like(IDS)
    mask[1, :25] = mask[2, :7] = 0
    inputs = {"input_ids": IDS * mask, "attention_mask": mask}
    assert torch.equal(ours(model, inputs), model.generate(**inputs, **HOW))
    assert fasa_compile.stats()["sparse_steps"] == 7


def test_sampling_draws_the_same_tokens():
    model = tiny_llama(layers=2)
    how = dict(do_sample=True, temperature=0.8, top_p=0.9)
    torch.manual_seed(3)
    expected = model.generate(IDS[:2], **(HOW | how))
    torch.manual_seed(3)
    assert torch.equal(ours(model, IDS[:2], **how), expected)
    assert fasa_compile.stats()["sparse_steps"] == 7


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_beams(cache):
    model = tiny_llama(layers=2)
    expected = model.generate(IDS[:1], num_beams=3, **HOW)
    assert torch.equal(ours(model, IDS[:1], num_beams=3, cache_implementation=cache), expected)
    assert fasa_compile.stats()["sparse_steps"] > 0


def test_assisted_decoding_takes_the_cache_that_it_needs():
    model, draft = tiny_llama(layers=2), tiny_llama(layers=1)
    expected = model.generate(IDS[:1], **HOW)
    assert torch.equal(ours(model, IDS[:1], assistant_model=draft), expected)


def test_layers_with_a_window():
    """Gemma 3's alternation of sliding and full layers, its hybrid static cache longer than the window."""
    model = tiny_gemma3()
    expected = model.generate(IDS[:1], **HOW)
    assert torch.equal(ours(model, IDS[:1], profile="all"), expected)
    assert fasa_compile.stats()["sparse_steps"] > 0
    fasa_compile.reset_stats()
    ours(model, IDS[:1], SMALL, profile="all")
    assert fasa_compile.stats()["sparse_steps"] == 7


def test_a_prefix_that_is_reused():
    """The cache of a common prefix is copied for each question after it."""
    model = tiny_llama(layers=2)
    prefix = cache_for(model, "static")
    with torch.no_grad():
        model(IDS[:1, :40], past_key_values=prefix)
    profile = llama_profile(2)
    for question in (IDS[:1], torch.cat([IDS[:1, :40], IDS[1:2, :9]], 1)):
        expected = model.generate(question, **HOW)
        found = ours(model, question, profile=profile, past_key_values=copy.deepcopy(prefix))
        assert torch.equal(found, expected)
    stats = fasa_compile.stats()
    # Seven single steps each; of the second question, the nine tokens behind the prefix are a step too.
    assert (stats["sparse_steps"], stats["multi_token_steps"]) == (15, 1)


def test_several_turns_on_one_cache():
    model = tiny_llama(layers=2)
    profile, cache = llama_profile(2), cache_for(model, "static")
    said = IDS[:1, :40]
    for turn in range(3):
        expected = model.generate(said, **HOW)
        said = ours(model, said, 120, profile, past_key_values=cache)
        assert torch.equal(said, expected), turn
        said = torch.cat([said, IDS[1:2, 5 * turn : 5 * turn + 5]], 1)
    stats = fasa_compile.stats()
    # Seven single steps a turn; what was said anew, six tokens, is a step in the second turn and in the third.
    assert (stats["sparse_steps"], stats["multi_token_steps"]) == (23, 2)


def test_the_pipeline():
    sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
    from tiny_folder import byte_tokenizer

    model = tiny_llama(layers=2)
    model.generation_config.eos_token_id = None
    how = dict(do_sample=False, max_new_tokens=6, return_full_text=False)
    text = "The quick brown fox jumps over the lazy dog."
    expected = transformers.pipeline("text-generation", model=model, tokenizer=byte_tokenizer())(text, **how)
    backend = fasa_compile.fasa_backend(llama_profile(2), n_fac=48, check_weights=False, inner="eager")
    model.forward = torch.compile(model.forward, backend=backend)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=byte_tokenizer())
    assert pipe(text, cache_implementation="static", disable_compile=True, **how) == expected
    assert fasa_compile.stats()["sparse_steps"] == 5


def test_a_device_map(tmp_path):
    pytest.importorskip("accelerate")
    tiny_llama(layers=2).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    expected = model.generate(IDS[:1].to(model.device), **HOW)
    assert torch.equal(ours(model, IDS[:1].to(model.device)), expected)
    assert fasa_compile.stats()["sparse_steps"] == 7


def test_a_device_map_over_several_devices(tmp_path):
    """accelerate's hooks break the graph at every module; ours do as they do and are traced."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_llama(layers=2)
    with pytest.raises(fasa_compile.ModelError, match="no hf_device_map"):
        fasa_compile.traceable_device_map(model)
    parts = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
    model = accelerate.dispatch_model(model, dict.fromkeys(parts, "cpu"), force_hooks=True)
    expected = model.generate(IDS[:1], **HOW)
    assert fasa_compile.traceable_device_map(model) is model
    hooks = sum(len(m._forward_pre_hooks) for m in model.modules())
    assert hooks == 6 and fasa_compile.traceable_device_map(model) is model
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks
    assert torch.equal(model.generate(IDS[:1], **HOW), expected)
    assert torch.equal(ours(model, IDS[:1]), expected)
    assert fasa_compile.stats()["sparse_steps"] == 7
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to("meta"))
    with pytest.raises(fasa_compile.ModelError, match=r"1 weights are not on a device, among them lm_head\.weight"):
        fasa_compile.traceable_device_map(model)


def test_weights_that_accelerate_keeps_on_disk(tmp_path):
    """Hooks around the modules bring their weights in: Dynamo compiles the model in parts. Right, dense, and said so once."""
    pytest.importorskip("accelerate")
    tiny_llama(layers=2).save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk"
    )
    expected = model.generate(IDS[:1], **HOW)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = generate(
            model,
            IDS[:1],
            profile=llama_profile(2),
            inner="eager",
            backend={"n_fac": COVERING, "check_weights": False},
            **HOW,
        )
    assert torch.equal(found, expected)
    ours_ = [str(w.message) for w in said if issubclass(w.category, fasa_compile.FasaWarning)]
    assert fasa_compile.stats()["sparse_steps"] == 0
    assert len(ours_) == 1 and "no decode step over a cache reached the backend" in ours_[0]


def test_weights_in_int8():
    """torchao's weight-only int8: the linears are other modules, the attention is the same."""
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_llama(layers=2)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    expected = model.generate(IDS[:1], **HOW)
    assert torch.equal(ours(model, IDS[:1]), expected)
    assert fasa_compile.stats()["sparse_steps"] == 7
    profile = fasa_compile.calibrate(model, IDS[:1], progress=False)
    assert len(profile.layers) == 2


@pytest.mark.parametrize(
    "how, breaks",
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}, False),
        ({"load_in_8bit": True, "llm_int8_threshold": 0.0}, False),
        ({"load_in_8bit": True}, True),
    ],
    ids=["nf4", "int8 without outliers", "int8"],
)
def test_weights_of_bitsandbytes(tmp_path, how, breaks):
    """LLM.int8() takes columns with outliers out, as many as there are: Dynamo breaks the graph there unless it is told to go on."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny_llama(layers=2).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(**how), device_map="cpu", dtype=torch.float32
    )
    expected = model.generate(IDS[:1], **HOW)
    if breaks:
        with pytest.warns(fasa_compile.FasaWarning, match="unknown-layer"):
            found = generate(
                model, IDS[:1], profile=llama_profile(2), inner="eager", backend={"check_weights": False}, **HOW
            )
        assert torch.equal(found, expected) and fasa_compile.stats()["sparse_steps"] == 0
        torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=breaks):
        assert torch.equal(ours(model, IDS[:1]), expected)
        assert fasa_compile.stats()["sparse_steps"] == 7
        torch._dynamo.reset()
        assert len(fasa_compile.calibrate(model, IDS[:1], progress=False).layers) == 2


def test_an_adapter_of_peft():
    peft = pytest.importorskip("peft")
    model = tiny_llama(layers=2)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    expected = adapted.generate(input_ids=IDS[:1], **HOW)
    assert torch.equal(ours(adapted, IDS[:1]), expected)
    assert fasa_compile.stats()["sparse_steps"] == 7
    with adapted.disable_adapter():
        plain = adapted.generate(input_ids=IDS[:1], **HOW)
        assert torch.equal(ours(adapted, IDS[:1]), plain)
