"""Outputs of commands: tables and lines for people, JSON for machines, plan files, pages and pictures."""
