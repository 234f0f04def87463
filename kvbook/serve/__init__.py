"""Serving: requests that come over time, scheduled step by step over one pool of blocks."""

from kvbook.serve.clock import Clock, LogicalClock, WallClock
from kvbook.serve.engine import Engine
from kvbook.serve.records import Output, Ran, RequestRecord, StepRecord
from kvbook.serve.request import Request
from kvbook.serve.scheduler import Job, Scheduler, Work

__all__ = [
    "Clock",
    "Engine",
    "Job",
    "LogicalClock",
    "Output",
    "Ran",
    "Request",
    "RequestRecord",
    "Scheduler",
    "StepRecord",
    "WallClock",
    "Work",
]
