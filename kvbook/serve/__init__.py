"""Serving: requests that come over time, scheduled step by step over one pool of blocks."""

from kvbook.serve.clock import Clock, LogicalClock, WallClock
from kvbook.serve.engine import Engine
from kvbook.serve.records import Output, Ran, RequestRecord, StepRecord
from kvbook.serve.request import Request
from kvbook.serve.scheduler import Job, Scheduler, Work
from kvbook.serve.simulate import simulate
from kvbook.serve.static import Served, serve_static
from kvbook.serve.trace import Arrival, Mix, make_trace, replay

__all__ = [
    "Arrival",
    "Clock",
    "Engine",
    "Job",
    "LogicalClock",
    "Mix",
    "Output",
    "Ran",
    "Request",
    "RequestRecord",
    "Scheduler",
    "Served",
    "StepRecord",
    "WallClock",
    "Work",
    "make_trace",
    "replay",
    "serve_static",
    "simulate",
]
