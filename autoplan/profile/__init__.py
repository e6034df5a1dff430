"""Measured profiles: what to measure on a device, and what the times found there say of a question."""
