"""How a call of attention is named wherever it is shown: one form, on one line or on several."""

from __future__ import annotations

from sage_plugin.schema import CallKey, CallShape


def describe(shape: CallShape) -> str:
    """Write a shape on one line: batch, heads, channels, length, dtype, layout and mask.

    Example:
        >>> from sage_plugin.measure.inputs import presets
        >>> describe(presets()["cogvideox-2b"])
        '2x30 heads of 64, 17,776 tokens, bf16 bhsd'
    """
    return ", ".join(lines(shape).splitlines())


def describe_key(key: CallKey) -> str:
    """Write a key on one line: its kernel, and its call as `describe` does."""
    return f"{key.kernel}:{key.variant} {', '.join(lines(key).splitlines())}"


def lines(call: CallShape | CallKey) -> str:
    """Write a call on three short lines, the same way for a shape and for a key.

    Example:
        >>> from sage_plugin.measure.inputs import presets
        >>> lines(presets()["cogvideox-2b"]).splitlines()
        ['2x30 heads of 64', '17,776 tokens', 'bf16 bhsd']
    """
    ratio = ""
    if isinstance(call, CallShape):
        grouped = "" if call.heads_q == call.heads_k else f":{call.heads_k}"
        heads = f"{call.batch}x{call.heads_q}{grouped}"
    else:
        heads = f"{call.batch_heads}"
        ratio = f" gqa {call.gqa_ratio}" if call.gqa_ratio > 1 else ""
    tokens = f"{call.seq_q:,}" + ("" if call.seq_q == call.seq_k else f":{call.seq_k:,}")
    form = f"{short_dtype(call.dtype)} {call.layout}{ratio}{mask_words(call)}"
    sizes = (f"{heads} head", heads), (f"{tokens} token", tokens)
    many, long = (word + "s" * (count != "1") for word, count in sizes)
    return f"{many} of {call.head_dim}\n{long}\n{form}"


def mask_words(call: CallShape | CallKey) -> str:
    """Write what hides keys from queries: ` causal`, and the kind of mask, if there are any."""
    causal = " causal" if call.causal else ""
    return causal + ("" if call.mask_kind == "none" else f" {call.mask_kind}")


def short_dtype(name: str) -> str:
    """Shorten torch's name of a floating-point dtype.

    Example:
        >>> short_dtype("bfloat16"), short_dtype("float32")
        ('bf16', 'fp32')
    """
    return name.replace("bfloat", "bf").replace("float", "fp")
