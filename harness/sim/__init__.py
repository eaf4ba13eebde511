"""A simulated server whose truth is known: the HTTP surface of vLLM over a model of a platform.

Runs in its own process, `python -m harness.sim`, under the same supervision as vLLM. The harness
talks to it over HTTP and imports of it the configuration alone. Knows no plan, trial or verdict.
Evidence made with it is marked as simulated and is never signable (docs/sim.md).
"""
