"""Checks that a module behaves like torch's own modules, one function per behavior."""
