"""Tuned configs of `patch(config_dir=)` reach linears, and reports tell what they save."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")

import sage_plugin
from sage_plugin.kernels.contract import ResolvedConfig
from sage_plugin.kernels.linear import executor, torch_ops, traced
from sage_plugin.kernels.linear.backends.torch_products import TorchProducts
from sage_plugin.kernels.resolver import Resolver
from sage_plugin.schema import LinearLaunch
from tests.plugin.tiny import tiny

LAUNCH = LinearLaunch(64, 64, 64, 4, 2)
SAVED_MS = 0.25
LINEARS = 12


@pytest.fixture
def asked(monkeypatch):
    """Folders that are looked into, where our product multiplies, as it would on a GPU."""
    folders = []
    real = Resolver.anew

    def anew(self, call, request):
        answer = real(self, call, request)
        if isinstance(answer, executor.LinearExecutor) and answer.decision.variant == "emulation":
            folders.append(request.config_dir)
            found = ResolvedConfig(LAUNCH, "exact", "a folder", SAVED_MS)
            answer.found = found if request.config_dir else None
        return answer

    monkeypatch.setattr(Resolver, "anew", anew)
    executor.resolver.answers.clear()
    yield folders
    executor.resolver.answers.clear()


def test_a_folder_of_configs_reaches_linears_and_what_it_saves_is_told(asked, tmp_path):
    model = tiny("cogx")
    options = {"kernel": "sdpa", "linears": "int8_row", "config_dir": tmp_path}
    handle = sage_plugin.patch(model.module, **options)
    model.run()
    assert set(asked) == {str(tmp_path)}
    report = handle.report()
    assert {(*row.config_sources.items(), row.saved_ms) for row in report.linears} == {
        (("exact", 1), SAVED_MS)
    }
    assert report.saved_ms() == pytest.approx(LINEARS * SAVED_MS)
    text = report.text()
    assert f"about {LINEARS * SAVED_MS:.1f} ms saved over the baseline per forward" in text
    assert f"took of {LINEARS} of the {LINEARS} kernel calls" in text
    assert "config exact x6; saved 1.5 ms" in " ".join(text.split())
    asked.clear()
    sage_plugin.patch(model.module, **options | {"config_dir": None})
    model.run()
    assert set(asked) == {None}
    assert handle.report().saved_ms() == 0.0


def test_a_graph_has_the_folder_too(monkeypatch, tmp_path):
    folders = []

    def products(where, key, config_dir):
        folders.append((key.kernel, config_dir))
        return TorchProducts()

    monkeypatch.setattr(traced, "has_ops", lambda x: True)
    monkeypatch.setattr(torch_ops, "_new_products", products)
    torch_ops._products.clear()
    model = tiny("cogx").module
    sage_plugin.patch(model, kernel="sdpa", linears="int8_row", config_dir=tmp_path)
    query = model.transformer_blocks[0].attn1.to_q
    with torch.no_grad():
        torch.compile(query, backend="eager", fullgraph=True)(torch.ones(4, query.in_features))
    assert folders == [("int8_row", str(tmp_path))]
    torch_ops._products.clear()
