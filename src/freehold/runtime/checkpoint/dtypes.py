"""Dtypes by name: torch's own in manifests, those of the safetensors format in its headers."""

from __future__ import annotations

import torch

__all__ = ["DTYPES", "DTYPE_NAMES", "SAFETENSORS_NAMES"]

# The format's own list: https://github.com/huggingface/safetensors/blob/main/safetensors/src/tensor.rs, enum Dtype.
SAFETENSORS_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: str(dtype).removeprefix("torch.") for dtype in SAFETENSORS_NAMES}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
