"""How tables name a call of attention."""

from __future__ import annotations

from sage_plugin.schema import CallKey, CallShape


def describe(shape: CallShape) -> str:
    """Write a shape in a few words: batch, heads, length and channels, `query:key` if they differ.

    Example:
        >>> from sage_plugin.measure.inputs import presets
        >>> describe(presets()["cogvideox-2b"])
        '2x30x17776x64 bf16 bhsd'
    """

    def pair(query: int, key: int) -> str:
        return f"{query}" if query == key else f"{query}:{key}"

    heads, seq = pair(shape.heads_q, shape.heads_k), pair(shape.seq_q, shape.seq_k)
    sizes = f"{shape.batch}x{heads}x{seq}x{shape.head_dim}"
    return f"{sizes} {short_dtype(shape.dtype)} {shape.layout}{mask_words(shape)}"


def describe_key(key: CallKey) -> str:
    """Write a key in a few words: kernel, batch x heads, length, channels, dtype, layout, mask."""
    seq = f"{key.seq_q}" if key.seq_q == key.seq_k else f"{key.seq_q}:{key.seq_k}"
    ratio = f" gqa {key.gqa_ratio}" if key.gqa_ratio > 1 else ""
    sizes = f"{key.batch_heads}x{seq}x{key.head_dim}"
    form = f"{short_dtype(key.dtype)} {key.layout}{ratio}{mask_words(key)}"
    return f"{key.kernel}:{key.variant} {sizes} {form}"


def lines(call: CallShape | CallKey) -> str:
    """Write a call's sizes on three short lines, the same way for a shape and for a key.

    Example:
        >>> from sage_plugin.measure.inputs import presets
        >>> lines(presets()["cogvideox-2b"]).splitlines()
        ['2x30 heads of 64', '17,776 tokens', 'bf16 bhsd']
    """
    if isinstance(call, CallShape):
        grouped = "" if call.heads_q == call.heads_k else f":{call.heads_k}"
        heads = f"{call.batch}x{call.heads_q}{grouped}"
    else:
        heads = f"{call.batch_heads}"
    tokens = f"{call.seq_q:,}" + ("" if call.seq_q == call.seq_k else f":{call.seq_k:,}")
    kind = f"{short_dtype(call.dtype)} {call.layout}{mask_words(call)}"
    return f"{heads} heads of {call.head_dim}\n{tokens} tokens\n{kind}"


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
