"""Measurements of zerostep against its peers."""
