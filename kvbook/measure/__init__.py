"""Instruments: clocks, timings, this machine's peaks, counters of operations and of bytes."""

from kvbook.measure.bytes import ByteCount, count_bytes
from kvbook.measure.clock import Clock, EventClock, HostClock, clock_for
from kvbook.measure.flops import CountedFlops, count_flops
from kvbook.measure.generation import GenerationTiming, measure_generation
from kvbook.measure.machine import last_level_cache, provenance
from kvbook.measure.peaks import probe
from kvbook.measure.record import Record, load_record, load_records, save_record
from kvbook.measure.steps import StepTiming, filled_cache, measure_step
from kvbook.measure.timing import (
    Timing,
    TooFastError,
    compare,
    flush_cache,
    format_seconds,
    measure,
)
from kvbook.measure.traffic import count_traffic, model_groups

__all__ = [
    "ByteCount",
    "Clock",
    "CountedFlops",
    "EventClock",
    "GenerationTiming",
    "HostClock",
    "Record",
    "StepTiming",
    "Timing",
    "TooFastError",
    "clock_for",
    "compare",
    "count_bytes",
    "count_flops",
    "count_traffic",
    "filled_cache",
    "flush_cache",
    "format_seconds",
    "last_level_cache",
    "load_record",
    "load_records",
    "measure",
    "measure_generation",
    "measure_step",
    "model_groups",
    "probe",
    "provenance",
    "save_record",
]
