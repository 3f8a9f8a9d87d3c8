"""Nereid: a language-model engine for NVIDIA Triton Inference Server."""
