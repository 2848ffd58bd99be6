"""Which classes of diffusers call attention: each is a processor that we patch, or known here.

A new release that brings attention in another form fails here, and not in silence on a GPU.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

import diffusers
from diffusers.models import attention_processor

from sage_plugin.plugin.redirect import DISPATCH, PREFIX, SDPA
from sage_plugin.plugin.retarget import patched_class, patched_module_class

TARGETS = {DISPATCH, SDPA}
ROOT = Path(diffusers.__file__).parent
REGISTRY = "diffusers.models.attention_dispatch"
"""Holds the backends themselves, which are plain functions."""

AUTOENCODER = "part of an autoencoder, which `patch` leaves alone, without a processor"
KNOWN = {
    "autoencoders.autoencoder_kl_hunyuanimage.HunyuanImageAttentionBlock": AUTOENCODER,
    "autoencoders.autoencoder_kl_hunyuanimage_refiner.HunyuanImageRefinerAttnBlock": AUTOENCODER,
    "autoencoders.autoencoder_kl_hunyuanvideo15.HunyuanVideo15AttnBlock": AUTOENCODER,
    "autoencoders.autoencoder_kl_qwenimage.QwenImageAttentionBlock": AUTOENCODER,
    "autoencoders.autoencoder_kl_qwenimage21.QwenImage21AttentionBlock": AUTOENCODER,
    "autoencoders.autoencoder_kl_wan.WanAttentionBlock": AUTOENCODER,
    "autoencoders.autoencoder_vidtok.VidTokAttnBlock": AUTOENCODER,
}
"""Classes that call attention and are not patched, and why that is so."""


def names_in(node: ast.AST) -> set[str]:
    """Names and attributes that code refers to; texts do not count."""
    parts = ast.walk(node)
    return {getattr(part, "id", None) or getattr(part, "attr", "") for part in parts}


def callers(source: str) -> tuple[list[str], dict[str, set[str]]]:
    """Classes that call attention, themselves or by a function of their module; those functions.

    Returns:
        Names of classes; and the functions that call attention, with the classes that name them.
    """
    tree = ast.parse(source)
    functions = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and names_in(node) & TARGETS
    }
    classes = {node.name: names_in(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    found = [name for name, names in classes.items() if names & (TARGETS | functions)]
    return found, {f: {name for name in found if f in classes[name]} for f in functions}


def sources() -> Iterator[tuple[str, str]]:
    """Import name and text of each module of diffusers' models that mentions attention."""
    for path in sorted((ROOT / "models").rglob("*.py")):
        source = path.read_text()
        module = ".".join(("diffusers", *path.relative_to(ROOT).with_suffix("").parts))
        if module != REGISTRY and any(target in source for target in TARGETS):
            yield module.removesuffix(".__init__"), source


def is_processor(cls: type) -> bool:
    """Whether a class has a `__call__` of its own, which torch's modules only inherit."""
    return any("__call__" in vars(c) for c in cls.__mro__ if c.__module__.startswith("diffusers"))


def direct_calls(cls: type) -> list[str]:
    """Methods that look attention up by its own name, as unpatched ones do."""
    methods = {n: v for c in reversed(cls.__mro__) for n, v in vars(c).items()}
    plain = {n: inspect.unwrap(v) for n, v in methods.items() if inspect.isfunction(v)}
    names = {name: set(function.__code__.co_names) for name, function in plain.items()}
    return [
        name
        for name, found in names.items()
        if TARGETS & found and not any(other.startswith(PREFIX) for other in found)
    ]


CALLERS = {module: callers(source) for module, source in sources()}
FOUND = [(module, name) for module, (classes, _) in CALLERS.items() for name in classes]


def test_the_search_finds_the_usual_classes():
    names = {name for _, name in FOUND}
    assert {"AttnProcessor2_0", "CogVideoXAttnProcessor2_0", "WanAttnProcessor"} <= names
    assert {"FluxAttnProcessor", "Flux2KVAttnProcessor", "SanaWMSoftmaxAttention"} <= names
    assert "SanaLinearAttnProcessor2_0" not in names
    assert len(FOUND) > 100
    assert direct_calls(attention_processor.AttnProcessor2_0) == ["__call__"]


@pytest.mark.parametrize(("module", "name"), FOUND)
def test_a_class_that_calls_attention_is_patched_or_known(module, name):
    cls = getattr(importlib.import_module(module), name)
    if is_processor(cls):
        generated = patched_class(cls)
        assert generated is not None, f"{module}.{name} is a processor that we do not patch"
        assert not direct_calls(generated), f"{module}.{name} still calls the host's attention"
        return
    path = f"{module}.{name}".removeprefix("diffusers.models.")
    if path in KNOWN:
        return
    generated = patched_module_class(cls)
    assert generated is not None, f"{path} calls attention, and we neither patch nor list it"
    assert not direct_calls(generated), f"{path} still calls the host's attention"


def test_nothing_is_listed_that_is_gone_or_a_processor():
    paths = {f"{module}.{name}".removeprefix("diffusers.models.") for module, name in FOUND}
    assert set(KNOWN) <= paths
    for path in KNOWN:
        module, name = f"diffusers.models.{path}".rsplit(".", 1)
        assert not is_processor(getattr(importlib.import_module(module), name))


def test_functions_that_call_attention_are_called_by_processors():
    found = {
        f"{module}.{function}": [getattr(importlib.import_module(module), c) for c in classes]
        for module, (_, functions) in CALLERS.items()
        for function, classes in functions.items()
    }
    assert "diffusers.models.transformers.transformer_flux2._flux2_kv_causal_attention" in found
    for function, classes in found.items():
        assert classes, f"no class of its module calls {function}"
        assert all(is_processor(cls) for cls in classes), function


def test_the_search_sees_code_and_no_texts():
    found, functions = callers('''
def helper(q):
    return dispatch_attention_fn(q, q, q)
class Spelled:
    def forward(self, q):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)
class Inner:
    def forward(self, q):
        def run():
            return helper(q)
        return run()
class Silent:
    """Calls scaled_dot_product_attention, it says."""
    def forward(self, q):
        return hasattr(F, "scaled_dot_product_attention")
''')
    assert found == ["Spelled", "Inner"]
    assert functions == {"helper": {"Inner"}}
