"""What torch makes of new tensors inside of a run, whatever the program around it has set."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Within the context new tensors are float32, on the CPU, and have gradients: a run trains also
    inside of `torch.inference_mode`, and after `torch.set_default_dtype`."""
    import torch  # some commands do without it

    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    with torch.inference_mode(False), torch.enable_grad():
        torch.set_default_dtype(torch.float32)
        if device.type != "cpu":
            torch.set_default_device("cpu")
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            if device.type != "cpu":
                torch.set_default_device(device)
