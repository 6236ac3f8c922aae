"""Sections of the page, one file for what is shown together."""
