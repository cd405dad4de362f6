"""A CUDA device made of CPU memory: the device path of the package, run whole on any machine.

    with emulated(schedule="late") as gpu:         # torch.cuda has one device now
        model.to("cuda")
        ...
    gpu.counts.launches, gpu.counts.waits          # what the host told it, and where it waited

machine.py: streams, memory, captures and counts. tensors.py: tensors of the device and what an
operator on them means. modes.py: what Python calls before an operator is dispatched. cuda.py:
torch.cuda's names. profile.py: torch's profiler. kernels.py: Triton's interpreter as a launcher.
definitions.py: kernels without Triton. emulate.py: puts all of it in place and takes it away again.
"""

from tests.device.emulate import emulated
from tests.device.guard import why_not
from tests.device.machine import CaptureError, HostWaitsError, Machine

__all__ = ["CaptureError", "HostWaitsError", "Machine", "emulated", "why_not"]
