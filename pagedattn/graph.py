"""CUDA graphs: a step of many layers recorded once and replayed as one launch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from pagedattn.errors import InvalidArgumentError
from pagedattn.jit import cuda

Result = TypeVar("Result")


class GraphedStep(Generic[Result]):
    """A function recorded as a CUDA graph.

    The function is run once to warm up (kernels compile, workspaces and plans come into being) and once more under
    capture. A replay does the same work on the same arrays: whatever changes from step to step, lengths, block tables,
    slots, inputs, has to be written into those arrays in place. Memory that the function allocates comes from a pool of
    its own, which lives as long as the graph.

    Parameters
    ----------
    step : callable
        Takes no arguments and issues its work to CuPy's current stream. It must not read the device, and its
        `PagedAttention` calls must be of a capturable kind (those that want output_qk need attention_metadata).
    device : int, optional
        Device id; the current one by default.

    Attributes
    ----------
    result
        What ``step`` returned under capture: its arrays hold the results after each replay.

    Raises
    ------
    MissingDependencyError
        CuPy or a GPU is absent.
    """

    def __init__(self, step: Callable[[], Result], device: int | None = None) -> None:
        cuda.require_device()
        self._cupy = cuda.cupy()
        self._device = self._cupy.cuda.Device(device)
        with self._device:
            self._pool = self._cupy.cuda.MemoryPool()
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
            ready = self._cupy.cuda.get_current_stream().record()
            with self._stream, self._cupy.cuda.using_allocator(self._pool.malloc):
                self._stream.wait_event(ready)  # inputs may still be on their way on the caller's stream
                step()
                self._stream.synchronize()
                self._stream.begin_capture()
                try:
                    self.result: Result = step()
                finally:
                    graph = self._stream.end_capture()
            self._graph = graph

    def __call__(self) -> Result:
        """Replay on the current stream and return `result`, whose arrays are filled in stream order."""
        with self._device:
            self._graph.launch(self._cupy.cuda.get_current_stream())
        return self.result


class GraphBuckets(Generic[Result]):
    """One graph per padded batch size, recorded when first needed.

    A batch of n sequences runs in the smallest bucket that holds it. The bucket's arrays are made for its full size; in
    a smaller batch the remaining sequences are empty (``cumulative_sequence_length`` stays level) and the remaining
    rows are padding, which the operator answers with 0 and never stores.

    Parameters
    ----------
    make_step : callable
        Takes a bucket's batch size, makes that bucket's arrays, and returns the step for `GraphedStep`.
    batch_sizes : iterable of int
        The buckets' sizes.
    device : int, optional

    Examples
    --------
    >>> graphs = GraphBuckets(make_step, (1, 2, 4, 8))  # doctest: +SKIP
    >>> size, step = graphs.of(3)  # doctest: +SKIP
    >>> write_inputs(size, ...); step()  # doctest: +SKIP
    """

    def __init__(
        self, make_step: Callable[[int], Callable[[], Result]], batch_sizes: Iterable[int], device: int | None = None
    ) -> None:
        self._make_step, self._device = make_step, device
        self.batch_sizes = sorted(set(batch_sizes))
        if not self.batch_sizes or self.batch_sizes[0] < 1:
            raise InvalidArgumentError(f"batch_sizes: expected at least one size >= 1, got {self.batch_sizes}.")
        self._graphs: dict[int, GraphedStep[Result]] = {}

    def of(self, batch_size: int) -> tuple[int, GraphedStep[Result]]:
        """Size and graph of the bucket for a batch of ``batch_size`` sequences, recorded at its first use.

        Raises
        ------
        InvalidArgumentError
            The batch is larger than the largest bucket.
        """
        index = bisect_left(self.batch_sizes, batch_size)
        if index == len(self.batch_sizes):
            raise InvalidArgumentError(
                f"batch_size: expected at most {self.batch_sizes[-1]}, the largest bucket, got {batch_size}."
            )
        size = self.batch_sizes[index]
        if size not in self._graphs:
            self._graphs[size] = GraphedStep(self._make_step(size), self._device)
        return size, self._graphs[size]
