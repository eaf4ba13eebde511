"""What a run leaves: files, digests, seals; imported into it and exported from it."""
