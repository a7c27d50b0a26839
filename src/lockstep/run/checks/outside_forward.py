"""Which method of a model an error came from, where it was not the model's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType

from torch import nn

#: What a call of a module goes through.
_CALLS = ("forward", "__call__", "_wrapped_call_impl", "_call_impl")


def method_of(error: BaseException, models: Sequence[nn.Module]) -> str:
    """Such as ``VAE.decode``: the outermost method of one of ``models`` in the traceback; "" if it was called whole."""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_name
        if name in _CALLS and isinstance(trace.tb_frame.f_locals.get("self"), nn.Module):
            return ""  # what comes is within a forward pass, such as a hook
        model = _model_of(trace.tb_frame, models)
        if model is not None:
            return trace.tb_frame.f_code.co_qualname.replace("<locals>.", "")
        trace = trace.tb_next
    return ""


def _model_of(frame: FrameType, models: Sequence[nn.Module]) -> nn.Module | None:
    owner = frame.f_locals.get("self")
    return next((model for model in models if model is owner), None)
