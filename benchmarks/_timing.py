"""Times work on a GPU: inside a CUDA graph, over buffers that together exceed the L2, as medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def captured(calls: Sequence[Callable[[], object]], loops: int = 1) -> torch.cuda.CUDAGraph:
    """``calls`` one after another, ``loops`` times, as one CUDA graph. They run once before, for what a first call makes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
        for _ in range(loops):
            for call in calls:
                call()
    return graph


def graph_time(calls: Sequence[Callable[[], object]], loops: int = 1, repeats: int = 15) -> float:
    """Microseconds per call. ``calls`` do the same work on different buffers and run in turn, ``loops`` times, in one
    CUDA graph; the median of ``repeats`` timed replays counts. The first replays warm up and are not timed."""
    graph = captured(calls, loops)
    times = []
    for i in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(1e3 * begin.elapsed_time(end) / (loops * len(calls)))
    return statistics.median(times)


def kernel_times(calls: Sequence[Callable[[], object]]) -> dict[str, list[float]]:
    """Microseconds of each kernel that ``calls`` launch, of all its launches, by name, as the profiler sees them. Do it when all else is
    timed: the profiler stays attached, and a step of four kernels in a graph that this process replays afterwards takes 1 to 4 us
    more."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in calls:
            call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.device_time)
    return times


def environment() -> dict[str, str | int]:
    """What a record must say to be compared: card and its multiprocessors, versions, date."""
    import datetime

    import triton

    return {
        "card": torch.cuda.get_device_name(),
        "multiprocessors": torch.cuda.get_device_properties().multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
