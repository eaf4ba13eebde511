"""Figures published by others, with their licences: see README.md beside this file."""
