"""`llmexp verify`: proofs of the project's promises, on the user's own machine and config."""
