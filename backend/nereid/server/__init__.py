"""The Triton face of the engine. Only `model` and `triton_io` import triton_python_backend_utils."""
