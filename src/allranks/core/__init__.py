"""Errors, the environment, units and clocks: what every layer needs and nothing more. No torch here."""
