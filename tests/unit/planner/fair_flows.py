"""A step as an event simulation: messages are flows, which share every card and uplink fairly (max-min).

Messages from one device to another follow each other, as on one connection. Everything else happens when it can.
"""

from __future__ import annotations

import math
from collections import defaultdict

from hpctrain.planner.simulate.engine import compile_schedule
from hpctrain.schedule.generate import make_schedule


def fair_rates(flows, capacity):
    """Rate of each flow: bottleneck by bottleneck, the flows through it share what is left of it equally.

    Args:
        flows: flow -> the ports that it passes.
        capacity: port -> what it carries.
    """
    rates, left, open_ = {}, dict(capacity), dict(flows)
    while open_:
        users = defaultdict(list)
        for flow, ports in open_.items():
            for port in ports:
                users[port].append(flow)
        port = min(users, key=lambda name: left[name] / len(users[name]))
        share = left[port] / len(users[port])
        for flow in users[port]:
            rates[flow] = share
            for passed in open_.pop(flow):
                left[passed] -= share
    return rates


def pipelines_end_s(cost, layout, ports, capacity, sums=()):
    """Seconds until every replica has run its action table, and all sums over the replicas have ended.

    Args:
        ports: (source device, target device) -> the ports that a message passes; () within a node takes no time.
        capacity: port -> bytes per second.
        sums: [stage] -> bytes that each device sends to the next replica's once all replicas have done the stage.
    """
    step = _Step(cost, layout, ports, sums)
    while step.running or step.flows:
        step.advance(fair_rates({way: ports(*way[:2]) for way in step.flows}, capacity))
    return step.now


class _Step:
    def __init__(self, cost, layout, ports, sums):
        self.layout, self.ports, self.sums, self.now = layout, ports, sums, 0.0
        self.to_do = [sum(layout.micro_batches)] * len(layout.blocks)  # backwards of each stage in all replicas
        tables = [make_schedule(layout.schedule, layout.pp, len(layout.blocks), n) for n in layout.micro_batches]
        self.programs = [compile_schedule(table)[0] for table in tables]
        self.stage_s = [
            [
                cost.stage(layout.unit(replica, stage), layout.micro_batch, p)
                for stage, p in enumerate(layout.model_parts)
            ]
            for replica in range(layout.dp)
        ]
        self.size = cost.work.message_bytes(layout.micro_batch, 1, "none")
        self.queue = {
            (replica, rank): [index for index, on_rank in enumerate(program.ranks) if on_rank == rank]
            for replica, program in enumerate(self.programs)
            for rank in range(layout.pp)
        }
        self.arrived, self.running = set(), {}  # (replica, action); (replica, rank) -> (its end, action)
        # way -> (bytes, message); way -> bytes left of the first one. Sums have ways of their own.
        self.waiting, self.flows = defaultdict(list), {}
        self.start()

    def start(self):
        """Start every action and message that can start now."""
        for (replica, rank), queue in self.queue.items():
            if queue and (replica, rank) not in self.running:
                needs = self.programs[replica].needs[queue[0]]
                if needs < 0 or (replica, needs) in self.arrived:
                    stage, kind = self.programs[replica].stage_and_kind(queue[0])
                    times = self.stage_s[replica][stage]
                    took = times.forward if kind == "F" else times.backward
                    self.running[replica, rank] = self.now + took, queue.pop(0)
        self.flows |= {way: queue[0][0] for way, queue in self.waiting.items() if queue and way not in self.flows}

    def advance(self, rates):
        """Go on to the next end of an action or a message."""
        ends = [end for end, _ in self.running.values()]
        then = min(ends + [self.now + left / rates[way] for way, left in self.flows.items()])
        self.flows = {way: left - rates[way] * (then - self.now) for way, left in self.flows.items()}
        self.now = then
        for way in [way for way, left in self.flows.items() if left <= 1e-6 * self.size]:
            del self.flows[way]
            self.arrived.add(self.waiting[way].pop(0)[1])
        for key in [key for key, (end, _) in self.running.items() if end <= self.now + 1e-12]:
            self.send(key[0], self.running.pop(key)[1])
        self.start()

    def send(self, replica, index):
        """Send what an action has made, if anybody waits for it, and the gradients of a stage that is done."""
        stage, kind = self.programs[replica].stage_and_kind(index)
        self.to_do[stage] -= kind == "B"
        if self.sums and kind == "B" and not self.to_do[stage]:
            units = [self.layout.unit(number, stage).device_ids[0] for number in range(self.layout.dp)]
            for way in zip(units, [*units[1:], *units[:1]], strict=True):
                if self.ports(*way):
                    self.waiting[(*way, "sum")].append((self.sums[stage], None))
        if self.programs[replica].sends[index] < 0:
            return
        stages = stage, stage + (1 if kind == "F" else -1)
        way = tuple(self.layout.unit(replica, stage).device_ids[0] for stage in stages)
        if self.ports(*way):
            self.waiting[way].append((self.size, (replica, index)))
        else:
            self.arrived.add((replica, index))


def node_ports(racks=()):
    """What a message passes: the cards of its nodes, and the uplinks of the racks that it leaves or enters."""

    def ports(source, target):
        a, b = source.node, target.node
        if a == b:
            return ()
        ups = [("up", number) for number, rack in enumerate(racks) if a in rack and b not in rack]
        downs = [("down", number) for number, rack in enumerate(racks) if b in rack and a not in rack]
        return (("out", a), ("in", b), *ups, *downs)

    return ports


def capacities(nodes, rate, racks=(), uplink=math.inf):
    """Bytes per second of every card in both directions, and of every rack's uplink."""
    cards = {(direction, node): rate for node in nodes for direction in ("out", "in")}
    return cards | {(direction, number): uplink for number in range(len(racks)) for direction in ("up", "down")}
