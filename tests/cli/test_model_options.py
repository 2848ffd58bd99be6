"""`sage tune --model`: the calls of a model that is not loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.program import error_of, sage
from tests.plugin.test_model_calls import LLAMA, WAN

TUNE = "tune --device cpu --kernel sage --dry-run"


@pytest.fixture(autouse=True)
def _models():
    for name, config in (("wan", WAN), ("llama", LLAMA)):
        Path(name).mkdir()
        (Path(name) / "config.json").write_text(json.dumps(config))


def test_the_calls_of_a_model_and_of_one_of_its_devices():
    shown = sage(f"{TUNE} --model wan --dtype fp16").stdout
    assert "1x12 heads of 128" in shown
    assert "32,760 tokens" in shown
    assert "32,760:512 tokens" in shown
    assert "fp16 bshd" in shown
    shown = sage(f"{TUNE} --model wan/config.json --image-size 64x32 --num-frames 5").stdout
    assert "16 tokens" in shown
    shown = sage(f"{TUNE} --model llama --seq-len 4096 --tp-size 4").stdout
    assert "1x8:2 heads of 128" in shown
    assert "fp16 bhsd causal" in shown
    spelt = sage(f"{TUNE} --seq-len 4096 -hq 8 -d 64 --tp-size 2 --tp-split-dim seq").stdout
    assert "2,048:4,096 tokens" in spelt


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model absent", "absent: no config.json"),
        ("--model wan -hq 4", "--model has its own shapes: leave --num-heads out"),
        ("--model wan --image-size large", "--image-size 'large': pixels such as 832x480"),
        ("--model wan --num-frames 0", "--num-frames 0: must be at least 1"),
        ("--model wan -b 0", "-b 0: must be at least 1"),
        ("--model wan --inputs-distribution flat", "--inputs-distribution 'flat'"),
        ("--model wan --tp-size 5", "--tp-size 5 does not divide heads_q 12"),
        ("--model llama", "has no length of its own"),
        ("--seq-len 64 --image-size 8x8", "--image-size is of a model: add --model"),
        ("--from-captures --model wan", "--model does not change captures"),
        ("captured --tp-size 2", "--tp-size does not change captures"),
    ],
)
def test_mistakes(words, says):
    done = sage(f"{TUNE} {words}")
    assert done.exit_code == 2
    assert says in error_of(done)
