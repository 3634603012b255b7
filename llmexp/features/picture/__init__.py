"""The curves of a run as loss.png, drawn at its end."""
