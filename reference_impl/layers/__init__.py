"""Layers that register themselves and are served by the forward context."""
