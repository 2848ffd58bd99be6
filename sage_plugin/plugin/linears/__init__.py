"""The linear layers of a patched model on 8-bit products, and back to the bit.

`roles.py` says what a linear is for, `eligible.py` which ones are taken and why the others are
left, `layer.py` holds one taken linear: its 8-bit weight, and the original that waits in CPU
memory. `module.py` is the class that such a linear has meanwhile, `compute.py` the way to the
kernels, `part.py` all linears of one component, `report.py` what they did.

The class of a module is swapped, and not its `forward` replaced: state dicts, `.to()`, loading and
copies have to know about the weight too, and `forward` as an attribute belongs to the hooks of
accelerate and diffusers. The 8-bit weight is a plain attribute, neither a parameter nor a buffer,
so that nobody saves, casts, counts or offloads it as a part of the model.
"""
