"""Spellings of systems, and the catalogue that knows their parts."""

import pytest

from lockstep.errors import SettingError
from lockstep.scale import open_catalogue, parse_system

CATALOGUE = open_catalogue()


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "kind", "within", "between"),
    [
        ("A100", 1, 1, "A100", "nvlink3", "ib-hdr8"),
        ("4xV100-nvlink", 1, 4, "V100", "nvlink2", "ib-edr4"),
        ("8xA100", 1, 8, "A100", "nvlink3", "ib-hdr8"),
        ("16x8xH100-ib", 16, 8, "H100", "nvlink4", "ib-ndr8"),
        ("2x8xA100-100gbe", 2, 8, "A100", "nvlink3", "100gbe"),
        ("2x8xA100-pcie4-10gbe", 2, 8, "A100", "pcie4", "10gbe"),
        ("8xA100-40GB", 1, 8, "A100-40GB", "nvlink3", "ib-hdr8"),
        ("4xA100-SXM4-80GB-nvlink", 1, 4, "A100", "nvlink3", "ib-hdr8"),
        ("2xh100-pcie", 1, 2, "H100-PCIe", "pcie5", "100gbe"),
        ("8xV100-host-gloo", 1, 8, "V100", "host-gloo", "ib-edr4"),
        ("2x4xT4-efa-400", 2, 4, "T4", "pcie3", "efa-400"),
        ("8xH200-nvlink4-nvls", 1, 8, "H200", "nvlink4-nvls", "ib-ndr8"),
    ],
)
def test_spellings(text, nodes, gpus, kind, within, between):
    found = parse_system(text, CATALOGUE)
    assert (found.nodes, found.gpus_per_node, found.gpu.name) == (nodes, gpus, kind)
    assert (found.within.name, found.between.name) == (within, between)
    # Its own name says the same.
    again = parse_system(found.name, CATALOGUE)
    assert (again.nodes, again.gpus_per_node, again.gpu, again.link) == (nodes, gpus, found.gpu, found.link)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4xV10O", "did you mean V100"),
        ("8xA100-nvlnk", "did you mean nvlink"),
        ("16x8xH100-1b", "did you mean"),
        ("0xA100", "give numbers from 1"),
        ("", "write GPUS x KIND"),
        ("8x", "write GPUS x KIND"),
        ("8xQuantum", "is no GPU that the catalogue knows; there are"),
    ],
)
def test_what_it_says_of_others(text, says):
    with pytest.raises(SettingError, match=says):
        parse_system(text, CATALOGUE)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("a100_40gb", "A100-40GB"),
        ("V100-SXM2-16GB (AWS p3)", "V100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("P100 (Pascal)", "P100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("RTX A1000", None),
        ("A1000", None),
        ("T400", None),
    ],
)
def test_names_that_devices_and_tables_give(text, name):
    found = CATALOGUE.find_gpu(text)
    assert (found.name if found else None) == name


def test_what_is_there_is_whole():
    """Each GPU names links that are there, of the right place, and every entry its source."""
    for gpu in CATALOGUE.gpus.values():
        assert CATALOGUE.links[gpu.within].place == "within"
        assert CATALOGUE.links[gpu.between].place == "between"
        assert gpu.source
        assert gpu.flops("bf16") >= gpu.flops("fp32") > 0


def test_the_user_adds_to_it():
    entry = {
        "tflops": {"fp32": 1},
        "memory_gbs": 100,
        "memory_gib": 8,
        "within": "pcie4",
        "between": "mine",
        "source": "I",
    }
    link = {"place": "between", "gbs": 5, "latency_us": 10, "hop_us": 1, "ranks": 2, "error": 0.1, "source": "I"}
    more = open_catalogue({"gpus": {"Toy": entry}, "links": {"mine": link}})
    assert parse_system("2x2xToy", more).between.bytes_per_s == 5e9
    with pytest.raises(SettingError, match="'Toy' lacks or misspells 'memory_gbs'"):
        open_catalogue({"gpus": {"Toy": {"tflops": {"fp32": 1}}}})


def test_nodes_get_equally_many_ranks():
    kind = parse_system("8xA100", CATALOGUE)
    assert [(s.nodes, s.gpus_per_node) for s in (kind.of_ranks(n, 8) for n in (1, 4, 8, 12, 16, 4096))] == [
        *((1, 1), (1, 4), (1, 8), (2, 6), (2, 8), (512, 8)),
    ]
