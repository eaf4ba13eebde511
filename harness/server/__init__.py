"""Servers under test: launch, readiness, effective configuration, stop of the process tree."""
