"""kvgate: a gated acceptance test for tiered KV-cache offload on vLLM."""

__version__ = "0.1.0"
