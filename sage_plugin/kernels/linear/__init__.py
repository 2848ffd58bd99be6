"""Linear layers on 8-bit products: `linear()`, quantized weights, and what runs each call."""
