"""Servers under test: launch, readiness, effective configuration, stop of the whole process tree."""
