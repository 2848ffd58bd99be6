"""Reasons for the host's attention: one cause each, told in one sentence."""

from __future__ import annotations

import pickle
import string

import pytest

from sage_plugin.kernels.fallback import Fallback, FallbackReason

GAPS = {cause: sum(f is not None for _, f, *_ in string.Formatter().parse(cause.value))
        for cause in Fallback}  # fmt: skip


def reason_of(cause):
    return FallbackReason(cause, tuple(range(GAPS[cause])))


def test_no_cause_is_an_alias_of_another():
    assert len(Fallback.__members__) == len(list(Fallback))


@pytest.mark.parametrize("cause", Fallback)
def test_a_reason_is_a_value_with_a_sentence(cause):
    reason, again = reason_of(cause), pickle.loads(pickle.dumps(reason_of(cause)))
    assert {reason: 1}[again] == 1
    assert "{" not in str(reason)
    assert not str(reason).endswith(".")


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, 13), "shorter than min_seq 13"),
        (FallbackReason(Fallback.V_CHANNELS, (64, 128)), "V has 64 channels and Q 128"),
        (FallbackReason(Fallback.POLICY, 2), "the policy's rule 2 leaves it to the host"),
        (
            FallbackReason(Fallback.MODEL_ARGUMENT, "{x}"),
            "only the model's own attention knows {x}",
        ),
    ],
)
def test_the_detail_fills_the_sentence(reason, text):
    assert str(reason) == text


def test_what_strict_mode_lets_pass():
    assert {cause for cause in Fallback if cause.asked_for} == {
        Fallback.DISABLED, Fallback.NOT_FINITE, Fallback.DENSE_ADDITIVE_MASK, Fallback.TOO_SMALL,
        Fallback.SMALL_LINEAR, Fallback.SHORTER_THAN_MIN_SEQ, Fallback.POLICY,
        Fallback.POLICY_WITHOUT_RULE, Fallback.WIDE_HEADS,
    }  # fmt: skip
