"""Workloads: pure functions from parameters and a seed to schedules."""
