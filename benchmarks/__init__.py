"""Side-by-side runs against peers. Each prints a table and one JSON line."""
