"""Commands that build and check the book. Nothing here is imported by kvbook or by a chapter."""
