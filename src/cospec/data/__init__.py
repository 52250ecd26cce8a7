"""Documents into packed rows, and where documents come from."""
