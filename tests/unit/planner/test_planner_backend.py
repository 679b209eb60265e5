"""A plan pays for messages as the training backend carries them, not as bare TCP does."""

import pytest

from hpctrain.planner.devices.links import Links, message_s, ring_all_reduce_s
from hpctrain.records.format.node_name import DeviceId
from hpctrain.records.topology.link import BackendFigures
from hpctrain.records.topology.link_cost import LinkCost


def test_links_over_the_backend_take_the_place_of_those_over_tcp(topology) -> None:
    bare = topology((1, 1), links={(0, 1): (1e-5, 1e-9)})
    link = bare.fabric.links[0]
    over = {"gloo": BackendFigures(alpha_s=1e-4, beta_s_per_byte=3e-9)}
    sides = {side: getattr(link, side).model_copy(update={"backend": over}) for side in ("ab", "ba")}
    fabric = bare.fabric.model_copy(update={"links": [link.model_copy(update=sides)]})
    measured = bare.model_copy(update={"fabric": fabric})

    device_ids = [DeviceId("local0:cpu0"), DeviceId("local1:cpu0")]
    times = [message_s(Links(LinkCost(each)), device_ids[:1], device_ids[1:], 1e6) for each in (bare, measured)]
    sums = [ring_all_reduce_s(Links(LinkCost(each)), device_ids, 1e6) for each in (bare, measured)]

    assert times == pytest.approx([1e-5 + 1e-3, 1e-4 + 3e-3])
    assert sums == pytest.approx([2 * (1e-5 + 5e-4), 2 * (1e-4 + 1.5e-3)])
