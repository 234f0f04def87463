"""Helpers that several test files share. None of them uses the code under test."""
