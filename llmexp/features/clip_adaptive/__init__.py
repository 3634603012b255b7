"""Clip each unit's gradient by the norm of its weights."""
