"""Pictures among tokens: where they are stored, which tokens are theirs, and where those stand."""
