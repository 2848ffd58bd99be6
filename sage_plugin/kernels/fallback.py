"""Why a call stays with the host's attention: a cause for code, and a sentence for users.

Traced code makes these and compares them, so they hold constants alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Fallback(Enum):
    """One cause each; the value is its sentence, with a gap for each detail."""

    # what `auto` leaves, as slower here
    TOO_SMALL = "so small a call is faster on the host's attention"
    DENSE_ADDITIVE_MASK = "an additive mask of rows and keys is faster on the host's attention"
    WIDE_HEADS = "heads of over {} channels are faster on the host's attention"
    CPU = "on a CPU the host's attention is the fastest"

    # what no kernel takes
    GRADIENT = "a gradient is needed"
    DROPOUT = "dropout is not supported"
    DTYPE = "dtype {} is not supported"
    HEAD_DIM = "head dim {} is over {}"
    V_CHANNELS = "V has {} channels and Q {}"
    EMPTY = "the call is empty"
    SHAPE = "not one batch of (B, H, S, D) tensors"
    CAUSAL_ALIGNMENT = "a causal call with Sq != Sk is aligned to the first key by the host"
    MASK_TYPE = "a mask that is a {}"
    MASK_DTYPE = "a mask of {}"
    MASK_SHAPE = "a mask that does not broadcast to (B, H, Sq, Sk)"
    MASK_DEVICE = "a mask on another device"
    TENSOR_SUBCLASS = "a tensor subclass brings its own attention"
    FUNCTION_MODE = "another TorchFunctionMode watches the attention calls"

    # what the user asked for
    SHORTER_THAN_MIN_SEQ = "shorter than min_seq {}"
    DISABLED = "SAGE_PLUGIN_DISABLE is set"
    POLICY = "the policy's rule {} leaves it to the host"
    POLICY_WITHOUT_RULE = "no rule of the policy takes it"
    POLICY_WITHOUT_STEPS = "the policy goes by the number of steps, which no scheduler has set"
    STEP_WITHOUT_SCHEDULER = (
        "the policy goes by denoising steps, and no scheduler that counts those of this call is "
        "known"
    )
    STEP_MET_MIDWAY = (
        "the policy goes by denoising steps, and the scheduler was met in the middle of a run"
    )
    STEP_STANDS_STILL = (
        "the policy goes by denoising steps, and the scheduler does not step with the model"
    )
    STEP_OUTSIDE_RUN = (
        "the policy goes by denoising steps, and the scheduler is before or past those of a run"
    )

    # what the device or its software cannot do
    DEVICE = "no kernel runs on device type {}"
    UNKNOWN_ARCHITECTURE = "{} is not a known {} architecture"
    NO_TRITON = "Triton is not installed"
    OLD_TRITON = "{} needs Triton {} or newer, and {} is installed"
    ARCHITECTURE_LACKS = "{} {}"
    BUILD_FAILED = "the kernel cannot be built here ({}: {})"
    ILLEGAL_CONFIG = "{}"

    # what the Hopper variants leave to the portable ones
    NO_HOPPER_VARIANT = "{} has no Hopper variant"
    HOPPER_ARCHITECTURE = "the Hopper variant runs on {} alone, and this is {}"
    HOPPER_MASK = "the Hopper variant takes no mask of rows and keys"
    HOPPER_SPECIAL = (
        "the Hopper variant takes no window, cap, sinks, packed sequences or bias of each head"
    )
    HOPPER_HEAD_DIM = "the Hopper variant takes head dims {} to {}, and this is {}"

    # what a linear leaves
    LINEAR_ON_CPU = "on a CPU torch's own linear is the fastest"
    SMALL_LINEAR = "so small a product is faster on torch's own linear"
    FEATURES = "in_features {} and out_features {} are not both multiples of {}"
    NO_TORCH_PRODUCT = "torch has no product of {} on {}"

    # what belongs to the host library
    ARGUMENTS = "arguments that only the host's attention knows"
    PARALLEL = "context parallel attention of this kind is the host's"
    ATTENTION_WEIGHTS = "attention weights are asked for"
    EAGER_IS_NOT_SOFTMAX = "the model's eager attention does more than softmax"
    IMPLEMENTATION = "masks and arguments of {!r} attention are its own"
    PACKED_BY_HOST = "sequences are packed, and their ends are for {!r} attention alone"
    WINDOW_BY_HOST = "a window of {} keys is for {!r} attention alone"
    MODEL_ARGUMENT = "only the model's own attention knows {}"
    UNKNOWN_TO_SDPA = (
        "transformers' sdpa attention knows no {}, which this model has: load it with "
        "attn_implementation='eager'"
    )

    # what a patch of linears leaves
    LINEAR_ROLE = "{} stay in 16 bit"
    LINEAR_EXCLUDED = "left out by include or exclude"
    LINEAR_TIED = "its weight is shared with another module"
    LINEAR_QUANTIZED = "{} is quantized already"
    LINEAR_CLASS = "{} is not torch's own linear"
    LINEAR_WEIGHT = "its weight is a {}"
    LINEAR_FORWARD = "its forward was replaced"
    LINEAR_OFFLOADED = "{} moves its weight at every call"
    LINEAR_READ = "the model reads its weight beside calling it"
    LINEAR_DEVICE = "the input is on another device than the weight"
    LINEAR_SMOOTHING = "it has {} input channels here, and smoothing factors of {}"
    LINEAR_NEW = "came in after patch; call refresh"
    EXPERTS_KERNEL = "{} multiplies no groups"
    EXPERTS_NORM = "a norm follows its experts"

    # what was computed
    NOT_FINITE = "an output of this layer was not finite"
    INPUT_NOT_FINITE = "inputs are not finite"

    @property
    def by_policy(self) -> bool:
        """Whether the user's policy says so, which needs no warning."""
        return self in (Fallback.POLICY, Fallback.POLICY_WITHOUT_RULE)

    @property
    def left_by_auto(self) -> bool:
        """Whether `auto` leaves the call for its size or its mask, and a kernel could take it."""
        return self in _LEFT_BY_AUTO

    @property
    def asked_for(self) -> bool:
        """Whether the user asked for it or was told, so that strict mode does not complain."""
        return self.by_policy or self.left_by_auto or self in _ASKED_FOR


_LEFT_BY_AUTO = (
    Fallback.TOO_SMALL,
    Fallback.DENSE_ADDITIVE_MASK,
    Fallback.WIDE_HEADS,
    Fallback.SMALL_LINEAR,
)
_ASKED_FOR = (
    Fallback.DISABLED,
    Fallback.NOT_FINITE,
    Fallback.SHORTER_THAN_MIN_SEQ,
)


@dataclass(frozen=True, slots=True)
class FallbackReason:
    """Why one call stays with the host's attention; its text is one sentence.

    Attributes:
        cause: what code asks for.
        detail: what fills the gap of the cause's sentence, or a tuple for several gaps.

    Example:
        >>> str(FallbackReason(Fallback.HEAD_DIM, (384, 256)))
        'head dim 384 is over 256'
    """

    cause: Fallback
    detail: str | int | tuple[str | int, ...] = ()

    def __str__(self) -> str:
        details = self.detail if isinstance(self.detail, tuple) else (self.detail,)
        return self.cause.value.format(*details)
