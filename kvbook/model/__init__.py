"""The transformer, its rotary positions and attention, and where weights and tokens come from."""
