"""What the child does, in this process: emulations on tiny inputs, and attention that cheats."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_plugin.accuracy import output
from sage_plugin.families.attention import replay as replay_call
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.tune.configs import trial
from sage_plugin.tune.configs.inputs import from_captures, from_drawn
from sage_plugin.tune.configs.plan import TuningRequest, build
from sage_plugin.tune.configs.trial import JudgeJob, RaceJob, ScreenJob
from sage_plugin.tune.run.runner import Race
from sage_plugin.tune.run.study import Timer
from tests.tune import captures
from tests.tune.captures import DENSE, GROUPED, MASKED, SELF

FAST = Timer("wall", screen_rounds=2, screen_s=0.02, race_rounds=4, race_s=0.1)


@pytest.fixture(autouse=True)
def _forget():
    trial._loaded_study = None
    yield
    trial._loaded_study = None


@pytest.fixture
def study(tmp_path):
    folder = captures.write(tmp_path / "c", [(SELF, (0, 1)), (SELF, (2,))])
    return build(TuningRequest(from_captures(folder), device="cpu", timer=FAST)).studies[0]


def tried(study, config):
    """What becomes of a config that is judged and, where it passes, timed."""
    judged = JudgeJob(study.problem, config)()
    if judged.status != "ok":
        return judged
    assert judged.time is None
    (timed,) = ScreenJob(study.problem, (judged,), study.default)()
    return timed


def test_a_sound_candidate_is_judged_on_all_captures_and_timed(study):
    found = tried(study, study.space[1])
    assert (found.study, found.stage, found.status) == (study.id, "screen", "ok")
    assert found.errors.bad_values == 0
    assert 0.99 < found.errors.cosine < 1
    assert found.time.method == "wall"
    assert 0 < found.extra["ratio"] < 100
    assert tried(study, study.default).extra["ratio"] == 1.0


@pytest.mark.parametrize("shape", [SELF, GROUPED], ids=["bshd", "bhsd gqa causal"])
def test_synthetic_inputs_and_every_layout_run(shape):
    (study,) = build(
        TuningRequest(from_drawn([ReplayInputs(shape)]), device="cpu", timer=FAST)
    ).studies
    assert tried(study, study.default).status == "ok"


def test_report_59_the_worst_head_of_the_worst_capture_is_gated(study, monkeypatch):
    seen = []
    real = replay_call.AttentionReplay.errors

    def watched(call, *args):
        seen.append(call.tensors[1].shape[1])
        return real(call, *args)

    monkeypatch.setattr(replay_call.AttentionReplay, "errors", watched)
    tried(study, study.default)
    assert sorted(seen) == [1, 2], "saved heads of both captures"


def cheat(monkeypatch, attention) -> None:
    monkeypatch.setattr(replay_call, "attention", attention)


def test_a_kernel_that_writes_nothing_fails_the_gate(study, monkeypatch):
    def nothing(q, k, v, *, out_dtype=None, **_):
        # The memory that a lazy kernel hands back was filled with NaN beforehand.
        return torch.full_like(q, float("nan"), dtype=out_dtype or v.dtype)

    cheat(monkeypatch, nothing)
    found = tried(study, study.default)
    assert found.status == "gate_failed"
    assert "NaN" in found.reason
    assert found.time is None, "what fails its gate is not timed"


def test_memory_is_poisoned_before_the_check(study, monkeypatch):
    poisoned = []
    real = output.poison
    monkeypatch.setattr(output, "poison", lambda *a: (poisoned.append(a[0]), real(*a)))
    tried(study, study.default)
    assert len(poisoned) >= 2 * len(study.sources)


def test_a_candidate_that_scribbles_on_its_inputs_is_found_and_the_next_is_judged_fairly(
    study, monkeypatch
):
    real = replay_call.attention

    def scribbling(q, k, v, *args, **keywords):
        result = real(q, k, v, *args, **keywords)
        q.add_(1)
        return result

    with monkeypatch.context() as patch:
        cheat(patch, scribbling)
        found = tried(study, study.default)
    assert found.status == "mutates_input"
    assert tried(study, study.default).status == "ok"


def test_scribbling_only_while_it_is_timed_is_found_too(study, monkeypatch):
    real = replay_call.AttentionReplay.whole

    def scribbling(call, *args):
        run = real(call, *args)
        return lambda: (call.tensors[2].mul_(1.01), run())

    monkeypatch.setattr(replay_call.AttentionReplay, "whole", scribbling)
    assert tried(study, study.space[1]).status == "mutates_input"


def test_a_race_times_all_in_one_measurement_and_the_first_twice(study):
    race = Race(study.space, study.space[2], budget_s=0.1)
    finals = RaceJob(study.problem, race)()
    assert [final.config for final in finals] == list(study.space)
    assert max(final.time.n for final in finals) == finals[0].time.n
    assert finals[0].extra["gain"] == finals[0].extra["gain_low"] == 0.0
    assert finals[0].extra["aa_ratio"] > 0
    assert [final.extra["incumbent"] for final in finals] == [0.0, 0.0, 1.0]
    assert finals[2].extra["gain_low_over_incumbent"] == 0.0
    assert all(final.kernel_time is None for final in finals), "an emulation has no launch"
    assert len({final.host_time for final in finals}) == 1
    assert finals[0].host_time.n <= trial.ASIDE_ROUNDS


def test_a_race_goes_on_where_the_host_s_attention_fails(study, monkeypatch):
    real, asked = replay_call.attention, []

    def failing(*args, kernel, **keywords):
        asked.append(kernel)
        if kernel == "sdpa":
            raise torch.OutOfMemoryError("no memory for the scores")
        return real(*args, kernel=kernel, **keywords)

    monkeypatch.setattr(replay_call, "attention", failing)
    finals = RaceJob(study.problem, Race(study.space[:2], None, budget_s=0.1))()
    assert asked.count("sdpa") == 1
    assert [final.status for final in finals] == ["ok", "ok"]
    assert [final.host_time for final in finals] == [None, None]


@pytest.fixture(params=[(MASKED, (0, 2)), (DENSE, (1,))], ids=["key_bias", "dense"])
def masked(request, tmp_path):
    folder = captures.write(tmp_path / "m", [request.param])
    return build(TuningRequest(from_captures(folder), device="cpu", timer=FAST)).studies[0]


def test_masked_captures_are_judged_and_timed_with_their_mask(masked, monkeypatch):
    assert tried(masked, masked.space[1]).status == "ok"
    real = replay_call.attention

    def unmasked(q, k, v, attn_mask=None, **keywords):
        return real(q, k, v, **keywords)

    loaded = trial._loaded(masked)
    timed = trial._call(masked, loaded.timed, masked.default)()
    split = loaded.timed.split(trial._decision(masked), masked.default, masked.facts)
    alone, _ = split.alone()
    assert torch.equal(timed, alone)
    cheat(monkeypatch, unmasked)
    assert tried(masked, masked.default).status == "gate_failed"
    assert not torch.equal(timed, trial._call(masked, loaded.timed, masked.default)())


def test_a_candidate_that_scribbles_on_its_mask_is_found(masked, monkeypatch):
    real = replay_call.attention

    def scribbling(q, k, v, attn_mask=None, **keywords):
        result = real(q, k, v, attn_mask=attn_mask, **keywords)
        attn_mask.fill_(True)
        return result

    monkeypatch.setattr(replay_call, "attention", scribbling)
    assert tried(masked, masked.default).status == "mutates_input"


def test_elsewhere_the_mask_is_timed_at_the_full_size(masked):
    source = masked.timed
    saved = source.load("cpu")
    timed = source.timed(saved, "cuda:0")
    shape = source.shape
    assert [t.shape[:2] for t in timed.tensors] == [
        (shape.batch, heads) for heads in (shape.heads_q, shape.heads_k, shape.heads_k)
    ]
    heads = 1 if shape.mask_kind == "key_bias" else shape.heads_q
    assert timed.mask.shape[:2] == (1, heads)
    assert torch.equal(timed.mask[0, -1], saved.mask[0, -1])


@pytest.mark.parametrize("kind", ["key_bias", "dense"])
def test_synthetic_masks_reach_the_gate(kind, monkeypatch):
    shape = dataclasses.replace(GROUPED, mask_kind=kind)
    (study,) = build(
        TuningRequest(from_drawn([ReplayInputs(shape)]), device="cpu", timer=FAST)
    ).studies
    assert tried(study, study.default).status == "ok"
    real = replay_call.attention
    cheat(monkeypatch, lambda q, k, v, attn_mask=None, **others: real(q, k, v, **others))
    assert tried(study, study.default).status == "gate_failed"


def test_the_launch_alone_gives_what_the_whole_call_gives(study):
    loaded = trial._loaded(study)
    whole = trial._call(study, loaded.timed, study.space[1])()
    split = loaded.timed.split(trial._decision(study), study.space[1], study.facts)
    alone, _ = split.alone()
    assert torch.equal(whole, alone)


def test_inputs_stay_for_the_next_candidate_of_the_same_study(study, monkeypatch):
    loads = []
    real = ReplayInputs.load
    monkeypatch.setattr(ReplayInputs, "load", lambda *a: (loads.append(a), real(*a))[1])
    for config in study.space:
        tried(study, config)
    assert len(loads) == len(study.sources)


def test_a_capture_that_changed_on_disk_is_refused(study):
    from sage_plugin.errors import CaptureError

    path = next(iter((captures.Path(study.timed.folder)).glob("*.safetensors")))
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(CaptureError, match="checksum"):
        tried(study, study.default)
