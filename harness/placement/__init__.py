"""What a model's KV takes and what a deployment's devices hold: arithmetic from a config.json.

Pure: dictionaries and numbers in, numbers out. Formulas and their sources: docs/placement.md.
"""
