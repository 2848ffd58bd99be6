"""Builds of Triton kernels that get addresses, as a driver does, and run in the interpreter."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from sage_plugin.kernels.attention.backends.triton import launch, mask_blocks
from sage_plugin.kernels.quantize.triton import key_mask
from sage_plugin.kernels.quantize.triton import launch as quantizers

LAUNCHED = (
    (launch, "quantized_attention_kernel"),
    (launch, "plain_attention_kernel"),
    (quantizers, "prepass_kernel"),
    (mask_blocks, "classify_mask_kernel"),
    (key_mask, "seen_keys_kernel"),
)


class RawKernel:
    """An interpreted kernel whose launches return a build, as those of a GPU's do."""

    def __init__(self, kernel: Any, runs: list[str]) -> None:
        self.kernel, self.runs = kernel, runs
        self.arg_names, self.__name__ = kernel.arg_names, kernel.__name__

    def __getitem__(self, grid):
        def run(*args, **options):
            self.kernel[grid](*args, **options)
            return RawBuild(self, args, options)

        return run


class RawBuild:
    """What a launch compiled to: it remembers the types of its arguments, and no tensor."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, owner: RawKernel, args: tuple[object, ...], options: dict[str, object]):
        self.owner, self.options = owner, options
        self.forms = [_form(value) for value in args]

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        """Launch on addresses."""
        assert (y, z, stream, function, metadata) == (1, 1, "stream", "function", "metadata")
        assert (launch_metadata, enter, leave) == (None, None, None)
        assert len(arguments) == len(self.owner.arg_names)
        given, constants = arguments[: len(self.forms)], arguments[len(self.forms) :]
        names = self.owner.arg_names[len(self.forms) :]
        assert [self.options[name] for name in names] == list(constants)
        values = [_rebuilt(*pair) for pair in zip(self.forms, given, strict=True)]
        self.owner.runs.append(self.owner.kernel.__name__)
        self.owner.kernel[(x,)](*values, **self.options)


def _form(value):
    if isinstance(value, tuple):
        return type(value), [_form(one) for one in value]
    descriptor = not isinstance(value, torch.Tensor) and hasattr(value, "base")
    tensor = value.base if descriptor else value
    if not isinstance(tensor, torch.Tensor):
        return None
    size, offset = tensor.untyped_storage().nbytes(), tensor.storage_offset()
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, size, descriptor


def _rebuilt(form, given):
    """An argument from its address; views of one storage become views of one again."""
    if form is None:
        return given
    if len(form) == 2:
        kind, forms = form
        values = [_rebuilt(*pair) for pair in zip(forms, given, strict=True)]
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    dtype, shape, strides, offset, size, descriptor = form
    address = given.base.data_ptr() if descriptor else given
    assert type(address) is int
    memory = (ctypes.c_char * size).from_address(address - offset * dtype.itemsize)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
    if not descriptor:
        return tensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, given.shape, given.strides, given.block_shape, given.padding)
