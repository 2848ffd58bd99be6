"""Runs the attention and linears of a diffusers model on our kernels, and puts everything back.

`patch.py` has the public calls, `component.py` one patched denoiser, `owners.py` finds it in what a
user holds, `hosts/` finds attention and swaps processors, `retarget.py` makes the classes that they
are swapped to, of the functions that `redirect.py` makes, and `twin.py` knows what they were.
`route.py` decides per call, `context.py` is what a layer knows, `counts.py` what it did,
`report.py` and `report_text.py` show it, `linears/` does all of that for linear layers,
`accelerate.py` both in one line, `steps/` knows the denoising step, `policy/` the rules that go by
it. `hosts/registration.py` offers the same attention by name, in the registries of diffusers and
transformers. Kernels and registry stand below; no capture, tuning or rendering is known here.
"""
