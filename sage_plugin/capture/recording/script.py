"""Runs somebody's script in this process and records from the denoisers that it runs.

A script that patches its model is recorded on its kernels; one that does not, on the attention that
it has: the first forward of a denoiser is noticed by a module hook of this process, which is gone
when the script ends.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from sage_plugin.capture.recording.recorder import HOST_KERNEL
from sage_plugin.errors import PatchError, UsageError
from sage_plugin.plugin.component import component_of
from sage_plugin.plugin.owners import owners_of
from sage_plugin.plugin.patch import PatchHandle, patch

_DENOISER_NAMES = ("Transformer", "UNet", "DiT")
_OTHER_NAMES = ("ControlNet", "Autoencoder")
_PIPELINES, _LANGUAGE = "diffusers.pipelines.pipeline_utils", "PreTrainedModel"


@dataclass(frozen=True, slots=True)
class ScriptEnd:
    """How a script ended.

    Attributes:
        status: what its own process would have exited with.
        traceback: text of the error that ended it, its own frames only; empty without one.
    """

    status: int
    traceback: str = ""


def check_script(path: Path) -> None:
    """See that there is a script to run.

    Raises:
        UsageError: the path is no readable file.
    """
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(f"script {path} {found}: name a Python file")
    if not os.access(path, os.R_OK):
        raise UsageError(f"script {path} cannot be read")


def run_script(path: Path, args: Sequence[str], recorder: CallListener) -> ScriptEnd:
    """Run a script as `__main__`, as `python path args...` would, and record from it.

    Args:
        path: the script.
        args: its own arguments.
        recorder: an open recorder without a target, or another listener.

    Returns:
        How it ended; an error of the script is not raised.
    """
    argv, search = sys.argv, list(sys.path)
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with DenoiserHook(recorder):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return _exited(end)
    except Exception as error:
        return ScriptEnd(1, _own_traceback(error, path))
    finally:
        sys.argv, sys.path[:] = argv, search
    return ScriptEnd(0)


class CallListener(Protocol):
    """What listens to the attention calls of denoisers; a recorder is one."""

    def attach(self, handle: PatchHandle, *, own_patch: bool = False) -> None:
        """Listen to a patched model."""

    def listens_to(self, model: nn.Module) -> bool:
        """Whether it does already."""

    def enter_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Count a forward that had begun when its model was attached."""


class DenoiserHook:
    """Attaches a listener to each denoiser at its first forward, patching it where nobody did."""

    def __init__(self, recorder: CallListener) -> None:
        self._recorder = recorder
        self._passed_over: set[type] = set()
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        # Hooks of all modules get no keyword arguments, unless the module says so under the hook's
        # id: the first hook enters the id of the second, for the one forward that is running.
        self._hooks = [
            register_module_forward_pre_hook(self._notice),
            register_module_forward_pre_hook(self._enter),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _notice(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            return
        part = component_of(module)
        if part is None and (not self._is_candidate(module) or owners_of(module)):
            return  # what was patched through a wrapper is noticed there
        if part is not None and self._recorder.listens_to(module):
            return
        try:
            handle = patch(module, kernel=HOST_KERNEL) if part is None else part.handle
        except PatchError:
            self._passed_over.add(type(module))
            return
        self._recorder.attach(handle, own_patch=part is None)
        if part is None:  # the hooks of this patch come too late for the forward that is running
            module._forward_pre_hooks_with_kwargs[self._hooks[1].id] = True

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        if kwargs is None or torch.compiler.is_compiling():
            return
        del module._forward_pre_hooks_with_kwargs[self._hooks[1].id]
        self._recorder.enter_forward(module, args, kwargs)

    def _is_candidate(self, module: nn.Module) -> bool:
        """A denoiser of diffusers, or a model of transformers in a script without pipelines.

        Both are known by their classes, so that neither library is imported here. The text encoders
        of a pipeline are models of transformers too, and nobody's denoiser.
        """
        cls = type(module)
        if cls in self._passed_over:
            return False
        if _PIPELINES not in sys.modules and any(c.__name__ == _LANGUAGE for c in cls.__mro__):
            return True
        model = any(c.__name__ == "ModelMixin" for c in cls.__mro__)
        named = any(n in cls.__name__ for n in _DENOISER_NAMES)
        other = any(n in cls.__name__ for n in _OTHER_NAMES)
        if model and named and not other:
            return True
        self._passed_over.add(cls)
        return False


def _exited(end: SystemExit) -> ScriptEnd:
    if end.code is None or isinstance(end.code, int):
        return ScriptEnd(end.code or 0)
    return ScriptEnd(1, f"{end.code}\n")  # Python prints such a code and exits with 1


def _own_traceback(error: Exception, path: Path) -> str:
    """The error as Python would show it, without the frames that ran the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
