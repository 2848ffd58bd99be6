"""The files of a capture folder: manifest, tensors, reader and writer."""
