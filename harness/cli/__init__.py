"""The command line: parsers, verbs and screens. Decides nothing."""
