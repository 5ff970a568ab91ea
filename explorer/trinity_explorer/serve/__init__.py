"""An endpoint for agents outside, whose requests become experiences."""
