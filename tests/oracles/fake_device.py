"""A device with a queue, a host that runs ahead of it, and no real time at all."""

from dataclasses import dataclass, field

from kvbook.measure.clock import EventClock, HostClock


@dataclass
class FakeDevice:
    """``order`` costs the host one time and the device another, later, in order."""

    host: float = 0.0  # what the host's clock shows
    free_at: float = 0.0  # when the queue will be empty
    waits: int = 0
    log: list[str] = field(default_factory=list)

    def order(self, name: str = "work", *, host: float = 0.0, device: float = 0.0) -> None:
        self.log.append(name)
        self.host += host
        self.free_at = max(self.free_at, self.host) + device

    def wait(self) -> None:
        self.log.append("wait")
        self.waits += 1
        self.host = max(self.host, self.free_at)

    def now(self) -> float:
        self.log.append("read clock")
        return self.host

    def host_clock(self) -> HostClock:
        return HostClock(self.wait, self.now)

    def event_clock(self) -> EventClock:
        return EventClock(lambda: FakeEvent(self))


@dataclass
class FakeEvent:
    device: FakeDevice
    stamp: float = 0.0

    def record(self) -> None:
        self.device.log.append("record")
        self.stamp = max(self.device.host, self.device.free_at)

    def synchronize(self) -> None:
        self.device.log.append("wait")
        self.device.waits += 1
        self.device.host = max(self.device.host, self.stamp)

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.device.host >= end.stamp, "asked before the event was reached"
        return (end.stamp - self.stamp) * 1000
