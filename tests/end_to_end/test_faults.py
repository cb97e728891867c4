"""What fails while a model decodes: afterwards it answers, dense, or one error is raised; the KV cache is never wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from models import (
    Custom,
    Interleaved,
    cache_for,
    decode,
    difference,
    llama_profile,
    profile_of,
    tiny_llama,
)
from test_state import Steps

import fasa_compile
from fasa_compile import FasaWarning, calibrate, fasa_backend
from fasa_compile.runtime import Runtime
from fasa_compile.triton_kernels import reference

IDS = torch.randint(0, 512, (1, 60), generator=torch.Generator().manual_seed(5))
TOKENS = torch.randint(0, 128, (1, 50), generator=torch.Generator().manual_seed(2))
PAIRS = tuple((2 * i, 2 * i + 1) for i in range(8))
STEPS = 5


def small_profile():
    return profile_of([(f"blocks.{i}", 4, 2, 16, PAIRS) for i in range(2)], 3, n_fac=12, n_sink=1, n_recent=2)


class Kernels:
    """Has graphs call the operators, as on a GPU, and the sparse step's kernel fail on its call number ``at``, from 0."""

    def __init__(self, monkeypatch, at: int, problem: BaseException, times: int = 1 << 30) -> None:
        from fasa_compile import rewrite

        self.calls, self.at, self.problem, self.times = 0, at, problem, times
        whole = reference.sparse_decode

        def kernel(*arguments, **how):
            self.calls += 1
            if self.at < self.calls <= self.at + self.times:
                raise self.problem
            return whole(*arguments, **how)

        monkeypatch.setattr(rewrite, "uses_kernels", lambda device: True)
        monkeypatch.setattr(reference, "sparse_decode", kernel)


def compiled(model, profile, **how):
    made = fasa_backend(profile, **({"inner": "eager", "check_weights": False} | how))
    return made, torch.compile(model, backend=made)


def reasons(made) -> set[str]:
    return {row.reason for row in made.explain().rows}


def books_balance() -> bool:
    stats = fasa_compile.stats()
    return stats["sites"] == stats["rewritten_sites"] + sum(stats["declined"].values())


NO_COMPILE = RuntimeError("planted: out of resource: shared memory")


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_kernel_that_cannot_be_compiled(kind, inner, monkeypatch):
    """The second layer's kernel fails when the first layer's keys of this step are in the cache already."""
    model = tiny_llama(layers=3)
    dense_cache, cache = cache_for(model, kind), cache_for(model, kind)
    dense = decode(model, model, IDS, dense_cache, STEPS)
    Kernels(monkeypatch, 1, NO_COMPILE)
    made, step = compiled(model, llama_profile(), inner=inner)
    with pytest.warns(FasaWarning, match=r"first step of a rewritten graph failed .*planted"):
        found = decode(model, step, IDS, cache, STEPS)
    assert difference(found, dense) <= 1e-5
    for mine, theirs in zip(cache.layers, dense_cache.layers, strict=True):
        assert difference(mine.keys, theirs.keys) <= 1e-5
        assert difference(mine.values, theirs.values) <= 1e-5
    assert cache.get_seq_length() == dense_cache.get_seq_length()
    assert reasons(made) == {"step-failed"}
    assert fasa_compile.stats()["sparse_steps"] == 0
    assert fasa_compile.stats()["dense_steps"] == STEPS
    assert books_balance()


def test_strict_raises_what_failed(monkeypatch):
    model = tiny_llama(layers=2)
    Kernels(monkeypatch, 1, NO_COMPILE)
    _, step = compiled(model, llama_profile(2), strict=True)
    with pytest.raises(RuntimeError, match="planted"):
        decode(model, step, IDS, cache_for(model, "static"), STEPS)


