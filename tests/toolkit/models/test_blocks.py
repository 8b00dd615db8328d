"""Blocks of a network, for the compiler and for sharding."""

from __future__ import annotations

from torch import nn

from vla_rl.toolkit.models.blocks import find_blocks


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.inner = nn.ModuleList([nn.Linear(2, 2)])


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.others = nn.ModuleList([nn.Linear(2, 2), nn.Tanh()])
        self.head = nn.Linear(2, 2)


def test_blocks_are_the_parts_of_the_named_classes() -> None:
    network = Network()
    assert find_blocks(network, (Layer,)) == list(network.layers)
    assert find_blocks(network, (Layer, nn.Linear)) == [*network.layers, network.others[0], network.head]


def test_without_classes_blocks_are_members_of_module_lists_that_have_weights() -> None:
    network = Network()
    assert find_blocks(network, ()) == [*network.layers, network.others[0]]


def test_a_shared_block_is_found_once() -> None:
    layer = Layer()
    assert find_blocks(nn.ModuleList([layer, layer]), ()) == [layer]
