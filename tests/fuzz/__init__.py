"""Random models, caches and schedules, compared with plain models after every operation.

``python -m tests.fuzz --seconds 60 --seed 0``, or ``make fuzz``. Files, in reading order:
``case`` (what is random), ``models`` and ``kinds`` (what is drawn), ``written_out`` and ``shelves``
(what must come out), ``watch`` (comparing), ``rows`` and ``owned`` (the operations), ``command``.
"""
