"""`benchmarks/accuracy.py`: what it counts as an error, which inputs, and what it reports."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from sage_plugin.families.attention.reference import reference
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.measure.inputs import self_attention
from sage_plugin.schema import LaunchConfig
from tests.tune.captures import GROUPED, MASKED, SELF, write

TINY = ["--lengths", "128", "--head-dims", "64", "--heads", "2", "--rows", "16"]
LAUNCH = LaunchConfig(64, 32, 4, 1, "pointer", True, True, 1)


def _run(accuracy: ModuleType, *options: str) -> dict:
    assert accuracy.main(["--output", "out.json", *options]) == 0
    return json.loads(Path("out.json").read_text())


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_errors_are_centered_by_the_mean_of_v(accuracy: ModuleType) -> None:
    exact = torch.tensor([[[[10.0, 12.0]], [[9.0, 11.0]]]])
    mean = torch.full((1, 2, 1, 2), 10.0)
    out = exact + torch.tensor([[[[0.5, 0.5]], [[0.0, 0.0]]]])
    found = accuracy.errors_of(out, exact, mean, torch.float32)
    assert found["rel_l1"] == pytest.approx(1 / 42)
    assert found["centred_rel_l1"] == pytest.approx(1 / 4)
    assert found["worst_head_rel_l1"] == pytest.approx(1 / 22)
    assert found["worst_head_centred_rel_l1"] == pytest.approx(1 / 2)
    assert found["gain"] == pytest.approx(43 / 42)
    assert found["rounding_floor"] == 0.0


def test_a_cell_compares_in_the_dtype_of_the_peer(
    accuracy: ModuleType, peer_kernels: ModuleType
) -> None:
    exact = torch.full((1, 1, 2, 4), 1.001)
    held = reference(exact, exact, exact)
    held = type(held)(rows=held.rows, out=exact, mean=torch.zeros(1, 1, 1, 4))
    fine = accuracy.errors_of(exact, exact, held.mean, torch.float32)
    ours = accuracy.Judged(exact, fine, "sage:emulation", LAUNCH, 1.0)
    peer = peer_kernels.Peer("p", "p", lambda *a, **k: None, ("sage",))
    theirs = dict(fine, centred_rel_l1=0.0005, worst_head_centred_rel_l1=0.0005)
    narrow = accuracy.cell("sage", ours, peer, torch.bfloat16, theirs, held)
    assert narrow["ours"] == narrow["rounding_floor"] == pytest.approx(0.001 / 1.001, rel=1e-3)
    assert not narrow["at_most"]
    wide = accuracy.cell("sage", ours, peer, torch.float32, theirs, held)
    assert (wide["ours"], wide["ratio"], wide["at_most"]) == (0.0, 0.0, True)
    broken = dict(theirs, centred_rel_l1=0.0, bad_values=1.0)
    assert accuracy.cell("sage", ours, peer, torch.bfloat16, broken, held)["at_most"]
    ours.errors["bad_values"] = 1.0
    assert not accuracy.cell("sage", ours, peer, torch.bfloat16, broken, held)["at_most"]


@pytest.mark.parametrize("causal", [False, True])
def test_the_emulation_of_some_rows_is_that_of_all(
    causal: bool, accuracy: ModuleType, accuracy_inputs: ModuleType
) -> None:
    shape = self_attention(1, 2, 200, 64)
    tensors = accuracy_inputs.drawn("biased", shape, device="cpu")
    rows = accuracy.twin_rows(200, count=40, granule=16, causal=causal)
    some = accuracy.emulated("fav3_sage", LAUNCH, tensors, rows, causal=causal, scale=0.1)
    twin = implementation("fav3_sage", "emulation")
    whole = twin.prepare(*tensors, problem=AttentionParams(0.1, causal, "bhsd"), launch=LAUNCH)
    full, _ = twin.launch(whole, out_dtype=torch.float32)
    torch.testing.assert_close(some, full[:, :, rows], rtol=1e-4, atol=1e-5)


def test_twin_rows_are_whole_granules(accuracy: ModuleType) -> None:
    drawn = accuracy.twin_rows(1000, count=48, granule=16, causal=False)
    starts = drawn.view(3, 16)[:, 0]
    assert (starts % 16 == 0).all()
    assert torch.equal(drawn.view(3, 16), starts[:, None] + torch.arange(16))
    assert drawn.max() < 992
    suffix = accuracy.twin_rows(1000, count=48, granule=128, causal=True)
    assert (suffix[0].item(), suffix[-1].item()) == (896, 999)
    assert accuracy.twin_rows(100, count=48, granule=128, causal=False).tolist() == list(range(100))


def test_outliers_are_where_their_names_say(accuracy_inputs: ModuleType) -> None:
    shape = self_attention(1, 1, 512, 64)
    q, k, v = accuracy_inputs.drawn("outlier_qk", shape, device="cpu")
    for tensor in (q, k):
        spread = tensor.float().std(dim=(0, 1, 2))
        assert (spread > 15).sum() == 16
        assert (spread < 1.5).sum() == 48
    assert v.float().std() < 1.1
    q, k, _ = accuracy_inputs.drawn("outlier_k", shape, device="cpu")
    assert q.float().std() < 1.1
    assert (k.float().std(dim=(0, 1, 2)) > 30).sum() == 2


def test_a_worse_peer_loses_every_cell(
    accuracy: ModuleType, installed: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.gain = 0.5
    body = _run(accuracy, *TINY, "--kernels", "fav3_sage,fav3_fp8", "--inputs", "normal,drift")
    cells = [one for row in body["rows"] for one in row["cells"]]
    assert [one["at_most"] for one in cells] == [True] * 8
    assert {one["peer"] for one in cells} == {"fa3 fp8"}
    assert {one["out_dtype"] for one in cells} == {"bfloat16"}
    assert all(one["ours"] < 0.2 < 0.4 < one["theirs"] for one in cells)
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "ours at most theirs in 8 of 8 cells (worst head: 8)"
    assert said[-3].startswith("fav3_sage / fa3 fp8: 4 of 4 cells")


def test_a_better_peer_wins_every_cell(
    accuracy: ModuleType, installed: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    body = _run(accuracy, *TINY, "--kernels", "sage", "--inputs", "biased", "--causal", "no")
    (one,) = body["rows"][0]["cells"]
    assert (one["peer"], one["out_dtype"]) == ("sageattention 1.0.6", "float32")
    assert one["theirs"] < one["ours"] < 0.05
    assert one["ours"] == one["ours_fp32"] == body["rows"][0]["ours"]["sage"]["centred_rel_l1"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("ours at most theirs in 0 of 1")
    assert body["verdict"][-1].startswith("ours at most theirs in 0 of 1")


def test_the_file_says_what_ran_where(accuracy: ModuleType, installed: ModuleType) -> None:
    body = _run(accuracy, *TINY, "--inputs", "normal", "--causal", "yes", "--commit", "abc")
    assert body["device"]["kind"] == "cpu"
    assert body["commit"] == "abc"
    assert body["toolchain"]["torch"] == torch.__version__
    assert body["peers"]["fa3-fwd"] == "0.0.3"
    (row,) = body["rows"]
    assert row["shape"]["causal"]
    assert set(row["ours"]) == {"sage", "fav3_sage", "fav3_fp8"}
    for one in row["ours"].values():
        assert one["ran"].endswith(":emulation")
        assert one["launch"]["block_n"] >= 32
        assert one["ratio_to_emulation"] == pytest.approx(1.0, abs=0.01)
    assert row["peers"]["fa3 bf16"]["centred_rel_l1"] < 0.01
    assert any("sdpa cudnn" in note for note in body["notes"])


def test_without_peers_ours_are_still_judged(
    accuracy: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    body = _run(accuracy, *TINY, "--kernels", "sage", "--inputs", "normal", "--causal", "no")
    assert 0.005 < body["rows"][0]["ours"]["sage"]["centred_rel_l1"] < 0.03
    assert body["rows"][0]["cells"] == []
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("fa3-fwd cannot be imported and is left out")
    assert said[-1] == "no peer that ours are held to is installed: nothing was compared"


def test_captures_keep_their_mask_and_scale(
    accuracy: ModuleType, installed: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = [(SELF, (0, 1)), (GROUPED, (0, 1)), (MASKED, (0,))]
    write(tmp_path / "caps", saved)
    body = _run(accuracy, "--captures", "caps", "--inputs", "none", "--kernels", "fav3_sage")
    assert "caps: 1 captures have a mask: left out" in capsys.readouterr().out
    plain, grouped = body["rows"]
    assert plain["input"] == "caps/000000"
    assert (plain["shape"]["heads_q"], plain["shape"]["causal"]) == (2, False)
    assert (grouped["shape"]["heads_q"], grouped["shape"]["heads_k"]) == (4, 2)
    assert grouped["shape"]["causal"]
    assert grouped["shape"]["scale"] == 32**-0.5
    assert [one["peer"] for row in body["rows"] for one in row["cells"]] == ["fa3 fp8"] * 2


def test_tensor_files_say_how_they_were_called(accuracy: ModuleType) -> None:
    x = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0))
    save_file({f"layer.{part}": x.clone() for part in "qkv"}, "a.safetensors", {"causal": "true"})
    save_file({part: x.clone() for part in "qkv"}, "b.safetensors", {"scale": "0.3"})
    options = ["--inputs", "none", "--kernels", "sage", "--tensors", "a.safetensors"]
    body = _run(accuracy, *options, "b.safetensors")
    assert [row["input"] for row in body["rows"]] == ["a/layer", "b"]
    assert [row["shape"]["causal"] for row in body["rows"]] == [True, False]
    scales = [row["shape"]["scale"] for row in body["rows"]]
    assert scales == pytest.approx([32**-0.5, 0.3])


def test_lengths_are_cut_to_whole_blocks_on_request(accuracy: ModuleType) -> None:
    options = ["--inputs", "drift", "--kernels", "sage", "--causal", "no", "--head-dims", "64"]
    body = _run(accuracy, *options, "--lengths", "150,40", "--trim", "64")
    shapes = [row["shape"] for row in body["rows"]]
    assert [(shape["seq_q"], shape["seq_k"]) for shape in shapes] == [(128, 128), (40, 40)]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--kernels", "sagee"], "'sagee' is not known"),
        (["--inputs", "normal,odd"], "'odd': allowed are normal"),
        (["--lengths", "0"], "needs numbers above zero"),
        (["--rows", "0"], "argument --rows: 0: needs a number above zero"),
        (["--device", "cuda"], "there is no GPU that torch can use"),
        (["--captures", "nowhere"], "nowhere does not exist"),
        (["--tensors", "nowhere"], "nowhere cannot be read"),
        (["--tensors", "flat.safetensors"], "flat.safetensors: q is missing or not (B, H, S, D)"),
        (["--inputs", "none"], "no inputs"),
        (["--output", "no/such/out.json"], "no/such is not a folder"),
    ],
)
def test_wrong_options_end_in_one_sentence(
    options: list[str],
    sentence: str,
    accuracy: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_file({part: torch.ones(4) for part in "qkv"}, "flat.safetensors")
    with pytest.raises(SystemExit) as ended:
        accuracy.main(["--output", "out.json", *options])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_a_damaged_capture_does_not_end_the_table(
    accuracy: ModuleType, installed: ModuleType, tmp_path: Path
) -> None:
    write(tmp_path / "caps", [(SELF, (0,)), (SELF, (1,))])
    path = tmp_path / "caps" / "000000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    body = _run(accuracy, "--captures", "caps", "--inputs", "none", "--kernels", "sage")
    assert [row["input"] for row in body["rows"]] == ["caps/000001"]
    assert any("does not match its checksum" in note for note in body["notes"])
