"""What a model will ask of the kernels, told before it runs."""
