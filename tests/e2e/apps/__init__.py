"""Apps that the end-to-end tests serve."""
