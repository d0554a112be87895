"""Faults put into real ranks at exact points, and what every rank must say and still have afterwards."""