class Counting(Interleaved):
    """Writes where a counter of its own stands, which it moves on; ``shifts``: a window whose rows move down instead."""

    shifts = False

    def __init__(self, width, length):
        super().__init__(width, length)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x, pos, table, mask):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, -1, self.D).split([self.H, self.HKV, self.HKV], dim=2)
        q, k = self.rotate(q, table), self.rotate(k, table)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.shifts:
            self.k_cache.copy_(torch.cat([self.k_cache[:, :, T:], k], 2))
            self.v_cache.copy_(torch.cat([self.v_cache[:, :, T:], v], 2))
            mask = None
        else:
            rows = self.count + torch.arange(T)
            self.k_cache[:, :, rows] = k
            self.v_cache[:, :, rows] = v
            self.count.add_(T)
        keys, values = self.k_cache.repeat_interleave(2, 1), self.v_cache.repeat_interleave(2, 1)
        y = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.3)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class Shifting(Counting):
    shifts = True


def prefilled(attention):
    model = Custom(attention).eval()
    with torch.no_grad():
        if issubclass(attention, Shifting):
            for i in range(40):
                model(TOKENS[:, i : i + 1], torch.tensor([i]))
        else:
            model(TOKENS[:, :40], torch.arange(40))
    return model


def steps_of(model, step):
    with torch.no_grad():
        return torch.cat([step(TOKENS[:, i : i + 1].clone(), torch.tensor([i])) for i in range(40, 45)], 1)


@pytest.mark.parametrize("attention", [Counting, Shifting])
def test_what_a_failed_step_changed_is_put_back(attention, monkeypatch):
    """A counter that the step moves on, and a window that it shifts, may not move twice for one token."""
    model = prefilled(attention)
    dense = steps_of(model, model)
    again = prefilled(attention)
    kernels = Kernels(monkeypatch, 1, NO_COMPILE)
    _, step = compiled(again, "all", n_fac=12, n_sink=1, n_recent=2)
    with pytest.warns(FasaWarning, match="planted"):
        assert difference(steps_of(again, step), dense) <= 1e-5
    assert kernels.calls == 2
    for name, value in again.named_buffers():
        assert difference(value, model.get_buffer(name)) <= 1e-5, name


def test_a_cache_too_large_to_copy_is_an_error(monkeypatch):
    from fasa_compile import fallback

    model = prefilled(Shifting)
    monkeypatch.setattr(fallback, "LARGEST_COPY", 1000)
    Kernels(monkeypatch, 1, NO_COMPILE)
    _, step = compiled(model, "all", n_fac=12, n_sink=1, n_recent=2)
    with pytest.raises(RuntimeError, match="planted"):
        steps_of(model, step)


def by_rows(cache, other, new, pos):
    cache[:, pos] = new
    other[:, pos] = cache[:, :2].sum()


def through_a_view(cache, other, new, pos):
    cache.transpose(0, 1)[pos] = new.transpose(0, 1)


def in_a_slice(cache, other, new, pos):
    cache[:, 2:4] = new[:, :1]


def added(cache, other, new, pos):
    cache.index_put_((torch.arange(3)[:, None], pos[None, :]), new, accumulate=True)


def read_before(cache, other, new, pos):
    cache[:, pos] = new + cache.sum()


def told_by_what_is_written(cache, other, new, pos):
    other[:, pos] = new
    cache[:, other[0, :1].long() % 4] = new[:, :1]


def moved_on(cache, other, new, pos):
    cache[:, pos] = new
    pos.add_(1)


def through_two_inputs(cache, other, new, pos):
    cache[:, pos] = new
    other[:, pos + 1] = new


