"""How a checkpoint becomes a pure function."""
