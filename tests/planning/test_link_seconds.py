"""Seconds of exchanges between GPUs that are not here."""

from lowtide.facts.gpus import GPUS
from lowtide.planning.link_seconds import LATENCY_SECONDS, SHARE_OF_PEAK, LinkedGroup

H100 = GPUS["h100-80g"]


def test_one_gpu_exchanges_nothing():
    assert LinkedGroup(H100, 1).gather_seconds(1e9) == 0.0
    assert LinkedGroup(H100, 1).send_seconds(1e9) == 0.0


def test_a_group_inside_of_a_node_has_its_links():
    seconds = LinkedGroup(H100, 8).gather_seconds(8e9)
    assert seconds == 7e9 / (H100.link_bytes_per_second * SHARE_OF_PEAK) + 3 * LATENCY_SECONDS


def test_members_of_one_node_share_its_network():
    whole, strided = LinkedGroup(H100, 64), LinkedGroup(H100, 8, stride=8)
    assert whole.bytes_per_second == 8 * H100.network_bytes_per_second * SHARE_OF_PEAK
    assert strided.bytes_per_second == H100.network_bytes_per_second * SHARE_OF_PEAK


def test_an_all_reduce_is_two_exchanges():
    group = LinkedGroup(H100, 16)
    assert group.reduce_seconds(1e9) == 2 * group.gather_seconds(1e9)