@pytest.mark.parametrize(
    ("graph", "shared", "saved"),
    [
        (by_rows, False, ()),
        (through_a_view, False, ()),
        (in_a_slice, False, ()),
        (added, False, ("cache",)),
        (read_before, False, ("cache",)),
        (told_by_what_is_written, False, ("cache",)),
        (moved_on, False, ("pos",)),
        (through_two_inputs, True, None),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_may_be_run_again(graph, shared, saved):
    """Inputs that a second run of a graph would find changed; and when they are put back, it ends as a single run does."""
    from fasa_compile.capture import capture
    from fasa_compile.fallback import copies, inputs_to_save, put_back

    found = []

    def backend(gm, example_inputs):
        places = inputs_to_save(capture(gm, example_inputs))
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        found.append(None if places is None else tuple(names[i].removeprefix("l_").rstrip("_") for i in places))

        def twice(*arguments):
            saved = copies(arguments, places or ())
            gm(*arguments)
            put_back(arguments, saved)
            return gm(*arguments)

        return twice

    def inputs():
        g = torch.Generator().manual_seed(0)
        both = torch.randn(2, 3, 8, generator=g)
        other = both[0] if shared else torch.randn(3, 8, generator=g)
        return both[0], other, torch.randn(3, 2, generator=g), torch.tensor([4, 5])

    once, again = inputs(), inputs()
    graph(*once)
    torch.compile(graph, backend=backend, dynamic=False)(*again)
    assert found == [saved]
    if saved is not None:
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_an_inner_compiler_that_fails_when_it_tunes():
    """What it made fails in its first call, where it would time its choices."""
    model = tiny_llama(layers=2)
    dense = decode(model, model, IDS, cache_for(model, "static"), STEPS)

    def inner(gm, example_inputs):
        def tuned(*arguments):
            gm(*arguments)
            raise RuntimeError("planted: no configuration works")

        return tuned

    made, step = compiled(model, llama_profile(2), inner=inner)
    with pytest.warns(FasaWarning, match="no configuration works"):
        assert difference(decode(model, step, IDS, cache_for(model, "static"), STEPS), dense) <= 1e-5
    assert reasons(made) == {"step-failed"}


@pytest.mark.parametrize("problem", [torch.OutOfMemoryError("planted: out of memory"), MemoryError("planted")])
def test_no_memory_for_the_packed_cache(problem, monkeypatch):
    """The first cache fits, a second one does not: what was answered sparsely goes on dense."""
    from fasa_compile import runtime

    model = tiny_llama(layers=2)
    dense = [decode(model, model, IDS, cache_for(model, "static"), STEPS) for _ in range(2)]
    made, step = compiled(model, llama_profile(2), n_fac=100)
    assert difference(decode(model, step, IDS, cache_for(model, "static"), STEPS), dense[0]) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == STEPS

    def allocate(self, k):
        raise problem

    monkeypatch.setattr(runtime._Keeper, "_allocate", allocate)
    second = cache_for(model, "static")
    with pytest.warns(FasaWarning, match="planted"):
        assert difference(decode(model, step, IDS, second, STEPS), dense[1]) <= 1e-5
    assert fasa_compile.stats()["dense_steps"] == STEPS
    assert reasons(made) == {"step-failed"}
    assert books_balance()


FAULTS = [
    KeyboardInterrupt(),
    torch.OutOfMemoryError("planted: out of memory"),
    RuntimeError("planted: a launch failed"),
]


@pytest.mark.parametrize("problem", FAULTS, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("at", [1, 5], ids=["first step", "third step"])
def test_a_step_that_broke_off_can_be_made_again(problem, at, monkeypatch):
    """The second layer of a step fails. It is raised (in a first step: unless dense can take over), and the same step made again
    gives every bit of an undisturbed run, in the logits and in the cache."""
    if at == 1 and type(problem) is RuntimeError:
        pytest.skip("the model's own graph takes over: test_a_kernel_that_cannot_be_compiled")
    kernels = Kernels(monkeypatch, 1 << 30, problem, times=1)
    whole = prefilled(Interleaved)
    expected = steps_of(whole, compiled(whole, small_profile())[1])
    torch._dynamo.reset()
    model = prefilled(Interleaved)
    _, step = compiled(model, small_profile())
    kernels.calls, kernels.at = 0, at
    out = []
    with torch.no_grad():
        for i in range(40, 45):
            token, pos = TOKENS[:, i : i + 1].clone(), torch.tensor([i])
            if i == 40 + at // 2:
                with pytest.raises(type(problem)):
                    step(token, pos)
            out.append(step(token, pos))
    assert torch.equal(torch.cat(out, 1), expected)
    for name, value in model.named_buffers():
        assert torch.equal(value, whole.get_buffer(name)), name
    assert fasa_compile.stats()["sparse_steps"] == 10


def test_a_step_that_broke_off_under_a_compiler_whose_writes_are_not_counted(monkeypatch):
    """Its writes leave no trace in PyTorch's count, as those through a raw pointer. A step breaks off between the write of the keys and
    of their packed row; decoding goes on with the next token, and nothing stale is read."""
    at = []
    whole = reference.pack_rows_

    def pack_rows_(*arguments):
        if at and at.pop():
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(reference, "pack_rows_", pack_rows_)

    def inner(gm, example_inputs):
        def uncounted(*arguments):
            tensors = tuple(x for x in arguments if isinstance(x, torch.Tensor))
            with torch.autograd._unsafe_preserve_version_counter(tensors):
                return gm(*arguments)

        return uncounted

    outcomes = []
    for anew in (False, True):
        torch._dynamo.reset()
        model = prefilled(Interleaved)
        step = Steps(model, small_profile(), anew, inner=inner)
        with torch.no_grad():
            for i in range(40, 43):
                step(TOKENS[:, i : i + 1].clone(), torch.tensor([i]))
            at.append(True)
            with pytest.raises(KeyboardInterrupt):
                step(TOKENS[:, 43:44].clone(), torch.tensor([43]))
            assert model.blocks[0].k_cache[:, :, 43].any(), "the keys were written"
            outcomes.append([step(TOKENS[:, i : i + 1].clone(), torch.tensor([i])) for i in range(44, 48)])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert fasa_compile.stats()["sparse_steps"] == 14


def test_calibration_that_is_interrupted():
    """The model is as before, and calibrating it again gives what an undisturbed calibration gives."""
    model = tiny_llama(layers=2)
    before = model(IDS).logits
    expected = calibrate(model, IDS, progress=False)
    own = model.forward = torch.compile(model.forward, backend="eager")

    def call(watched, ids):
        watched(ids[:, :20])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, IDS, forward=call, progress=False)
    assert model.__dict__["forward"] is own, "calibration took the compiled forward away and must bring it back"
    del model.forward
    assert torch.equal(model(IDS).logits, before)
    again = calibrate(model, IDS, progress=False)
    assert again == expected
    _, step = compiled(model, again, n_fac=100)
    dense = decode(model, model, IDS, cache_for(model, "static"), 2)
    assert difference(decode(model, step, IDS, cache_for(model, "static"), 2), dense) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 2


@pytest.mark.parametrize("models", [1, 2])
def test_two_threads(models):
    """Two threads decode with caches of their own, through one compiled model or one backend on two models."""
    first = tiny_llama(layers=2)
    made, step = compiled(first, llama_profile(2))
    steps, of = [step, step], [first, first]
    if models == 2:
        second = tiny_llama(layers=2, intermediate_size=256)
        of[1], steps[1] = second, torch.compile(second, backend=made)
    prompts = [IDS[:, :40], IDS[:, 20:60]]

    def answer(i: int):
        return decode(of[i], steps[i], prompts[i], cache_for(of[i], "static"), 12)

    alone = [answer(0), answer(1)]
    assert fasa_compile.stats()["sparse_steps"] == 24
    found: dict[int, torch.Tensor] = {}
    problems: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(2):
                found[i] = answer(i)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not problems, problems
    assert all(torch.equal(found[i], alone[i]) for i in range(2))
    assert fasa_compile.stats()["sparse_steps"] == 24 * 3


@pytest.fixture
def one_thread():
    """A forked child has none of its parent's worker threads, and Dynamo compiles anew for another number of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_goes_on_where_its_parent_was(one_thread):
    """While another thread of the parent is inside a step, whose lock nobody in the child would ever open."""
    model = prefilled(Interleaved)
    step, runtimes = following(small_profile(), model)
    expected = steps_of(model, step)
    with torch.no_grad():
        last = step(TOKENS[:, 45:46].clone(), torch.tensor([45]))
        inside, leave = threading.Event(), threading.Event()
        (runtime,) = runtimes
        whole = runtime._compiled

        def slow(*arguments):
            inside.set()
            leave.wait(60)
            return whole(*arguments)

        runtime._compiled = slow
        thread = threading.Thread(target=steps_of, args=(model, step))
        thread.start()
        inside.wait(60)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            code = b"0"
            try:
                runtime._compiled = whole
                out = step(TOKENS[:, 45:46].clone(), torch.tensor([45]))
                code = b"1" if torch.equal(out, last) else b"2"
                code = b"3" if len(runtimes) > 1 else code  # compiled anew: nothing was tested
            finally:
                os.write(write, code)
                os._exit(0)
        leave.set()
        thread.join(60)
        os.close(write)
        import select

        ready, _, _ = select.select([read], [], [], 60)
        answer = os.read(read, 1) if ready else b"no answer"
        if not ready:
            os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(read)
    assert answer == b"1", answer
    assert expected.isfinite().all()


def following(profile, model):
    """The model compiled, and a list that will hold the runtimes of its graphs."""
    made, runtimes = fasa_backend(profile, inner="eager", check_weights=False), []

    def keep(gm, example_inputs):
        found = made(gm, example_inputs)
        if isinstance(found, Runtime):
            runtimes.append(found)
        return found

    return torch.compile(model, backend=keep), runtimes


NO_DISK = """
    import os, resource, signal, sys, warnings
    sys.path[:0] = {paths!r}
    import torch, torch._dynamo.repro.after_dynamo, torch._inductor.compile_fx  # imported while there is room
    from models import *
    from fasa_compile import fasa_backend, stats
    model = tiny_llama(layers=2)
    ids = torch.randint(0, 512, (1, 50), generator=torch.Generator().manual_seed(5))
    profile = llama_profile(2)
    profile.save("kept.json")
    dense = decode(model, model, ids, cache_for(model, "static"), 3)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # from here on no file takes a byte
    try:
        llama_profile(2, n_tip=4).save("kept.json")
        print("saved")
    except OSError as error:
        print("OSError")
    for inner in {inners!r}:
        torch._dynamo.reset()
        made = fasa_backend(profile, inner=inner, n_fac=100, check_weights=False)
        try:
            out = decode(model, torch.compile(model, backend=made), ids, cache_for(model, "static"), 3)
            print("right" if difference(out, dense) <= 1e-4 else "wrong", stats()["sparse_steps"])
        except Exception as error:
            print("error", type(error).__name__, str(error).splitlines()[0][:200])
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    out = decode(model, torch.compile(model, backend=made), ids, cache_for(model, "static"), 3)
    print("right" if difference(out, dense) <= 1e-4 else "wrong")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of resources here")
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_full_disk(inner, tmp_path):
    """Nothing can be written: not a dump, not a compile cache, not a profile. The model answers, or says why not, once."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1] / "benchmarks" / "quality")]
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(NO_DISK.format(paths=paths, inners=[inner])))
    places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "FASA_DUMP": "dump"}
    environment = os.environ | {name: str(tmp_path / place) for name, place in places.items()}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    saved, answer, after = done.stdout.splitlines()
    assert saved == "OSError"
    assert fasa_compile.FCProfile.load(tmp_path / "kept.json") == llama_profile(2)
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".json") == ["kept.json"]
    assert answer == "right 3" if inner == "eager" else answer.startswith(("right", "error"))
    assert after == "right"
