"""Times work on a CUDA device: from a CUDA graph, with a cold L2, as the median of many."""

from collections.abc import Callable
from statistics import median

import torch
import triton

from benchmarks.gpu_cases import Rates

FLUSH_BYTES = 512 * 2**20
"""More than any L2 (B200: 126 MiB)."""


@triton.jit
def empty_kernel():
    """What a launch costs."""


class Stopwatch:
    """Times a function's work on the current device, in microseconds."""

    def __init__(self, repeats: int = 25) -> None:
        self._repeats = repeats
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def microseconds(self, run: Callable[[], None]) -> float:
        """Median time of one run; launches come from a captured graph, so Python costs nothing."""
        replay = _captured(run)
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(self._repeats)
        ]
        for start, end in events:
            # Also keeps the device busy until the replay is queued.
            self._flush.zero_()
            start.record()
            replay()
            end.record()
        torch.cuda.synchronize()
        return 1e3 * median(start.elapsed_time(end) for start, end in events)

    def rates(self) -> Rates:
        """Bandwidth of a large copy and speed of a large bfloat16 GEMM."""
        half = self._flush.numel() // 2
        source, target = self._flush[:half], self._flush[half:]
        copy = self.microseconds(lambda: target.copy_(source))
        size = 8192
        a, b, c = (torch.ones(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        gemm = self.microseconds(lambda: torch.mm(a, b, out=c))
        return Rates(2 * source.nbytes / copy * 1e6, 2 * size**3 / gemm * 1e6)


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compile and allocate outside of the capture
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
