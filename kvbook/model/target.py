"""Where numbers are kept, and as what.

Knows: which devices this PyTorch can use here, which dtypes a model computes in. Does not know:
models, files, clocks.
"""

import torch

FLOATS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def usable_device(device: torch.device | str, name: str = "device") -> torch.device:
    """The device, with its number; ``ValueError`` if nothing can be kept there.

    A device that is absent, or that this build of PyTorch does not know, would otherwise fail
    late and in PyTorch's words. ``meta`` keeps no numbers and is refused as well.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    way_out = "cpu can always be used"
    if not isinstance(device, str | torch.device):
        raise ValueError(
            f"{name} must be a name such as 'cpu' or 'cuda', or a torch.device, got {device!r:.80}"
        )
    try:
        found = torch.empty(1, device=device).device
    except (RuntimeError, AssertionError, ImportError) as error:  # as the missing device likes
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{name} {str(device)!r:.80} cannot be used here: {reason:.120}; {way_out}"
        ) from error
    if found.type == "meta":
        raise ValueError(f"{name} 'meta' keeps no numbers; {way_out}")
    return found


def float_dtype(dtype: torch.dtype, name: str = "dtype") -> torch.dtype:
    """``dtype`` if a model can compute in it, else ``ValueError``.

    >>> float_dtype(torch.bfloat16)
    torch.bfloat16
    """
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS.values():
        allowed = ", ".join(f"torch.{allowed}" for allowed in FLOATS)
        raise ValueError(f"{name} must be one of {allowed}, got {dtype!r:.80}")
    return dtype
